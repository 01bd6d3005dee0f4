"""Mixed precision: weights, gradients and optimizer in float32; layers compute, and send, in bfloat16.

torch.autocast decides operation by operation, as in any training loop. Besides, what enters a layer is
rounded to bfloat16 at every boundary between layers, whether the plan cuts there or not: half the bytes
travel, and the plan does not change what is computed. The loss is computed in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT32, FLOAT64

_WEIGHTS = {FLOAT32: torch.float32, FLOAT64: torch.float64, BFLOAT16_AUTOCAST: torch.float32}


def weight_dtype(dtype: str) -> torch.dtype:
    """Return the dtype in which weights are held, and inputs given, under a dtype of the settings."""
    return _WEIGHTS[dtype]


def lowered_dtype(dtype: str) -> torch.dtype | None:
    """Return the dtype to which autocast lowers; None where there is no autocast."""
    return torch.bfloat16 if dtype == BFLOAT16_AUTOCAST else None


def boundary_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of floating tensors that travel from layer to layer."""
    return lowered_dtype(dtype) or weight_dtype(dtype)


@contextmanager
def kept_casts() -> Iterator[None]:
    """Keep the lowered copies of weights that are made inside to the end, for all microbatches.

    Without it every forward would make its own, and every microbatch in flight would keep them. Weights must
    not change inside before their last use.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
