"""The forwards and backwards of the stages on one rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetpipe.models.chunked_loss import ChunkedLoss
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.loss import Loss
from hetpipe.models.mixed_precision import travels_in
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.repeat_check import check_repeatable
from hetpipe.program.instructions import Compute, Pass, Program
from hetpipe.runtime.accelerators import widest_float
from hetpipe.runtime.host_activations import HostActivations


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The samples of a microbatch: inputs by name and labels, each [microbatch, ...], and places in the step.

    weight: what a token's loss counts, 1 / (loss tokens of the whole step).
    """

    step: int
    samples: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    labels: Tensor
    weight: float


Seen = Callable[[Tensor, Microbatch], None]
"""Takes the outputs of a model for a microbatch; see `StageRunner.logits`."""


@dataclass(slots=True)
class _Segment:
    """Layers [start, stop) of a microbatch, differentiated at once.

    carried: what enters them. outputs: () where the forward is run again.
    """

    start: int
    stop: int
    carried: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class _InFlight:
    """A microbatch and its segments, from the first to the last that still waits for its backward.

    passing: of a step that goes layer by layer, what the last layer that has run hands to the next one, or
    the gradients that the next backward takes.
    """

    microbatch: Microbatch
    segments: list[_Segment]
    passing: Sequence[Tensor | None] = ()


