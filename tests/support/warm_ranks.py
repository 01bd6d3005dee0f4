"""Makes what each rank would make at its start: once, by the server that forks them, where it imports this.

Machine code that they call, and the structure of the models that most tests train.
"""

import torch

from hetpipe.data.task import chain_of
from hetpipe.models.huggingface import model_spec
from hetpipe.models.philox_compiled import applied
from hetpipe.models.philox_torch import draw

applied(torch.ones(1, 8, dtype=torch.float64), draw(key=1, call=0, samples=(0,), keep_probability=0.5))
if torch.cuda.device_count() == 0:  # else autograd starts threads, which stand in the way of a fork
    for _name in ("bert-tiny", "gpt2-tiny", "llama-tiny"):
        chain_of(model_spec(_name)).boundary(1, 64)
