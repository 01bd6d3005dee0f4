"""A model of which one rank owns some layers: the others are gates without weights.

The model's own forward runs, so masks, rotary tables and positions are whatever the model computes; nothing
but the tensors between blocks has to travel, and what all blocks of a list take beside them, as the output of
an encoder. To compute layers [start, stop) the forward runs the part before
the blocks without gradients, gates pass on whatever they get until `start`, the gate of `start` injects what
the stage before sent, and the gate of `stop` leaves by an exception:

    prefix ~ gate ~ gate ~ [inject] block - block [leave]      ~ repeated for masks only, - computed

Where the prefix gives the same for all inputs of a shape, it runs once: a stage that begins and ends with a
block then calls its blocks itself (`hetpipe.models.block_arguments`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.block_arguments import Arguments, BlockArguments, Recorder, shape_key
from hetpipe.models.block_structure import BlockList, BlockStructure, Inputs, call_options, logits_of
from hetpipe.models.keyed_dropout import PREFIX
from hetpipe.models.quantized_weights import tensors_of

Carried = tuple[Tensor, ...]


class _LeaveError(Exception):
    """A signal of control flow: the computation reached `stop`."""


class LayerModel(nn.Module):
    """The layers of a chain that one rank owns, with real weights; made by `ChainModel.materialise`.

    Lives on one device in one dtype: materialise again rather than moving it.

    on_layer: called with each layer about to be computed; with PREFIX (-1) before what is for masks only.
    on_boundary: called with a layer and the tensors that enter it, at each one inside the range that runs.
    lowered: what autocast computes in, and tensors between layers are rounded to; None for no autocast.
    first_trained: the first layer of the chain that trains a parameter; what enters it needs no gradient.
    absent: names of owned parameters whose weights are elsewhere, but for the time of a computation.
    compiles: whether blocks run as `compile_blocks` has compiled them.
    on_host: names of owned parameters that are in the host's memory, but for the time of a computation.
    fetch: called with a layer whose weights are needed now, and with the way of the pass: 1, -1 for a
    backward, 0 where it ends. rooms: where they come to; host_tensors: where they are on the host.
    """

    first_trained: int = 0
    compiles: bool = False
    absent: frozenset[str] = frozenset()
    device_type: str = "cpu"
    lowered: torch.dtype | None = None
    on_layer: Callable[[int], None] | None = None
    on_boundary: Callable[[int, Carried], None] | None = None
    on_host: frozenset[str] = frozenset()
    fetch: Callable[[int, int], None] | None = None
    rooms: tuple[Tensor, ...] = ()
    host_tensors: tuple[Tensor, ...] = ()

    def __init__(
        self, model: nn.Module, num_layers: int, owned: Mapping[int, dict[str, nn.Parameter]]
    ) -> None:
        super().__init__()
        self.model, self._by_layer = model, owned
        self.layers = frozenset(owned)
        self.num_layers = self._ends = num_layers
        self._ranges: set[tuple[int, int]] = set()

    def run(self, start: int, stop: int, inputs: Inputs, carried: Carried = ()) -> Carried:
        """Compute layers [start, stop), all of them owned; () is carried into layer 0.

        inputs: the model's inputs of this microbatch, wherever the range starts: their shapes and masks are
        needed. Returns what travels to layer `stop`; (logits,) at the end of the chain.
        """
        if (start, stop) not in self._ranges:
            if not 0 <= start < stop <= self.num_layers or not self.layers.issuperset(range(start, stop)):
                raise ValueError(
                    f"layers [{start}, {stop}) are not all owned here; owned: {sorted(self.layers)}"
                )
            self._ranges.add((start, stop))
        self._ends = stop
        if self.lowered is None:
            return self.compute(start, stop, inputs, carried)
        with torch.autocast(self.device_type, self.lowered):
            carried = self.compute(start, stop, inputs, carried)
        return tuple(map(torch.Tensor.float, carried)) if stop == self.num_layers else carried

    def compute(self, start: int, stop: int, inputs: Inputs, carried: Carried) -> Carried:
        """Do what `run` does without its check that the layers are owned: others compute with zeros."""
        raise NotImplementedError

    def compile_blocks(self) -> None:
        """Let owned blocks run compiled from now on (`compiles`), each compiled when it is first run.

        Raises: InputError if there are none, or they cannot be compiled.
        """
        raise InputError("--compile is for models with a list of blocks, which an nn.Sequential has not")

    def module_of(self, layer: int) -> nn.Module | None:
        """Return the module that is a layer; None at the ends of a model around blocks, which are many."""
        raise NotImplementedError

    def parameters_of(self, layer: int) -> dict[str, nn.Parameter]:
        """Return the parameters of an owned layer by canonical name; all its layers share a tied one."""
        return dict(self._by_layer[layer])

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all owned layers by name, each once, in the order of the layers."""
        return {name: value for layer in self._by_layer.values() for name, value in layer.items()}

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """Return those of `owned_parameters` whose weights are here all the time."""
        return {name: value for name, value in self.owned_parameters().items() if name not in self.absent}

    def held_tensors(self) -> list[Tensor]:
        """Return the tensors that hold weights on the device; several of one that is quantized."""
        here = {name: value for name, value in self.held_parameters().items() if name not in self.on_host}
        return [*(tensor for value in here.values() for tensor in tensors_of(value)), *self.rooms]

    def kept_arguments(self) -> list[Tensor]:
        """Return the tensors that are kept from one forward to the next: masks and rotary tables."""
        return []

    def forget_arguments(self) -> None:
        """Let go of `kept_arguments`; they are made again when they are needed."""

    def _rounded(self, tensors: Carried) -> Carried:
        """Return what leaves a layer as the next one gets it, be it on this rank or another."""
        if self.lowered is None:
            return tensors
        return tuple(tensor.to(self.lowered) if tensor.is_floating_point() else tensor for tensor in tensors)

    def _cross(self, layer: int, tensors: Carried) -> None:
        if self.on_boundary is not None:
            self.on_boundary(layer, tensors)
        if self.fetch is not None:
            for back in [tensor for tensor in tensors if tensor.requires_grad][:1]:
                fetch = partial(_fetch_before, self.fetch, layer - 1)  # after all of this layer's backward
                back.register_hook(fetch)  # type: ignore[no-untyped-call]  # torch
        self._enter(layer)

    def _enter(self, layer: int) -> None:
        if self.fetch is not None and layer != PREFIX:
            self.fetch(layer, 1 if layer + 1 < self._ends else 0)
        if self.on_layer is not None:
            self.on_layer(layer)

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        # Moving would give every stand-in its full memory.
        raise TypeError("a LayerModel cannot be moved or cast; materialise it with that device and dtype")


