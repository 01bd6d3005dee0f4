"""The runner of one rank's forwards alone, over the channels of its training: the loss of other samples."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hetpipe.models.mixed_precision import travels_in
from hetpipe.program.forward_only import finished_sends, forward_only
from hetpipe.program.instructions import Compute, Direction, Pass, Program, Transfer
from hetpipe.program.layer_rounds import visit_fetches
from hetpipe.runtime.layer_sync import LayerSync
from hetpipe.runtime.stage_runner import Microbatch, Seen, StageRunner
from hetpipe.runtime.transport import TensorShape, Transport

_Place = tuple[int, int, int]


class ForwardRunner:
    """The forwards of one rank; owns the tensors that its next stage takes.

    No emulated link or device is waited for: it is no part of a step, and nothing of it is timed.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        *,
        stages: StageRunner,
        transport: Transport,
        boundaries: Callable[[int, Microbatch], tuple[TensorShape, ...]],
        wires: Sequence[torch.dtype] = (),
        sync: LayerSync | None = None,
    ) -> None:
        """Look up the list; the rest as for `hetpipe.runtime.executor.Executor`.

        sync: of weights that are sharded; None where all are here.
        """
        self._sync = sync
        self._program = program
        self._rank = rank
        self._stages = stages
        self._transport = transport
        self._boundaries = boundaries
        self._wires = wires
        self._list = forward_only(program, rank)
        self._over = finished_sends(program, rank)

    @torch.no_grad()
    def loss(self, microbatch: Callable[[int, int], Microbatch], seen: Seen | None = None) -> float:
        """Return what this rank's last stages add to the loss of as many samples as a step has.

        seen: is given the outputs of each of its microbatches, and these.
        """
        if self._sync is not None and not self._program.plan.fetches_apart:
            return self._loss_by_layer(microbatch, self._sync, seen)
        if self._sync is not None:
            pipelines = self._program.plan.pipelines
            self._sync.serve(visit_fetches(self._program, lambda index, _: pipelines[index].num_microbatches))
        kept: dict[_Place, tuple[Tensor, ...]] = {}
        for index, instruction in enumerate(self._list):
            for send in self._over.get(index, ()):
                self._transport.release(send)
            match instruction:
                case Compute():
                    self._compute(instruction, microbatch, kept, seen)
                case Transfer(direction=Direction.SEND):
                    place = instruction.pipeline, instruction.stage + 1, instruction.microbatch
                    self._transport.send(instruction, kept.pop(place))
                case Transfer():
                    self._post(instruction, microbatch)
        self._transport.finish()
        return float(self._stages.take_loss())

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of what `seen` is given, inside of it."""
        return self._stages.logits(outputs)

    def _loss_by_layer(
        self,
        microbatch: Callable[[int, int], Microbatch],
        sync: LayerSync,
        seen: Seen | None,
    ) -> float:
        """Return the same where all ranks fetch each layer for as many microbatches as any of them has."""
        plan = self._program.plan
        ((pipeline, stage),) = plan.places[plan.device_names[self._rank]]
        own = plan.pipelines[pipeline].num_microbatches
        for number in range(max(each.num_microbatches for each in plan.pipelines)):
            entering: tuple[Tensor, ...] = ()
            for layer in range(plan.num_layers):
                with sync.fetched(layer):
                    if number < own:
                        compute = Compute(Pass.FORWARD, pipeline, stage, number, layer)
                        data = microbatch(pipeline, number)
                        entering = self._stages.evaluate(compute, data, entering, seen)
        return float(self._stages.take_loss())

    def _compute(
        self,
        compute: Compute,
        microbatch: Callable[[int, int], Microbatch],
        kept: dict[_Place, tuple[Tensor, ...]],
        seen: Seen | None,
    ) -> None:
        place = compute.pipeline, compute.stage, compute.microbatch
        entering: tuple[Tensor, ...] = ()
        if compute.stage:
            if place in kept:
                entering = kept.pop(place)
            else:
                entering = self._transport.receive(Transfer(Direction.RECV, compute.op, *place))
        data = microbatch(compute.pipeline, compute.microbatch)
        made = self._evaluated(compute, data, entering, seen)
        if made:
            kept[place[0], place[1] + 1, place[2]] = made

    def _evaluated(
        self, compute: Compute, data: Microbatch, entering: tuple[Tensor, ...], seen: Seen | None
    ) -> tuple[Tensor, ...]:
        """Return what leaves a stage, gone through layer by layer where weights are fetched."""
        if self._sync is None:
            return self._stages.evaluate(compute, data, entering, seen)
        for layer in range(*self._program.stage(compute).layers):
            with self._sync.fetched(layer):
                entering = self._stages.evaluate(replace(compute, layer=layer), data, entering, seen)
        return entering

    def _post(self, receive: Transfer, microbatch: Callable[[int, int], Microbatch]) -> None:
        program, boundary = self._program, receive.boundary
        layer = program.pipeline(receive).stages[boundary].start
        wire = None
        if self._wires:
            giver, taker = (program.rank_of(receive.pipeline, boundary + side) for side in (-1, 0))
            wire = travels_in(self._wires[giver], self._wires[taker])
        shapes = self._boundaries(layer, microbatch(receive.pipeline, receive.microbatch))
        self._transport.post_receive(receive, tuple(shape.sent_in(wire) for shape in shapes))
