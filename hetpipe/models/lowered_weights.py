"""Trained weights under autocast: the copy that a step keeps, and a gradient that is in float32 at once.

Autocast can keep the copies itself, but then the gradients in 16 bits wait for each other. Of all that is
ready torch runs first what was recorded last (pytorch, torch/csrc/autograd/engine.cpp), and a cast that is
kept was recorded in the step's first forward, before everything of later microbatches:

    autocast    block 2 | block 1 | block 0 | casts 2 1 0     gradients in 16 bits of all layers at the end
    here        block 2 cast | block 1 cast | block 0 cast    of one layer
"""

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.models.frozen_weights import may_cast
from hetpipe.models.mixed_precision import lowered_copy


def lower_where_used(model: nn.Module, trained: Container[nn.Parameter], lowered: torch.dtype) -> None:
    """Let modules that multiply compute with the lowered copies of trained weights that a step keeps.

    What other modules do with theirs is left to autocast.
    """
    for module in model.modules():
        if not may_cast(module) or isinstance(module, nn.Embedding):
            continue
        keys = tuple(key for key, value in module._parameters.items() if value in trained)
        if keys:
            module.__dict__["forward"] = partial(_computed, module, module.forward, keys, lowered)


class _Lowered(torch.autograd.Function):
    """A weight in 16 bits, of which there is a copy already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def _computed(
    module: nn.Module,
    forward: Callable[..., Tensor],
    keys: tuple[str, ...],
    lowered: torch.dtype,
    *args: Tensor,
    **options: Tensor,
) -> Tensor:
    """Compute with the lowered copies of some parameters, where autocast would lower them."""
    held = {key: value for key in keys if (value := module._parameters[key]) is not None}
    place = next(iter(held.values())).device.type
    copies = {key: lowered_copy(value, lowered) for key, value in held.items()}
    if not torch.is_autocast_enabled(place) or any(copy is None for copy in copies.values()):
        return forward(*args, **options)
    try:
        lower = _Lowered.apply
        module._parameters.update({key: lower(held[key], copy) for key, copy in copies.items()})  # type: ignore[no-untyped-call]
        return forward(*args, **options)
    finally:
        module._parameters.update(held)