class StageRunner:
    """The layers of one rank at work; owns the microbatches that are in flight there.

    Gradients add up in the parameters; the loss of finished forwards in `take_loss`. loss_scale: what all
    gradients are multiplied by, and no loss; None: by nothing.
    """

    loss_scale: float | None = None
    saving: Callable[[], AbstractContextManager[object]] = nullcontext
    """The context of forwards whose backward comes later."""
    on_host: HostActivations | None = None
    """What keeps on the host what some stages save, in place of `saving`."""

    def __init__(
        self,
        program: Program,
        model: LayerModel,
        dropout: KeyedDropout,
        loss: Loss,
        wires: Sequence[torch.dtype] = (),
    ) -> None:
        """Take the stages of a rank; wires: as for `Executor`, () where all ranks have the same."""
        self._model = model
        several = len(set(wires)) > 1
        self._sent_in: dict[tuple[int, int], torch.dtype] = {}
        self._taken_in: dict[tuple[int, int], torch.dtype] = {}
        for index, pipeline in enumerate(program.plan.pipelines if several else ()):
            for stage in range(len(pipeline.stages) - 1):
                giver, taker = (wires[program.rank_of(index, stage + side)] for side in (0, 1))
                self._sent_in[index, stage] = travels_in(giver, taker)
                self._taken_in[index, stage + 1] = taker
        self._dropout = dropout
        self._enter_layer = dropout.enter_layer
        self._loss = loss
        self._alive: dict[tuple[int, int, int], _InFlight] = {}
        self._stages = [pipeline.stages for pipeline in program.plan.pipelines]
        self._first_backward = program.first_backward
        self._first_trained = program.first_trained
        self._loss_so_far: Tensor | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._alive)

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled, for each shape of a microbatch anew."""
        return self._model.compiles

    def rehearse(
        self,
        compute: Compute,
        microbatch: Microbatch,
        carried: tuple[Tensor, ...],
        names: Sequence[str],
        at_hand: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Run a stage forward and backward before the first step; gradients are added up all the same.

        A device loads kernels and makes room when something is first computed, for which it may wait for all
        that was handed in before: no message is under way then. Its layers are checked by the way.

        names: of all layers. at_hand: the context in which a layer can run, where a step goes layer by layer.

        Raises: InputError if a layer must not be run again.
        """
        entering = carried
        stage = self._stages[compute.pipeline][compute.stage]
        for layer in range(stage.start, stage.stop):
            with at_hand(layer) if at_hand else nullcontext():
                entering = check_repeatable(
                    self._model, layer, names[layer], microbatch.inputs, entering, dropout=self._dropout
                )
        has_backward = compute.stage >= self._first_backward[compute.pipeline]
        if at_hand is not None:
            self._rehearse_by_layer(compute, microbatch, carried, at_hand, has_backward=has_backward)
            return
        outputs = self.forward(compute, microbatch, carried)
        if has_backward:
            self.backward(compute, _ones(outputs))
        self._loss_so_far = None

    def _rehearse_by_layer(
        self,
        compute: Compute,
        microbatch: Microbatch,
        carried: tuple[Tensor, ...],
        at_hand: Callable[[int], AbstractContextManager[None]],
        *,
        has_backward: bool,
    ) -> None:
        stage, outputs = self._stages[compute.pipeline][compute.stage], carried
        for layer in range(stage.start, stage.stop):
            with at_hand(layer):
                entering = carried if layer == stage.start else ()
                outputs = self.forward(replace(compute, layer=layer), microbatch, entering)
        first = max(stage.start, self._first_trained)
        for layer in reversed(range(first, stage.stop)) if has_backward else ():
            with at_hand(layer):
                back = replace(compute, op=Pass.BACKWARD, layer=layer)
                self.backward(back, _ones(outputs) if layer == stage.stop - 1 else ())
        self._loss_so_far = None

    def forward(
        self, compute: Compute, microbatch: Microbatch, carried: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return what travels to the next stage; () from the last, whose result is the loss.

        Of a layer alone: () also where the stage goes on.
        """
        stage = self._stages[compute.pipeline][compute.stage]
        if compute.layer is not None:
            return self._layer_forward(compute, compute.layer, microbatch, carried)
        whole = _Segment(stage.start, stage.stop, self._entering(stage.start, carried))
        if compute.stage < self._first_backward[compute.pipeline]:
            return self._run(compute, microbatch, whole)
        if stage.recompute:
            outputs, segments = self._run_to_keep(compute, microbatch, whole, stage.segments)
        else:
            outputs = whole.outputs = self._run(compute, microbatch, whole)
            segments = [whole]
        last = self._is_last(compute)
        if last:
            self._add_loss(outputs[0].detach())
        self._alive[_key(compute)] = _InFlight(microbatch, segments)
        return () if last else outputs

    def evaluate(
        self, compute: Compute, microbatch: Microbatch, carried: tuple[Tensor, ...], seen: Seen | None = None
    ) -> tuple[Tensor, ...]:
        """Return what travels to the next stage, or layer, without dropout, and keep nothing for a backward.

        The loss of the last stage adds up as that of `forward`. Called without autograd. seen: is given the
        outputs of the model and the microbatch.
        """
        stage = self._stages[compute.pipeline][compute.stage]
        start, stop = stage.layers if compute.layer is None else (compute.layer, compute.layer + 1)
        self._model.eval()
        try:
            outputs = self._run(compute, microbatch, _Segment(start, stop, carried), seen)
        finally:
            self._model.train()
        if stop == self._model.num_layers:
            self._add_loss(outputs[0])
            return ()
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of what `seen` is given: itself, unless the loss is left to project it."""
        return self._loss.logits(outputs) if isinstance(self._loss, ChunkedLoss) else outputs

    def backward(self, compute: Compute, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of the forward's inputs, for the stage before; one per floating tensor.

        () where no stage before it needs them.
        gradients: one per floating output of the forward, none at the last stage.
        """
        if compute.layer is not None:
            return self._layer_backward(compute, compute.layer, gradients)
        kept = self._alive.pop(_key(compute))
        if self.on_host is not None:
            self.on_host.going_back(compute)
        found: Sequence[Tensor | None] = gradients
        first = kept.segments[0]
        while kept.segments:  # the later ones are let go of before the next is run again
            found = self._segment_backward(compute, kept.microbatch, kept.segments.pop(), found)
        return self._given_back(compute, first, found)

    def _given_back(
        self, compute: Compute, first: _Segment, found: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of what entered a stage, for the stage before; () where none needs them."""
        if compute.stage <= self._first_backward[compute.pipeline]:
            return ()
        carried = (tensor for tensor in first.carried if tensor.is_floating_point())
        pairs = zip(carried, found, strict=True)
        return tuple(torch.zeros_like(tensor) if grad is None else grad for tensor, grad in pairs)

    def _layer_forward(
        self, compute: Compute, layer: int, microbatch: Microbatch, carried: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Run one layer of a stage; its graph is its own, so that its backward can be run alone."""
        stage, key = self._stages[compute.pipeline][compute.stage], _key(compute)
        if layer == stage.start:
            self._alive[key] = _InFlight(microbatch, [])
            entering: Iterable[Tensor] = carried
        else:
            entering = (tensor.detach() for tensor in self._alive[key].passing if tensor is not None)
        kept = self._alive[key]
        segment = _Segment(layer, layer + 1, self._entering(layer, entering))
        has_backward = compute.stage >= self._first_backward[compute.pipeline]
        if stage.recompute or not has_backward:
            with torch.no_grad():
                outputs = self._run(compute, microbatch, segment)
        else:
            outputs = segment.outputs = self._run(compute, microbatch, segment)
        if has_backward and layer >= self._first_trained:
            kept.segments.append(segment)
        if layer + 1 < stage.stop:
            kept.passing = outputs
            return ()
        kept.passing = ()
        if not has_backward:
            del self._alive[key]
        if self._is_last(compute):
            self._add_loss(outputs[0].detach())
            return ()
        return outputs

    def _layer_backward(
        self, compute: Compute, layer: int, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Go back through one layer of a stage, the last one that still waits."""
        stage, key = self._stages[compute.pipeline][compute.stage], _key(compute)
        kept = self._alive[key]
        segment = kept.segments.pop()
        assert segment.start == layer, f"layer {segment.start} waits for its backward, not {layer}"
        incoming: Sequence[Tensor | None] = gradients if layer == stage.stop - 1 else kept.passing
        kept.passing = found = self._segment_backward(compute, kept.microbatch, segment, incoming)
        if layer > max(stage.start, self._first_trained):
            return ()
        del self._alive[key]
        return self._given_back(compute, segment, found)

    def _add_loss(self, loss: Tensor) -> None:
        if self._loss_so_far is None:
            self._loss_so_far = loss.to(widest_float(loss.device), copy=True)
        else:
            self._loss_so_far += loss

    def take_loss(self) -> Tensor:
        """Return the sum of the weighted losses since the last call: a scalar, most exact."""
        total, self._loss_so_far = self._loss_so_far, None
        return torch.zeros((), dtype=torch.float64) if total is None else total

    def _run_to_keep(
        self, compute: Compute, microbatch: Microbatch, whole: _Segment, layers: Sequence[tuple[int, int]]
    ) -> tuple[tuple[Tensor, ...], list[_Segment]]:
        """Return the outputs of a stage, and its segments: of its tensors only what enters them is kept."""
        entering = {whole.start: whole.carried}
        firsts = {start for start, _ in layers[1:]}

        def keep(layer: int, tensors: tuple[Tensor, ...]) -> None:
            if layer in firsts:
                entering[layer] = self._entering(layer, (tensor.detach() for tensor in tensors))

        before, self._model.on_boundary = self._model.on_boundary, keep
        try:
            with torch.no_grad():
                outputs = self._run(compute, microbatch, whole)
        finally:
            self._model.on_boundary = before
        return outputs, [_Segment(start, stop, entering[start]) for start, stop in layers]

    def _segment_backward(
        self,
        compute: Compute,
        microbatch: Microbatch,
        segment: _Segment,
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the gradients of what enters a segment; None where nothing depends on it."""
        outputs = segment.outputs or self._run(compute, microbatch, segment)
        targets = [tensor for tensor in outputs if tensor.is_floating_point()]
        if self._model.fetch is not None:
            self._model.fetch(segment.stop - 1, -1)
        if segment.stop == self._model.num_layers:
            scale = self.loss_scale
            torch.autograd.backward(
                targets, None if scale is None else [torch.full_like(target, scale) for target in targets]
            )
        else:
            pairs = [
                (target, gradient)
                for target, gradient in zip(targets, gradients, strict=True)
                if target.requires_grad and gradient is not None
            ]
            if pairs:
                torch.autograd.backward([target for target, _ in pairs], [gradient for _, gradient in pairs])
        return [tensor.grad for tensor in segment.carried if tensor.is_floating_point()]

    def _run(
        self, compute: Compute, microbatch: Microbatch, segment: _Segment, seen: Seen | None = None
    ) -> tuple[Tensor, ...]:
        if self._model.on_layer is not self._enter_layer:  # the model may serve several programs
            self._model.on_layer = self._enter_layer
        self._dropout.at(microbatch.step, microbatch.samples, range(segment.start, segment.stop))
        carried = segment.carried
        if segment.start == self._stages[compute.pipeline][compute.stage].start:
            carried = _cast(carried, self._taken_in.get(_key(compute)[:2]))
        if self.on_host is None:
            saving = self.saving()
        else:
            held = (*microbatch.inputs.values(), microbatch.labels, *segment.carried, *carried)
            saving = self.on_host.saving(compute, held)
        with self._dropout, saving:
            outputs = self._model.run(segment.start, segment.stop, microbatch.inputs, carried)
        if segment.stop < self._model.num_layers:
            return self._as_taken(compute, segment.stop, outputs)
        if seen is not None:
            seen(outputs[0], microbatch)
        return (self._loss(outputs[0], microbatch.labels) * microbatch.weight,)

    def _as_taken(self, compute: Compute, stop: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what ends at a layer in the dtype in which it travels to the next stage."""
        if stop < self._stages[compute.pipeline][compute.stage].stop:
            return outputs
        return _cast(outputs, self._sent_in.get(_key(compute)[:2]))

    def _entering(self, layer: int, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return leaves of autograd's graph, with a gradient where layers before this one train."""
        needed = layer > self._model.first_trained
        return tuple(tensor.requires_grad_(needed and tensor.is_floating_point()) for tensor in tensors)

    def _is_last(self, compute: Compute) -> bool:
        return compute.stage == len(self._stages[compute.pipeline]) - 1


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """Return tensors, floating ones cast as autograd casts: gradients back to their dtype; None: as is."""
    if dtype is None:
        return tensors
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


def _ones(outputs: Iterable[Tensor]) -> list[Tensor]:
    return [torch.ones_like(value) for value in outputs if value.is_floating_point()]


def _key(compute: Compute) -> tuple[int, int, int]:
    return (compute.pipeline, compute.stage, compute.microbatch)
