"""Mixed precision: weights, gradients and optimizer in float32; layers compute, and send, in 16 bits.

torch.autocast decides operation by operation, as in any training loop. Besides, what enters a layer is
rounded to bfloat16 or float16 at every boundary between layers, whether the plan cuts there or not: half the
bytes travel, and the plan does not change what is computed. The loss is computed in float32.

Between ranks of different precisions nothing is lost on the way that would not be lost without it
(`travels_in`). From bfloat16 to float16, or back, tensors travel in the dtype of the rank that takes them:
its layers round what enters them to it anyway, and its gradients are in it. Between float32 and 16 bits they
travel in the 16 bits, whoever takes them: what leaves the layers in 16 bits is rounded, what enters them will
be, and the gradients of both are in 16 bits.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, FLOAT32, FLOAT64, MIXED, TF32

_WEIGHTS = dict.fromkeys((FLOAT32, TF32, BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, MIXED), torch.float32)
_WEIGHTS[FLOAT64] = torch.float64
_LOWERED = {BFLOAT16_AUTOCAST: torch.bfloat16, FLOAT16_AUTOCAST: torch.float16}


def weight_dtype(dtype: str) -> torch.dtype:
    """Return the dtype in which weights are held, and inputs given, under a dtype of the settings."""
    return _WEIGHTS[dtype]


def lowered_dtype(dtype: str) -> torch.dtype | None:
    """Return the dtype to which autocast lowers; None where there is no autocast."""
    return _LOWERED.get(dtype)


def boundary_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of floating tensors that travel to a layer that computes in a dtype."""
    return lowered_dtype(dtype) or weight_dtype(dtype)


def travels_in(giver: torch.dtype, taker: torch.dtype) -> torch.dtype:
    """Return the dtype of floating tensors, and of their gradients, between ranks with these boundary dtypes.

    The narrower of the two; of equally narrow ones the taker's.

    >>> travels_in(torch.float32, torch.bfloat16), travels_in(torch.bfloat16, torch.float32)
    (torch.bfloat16, torch.bfloat16)
    >>> travels_in(torch.bfloat16, torch.float16)
    torch.float16
    """
    return giver if giver.itemsize < taker.itemsize else taker


def set_products(dtype: str, place: torch.device) -> None:
    """Let the GPU of this process multiply float32 matrices in tf32, if that is the dtype.

    A CPU goes on in float32, and so does Apple's GPU, which has nothing between that and 16 bits.
    """
    if dtype == TF32 and place.type == "xpu":
        torch.set_float32_matmul_precision("high")
    if dtype == TF32 and place.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


_COPIES: ContextVar[dict[nn.Parameter, Tensor] | None] = ContextVar("lowered copies of a step", default=None)


@contextmanager
def kept_casts() -> Iterator[None]:
    """Keep the lowered copies of weights that are made inside to the end, for all microbatches.

    Without it every forward would make its own, and every microbatch in flight would keep them. Weights must
    not change inside before their last use.
    """
    token = _COPIES.set({})
    torch.autocast_increment_nesting()  # for what autocast itself casts: see `lowered_weights`
    try:
        yield
    finally:
        _COPIES.reset(token)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def kept_copies() -> Collection[Tensor]:
    """Return the lowered copies of weights that are kept so far inside of `kept_casts`; none outside."""
    return (_COPIES.get() or {}).values()


def lowered_copy(weight: nn.Parameter, lowered: torch.dtype) -> Tensor | None:
    """Return the copy of a weight that is kept inside of `kept_casts`, with no graph; None outside."""
    copies = _COPIES.get()
    if copies is None:
        return None
    found = copies.get(weight)
    if found is None:
        found = copies[weight] = weight.detach().to(lowered)
    return found
