"""Dropout as a pure function of a key: the counter-based random numbers of Philox 4x32-10.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3. Word j of
the block whose counter is (i, low half of the sample, high half of the sample, call) decides about element
4 i + j of the sample. So every device draws the same bits, for any microbatch size, and none of them is kept
where they are many: the backward draws them once more.
"""

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hetpipe.models.philox_torch import Draw, words

KEPT_ELEMENTS = 4096
"""Of samples of so many elements at most the CPU keeps what it multiplied with, for the backward.

For each element 4 bytes, which profiles count: to draw these again would cost less than to ask for it.
"""


def dropped(x: Tensor, drawn: Draw) -> Tensor:
    """Return x, [samples, ...] or [samples x rows, ...], with elements dropped and the others scaled.

    What is lower than float32 is multiplied in float32 and rounded once.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        if _drawn_at_once(x) and x.numel() <= KEPT_ELEMENTS * len(drawn.samples):
            result: Tensor = x * _compiled().factors(drawn, x)
            return result
        return _Dropped.apply(x, drawn)  # type: ignore[no-any-return, no-untyped-call]  # torch
    return applied(x, drawn)


def kept(drawn: Draw, num_elements: int, device: torch.device) -> Tensor:
    """Return which elements of each sample are kept: [samples, num_elements], bool."""
    if device.type == "cpu":
        mask: Tensor = _compiled().kept(drawn, num_elements)
        return mask
    return words(drawn, num_elements, device) <= drawn.last


class _Dropped(torch.autograd.Function):
    """Dropout that keeps nothing for its backward but the key."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, drawn: Draw) -> Tensor:
        ctx.drawn = drawn
        return applied(x, drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return dropped(gradients[0], ctx.drawn), None


def applied(x: Tensor, drawn: Draw) -> Tensor:
    """Do what `dropped` does, beside autograd."""
    x = x.detach().contiguous()
    kernels = None
    if _drawn_at_once(x):
        kernels = _compiled()
    elif x.is_cuda and x.dtype is not torch.float64 and _has_triton():
        kernels = _triton()
    if kernels is not None:
        result: Tensor = kernels.applied(x, drawn)
        return result
    num_elements = x.numel() // len(drawn.samples)
    mask = kept(drawn, num_elements, x.device).view(x.shape)
    return x.mul(mask).mul_(drawn.scale)


def _drawn_at_once(x: Tensor) -> bool:
    """Return whether the CPU multiplies x in its own dtype, as machine code."""
    return x.is_cpu and (x.dtype is torch.float32 or x.dtype is torch.float64)


@cache
def _compiled() -> ModuleType:
    # NOTE: not at the top: to load the compiler takes half a second, which a model without dropout is spared.
    from hetpipe.models import philox_compiled

    return philox_compiled


@cache
def _triton() -> ModuleType:
    from hetpipe.models import philox_triton

    return philox_triton


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
