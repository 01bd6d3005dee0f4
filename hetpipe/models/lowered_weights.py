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
    """A weight in 16 bits, of which there is a copy already: for blocks that torch.compile traces."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def _with_data(weight: nn.Parameter, copy: Tensor) -> Tensor:
    """Return what `_Lowered` does, by a node of torch's own, which costs the host less than one of Python.

    A view of the weight that holds the copy: where a gradient comes in another dtype than the result of the
    forward had, torch's engine casts it (validate_outputs in torch/csrc/autograd/engine.cpp).
    """
    lowered = weight.view_as(weight)
    lowered.data = copy
    return lowered


def _computed(
    module: nn.Module,
    forward: Callable[..., Tensor],
    keys: tuple[str, ...],
    lowered: torch.dtype,
    *args: Tensor,
    **options: Tensor,
) -> Tensor:
    """Compute with the lowered copies of some parameters, where autocast would lower them."""
    lower = _Lowered.apply if torch.compiler.is_compiling() else _with_data
    parameters: dict[str, Any] = module._parameters
    held: dict[str, Tensor] = {}
    try:
        for key in keys:
            weight = parameters[key]
            if weight is None:
                continue
            if not torch.is_autocast_enabled(weight.device.type):
                break
            copy = lowered_copy(weight, lowered)
            if copy is None:
                break
            held[key], parameters[key] = weight, lower(weight, copy)
        return forward(*args, **options)
    finally:
        parameters.update(held)
