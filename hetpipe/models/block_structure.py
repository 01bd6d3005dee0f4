"""The structure of an unchanged model: its chain of blocks, what they exchange, who uses which parameter."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cost_model.errors import InputError
from hetpipe.models.frozen_weights import NO_USE, Use, is_rounded, kept_dtype, use_of
from hetpipe.models.quantized_weights import Packing

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter of a layer.

    name: canonical, the first name under which the model lists it.
    reached: the loss on the logits depends on it and the model trains it (requires_grad); otherwise it has
    no gradient.
    tied: another layer holds it as well, so that gradients have to be summed; never where it is not reached.
    shared: another layer holds it as well, be it trained or not.
    given: dtype of the weight that training begins with. uses: what this layer does with it.
    keeps: uses of all layers where it is frozen, with OTHER where a module may not cast it; none where it is
    not frozen. packing: how it is held in 4 or 8 bits, None: in a dtype.
    """

    name: str
    shape: tuple[int, ...]
    tied: bool
    reached: bool
    shared: bool = False
    given: torch.dtype = torch.float32
    uses: Use = Use.OTHER
    keeps: Use = NO_USE
    packing: Packing | None = None

    def kept_dtype(self, dtype: torch.dtype, lowered: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which the parameter is held between steps; dtype: of trained ones."""
        return kept_dtype(self.given, self.keeps, dtype, lowered) if self.keeps else dtype

    def kept_bytes(self, dtype: torch.dtype, lowered: torch.dtype | None) -> int:
        """Return the bytes that the parameter takes between steps; dtype: of trained ones."""
        if self.packing is not None:
            return self.packing.stored_bytes(self.shape)
        return math.prod(self.shape) * self.kept_dtype(dtype, lowered).itemsize

    def is_rounded(self, kept: torch.dtype) -> bool:
        """Return whether it is frozen and kept in a dtype that cannot hold what was given."""
        return bool(self.keeps) and is_rounded(kept, self.given)


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that travels from block to block.

    argument: position or keyword at which a block takes it.
    output: index in the tuple that a block returns; None where it returns the plain tensor.
    """

    argument: int | str
    output: int | None


@dataclass(frozen=True, slots=True)
class BlockStructure:
    """A list of alike blocks inside a model, called one after the other.

    path: name of the nn.ModuleList.
    num_outputs: length of the tuple that a block returns, None where it returns the plain tensor.
    """

    path: str
    num_blocks: int
    ports: tuple[Port, ...]
    num_outputs: int | None


@dataclass(frozen=True, slots=True)
class Observation:
    """The findings of one forward and backward of a model; parameter names are relative to their block."""

    ports: tuple[Port, ...]
    num_outputs: int | None
    used_before: Mapping[str, Use]
    used_after: Mapping[str, Use]
    used_in_blocks: Mapping[str, Use]
    reached: frozenset[str]
    reached_in_blocks: frozenset[str]


def find_blocks(model: nn.Module) -> str:
    """Return the name of the list of alike modules that holds the most parameters.

    Raises: InputError if the model has no such list.
    """
    lists = [
        (sum(parameter.numel() for parameter in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 1
        and len({type(block) for block in module}) == 1
    ]
    if not lists:
        raise InputError(
            f"{type(model).__name__} cannot be split: it has no list of alike blocks (nn.ModuleList)"
        )
    _, path = max(lists)
    return str(path)


def logits_of(output: Any) -> Tensor:
    """Return the prediction logits in a model's output: its tensor, its logits, or the first of a tuple."""
    for candidate in (
        output,
        getattr(output, "logits", None),
        getattr(output, "prediction_logits", None),
        output[0] if isinstance(output, tuple) and output else None,
    ):
        if isinstance(candidate, Tensor):
            return candidate
    raise InputError(
        f"the model returns a {type(output).__name__} without logits; return a tensor or set .logits"
    )


@contextmanager
def refused_on_error(reason: str) -> Iterator[None]:
    """Turn whatever a model's own code raises into an InputError that gives this reason."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        message = str(error).partition("\n")[0]
        raise InputError(f"{reason}: {type(error).__name__}: {message}") from error


def call_options(model: nn.Module) -> dict[str, bool]:
    """Return keyword arguments for every forward of this model: Hugging Face's must not build caches."""
    return {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}


def unfreeze(model: nn.Module) -> None:
    """Let every parameter that can take a gradient take one, so that autograd shows where it goes."""
    for value in model.parameters():
        value.requires_grad_(value.is_floating_point() or value.is_complex())


def observe(model: nn.Module, path: str, inputs: Inputs) -> Observation:
    """Run a (small) model once and record what its blocks exchange, be its parameters frozen or not.

    Raises: InputError if the blocks are not a chain; says which rule they break.
    """
    blocks = list(model.get_submodule(path).children())
    recorder = _Recorder(model, path, len(blocks))
    unfreeze(model)
    model.eval()
    failure = f"{type(model).__name__} cannot be split: its forward fails on {', '.join(inputs)}"
    with refused_on_error(failure), _hooks(blocks, recorder), torch.enable_grad(), recorder:
        logits = logits_of(model(**inputs, **call_options(model)))
    if recorder.phase != len(blocks) + 1:
        raise InputError(
            f"{type(model).__name__} cannot be split: it does not call every block of {path!r} in order"
        )
    prefix = f"{path}."
    if outer := sorted(name for name in recorder.used[_INSIDE] if not name.startswith(prefix)):
        raise InputError(
            f"{type(model).__name__} cannot be split: its blocks use {outer[0]!r}, which lies outside of them"
        )
    in_blocks: dict[str, Use] = {}
    for used in recorder.used:
        for name, use in used.items():
            if name.startswith(prefix):
                inner = name.removeprefix(prefix).partition(".")[2]
                in_blocks[inner] = in_blocks.get(inner, NO_USE) | use
    ports = _ports(model, recorder)
    logits.float().square().sum().backward()  # type: ignore[no-untyped-call]
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Observation(
        ports=ports,
        num_outputs=len(recorder.outputs[0]) if isinstance(recorder.outputs[0], tuple) else None,
        used_before=recorder.used[_BEFORE],
        used_after=recorder.used[_AFTER],
        used_in_blocks=in_blocks,
        reached=frozenset(name for name in reached if not name.startswith(prefix)),
        reached_in_blocks=frozenset(
            name.removeprefix(prefix).partition(".")[2] for name in reached if name.startswith(prefix)
        ),
    )


_BEFORE, _INSIDE, _AFTER = range(3)


class UseRecorder(TorchFunctionMode):
    """A record of what is done with each parameter of a model, by phase; owns it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.used: tuple[dict[str, Use], ...] = ({},)
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    def _phase(self) -> int:
        return 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # What returns no tensor (.dtype, .size()) is no use of a parameter.
        if isinstance(result, (Tensor, tuple)) and not isinstance(result, torch.Size):
            used = self.used[self._phase()]
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and leaf in self._names:
                    name = self._names[leaf]
                    used[name] = used.get(name, NO_USE) | use_of(func)
        return result


class _Recorder(UseRecorder):
    """A record of each block's arguments and outputs, and of what each phase does with parameters."""

    def __init__(self, model: nn.Module, path: str, num_blocks: int) -> None:
        super().__init__(model)
        self.model_name = type(model).__name__
        self.path = path
        self.num_blocks = num_blocks
        self.phase = 0  # 0: before the blocks, k: in or after block k - 1, num_blocks + 1: after all
        self.used = ({}, {}, {})
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.outputs: list[Any] = []

    def _phase(self) -> int:
        return _BEFORE if self.phase == 0 else _AFTER if self.phase > self.num_blocks else _INSIDE

    def before_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.phase != index:
            raise InputError(
                f"{self.model_name} cannot be split: it calls the blocks of {self.path!r} out of order"
            )
        self.phase = index + 1
        self.arguments.append((args, kwargs))

    def after_block(self, index: int, output: Any) -> None:
        self.outputs.append(output)
        if index + 1 == self.num_blocks:
            self.phase = index + 2


@contextmanager
def _hooks(blocks: list[nn.Module], recorder: _Recorder) -> Iterator[None]:
    handles = []
    for index, block in enumerate(blocks):

        def before(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            recorder.before_block(index, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any, index: int = index) -> None:
            recorder.after_block(index, output)

        handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ports(model: nn.Module, recorder: _Recorder) -> tuple[Port, ...]:
    """Return the ports of the blocks, by object identity: what block i takes that block i - 1 returned."""
    name = type(model).__name__
    found = [
        _ports_between(output, *arguments)
        for output, arguments in zip(recorder.outputs, recorder.arguments[1:], strict=False)
    ]
    if not found[0]:
        raise InputError(f"{name} cannot be split: block 1 takes no tensor that block 0 returns")
    if len(set(found)) > 1:
        raise InputError(f"{name} cannot be split: its blocks do not all pass on the same tensors")
    ports = found[0]
    for index, (args, kwargs) in enumerate(recorder.arguments):
        taken = {port.argument for port in ports}
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in places:
            if place in taken:
                if not isinstance(value, Tensor):
                    raise InputError(
                        f"{name} cannot be split: block {index} takes no tensor as argument {place!r}"
                    )
            elif any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value)):
                raise InputError(
                    f"{name} cannot be split: argument {place!r} of block {index} is made from parameters, "
                    "but is not what the block before returns"
                )
    return ports


def _ports_between(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Port, ...]:
    outputs = output if isinstance(output, tuple) else (output,)
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return tuple(
        Port(argument=place, output=index if isinstance(output, tuple) else None)
        for place, value in places
        for index, tensor in enumerate(outputs)
        if isinstance(value, Tensor) and value is tensor
    )


def holding_layers(name: str, path: str, num_blocks: int, seen: Observation) -> tuple[int, ...]:
    """Return the layers that hold a parameter; one that nobody uses stays with the head."""
    if name.startswith(f"{path}."):
        return (int(name.removeprefix(f"{path}.").partition(".")[0]) + 1,)
    before, after = name in seen.used_before, name in seen.used_after
    return (0,) * before + (num_blocks + 1,) * (after or not before)


def use_in(name: str, layer: int, path: str, seen: Observation) -> Use:
    """Return how a layer uses a parameter."""
    if name.startswith(f"{path}."):
        return seen.used_in_blocks.get(name.removeprefix(f"{path}.").partition(".")[2], NO_USE)
    return (seen.used_after if layer else seen.used_before).get(name, NO_USE)


def is_reached(name: str, path: str, seen: Observation) -> bool:
    """Return whether the output of the model depends on a parameter."""
    if name.startswith(f"{path}."):
        return name.removeprefix(f"{path}.").partition(".")[2] in seen.reached_in_blocks
    return name in seen.reached