class SequentialLayers(LayerModel):
    """Layers of an nn.Sequential: each child takes and returns a tensor or a tuple of tensors."""

    @cached_property
    def _children(self) -> tuple[nn.Module, ...]:
        assert isinstance(self.model, nn.Sequential)
        return tuple(self.model)  # one that is there twice, twice

    def module_of(self, layer: int) -> nn.Module | None:
        return self._children[layer]

    def compute(self, start: int, stop: int, inputs: Inputs, carried: Carried) -> Carried:
        self._enter(start)
        children = self._children
        tensors = tuple(inputs.values()) if start == 0 else carried
        for layer in range(start, stop):
            if layer > start:
                self._cross(layer, tensors)
            result = children[layer](tensors if len(tensors) > 1 else tensors[0])
            tensors = result if isinstance(result, tuple) else (result,)
            if layer + 1 < self.num_layers:
                tensors = self._rounded(tensors)
        return (logits_of(tensors),) if stop == self.num_layers else tensors


def _fetch_before(fetch: Callable[[int, int], None], layer: int, _: Tensor) -> None:
    fetch(layer, -1)


def _zeros(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a forward that costs nothing, for a module without weights: zeros of the right shape."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() == 0 or any(weight.stride()):
        return None
    zero = weight.detach()[(0,) * weight.dim()]
    if type(module) is nn.Embedding:
        return lambda ids: zero.expand(*ids.shape, weight.shape[1])
    if type(module) is nn.LayerNorm:
        return lambda x: zero.expand(x.shape)
    if type(module) is nn.Linear:
        return lambda x: zero.expand(*x.shape[:-1], weight.shape[0])
    return None


class BlockLayers(LayerModel):
    """Layers of a model around lists of blocks: each call of a block is one, the rest is around them."""

    def __init__(
        self,
        model: nn.Module,
        owned: Mapping[int, dict[str, nn.Parameter]],
        structure: BlockStructure,
    ) -> None:
        super().__init__(model, structure.around[-1] + 1, owned)
        self._around = frozenset(structure.around)
        self._firsts = frozenset(structure.first_layers)
        self._names = structure.layer_names
        self._options = call_options(model)
        self._start = self._stop = self._next = 0
        self._grad = True
        self._carried: Carried = ()
        self._beside: Carried = ()
        self._arguments = BlockArguments()
        self._recorder: Recorder | None = None
        own = {id(value) for value in self.owned_parameters().values()}
        for module in model.modules():
            zeros = None if id(getattr(module, "weight", None)) in own else _zeros(module)
            if zeros is not None:
                module.__dict__["forward"] = zeros
        lists = {blocks: tuple(model.get_submodule(blocks.path).children()) for blocks in structure.lists}
        self._lists = {layer: blocks for layer, (blocks, _) in structure.calls.items()}
        self._blocks = {layer: lists[blocks][block] for layer, (blocks, block) in structure.calls.items()}
        self._forwards = {layer: block.forward for layer, block in self._blocks.items()}
        self._compiled: dict[int, Callable[..., Any]] = {}
        for block in set(self._blocks.values()):
            # Replacing the forward, not the block, keeps its type, attributes and names.
            block.__dict__["forward"] = partial(self._gate, block)

    def module_of(self, layer: int) -> nn.Module | None:
        return self._blocks.get(layer)

    def compute(self, start: int, stop: int, inputs: Inputs, carried: Carried) -> Carried:
        self._check_carried(start, carried)
        self._start, self._stop, self._carried = start, stop, carried
        self._grad = torch.is_grad_enabled()
        try:
            if not self._around.isdisjoint(range(start, stop)):
                return self._by_model(inputs)
            key = shape_key(inputs, training=self.training)
            known = self._arguments.find(key, range(start, stop))
            if known is not None:
                return self._by_blocks(known)
            if not self._arguments.may_record(key):
                return self._by_model(inputs)
            self._recorder = Recorder(inputs, self.device_type)
            self._recorder.mark(carried)
            with self._recorder:
                result = self._by_model(inputs)
            self._arguments.keep(key, self._recorder)
            return result
        finally:
            self._recorder, self._carried, self._beside = None, (), ()

    def _check_carried(self, start: int, carried: Carried) -> None:
        blocks = self._lists.get(start)
        if blocks is not None:
            wanted = len(blocks.places)
        else:
            wanted = len(self._lists[start - 1].ports) if start else 0
        if len(carried) != wanted:
            raise ValueError(f"layer {start} does not take {len(carried)} carried tensors")

    def _by_model(self, inputs: Inputs) -> Carried:
        """Run the model's own forward, from the start to where it leaves."""
        self._enter(PREFIX if self._start else 0)
        self._next = 1
        try:
            if self._start:
                torch.set_grad_enabled(False)
            return (logits_of(self.model(**inputs, **self._options)),)
        except _LeaveError:
            return self._carried
        finally:
            torch.set_grad_enabled(self._grad)

    def _by_blocks(self, known: Mapping[int, Arguments]) -> Carried:
        """Call the blocks themselves, with arguments that are known."""
        tensors, self._next = self._carried, self._start
        try:
            for layer in range(self._start, self._stop):
                blocks = self._lists[layer]
                args, kwargs = _injected(blocks, *known[layer], tensors)
                result = _unpacked(blocks, self._blocks[layer](*args, **kwargs))
                tensors = (*result, *self._beside)
        except _LeaveError:  # by the last block of a list
            return self._carried
        return self._rounded(tensors)

    def compile_blocks(self) -> None:
        # NOTE: not at the top: it registers an operation, and torch's compiler is slow to load.
        from hetpipe.models.compiled_blocks import check_compilable, compiled

        for layer in sorted(self.layers & self._blocks.keys()):
            block, name = self._blocks[layer], self._names[layer]
            check_compilable(block, name)
            self._compiled[layer] = compiled(self._forwards[layer], name)
        self.compiles = True

    def kept_arguments(self) -> list[Tensor]:
        return self._arguments.tensors()

    def forget_arguments(self) -> None:
        self._arguments.forget()

    def _gate(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Do what a block does when it is called: pass through, inject, leave, or compute."""
        layer = self._next
        if self._blocks.get(layer) is not block:
            raise InputError(
                f"{type(self.model).__name__} calls its blocks in another order than when its layers were "
                "found, so it cannot be split; let the order depend on nothing (layerdrop 0)"
            )
        blocks, after = self._lists[layer], layer + 1
        self._next = after + 1 if after in self._around else after
        if layer < self._start:
            if after == self._start and after in self._around:
                self._begin(after)
                return packed(blocks, self._carried)
            return packed(blocks, taken(blocks, args, kwargs))
        if layer == self._start:
            tensors = self._carried
            self._begin(layer)
        else:
            tensors = self._rounded(taken(blocks, args, kwargs))
            if layer not in self._firsts:
                tensors = (*tensors[: len(blocks.ports)], *self._beside)
            self._arrive(layer, tensors)
        self._beside = tensors[len(blocks.ports) :]
        if layer == self._start or self._beside or self.lowered is not None:
            args, kwargs = _injected(blocks, args, kwargs, tensors)
        result = self._computed(layer, args, kwargs)
        if self.lowered is not None:
            result = packed(blocks, self._rounded(_unpacked(blocks, result)))
        if after in self._around:
            self._beside = ()
            self._arrive(after, _unpacked(blocks, result))
        return result

    def _computed(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a block; where it is recorded, note what it was given beside what travels."""
        forward = self._compiled.get(layer, self._forwards[layer]) if self.compiles else self._forwards[layer]
        recorder = self._recorder
        if recorder is None:
            return forward(*args, **kwargs)
        blocks = self._lists[layer]
        recorder.note(layer, *_injected(blocks, args, kwargs, (None,) * len(blocks.places)))
        with recorder.paused():
            result = forward(*args, **kwargs)
        recorder.mark([result])
        return result

    def _begin(self, layer: int) -> None:
        torch.set_grad_enabled(self._grad)
        self._enter(layer)

    def _arrive(self, layer: int, tensors: Carried) -> None:
        if layer == self._stop:
            self._carried = tensors
            raise _LeaveError
        self._cross(layer, tensors)


def taken(blocks: BlockList, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried:
    """Return the tensors that travel to a call of a block, by its arguments."""
    return tuple(args[place] if isinstance(place, int) else kwargs[place] for place in blocks.places)


def _injected(
    blocks: BlockList, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor | None]
) -> Arguments:
    positional, kwargs = list(args), dict(kwargs)
    for place, tensor in zip(blocks.places, tensors, strict=True):
        if isinstance(place, int):
            positional[place] = tensor
        else:
            kwargs[place] = tensor
    return tuple(positional), kwargs


def _unpacked(blocks: BlockList, result: Any) -> Carried:
    return tuple(result if port.output is None else result[port.output] for port in blocks.ports)


def packed(blocks: BlockList, tensors: Carried) -> Any:
    """Return the tensors in the form in which a block returns them, None for what does not travel.

    What travels beside them, and is no output, may follow.
    """
    if blocks.num_outputs is None:
        return tensors[0]
    result: list[Tensor | None] = [None] * blocks.num_outputs
    for port, tensor in zip(blocks.ports, tensors, strict=False):
        assert port.output is not None
        result[port.output] = tensor
    return tuple(result)
