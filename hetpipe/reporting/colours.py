"""The colours of pictures and pages, told apart by people with any colour vision.

Okabe and Ito, "Color Universal Design" (2008).
"""

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
FORWARD, BACKWARD, OPTIMIZER, SYNC = SKY, BLUE, GREEN, ORANGE
IDLE, INK = "#E6E6E6", "#333333"
FROZEN = "#A6BDD7"
