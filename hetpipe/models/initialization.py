"""Initial weights as a function of the seed and the module's name alone: no plan can change them."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hetpipe.models.adapters import adapted_layers, base_alone, base_name, draw_adapters, is_adapter
from hetpipe.models.keyed_dropout import stable_hash
from hetpipe.models.quantized_modules import linear_layers


@contextmanager
def private_random_stream(seed: int) -> Iterator[None]:
    """Draw from this seed inside the context; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        # NOTE: torch.manual_seed would reseed the accelerators as well.
        torch.default_generator.manual_seed(seed)
        yield


_FILLS = frozenset(
    {"uniform_", "normal_", "trunc_normal_", "constant_", "kaiming_uniform_", "fill_", "zero_", "erfinv_"}
)
"""Functions of torch.nn.init, of what transformers has in their place, and methods of tensors."""


class _NothingToFill(TorchFunctionMode):
    """Leaves out initial values of tensors without storage: each takes torch a millisecond of Python."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _FILLS:
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta:
                return filled
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules inside the context with real buffers, and with parameters without storage or values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        with _NothingToFill():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def has_rule(model: nn.Module) -> bool:
    """Return whether the model says how each module is initialised, as all of Hugging Face's do."""
    return hasattr(model, "_init_weights")


def initialise_by_module(
    model: nn.Module, names: Mapping[nn.Parameter, str], owned: Collection[str], seed: int
) -> None:
    """Initialise the owned parameters by the model's own rule, module by module, children first.

    names: canonical names of all parameters.

    Each module draws from a stream of its own. A tied parameter is initialised under its canonical name only;
    a module above it may initialise it again, as GPT-2's attention does with its projection. Adapters change
    no draw of the base, and are drawn by peft's rule.
    """
    with base_alone(model):
        base = {parameter: base_name(name) for parameter, name in names.items() if not is_adapter(name)}
        _initialise_base(model, base, {base_name(name) for name in owned}, seed)
    for name, layer in adapted_layers(model).items():
        with private_random_stream(stable_hash(f"{seed},{name}.lora")):
            draw_adapters(layer)


def _initialise_base(
    model: nn.Module, names: Mapping[nn.Parameter, str], owned: Collection[str], seed: int
) -> None:
    for parameter, name in names.items():
        cast(Any, parameter)._is_hf_initialized = name not in owned
    with torch.no_grad():
        for name, module, rule in _post_order("", model, None):
            tied_elsewhere = [
                parameter
                for listed_name, parameter in module.named_parameters(prefix=name, recurse=False)
                if names[parameter] != listed_name and names[parameter] in owned
            ]
            for parameter in tied_elsewhere:
                cast(Any, parameter)._is_hf_initialized = True
            with private_random_stream(stable_hash(f"{seed},{name}")):
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


class Template:
    """A module without its weights; a call gives a copy whose parameters are zero, tied ones tied.

    The copy is made on the device of the context, as one that a constructor makes. Buffers keep their values.
    Can be sent to other processes: parameters cost nothing here.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = _copy_with(
            module, lambda value: nn.Parameter(value.detach().to("meta"), value.requires_grad)
        )  # matrices in 4 or 8 bits are given by themselves, and have linear layers here
        for part in self.module.modules():
            part._buffers.update(
                {key: value.cpu() for key, value in part._buffers.items() if value is not None}
            )

    def __call__(self) -> nn.Module:
        made = _copy_with(
            self.module,
            lambda value: nn.Parameter(torch.zeros(value.shape, dtype=value.dtype), value.requires_grad),
        )
        return made.to("meta") if torch.empty(0).is_meta else made


def _copy_with(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> nn.Module:
    """Return a deep copy of a module with other parameters, one for each, and without quantized ones."""
    made: dict[int, nn.Parameter] = {}

    def once(value: nn.Parameter) -> nn.Parameter:
        return made.setdefault(id(value), make(value))

    layers, weights = linear_layers(module, once)
    for value in module.parameters():
        if id(value) not in weights:
            once(value)
    return copy.deepcopy(module, {**made, **layers})
