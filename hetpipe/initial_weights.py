"""Initial weights as a function of the seed and the module's name alone: no plan can change them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from hetpipe.dropout import stable_hash


@contextmanager
def own_random_stream(seed: int) -> Iterator[None]:
    """Draws inside come from this seed; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        # NOTE: torch.manual_seed would reseed the accelerators as well.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have real buffers, and parameters without storage."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def has_rule(model: nn.Module) -> bool:
    """Whether the model says how each of its modules is initialised, as all of Hugging Face's do."""
    return hasattr(model, "_init_weights")


def initialise_by_module(
    model: nn.Module, names: Mapping[nn.Parameter, str], owned: Collection[str], seed: int
) -> None:
    """Initialise the owned parameters by the model's own rule, module by module, children first.

    names: canonical names of all parameters.

    Each module draws from a stream of its own. A tied parameter is initialised under its canonical name only;
    a module above it may initialise it again, as GPT-2's attention does with its projection.
    """
    for parameter, name in names.items():
        cast(Any, parameter)._is_hf_initialized = name not in owned
    with torch.no_grad():
        for name, module, rule in _post_order("", model, None):
            tied_elsewhere = [
                parameter
                for own_name, parameter in module.named_parameters(prefix=name, recurse=False)
                if names[parameter] != own_name and names[parameter] in owned
            ]
            for parameter in tied_elsewhere:
                cast(Any, parameter)._is_hf_initialized = True
            with own_random_stream(stable_hash(f"{seed},{name}")):
                rule(module)
            for parameter in tied_elsewhere:
                cast(Any, parameter)._is_hf_initialized = False
    for parameter in names:
        del cast(Any, parameter)._is_hf_initialized


def _post_order(
    name: str, module: nn.Module, rule: Callable[[nn.Module], None] | None
) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], None]]]:
    rule = getattr(module, "_init_weights", rule)
    assert rule is not None
    for child_name, child in module.named_children():
        yield from _post_order(f"{name}.{child_name}" if name else child_name, child, rule)
    yield name, module, rule
