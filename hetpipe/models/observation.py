"""What one run of a small model shows: in which order it calls its blocks, what they exchange, who uses what.

Values are followed by the identity of tensors. Calls are numbered by phases:

    0 before all, 1 in call 0, 2 after it, 3 in call 1, 4 after it, ...
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cost_model.errors import InputError
from hetpipe.models.block_structure import (
    BlockList,
    BlockStructure,
    Inputs,
    Port,
    call_options,
    lists_of_blocks,
    logits_of,
    refused_on_error,
    unfreeze,
)
from hetpipe.models.frozen_weights import NO_USE, Use, use_of


@dataclass(frozen=True, slots=True)
class Observation:
    """The findings of one forward and backward of a model.

    used: by canonical name, what each layer around the lists does with parameters; used_in_blocks: the same
    of blocks, list by list, with names as a block has them. reached: the loss depends on them.
    """

    structure: BlockStructure
    used: tuple[Mapping[str, Use], ...]
    used_in_blocks: tuple[Mapping[str, Use], ...]
    reached: frozenset[str]
    reached_in_blocks: tuple[frozenset[str], ...]


def observe(build: Callable[[], nn.Module], inputs: Inputs) -> tuple[nn.Module, Observation]:
    """Run a (small) model once and record what its blocks exchange, be its parameters frozen or not.

    Returns the model as well.

    Raises: InputError if the blocks are not a chain; says which rule they break.
    """
    first: InputError | None = None
    for paths in lists_of_blocks(build()):
        model = build()
        try:
            return model, _observe(model, paths, inputs)
        except InputError as error:
            first = first or error
    assert first is not None
    raise first


def _observe(model: nn.Module, paths: Sequence[str], inputs: Inputs) -> Observation:
    recorder = _Recorder(model, paths)
    unfreeze(model)
    model.eval()
    failure = f"{recorder.refusal} its forward fails on {', '.join(inputs)}"
    with refused_on_error(failure), recorder.looking(), torch.enable_grad(), recorder:
        logits = logits_of(model(**inputs, **call_options(model)))
    spans = _spans(recorder, paths)
    counts = {len(tensor) for tensor in inputs.values()}
    lists = tuple(_block_list(recorder, path, span, counts) for path, span in spans)
    shapes_vary = any(
        _shapes_vary(recorder.calls[slice(*span)], ports)
        for ports, (_, span) in zip(lists, spans, strict=True)
    )
    gaps = [2 * start for _, (start, _) in spans] + [2 * len(recorder.calls)]
    _check_uses(recorder, gaps)
    logits.float().square().sum().backward()  # type: ignore[no-untyped-call]
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    in_blocks, reached_in_blocks = [], []
    for path, (start, stop) in spans:
        used: dict[str, Use] = {}
        for call in range(start, stop):
            names = recorder.inner_names(path, recorder.calls[call].block)
            for parameter, use in recorder.used[2 * call + 1].items():
                used[names[parameter]] = used.get(names[parameter], NO_USE) | use
        in_blocks.append(used)
        reached_in_blocks.append(
            frozenset(
                inner
                for block in {recorder.calls[call].block for call in range(start, stop)}
                for parameter, inner in recorder.inner_names(path, block).items()
                if parameter.grad is not None
            )
        )
    return Observation(
        structure=BlockStructure(lists, recorder.looked_into or shapes_vary),
        used=tuple(
            {recorder.names[value]: use for value, use in recorder.used.get(gap, {}).items()} for gap in gaps
        ),
        used_in_blocks=tuple(in_blocks),
        reached=frozenset(reached),
        reached_in_blocks=tuple(reached_in_blocks),
    )


class UseRecorder(TorchFunctionMode):
    """A record of what is done with each parameter of a model, by phase; owns it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.used: dict[int, dict[nn.Parameter, Use]] = {}
        self.phase = 0

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
            used = self.used.setdefault(self.phase, {})
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and leaf in self.names:
                    used[leaf] = used.get(leaf, NO_USE) | use_of(func)
                elif isinstance(leaf, Tensor) and leaf.requires_grad:
                    self.read(leaf)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self.made(leaf)
        return result

    def read(self, tensor: Tensor) -> None:
        """Note that an operation takes a tensor that depends on parameters."""

    def made(self, tensor: Tensor) -> None:
        """Note that an operation gives a tensor that depends on parameters."""


