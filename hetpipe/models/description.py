"""What is found out about a model before it is cut: its layers, and what each holds and trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor, nn

from hetpipe.models.adapters import has_adapters
from hetpipe.models.block_structure import (
    BlockStructure,
    Inputs,
    ParameterInfo,
    unfreeze,
    whole_logits,
)
from hetpipe.models.found_structure import holders_by_name, reached_names, structure_of, uses_by_layer
from hetpipe.models.frozen_weights import NO_USE, uncast
from hetpipe.models.initialization import has_rule, private_random_stream
from hetpipe.models.observation import observe
from hetpipe.models.sequential import holders_of, reached_and_used


@dataclass(frozen=True, slots=True)
class Description:
    """The findings about a model; fields as of `ChainModel`."""

    structure: BlockStructure | None
    layer_names: tuple[str, ...]
    layer_parameters: tuple[tuple[ParameterInfo, ...], ...]
    has_rule: bool
    base: frozenset[str]

    @property
    def trains(self) -> bool:
        """Return whether it trains anything."""
        return any(info.reached for infos in self.layer_parameters for info in infos)

    @property
    def unreached(self) -> frozenset[str]:
        """Return the names of parameters that are not frozen, and that the example did not reach."""
        return frozenset(info.name for infos in self.layer_parameters for info in infos if info.unreached)

    def reaching(self, names: set[str]) -> "Description":
        """Return the same, with parameters of these names that are not frozen reached, too."""

        def reached(info: ParameterInfo) -> ParameterInfo:
            if not info.unreached or info.name not in names:
                return info
            return replace(info, reached=True, unreached=False, tied=info.shared)

        layers = tuple(tuple(map(reached, infos)) for infos in self.layer_parameters)
        return replace(self, layer_parameters=layers)


def describe(
    name: str,
    build: Callable[[], nn.Module],
    build_small: Callable[[], nn.Module],
    inputs: Inputs,
    example: Inputs,
    given: Mapping[str, Tensor] | None = None,
) -> Description:
    """Look at a model on the meta device, and at a small one that runs once.

    inputs: of the small one's run, two samples. given: initial weights by name, None if they are drawn.

    Raises: InputError if the model cannot be split; says why.
    """
    with torch.device("meta"):
        model = build()
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    unfrozen = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    if isinstance(model, nn.Sequential):
        structure, layer_names = None, tuple(str(index) for index in range(len(model)))
        holders = holders_of(model)
        reached, used = reached_and_used(build, inputs)
        uses = {(key, layer): used.get(key, NO_USE) for key, layers in holders.items() for layer in layers}
    else:
        with private_random_stream(0), torch.device("cpu"):
            small, seen = observe(build_small, inputs)
        structure = structure_of(name, build, example, model=model, small=small, seen=seen)
        layer_names = structure.layer_names
        uses = uses_by_layer(model, structure, seen)
        unused = shapes.keys() - {key for key, _ in uses}
        uses |= {(key, layer): NO_USE for key in unused for layer in _holding(structure, key)}
        holders = holders_by_name(uses)
        reached = reached_names(model, structure, seen)
    by_layer: list[list[ParameterInfo]] = [[] for _ in layer_names]
    # weights drawn by a model's rule are drawn in float32
    begun = dict(model.named_parameters()) if given is None and not has_rule(model) else given or {}
    modules = uncast(model)
    for key, layers in holders.items():
        is_trained = key in reached and key in unfrozen
        keeps = modules[key] | reduce(or_, (uses[key, layer] for layer in layers))
        for layer in layers:
            info = ParameterInfo(
                key,
                shapes[key],
                tied=is_trained and len(layers) > 1,
                reached=is_trained,
                unreached=key in unfrozen and not is_trained,
                shared=len(layers) > 1,
                given=begun[key].dtype if key in begun else torch.float32,
                uses=uses[key, layer],
                keeps=NO_USE if key in unfrozen else keeps,
            )
            by_layer[layer].append(info)
    return Description(
        structure,
        layer_names,
        tuple(tuple(infos) for infos in by_layer),
        has_rule=structure is not None and has_rule(model),
        base=frozenset(shapes.keys() - unfrozen) if has_adapters(model) else frozenset(),
    )


def _holding(structure: BlockStructure, name: str) -> list[int]:
    """Return the layers that have a parameter which nothing uses: of its block, else the head."""
    found = [
        layer
        for layer, (blocks, block) in structure.calls.items()
        if name.startswith(f"{blocks.path}.{block}.")
    ]
    return found or [len(structure.layer_names) - 1]


def reached_by(build: Callable[[], nn.Module], more: Callable[[], Inputs]) -> set[str]:
    """Return the parameters that samples reach in train mode, with the weights that training begins with.

    What is found with one sample, in eval mode or with weights of zero may be less: experts of a mixture, or
    what runs in training alone. None where the model cannot be run so, as ranks refuse what is missed
    (`hetpipe.runtime.unreached`).
    """
    try:
        with private_random_stream(0), torch.device("cpu"):
            model = build().train()
            unfreeze(model)
            total = whole_logits(model, more()).float().square().sum()
            total.backward()  # type: ignore[no-untyped-call]
    except Exception:  # what a model of somebody else raises of other samples is of many kinds
        return set()
    return {name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()}
