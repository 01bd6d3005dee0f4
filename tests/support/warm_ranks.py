"""Makes what each rank would make at its start: once, by the server that forks them, where it imports this.

Machine code that they call, and the structure of the models that most tests train.
"""

import torch

from hetpipe.data.task import chain_of
from hetpipe.models.huggingface import model_spec
from hetpipe.models.philox_compiled import applied, kept
from hetpipe.models.philox_torch import draw

_DRAWN = draw(key=1, call=0, samples=(0, 1), keep_probability=0.5)
for _dtype in (torch.float32, torch.float64):
    applied(torch.ones(2, 8, dtype=_dtype), _DRAWN)
kept(_DRAWN, 8)
if torch.cuda.device_count() == 0:  # else autograd starts threads, which stand in the way of a fork
    for _name in ("bert-tiny", "gpt2-tiny", "llama-tiny"):
        chain_of(model_spec(_name)).boundary(1, 64)
