"""Loads machine code that ranks call: once, by the server that forks them, where it imports this."""

import torch

from hetpipe.models.philox_compiled import applied, kept
from hetpipe.models.philox_torch import draw

_DRAWN = draw(key=1, call=0, samples=(0, 1), keep_probability=0.5)
for _dtype in (torch.float32, torch.float64):
    applied(torch.ones(2, 8, dtype=_dtype), _DRAWN)
kept(_DRAWN, 8)