@dataclass(slots=True)
class _Call:
    """A call of a block: of which list and which in it, what it was given and what it returned."""

    path: str
    block: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def places(self) -> list[tuple[int | str, Any]]:
        return [*enumerate(self.args), *self.kwargs.items()]

    @property
    def outputs(self) -> tuple[Any, ...]:
        return self.output if isinstance(self.output, tuple) else (self.output,)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A tensor that depends on parameters, made in one phase and taken by an operation in a later one."""

    tensor: Tensor
    made: int
    used: int


class _Recorder(UseRecorder):
    """A record of each call of a block, and of what each phase does with parameters and their offspring."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        super().__init__(model)
        self.refusal = f"{type(model).__name__} cannot be split:"
        self.model = model
        self.blocks = {
            path: [block for _, block in model.get_submodule(path).named_children()] for path in paths
        }
        self.calls: list[_Call] = []
        self.readings: list[_Reading] = []
        self.looked_into = False
        self._made: dict[int, tuple[Tensor, int]] = {}  # the tensor itself, lest another takes its id

    def inner_names(self, path: str, block: int) -> dict[nn.Parameter, str]:
        """Return the parameters of a block by the names that they have in it."""
        return {value: name for name, value in self.blocks[path][block].named_parameters()}

    def phase_of(self, tensor: Tensor) -> int | None:
        """Return in which phase a tensor that depends on parameters, and is none, was made; else None."""
        is_made = id(tensor) in self._made and not isinstance(tensor, nn.Parameter)
        return self._made[id(tensor)][1] if is_made else None

    def read(self, tensor: Tensor) -> None:
        _, made = self._made.get(id(tensor), (tensor, self.phase))
        if made < self.phase:
            self.readings.append(_Reading(tensor, made, self.phase))

    def made(self, tensor: Tensor) -> None:
        self._made.setdefault(id(tensor), (tensor, self.phase))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Note calls of blocks, and whether anything beside them looks into one."""
        handles = []
        for path, blocks in self.blocks.items():
            for index, block in enumerate(blocks):

                def before(
                    _: nn.Module, args: Any, kwargs: Any, path: str = path, index: int = index
                ) -> None:
                    self.calls.append(_Call(path, index, args, kwargs))
                    self.phase = 2 * len(self.calls) - 1

                def after(_: nn.Module, __: Any, output: Any) -> None:
                    self.calls[-1].output = output
                    self.phase = 2 * len(self.calls)

                handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(block.register_forward_hook(after))
        mine = {id(block) for blocks in self.blocks.values() for block in blocks}
        look_up = nn.Module.__getattr__

        def noted(module: nn.Module, name: str) -> Any:
            self.looked_into |= id(module) in mine and self.phase % 2 == 0
            return look_up(module, name)

        nn.Module.__getattr__ = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__getattr__ = look_up  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()


def _spans(recorder: _Recorder, paths: Sequence[str]) -> list[tuple[str, tuple[int, int]]]:
    """Return the lists in the order in which they are called, each with its calls [start, stop)."""
    spans: list[tuple[str, tuple[int, int]]] = []
    start = 0
    for path, calls in groupby(recorder.calls, key=lambda call: call.path):
        stop = start + len(list(calls))
        spans.append((path, (start, stop)))
        start = stop
    if len(spans) > len(paths):
        raise InputError(f"{recorder.refusal} it calls blocks of {' and '.join(map(repr, paths))} in turn")
    for path in paths:
        called = {call.block for call in recorder.calls if call.path == path}
        if len(called) < len(recorder.blocks[path]):
            raise InputError(f"{recorder.refusal} it does not call every block of {path!r}")
    for _, (start, stop) in spans:
        if stop - start < 2:
            raise InputError(f"{recorder.refusal} it has no list of alike blocks (nn.ModuleList)")
    return spans


def _block_list(recorder: _Recorder, path: str, span: tuple[int, int], counts: set[int]) -> BlockList:
    """Return what the calls of a list exchange, by object identity: what a call takes that another returned.

    counts: of the samples, as the inputs have them.
    """
    calls = recorder.calls[slice(*span)]
    if any(
        isinstance(leaf, bool | int | float | complex) for call in calls for leaf in tree_leaves(call.output)
    ):
        raise InputError(
            f"{recorder.refusal} the blocks of {path!r} return numbers beside their tensors, and only "
            "tensors travel"
        )
    found = [_ports_between(before, after) for before, after in pairwise(calls)]
    if not found[0]:
        raise InputError(f"{recorder.refusal} block 1 takes no tensor that block 0 returns")
    if len(set(found)) > 1:
        raise InputError(f"{recorder.refusal} its blocks do not all pass on the same tensors")
    ports = found[0]
    taken = {port.argument for port in ports}
    first = dict(calls[0].places)
    beside = tuple(
        place
        for place, value in first.items()
        if place not in taken
        and _depends(value)
        and isinstance(value, Tensor)
        and all(dict(call.places).get(place) is value for call in calls)
    )
    for index, call in enumerate(calls):
        for place, value in call.places:
            if place in taken and not isinstance(value, Tensor):
                raise InputError(
                    f"{recorder.refusal} block {index} of {path!r} takes no tensor as argument {place!r}"
                )
            if place not in taken and place not in beside and _depends(value):
                raise InputError(
                    f"{recorder.refusal} argument {place!r} of block {index} of {path!r} is made from "
                    "parameters, but is not what the block before returns"
                )
    before = 2 * span[0]
    entering = tree_leaves(recorder.calls[span[0] - 1].output) if before else []
    for place in (*taken, *beside):
        value = first[place]
        if recorder.phase_of(value) not in (None, before) and not any(value is leaf for leaf in entering):
            raise InputError(
                f"{recorder.refusal} argument {place!r} of the blocks of {path!r} is made before other "
                "blocks, and is not what those return"
            )
        if len(counts) == 1 and first[place].shape[:1] != (*counts,):
            raise InputError(
                f"{recorder.refusal} the first dimension of argument {place!r} of the blocks of {path!r} is "
                "not the samples (batch_first)"
            )
    outputs = calls[0].output
    return BlockList(
        path=path,
        order=tuple(call.block for call in calls),
        ports=ports,
        beside=beside,
        num_outputs=len(outputs) if isinstance(outputs, tuple) else None,
    )


def _shapes_vary(calls: Sequence[_Call], blocks: BlockList) -> bool:
    """Return whether what travels between blocks changes its shape."""
    shapes = [[value.shape for place, value in call.places if place in blocks.places] for call in calls]
    leaving = [calls[-1].outputs[port.output or 0].shape for port in blocks.ports]
    return any(each != shapes[0] for each in shapes) or leaving != shapes[0][: len(leaving)]


def _depends(value: Any) -> bool:
    """Return whether anything in a value is made from parameters."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))


