"""The forwards and backwards of the stages on one rank."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.loss import Loss
from hetpipe.models.mixed_precision import travels_in
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.repeat_check import check_repeatable
from hetpipe.program.instructions import Compute, Program
from hetpipe.runtime.accelerators import widest_float


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
    """A microbatch and its segments, from the first to the last that still waits for its backward."""

    microbatch: Microbatch
    segments: list[_Segment]


class StageRunner:
    """The layers of one rank at work; owns the microbatches that are in flight there.

    Gradients add up in the parameters; the loss of finished forwards in `take_loss`. loss_scale: what all
    gradients are multiplied by, and no loss; None: by nothing.
    """

    loss_scale: float | None = None

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
        self._loss_so_far: Tensor | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._alive)

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled, for each shape of a microbatch anew."""
        return self._model.compiles

    def rehearse(
        self, compute: Compute, microbatch: Microbatch, carried: tuple[Tensor, ...], names: Sequence[str]
    ) -> None:
        """Run a stage forward and backward before the first step; gradients are added up all the same.

        A device loads kernels and makes room when something is first computed, for which it may wait for all
        that was handed in before: no message is under way then. Its layers are checked by the way.

        names: of all layers. Raises: InputError if a layer must not be run again.
        """
        entering = carried
        stage = self._stages[compute.pipeline][compute.stage]
        for layer in range(stage.start, stage.stop):
            entering = check_repeatable(
                self._model, layer, names[layer], microbatch.inputs, entering, dropout=self._dropout
            )
        outputs = self.forward(compute, microbatch, carried)
        if compute.stage >= self._first_backward[compute.pipeline]:
            self.backward(compute, [torch.ones_like(value) for value in outputs if value.is_floating_point()])
        self._loss_so_far = None

    def forward(
        self, compute: Compute, microbatch: Microbatch, carried: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return what travels to the next stage; () from the last, whose result is the loss."""
        stage = self._stages[compute.pipeline][compute.stage]
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
        self, compute: Compute, microbatch: Microbatch, carried: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return what travels to the next stage, without dropout, and keep nothing for a backward.

        The loss of the last stage adds up as that of `forward`. Called without autograd.
        """
        stage = self._stages[compute.pipeline][compute.stage]
        self._model.eval()
        try:
            outputs = self._run(compute, microbatch, _Segment(stage.start, stage.stop, carried))
        finally:
            self._model.train()
        if self._is_last(compute):
            self._add_loss(outputs[0])
            return ()
        return outputs

    def backward(self, compute: Compute, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of the forward's inputs, for the stage before; one per floating tensor.

        () where no stage before it needs them.
        gradients: one per floating output of the forward, none at the last stage.
        """
        kept = self._alive.pop(_key(compute))
        found: Sequence[Tensor | None] = gradients
        first = kept.segments[0]
        while kept.segments:  # the later ones are let go of before the next is run again
            found = self._segment_backward(compute, kept.microbatch, kept.segments.pop(), found)
        if compute.stage <= self._first_backward[compute.pipeline]:
            return ()
        carried = (tensor for tensor in first.carried if tensor.is_floating_point())
        pairs = zip(carried, found, strict=True)
        return tuple(torch.zeros_like(tensor) if grad is None else grad for tensor, grad in pairs)

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

    def _run(self, compute: Compute, microbatch: Microbatch, segment: _Segment) -> tuple[Tensor, ...]:
        if self._model.on_layer is not self._enter_layer:  # the model may serve several programs
            self._model.on_layer = self._enter_layer
        self._dropout.at(microbatch.step, microbatch.samples, range(segment.start, segment.stop))
        carried = segment.carried
        if segment.start == self._stages[compute.pipeline][compute.stage].start:
            carried = _cast(carried, self._taken_in.get(_key(compute)[:2]))
        with self._dropout:
            outputs = self._model.run(segment.start, segment.stop, microbatch.inputs, carried)
        if segment.stop < self._model.num_layers:
            return self._as_taken(compute, segment.stop, outputs)
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


def _key(compute: Compute) -> tuple[int, int, int]:
    return (compute.pipeline, compute.stage, compute.microbatch)
