"""The verbs of the command line, a function each. torch, NumPy and matplotlib are imported inside them."""
