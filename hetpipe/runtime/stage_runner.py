"""The forwards and backwards of the stages on one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.loss import Loss
from hetpipe.models.partial_model import LayerModel
from hetpipe.program.instructions import Compute, Program


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
class _InFlight:
    microbatch: Microbatch
    carried: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # empty where the forward is run again


class StageRunner:
    """The layers of one rank at work; owns the microbatches that are in flight there.

    Gradients add up in the parameters; the loss of finished forwards in `take_loss`.
    """

    def __init__(self, program: Program, model: LayerModel, dropout: KeyedDropout, loss: Loss) -> None:
        self._model = model
        self._dropout = dropout
        self._enter_layer = dropout.enter_layer
        self._loss = loss
        self._alive: dict[tuple[int, int, int], _InFlight] = {}
        self._stages = [pipeline.stages for pipeline in program.plan.pipelines]
        self._loss_so_far: Tensor | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._alive)

    def forward(
        self, compute: Compute, microbatch: Microbatch, carried: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return what travels to the next stage; () from the last, whose result is the loss."""
        needs_gradient = self._stages[compute.pipeline][compute.stage].start > self._model.first_trained
        for tensor in carried:
            tensor.requires_grad_(needs_gradient and tensor.is_floating_point())
        recompute = self._stages[compute.pipeline][compute.stage].recompute
        if recompute:
            with torch.no_grad():
                outputs = self._run(compute, microbatch, carried)
        else:
            outputs = self._run(compute, microbatch, carried)
        last = self._is_last(compute)
        if last:
            loss = outputs[0].detach()
            if self._loss_so_far is None:
                self._loss_so_far = loss.to(torch.float64, copy=True)
            else:
                self._loss_so_far += loss
        kept = () if recompute else outputs
        self._alive[_key(compute)] = _InFlight(microbatch, carried, kept)
        return () if last else outputs

    def backward(self, compute: Compute, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of the forward's inputs, for the stage before; one per floating tensor.

        gradients: one per floating output of the forward, none at the last stage.
        """
        kept = self._alive.pop(_key(compute))
        outputs = kept.outputs or self._run(compute, kept.microbatch, kept.carried)
        targets = [tensor for tensor in outputs if tensor.is_floating_point()]
        if self._is_last(compute):
            torch.autograd.backward(targets)
        else:
            pairs = [pair for pair in zip(targets, gradients, strict=True) if pair[0].requires_grad]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in kept.carried
            if tensor.is_floating_point()
        )

    def take_loss(self) -> float:
        """Return the sum of the weighted losses since the last call."""
        total, self._loss_so_far = self._loss_so_far, None
        return 0.0 if total is None else float(total)

    def _run(
        self, compute: Compute, microbatch: Microbatch, carried: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        stage = self._stages[compute.pipeline][compute.stage]
        if self._model.on_layer is not self._enter_layer:  # the model may serve several programs
            self._model.on_layer = self._enter_layer
        self._dropout.at(microbatch.step, microbatch.samples)
        with self._dropout:
            outputs = self._model.run(stage.start, stage.stop, microbatch.inputs, carried)
        if not self._is_last(compute):
            return outputs
        return (self._loss(outputs[0], microbatch.labels) * microbatch.weight,)

    def _is_last(self, compute: Compute) -> bool:
        return compute.stage == len(self._stages[compute.pipeline]) - 1


def _key(compute: Compute) -> tuple[int, int, int]:
    return (compute.pipeline, compute.stage, compute.microbatch)
