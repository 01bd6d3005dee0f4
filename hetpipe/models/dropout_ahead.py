"""To import this loads the machine code that draws dropout on CPUs: once, for all that a server forks."""

import torch

from hetpipe.models.philox_compiled import applied, kept
from hetpipe.models.philox_torch import draw

_DRAWN = draw(key=1, call=0, samples=(0,), keep_probability=0.5)
applied(torch.ones(1, 8), _DRAWN)
kept(_DRAWN, 8)