def _ports_between(before: _Call, after: _Call) -> tuple[Port, ...]:
    return tuple(
        Port(argument=place, output=index if isinstance(before.output, tuple) else None)
        for place, value in after.places
        for index, tensor in enumerate(before.outputs)
        if isinstance(value, Tensor) and value is tensor
    )


def _check_uses(recorder: _Recorder, gaps: Sequence[int]) -> None:
    """Check that each layer uses nothing but its own parameters and what travels to it.

    gaps: the phases of the layers around the lists.

    Raises: InputError naming what it uses beside.
    """
    for phase, used in recorder.used.items():
        if phase in gaps:
            continue
        call = recorder.calls[(phase - 1) // 2]
        mine = recorder.inner_names(call.path, call.block)
        if outer := sorted(recorder.names[value] for value in used if value not in mine):
            raise InputError(f"{recorder.refusal} its blocks use {outer[0]!r}, which lies outside of them")
    for reading in recorder.readings:
        call = recorder.calls[(reading.used - 1) // 2]
        if reading.used % 2:
            if not any(reading.tensor is leaf for leaf in tree_leaves((call.args, call.kwargs))):
                raise InputError(
                    f"{recorder.refusal} block {call.block} of {call.path!r} uses what was made from "
                    "parameters before it and is none of its arguments"
                )
        elif not any(reading.tensor is leaf for leaf in tree_leaves(call.output)):
            raise InputError(
                f"{recorder.refusal} after the blocks of {call.path!r} it uses what was made from "
                "parameters before the last of them, and is not what that returns"
            )
