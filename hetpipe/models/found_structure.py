"""The structure of a full model, from what a run of its small copy shows."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from cost_model.errors import InputError
from hetpipe.models.block_structure import BlockList, BlockStructure, Inputs, call_options
from hetpipe.models.frozen_weights import NO_USE, Use
from hetpipe.models.initialization import parameters_on_meta, private_random_stream
from hetpipe.models.observation import Observation
from hetpipe.models.partial_model import Carried, LayerModel, packed, taken
from hetpipe.models.placement import place


def structure_of(
    name: str,
    build: Callable[[], nn.Module],
    example: Inputs,
    *,
    model: nn.Module,
    small: nn.Module,
    seen: Observation,
) -> BlockStructure:
    """Return the structure of a model, of whose small copy all but the number of blocks is known.

    Raises: InputError if the small copy is another model.
    """
    lists = []
    for blocks in seen.structure.lists:
        try:
            num_blocks, num_small = (
                len(list(each.get_submodule(blocks.path).children())) for each in (model, small)
            )
        except AttributeError:
            num_blocks = num_small = 0
        if type(small) is not type(model) or not num_blocks:
            raise InputError(f"the shrunken copy of {name} is a {type(small).__name__} with other blocks")
        order = tuple(range(num_blocks))
        if blocks.order != tuple(range(num_small)):
            order = _order_of(build, blocks, example)
        lists.append(replace(blocks, order=order))
    return replace(seen.structure, lists=tuple(lists))


def _order_of(build: Callable[[], nn.Module], blocks: BlockList, example: Inputs) -> tuple[int, ...]:
    """Return which blocks a model calls that calls some of them again; nothing is computed in them."""
    with private_random_stream(0), parameters_on_meta(), torch.device("cpu"):
        model = build()
    names = {parameter: name for name, parameter in model.named_parameters()}
    place(model, names, {}, torch.float32, torch.device("cpu"), {})
    order: list[int] = []

    def passed_through(index: int, *args: Any, **kwargs: Any) -> Any:
        order.append(index)
        return packed(blocks, taken(blocks, args, kwargs))

    for index, block in enumerate(model.get_submodule(blocks.path).children()):
        block.__dict__["forward"] = partial(passed_through, index)
    with torch.no_grad():
        model(**example, **call_options(model))
    return tuple(order)


def uses_by_layer(
    model: nn.Module, structure: BlockStructure, seen: Observation
) -> dict[tuple[str, int], Use]:
    """Return what each layer does with each parameter that it holds."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    in_blocks = dict(zip(structure.lists, seen.used_in_blocks, strict=True))
    uses = {
        (names[parameter], layer): in_blocks[blocks].get(inner, NO_USE)
        for layer, (blocks, block) in structure.calls.items()
        for inner, parameter in model.get_submodule(f"{blocks.path}.{block}").named_parameters()
    }
    for layer, used in zip(structure.around, seen.used, strict=True):
        uses |= {(name, layer): use for name, use in used.items() if name in names.values()}
    return uses


def holders_by_name(uses: Collection[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    """Return the layers that hold each parameter, rising."""
    found: dict[str, list[int]] = {}
    for name, layer in sorted(uses, key=lambda use: use[1]):
        found.setdefault(name, []).append(layer)
    return {name: tuple(layers) for name, layers in found.items()}


def reached_names(model: nn.Module, structure: BlockStructure, seen: Observation) -> set[str]:
    """Return the parameters on which the loss depends."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    in_blocks: dict[str, bool] = {}
    for blocks, reached in zip(structure.lists, seen.reached_in_blocks, strict=True):
        for block in model.get_submodule(blocks.path).children():
            for inner, parameter in block.named_parameters():
                name = names[parameter]
                in_blocks[name] = in_blocks.get(name, False) or inner in reached
    return {name for name in names.values() if in_blocks.get(name, name in seen.reached)}


def what_crosses(structure: BlockStructure, layers: LayerModel, example: Inputs) -> list[Carried]:
    """Return what crosses at each boundary.

    Unless blocks change its shape, it is alike between all of a list, and after the last one without what is
    beside.

    layers: without weights.
    """
    crossing: list[Carried] = []
    if structure.keeps_blocks:
        layers.on_boundary = lambda _, tensors: crossing.append(tensors)
        layers.compute(0, layers.num_layers, example, ())
        return crossing
    leaving: Carried = ()
    for blocks, first in zip(structure.lists, structure.first_layers, strict=True):
        entering = layers.compute(first - 1, first, example, leaving)
        leaving = entering[: len(blocks.ports)]
        crossing += [*[entering] * len(blocks.order), leaving]
    return crossing
