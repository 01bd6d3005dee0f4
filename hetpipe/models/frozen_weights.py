"""Frozen weights in their own bytes: one copy, and exactly what float32 weights would compute.

A frozen weight never changes, so it needs no float32 copy of what was given in 16 bits, and none besides the
one that multiplies:

    under autocast, in matrix products alone     kept as autocast would cast it, once (lowered)
    given in 16 bits, in products or looked up   kept as given, cast for the time of one operation (given)
    in 4 or 8 bits, in products alone            kept so, dequantized for the time of one operation
    anything else (norms, unusual modules)       kept as trained weights are

The operation that casts saves the kept weight for its backward, which casts it again. See
hetpipe.models.quantized_weights for 4 and 8 bits.
"""

from collections.abc import Callable, Mapping
from enum import Flag, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hetpipe.models.quantized_weights import dense


class Use(Flag):
    """The kinds of operations that take a parameter itself.

    MULTIPLIED: autocast lowers it, on CPUs and GPUs; LOOKED_UP: an embedding's rows; OTHER: anything else.
    """

    MULTIPLIED = auto()
    LOOKED_UP = auto()
    OTHER = auto()


NO_USE = Use(0)

_LOWERED_BY_AUTOCAST = (
    *("linear", "addmm", "addbmm", "baddbmm", "bmm", "mm", "matmul", "__matmul__", "__rmatmul__"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
"""Operations in torch.autocast's lists for CPUs and for CUDA (pytorch, aten/src/ATen/autocast_mode.h)."""

_CASTING = frozenset(
    {
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.conv.Conv1d",
        "torch.nn.modules.conv.Conv2d",
        "torch.nn.modules.conv.Conv3d",
        "torch.nn.modules.sparse.Embedding",
        "transformers.pytorch_utils.Conv1D",
    }
)
"""Classes whose forward uses their parameters in one operation, and may be given others for its time."""

_HALVES = (torch.bfloat16, torch.float16)


_View = tuple[str, torch.Size, tuple[int, ...], int]
"""A view of a cast: the parameter's key, and shape, strides and offset in its storage."""


def use_of(function: Callable[..., Any]) -> Use:
    """Return what an operation does with a parameter that it is given."""
    name = getattr(function, "__name__", "")
    if name in _LOWERED_BY_AUTOCAST:
        return Use.MULTIPLIED
    # an embedding with max_norm writes into its weight; its module is not left to do that by `may_cast`
    return Use.LOOKED_UP if name == "embedding" else Use.OTHER


def may_cast(module: nn.Module) -> bool:
    """Return whether a module may compute with casts of its parameters."""
    if getattr(module, "max_norm", None) is not None:
        return False
    return f"{type(module).__module__}.{type(module).__qualname__}" in _CASTING


def uncast(model: nn.Module) -> dict[str, Use]:
    """Return OTHER for parameters that a module has which may not cast them, by name; no use for others."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = dict.fromkeys(names.values(), NO_USE)
    for module in model.modules():
        if not may_cast(module):
            for parameter in module.parameters(recurse=False):
                found[names[parameter]] = Use.OTHER
    return found


def kept_dtype(given: torch.dtype, uses: Use, dtype: torch.dtype, lowered: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a frozen parameter is kept.

    given: of the user's weight. uses: OTHER where a module that has it may not cast. dtype: of trained
    weights; lowered: what autocast computes in, None for no autocast.
    """
    if lowered is not None and uses == Use.MULTIPLIED:
        return lowered
    return given if given in _HALVES and uses and Use.OTHER not in uses else dtype


def is_rounded(kept: torch.dtype, given: torch.dtype) -> bool:
    """Return whether a frozen weight is kept in a dtype that cannot hold what was given."""
    return kept in _HALVES and torch.promote_types(kept, given) != kept


def cast_where_used(
    model: nn.Module, kept: Mapping[nn.Parameter, str], dtype: torch.dtype, lowered: torch.dtype | None
) -> None:
    """Let modules compute with casts of the parameters that are kept in other bytes than they compute in.

    kept: the owned frozen parameters. An embedding gives rows of dtype, anything else multiplies in lowered.
    """
    for module in model.modules():
        mine = [key for key, value in module._parameters.items() if value is not None and value in kept]
        if not mine or not may_cast(module):
            continue
        weights = {key: module._parameters[key] for key in mine}
        if isinstance(module, nn.Embedding):
            if any(value is not None and value.dtype != dtype for value in weights.values()):
                module.__dict__["forward"] = partial(_looked_up, module.forward, dtype)
            continue
        width = lowered or dtype
        narrow = tuple(key for key, value in weights.items() if value is not None and value.dtype != width)
        if narrow:
            module.__dict__["forward"] = partial(_computed, module, module.forward, narrow, width)


def _looked_up(forward: Callable[[Tensor], Tensor], dtype: torch.dtype, ids: Tensor) -> Tensor:
    return forward(ids).to(dtype)


def _computed(
    module: nn.Module,
    forward: Callable[..., Tensor],
    keys: tuple[str, ...],
    dtype: torch.dtype,
    *args: Tensor,
) -> Tensor:
    """Compute with casts of some parameters, of which the graph keeps the parameters alone.

    What an operation saves of a cast is kept as a view, (size, stride, offset), that is made again: a product
    saves the transposed weight.
    """
    held = {key: module._parameters[key] for key in keys}
    casts = {key: dense(value, dtype) for key, value in held.items() if value is not None}
    homes = {value.untyped_storage()._cdata: key for key, value in casts.items()}

    def pack(tensor: Tensor) -> Tensor | _View:
        key = homes.get(tensor.untyped_storage()._cdata)
        return tensor if key is None else (key, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        key, shape, stride, offset = packed
        value = held[key]
        assert value is not None
        return dense(value, dtype).as_strided(shape, stride, offset)

    try:
        module._parameters.update(casts)  # type: ignore[arg-type]  # tensors for the time of one operation
        with saved_tensors_hooks(pack, unpack):
            return forward(*args)
    finally:
        module._parameters.update(held)
