"""The check that a layer may be run again and apart from others: recompute and cuts do so, unknown to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from cost_model.errors import InputError
from hetpipe.models.block_structure import Inputs
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.partial_model import Carried, LayerModel

ROUNDING = 32
"""How many times the precision of its dtype two results may be apart, relative to the largest entry."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor that a layer was given, as it was then."""

    what: str
    tensor: Tensor
    version: int
    before: Tensor

    @classmethod
    def of(cls, what: str, tensor: Tensor) -> "_Given":
        return cls(what, tensor, tensor._version, tensor.detach().clone())

    @property
    def has_changed(self) -> bool:
        """Return whether it was written to, be it past autograd (`.data`)."""
        return self.tensor._version != self.version or not _same(self.tensor, self.before)


@torch.no_grad()
def check_repeatable(
    model: LayerModel, layer: int, name: str, inputs: Inputs, carried: Carried, *, dropout: KeyedDropout
) -> Carried:
    """Run an owned layer twice on the same samples, in train mode; return what it gives.

    name: of the layer, for errors. inputs, carried: as for `LayerModel.run`; they stay as they are.

    Raises: InputError if the layer works in place on what it is given, changes a buffer or what it trains, or
    gives another result when it is run again: its result would depend on the plan.
    """
    buffers = dict(model.named_buffers())
    if buffers:  # what is only kept for its size, such as a table of positions, is there after a first run
        halves = {key: tensor / 2 if tensor.is_floating_point() else tensor for key, tensor in inputs.items()}
        others = tuple(tensor / 2 if tensor.is_floating_point() else tensor for tensor in carried)
        _run(model, layer, halves, others, dropout)
        buffers = {key: value.clone() for key, value in model.named_buffers()}
    model.forget_arguments()  # so that the second run has what the first one kept
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    versions = {key: value._version for key, value in trained.items()}
    given, first = _run(model, layer, inputs, carried, dropout)
    if changed := next((found.what for found in given if found.has_changed), None):
        raise InputError(
            f"layer {name!r} works in place on {changed}, which cuts and recompute give it again; let it "
            "work on a copy (x = x + y for x += y)"
        )
    for key, value in model.named_buffers():
        if key not in buffers or not _same(value, buffers[key]):
            raise InputError(
                f"layer {name!r} changes its buffer {key.removeprefix('model.')!r} in forward, so results "
                "depend on microbatches and recompute; take that out, or use a layer without it"
            )
    for key, parameter in trained.items():
        if parameter._version != versions[key]:
            raise InputError(
                f"layer {name!r} changes its parameter {key.removeprefix('model.')!r} in forward, which the "
                "devices that hold it would each do by themselves; take that out"
            )
    _, second = _run(model, layer, inputs, carried, dropout)
    if not all(_equal(one, other) for one, other in zip(first, second, strict=True)):
        raise InputError(
            f"layer {name!r} gives another result when it is run again on the same samples, as recompute "
            "does; take out what it remembers from one forward to the next"
        )
    return first


def _run(
    model: LayerModel, layer: int, inputs: Inputs, carried: Carried, dropout: KeyedDropout
) -> tuple[list[_Given], Carried]:
    """Return what the layer was given, and its result."""
    inputs = {key: tensor.detach().clone() for key, tensor in inputs.items()}
    carried = tuple(tensor.detach().clone() for tensor in carried)
    given = [_Given.of(f"input {key!r}", tensor) for key, tensor in inputs.items()]
    given += [_Given.of("what the layer before it gives", tensor) for tensor in carried]
    size = len(next(iter((*inputs.values(), *carried))))
    before = model.on_layer, model.on_boundary
    model.on_layer, model.on_boundary = dropout.enter_layer, None
    dropout.at(0, range(size), (layer,))
    try:
        with dropout, _arguments_of(model.module_of(layer), given):
            return given, model.run(layer, layer + 1, inputs, carried)
    finally:
        model.on_layer, model.on_boundary = before


@contextmanager
def _arguments_of(module: nn.Module | None, given: list[_Given]) -> Iterator[None]:
    """Note what else a block gets, such as a mask, which the blocks after it get too."""
    if module is None:
        yield
        return

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
            if isinstance(leaf, Tensor):
                place = getattr(path[1], "key", getattr(path[1], "idx", ""))
                given.append(_Given.of(f"its argument {place!r}", leaf))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same, no number where the other has none."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two results are the same, to the rounding of sums in another order."""
    if _same(one, other):
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return False
    largest = ROUNDING * torch.finfo(one.dtype).eps * one.abs().max()
    return bool((one - other).abs().max() <= largest)
