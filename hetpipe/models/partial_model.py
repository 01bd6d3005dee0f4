"""A model of which one rank owns some layers: the others are gates without weights.

The model's own forward runs, so masks, rotary tables and positions are whatever the model computes; nothing
but the tensors between blocks has to travel. To compute layers [start, stop) the forward runs the part before
the blocks without gradients, gates pass on whatever they get until `start`, the gate of `start` injects what
the stage before sent, and the gate of `stop` leaves by an exception:

    prefix ~ gate ~ gate ~ [inject] block - block [leave]      ~ repeated for masks only, - computed

Where the prefix gives the same for all inputs of a shape, it runs once: a stage that begins and ends with a
block then calls its blocks itself (`hetpipe.models.block_arguments`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.block_arguments import Arguments, BlockArguments, Recorder, shape_key
from hetpipe.models.block_structure import BlockStructure, Inputs, call_options, logits_of
from hetpipe.models.keyed_dropout import PREFIX
from hetpipe.models.quantized_weights import tensors_of

Carried = tuple[Tensor, ...]


class _LeaveError(Exception):
    """A signal of control flow: the computation reached `stop`."""


class LayerModel(nn.Module):
    """The layers of a chain that one rank owns, with real weights; made by `ChainModel.materialise`.

    on_layer: called with each layer about to be computed, and with PREFIX (-1) before what is repeated for
    masks only.
    on_boundary: called with a layer and the tensors that enter it, at each boundary inside of the range that
    runs. Lives on one device in one dtype: materialise again rather than moving it.
    lowered: what autocast computes in, and tensors between layers are rounded to; None for no autocast.
    first_trained: the first layer of the chain that trains a parameter; what enters it needs no gradient.
    absent: names of owned parameters whose weights are elsewhere, but for the time of a computation.
    compiles: whether blocks run as `compile_blocks` has compiled them.
    """

    first_trained: int = 0
    compiles: bool = False
    absent: frozenset[str] = frozenset()
    device_type: str = "cpu"
    lowered: torch.dtype | None = None
    on_layer: Callable[[int], None] | None = None
    on_boundary: Callable[[int, Carried], None] | None = None

    def __init__(
        self, model: nn.Module, num_layers: int, owned: Mapping[int, dict[str, nn.Parameter]]
    ) -> None:
        super().__init__()
        self.model = model
        self.layers = frozenset(owned)
        self.num_layers = num_layers
        self._by_layer = owned
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
        """Return the tensors that hold the weights of all owned layers; several of one that is quantized."""
        return [tensor for value in self.held_parameters().values() for tensor in tensors_of(value)]

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
        if self.on_layer is not None:
            self.on_layer(start)
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
    """Layers of a model around a list of blocks: 0 is all before the blocks, the last all after them."""

    def __init__(
        self,
        model: nn.Module,
        num_layers: int,
        owned: Mapping[int, dict[str, nn.Parameter]],
        structure: BlockStructure,
    ) -> None:
        super().__init__(model, num_layers, owned)
        self._ports = structure.ports
        self._num_outputs = structure.num_outputs
        self._options = call_options(model)
        self._start = self._stop = 0
        self._grad = True
        self._carried: Carried = ()
        self._arguments = BlockArguments()
        self._recorder: Recorder | None = None
        own = {id(value) for value in self.owned_parameters().values()}
        for module in model.modules():
            zeros = None if id(getattr(module, "weight", None)) in own else _zeros(module)
            if zeros is not None:
                module.__dict__["forward"] = zeros
        self._blocks = tuple(model.get_submodule(structure.path).children())
        self._forwards = {index + 1: block.forward for index, block in enumerate(self._blocks)}
        self._compiled: dict[int, Callable[..., Any]] = {}
        for index, block in enumerate(self._blocks):
            # Replacing the forward, not the block, keeps its type, attributes and names.
            block.__dict__["forward"] = self._gate(index + 1, block.forward)

    def module_of(self, layer: int) -> nn.Module | None:
        return self._blocks[layer - 1] if 0 < layer < self.num_layers - 1 else None

    def compute(self, start: int, stop: int, inputs: Inputs, carried: Carried) -> Carried:
        if len(carried) != (len(self._ports) if start else 0):
            raise ValueError(f"layer {start} does not take {len(carried)} carried tensors")
        self._start, self._stop, self._carried = start, stop, carried
        self._grad = torch.is_grad_enabled()
        try:
            if start == 0 or stop == self.num_layers:
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
            self._recorder, self._carried = None, ()

    def _by_model(self, inputs: Inputs) -> Carried:
        """Run the model's own forward, from the start to where it leaves."""
        if self.on_layer is not None:
            self.on_layer(PREFIX if self._start else 0)
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
        tensors = self._carried
        try:
            for layer in range(self._start, self._stop):
                args, kwargs = self._injected(*known[layer], tensors)
                tensors = self._unpacked(self._blocks[layer - 1](*args, **kwargs))
        except _LeaveError:  # by the last block of all
            return self._carried
        return self._rounded(tensors)

    def compile_blocks(self) -> None:
        # NOTE: not at the top: it registers an operation, and torch's compiler is slow to load.
        from hetpipe.models.compiled_blocks import check_compilable, compiled

        for layer in self.layers & set(self._forwards):
            block, name = self._blocks[layer - 1], f"block{layer - 1}"
            check_compilable(block, name)
            self._compiled[layer] = compiled(self._forwards[layer], name)
        self.compiles = True

    def kept_arguments(self) -> list[Tensor]:
        return self._arguments.tensors()

    def forget_arguments(self) -> None:
        self._arguments.forget()

    def _gate(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a block does when called: pass through, inject, leave, or compute."""
        head = self.num_layers - 1

        def gate(*args: Any, **kwargs: Any) -> Any:
            if layer < self._start:
                if layer + 1 < head or self._start < head:
                    return self._pack(self._taken(args, kwargs))
                self._begin(head)
                return self._pack(self._carried)
            if layer == self._start:
                args, kwargs = self._injected(args, kwargs, self._carried)
                self._begin(layer)
            else:
                tensors = self._rounded(self._taken(args, kwargs))
                self._arrive(layer, tensors)
                if self.lowered is not None:
                    args, kwargs = self._injected(args, kwargs, tensors)
            compute = self._compiled.get(layer, forward) if self.compiles else forward
            if self._recorder is None:
                result = compute(*args, **kwargs)
            else:
                result = self._recorded(self._recorder, layer, compute, args, kwargs)
            if self.lowered is not None:
                result = self._pack(self._rounded(self._unpacked(result)))
            if layer + 1 == head:
                self._arrive(head, self._unpacked(result))
            return result

        return gate

    def _recorded(
        self,
        recorder: Recorder,
        layer: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a block, and record what it was given beside the tensors between blocks."""
        others = self._injected(args, kwargs, (None,) * len(self._ports))
        recorder.note(layer, *others)
        with recorder.paused():
            result = forward(*args, **kwargs)
        recorder.mark([result])
        return result

    def _begin(self, layer: int) -> None:
        torch.set_grad_enabled(self._grad)
        if self.on_layer is not None:
            self.on_layer(layer)

    def _arrive(self, layer: int, tensors: Carried) -> None:
        if layer == self._stop:
            self._carried = tensors
            raise _LeaveError
        self._cross(layer, tensors)

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried:
        return tuple(
            args[port.argument] if isinstance(port.argument, int) else kwargs[port.argument]
            for port in self._ports
        )

    def _injected(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor | None]
    ) -> Arguments:
        positional, kwargs = list(args), dict(kwargs)
        for port, tensor in zip(self._ports, tensors, strict=True):
            if isinstance(port.argument, int):
                positional[port.argument] = tensor
            else:
                kwargs[port.argument] = tensor
        return tuple(positional), kwargs

    def _unpacked(self, result: Any) -> Carried:
        return tuple(result if port.output is None else result[port.output] for port in self._ports)

    def _pack(self, tensors: Carried) -> Any:
        """Return the tensors in the form in which a block returns them, None for what does not travel."""
        if self._num_outputs is None:
            return tensors[0]
        result: list[Tensor | None] = [None] * self._num_outputs
        for port, tensor in zip(self._ports, tensors, strict=True):
            assert port.output is not None
            result[port.output] = tensor
        return tuple(result)
