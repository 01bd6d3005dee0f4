"""The executor, which runs a rank's instruction list for real."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from cost_model.dtypes import scales_loss
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Exchange,
    Gather,
    Instruction,
    Message,
    Norm,
    Pass,
    Reduce,
    Step,
    Sync,
    Transfer,
)
from hetpipe.program.layer_rounds import visit_fetches
from hetpipe.program.trace import Event
from hetpipe.runtime.emulated_links import Board
from hetpipe.runtime.forward_runner import ForwardRunner
from hetpipe.runtime.gradient_sync import GradientSync
from hetpipe.runtime.host_staging import numbers_on_host
from hetpipe.runtime.inner_sums import InnerSums
from hetpipe.runtime.layer_sync import LayerSync
from hetpipe.runtime.loss_scale import LossScale
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import Pace
from hetpipe.runtime.peer_errors import PeerTimeout
from hetpipe.runtime.rank_lookups import Shaped, computations_of, crossing
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from hetpipe.runtime.step_outcome import StepOutcome
from hetpipe.runtime.step_rounds import StepRounds
from hetpipe.runtime.transport import TensorShape, Transport
from hetpipe.runtime.unreached import Unreached
from partition.plan import Pipeline

Boundaries = Callable[[int, Microbatch], tuple[TensorShape, ...]]
"""(layer, microbatch) -> the tensors that travel from layer - 1 to layer for it."""


class Executor:
    """The runner of one rank's list; owns nothing but the order: each part below owns its own resource.

    loss_scale: of the next step, the same on all ranks; None where losses are not scaled.
    """

    def __init__(
        self,
        costs: ProgramCosts,
        rank: int,
        *,
        stages: StageRunner,
        transport: Transport,
        sync: GradientSync | LayerSync,
        optimizer: Optimizer,
        boundaries: Boundaries,
        pace: Pace,
        board: Board | None,
        wires: Sequence[torch.dtype] = (),
        unreached: Unreached | None = None,
    ) -> None:
        """Look up what each instruction of the list needs.

        unreached: owns what no sample may reach, None where there is none.
        wires: by rank, the dtype of tensors between its layers (`travels_in`); () where all are as
        boundaries says.
        """
        self.loss_scale = LossScale() if scales_loss(costs.dtypes) else None
        self._costs = costs
        self._program = costs.program
        self._rank = rank
        self._stages = stages
        self._transport = transport
        self._sync = sync
        self._optimizer = optimizer
        self._unreached = unreached or Unreached({})
        self._boundaries = boundaries
        self._wires = tuple(wires)
        self._pace = pace
        self._board = board
        self._computations = computations_of(costs, rank)
        self._sent, self._received = crossing(self._program, rank, self._wires)
        self._outgoing: dict[Message, tuple[Tensor, ...]] = {}
        self._shapes: dict[Shaped, tuple[TensorShape, ...]] = {}  # of the step at hand
        self._sync_ends: dict[Instruction, float] = {}
        self._step = 0
        self._begun: dict[int, float] = {}  # buckets whose sums began inside a backward, and when
        self._inner: InnerSums | None = None
        self._rounds: StepRounds | None = None
        if isinstance(sync, GradientSync):
            self._inner = InnerSums(costs, rank, sync, pace, self._begin_sum)
        else:
            self._rounds = StepRounds(self._program, rank, sync, self._join, self._wait_for)
            stages.saving = sync.saving

    def prepare(self) -> None:
        """Forget the gradients of the step before; not part of a step, and before its common start."""
        self._optimizer.zero_grad()
        self._unreached.forget()
        self._sync.attach()

    @torch.enable_grad()
    def rehearse(self, microbatch: Callable[[int, int], Microbatch], layer_names: Sequence[str]) -> None:
        """Run each stage of this rank once, forward and backward, before the first step; nothing is sent.

        Weights, states, random numbers and the loss of the next step are as if it had not been.

        Raises: InputError if a layer's result would depend on the plan; see `check_repeatable`.
        """
        self.prepare()
        if isinstance(self._sync, LayerSync):
            self._sync.serve(visit_fetches(self._program, self._rehearsals))
        for index, pipeline in enumerate(self._program.plan.pipelines):
            for place, stage in enumerate(pipeline.stages):
                if self._program.rank_of(index, place) != self._rank:
                    continue
                wire = self._wires[self._rank] if self._wires else None
                for number in self._rehearsed(pipeline):
                    data = microbatch(index, number)
                    shapes = self._boundaries(stage.start, data) if place else ()
                    carried = tuple(shape.sent_in(wire).filled(data.labels.device) for shape in shapes)
                    compute = Compute(Pass.FORWARD, index, place, number)
                    at_hand = None if self._rounds is None else self._rounds.at_hand
                    self._stages.rehearse(compute, data, carried, layer_names, at_hand)
        self.prepare()

    def _rehearsals(self, pipeline: int, layer: int) -> int:
        """Return how often a layer is rehearsed: its check, its forward, and its backward if it has one."""
        each = 3 if layer >= self._program.first_trained else 2
        return each * len(self._rehearsed(self._program.plan.pipelines[pipeline]))

    def _rehearsed(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Return the microbatches that are rehearsed: the first; one of each size where that is compiled."""
        last = pipeline.num_microbatches - 1
        is_smaller = pipeline.microbatch_samples(last) != pipeline.microbatch_samples(0)
        return (0, last) if is_smaller and self._stages.compiles else (0,)

    def gradient_buffers(self) -> list[Tensor]:
        """Return the tensors that `prepare` made room for."""
        return self._sync.buffers()

    @torch.enable_grad()
    def step(
        self,
        step: int,
        microbatch: Callable[[int, int], Microbatch],
        *,
        start_s: float,
        learning_rate: float,
        clip_norm: float,
    ) -> StepOutcome:
        """Run the whole list once, after `prepare`.

        microbatch: (pipeline, microbatch) -> its data, whose shapes may differ from step to step, but for the
        number of samples. start_s: common start of all ranks, monotonic clock. A step whose gradients are not
        finite leaves the parameters as they are, on all ranks alike.
        """
        events: list[tuple[Instruction, float, float]] = []
        self._shapes.clear()
        self._sync_ends.clear()
        self._step = step
        totals = torch.zeros(3, dtype=torch.float64)
        scale = None if self.loss_scale is None else self.loss_scale.value
        self._stages.loss_scale = scale
        if self._rounds is not None:
            self._rounds.begin()
        self._pace.step = step
        self._pace.start_step(start_s)
        for index, instruction in enumerate(self._program.ranks[self._rank]):
            begin = self._pace.now_s
            end = begin
            match instruction:
                case Compute():
                    begin, end = self._compute(index, microbatch)
                case Transfer():
                    if index in self._sent:
                        end = self._send(instruction, self._sent[index])
                    else:
                        self._post_receive(instruction, self._received[index], microbatch)
                        continue
                case Sync():
                    begin = end = self._start_sync(instruction)
                case Norm():
                    totals = self._norm_of_all(scale or 1.0)
                    end = self._pace.now_s
                case Step():
                    begin, end = self._update(totals, learning_rate, clip_norm, scale or 1.0)
                case Broadcast():
                    end = self._start_broadcast(instruction)
                case Reduce() | Gather():
                    assert self._rounds is not None
                    begin = end = self._rounds.start(index, instruction)
            events.append((instruction, begin, end))
        self._finish_broadcasts()
        self._pace.finish()
        end_s = time.monotonic()
        settled = self._pace.settle()
        self._transport.finish()
        finite = float(totals[1]) == 0.0
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after_step(finite=finite)
        return StepOutcome(
            loss=float(totals[2]),
            gradient_norm=float(totals[0].sqrt()),
            finite=finite,
            loss_scale=scale,
            start_s=start_s,
            end_s=end_s,
            busy_s=self._pace.busy_s,
            over_budget_s=self._pace.over_budget_s,
            events=self._as_events(events, settled, start_s),
            host_events=self._on_host(events, start_s),
        )

    def forwards(self) -> ForwardRunner:
        """Return what runs the forwards of this rank alone, between steps."""
        return ForwardRunner(
            self._program, self._rank, stages=self._stages, transport=self._transport,
            boundaries=self._boundaries, wires=self._wires,
            sync=self._sync if isinstance(self._sync, LayerSync) and self._sync.fetches else None,
        )  # fmt: skip

    def close(self) -> None:
        """Give back the process groups; all ranks together, after their last step."""
        if len(self._program.ranks) > 1:
            dist.barrier()  # until nobody waits for a broadcast any more
        self._transport.close()
        self._sync.close()

    def _as_events(
        self, spans: list[tuple[Instruction, float, float]], settled: dict[float, float], start_s: float
    ) -> tuple[Event, ...]:
        """Return what took place from when to when, from the step's start on; settled: see `Pace.settle`."""
        events = []
        for instruction, begin_s, end_s in spans:
            if instruction in self._sync_ends:
                end_s = max(begin_s, self._sync_ends[instruction])
            begin_s, end_s = settled.get(begin_s, begin_s), settled.get(end_s, end_s)
            events.append(Event(self._rank, instruction, begin_s - start_s, end_s - start_s))
        return tuple(events)

    def _on_host(self, spans: list[tuple[Instruction, float, float]], start_s: float) -> tuple[Event, ...]:
        """Return the same by the host's clock; nothing where the device has no other."""
        if (host := self._pace.host_times) is None:
            return ()
        events = []
        for instruction, begin_s, end_s in spans:
            begin_s, end_s = host.of_begin(begin_s), host.of_end(self._sync_ends.get(instruction, end_s))
            events.append(Event(self._rank, instruction, begin_s - start_s, max(begin_s, end_s) - start_s))
        return tuple(events)

    def _compute(self, place: int, microbatch: Callable[[int, int], Microbatch]) -> tuple[float, float]:
        work = self._computations[place]
        compute = work.compute
        received: tuple[Tensor, ...] = ()
        ready_s = 0.0
        if work.receive is not None:
            asked_s = time.monotonic()
            received = self._transport.receive(work.receive)
            if self._board is not None:
                assert work.message is not None
                ready_s = self._board.due_s(work.message, asked_s)
        elif work.message is not None:
            received = self._outgoing.pop(work.message)
        for send in work.releases:
            self._transport.release(send)
        if self._rounds is not None:
            ready_s = max(ready_s, self._rounds.before(place, compute))
        start = self._pace.begin(ready_s)
        if compute.op is Pass.FORWARD:
            result = self._stages.forward(compute, microbatch(compute.pipeline, compute.microbatch), received)
        else:
            with self._inner.during(place, start) if self._inner else nullcontext():
                result = self._stages.backward(compute, received)
        if self._rounds is not None:
            self._rounds.after(place)
        if work.kept:
            # the stages' graphs stay apart, as if the tensors had been sent
            result = tuple(tensor.detach() for tensor in result)
        if work.made is not None:
            self._outgoing[work.made] = result
        return start, self._pace.end(start, work.nominal_s)

    def _send(self, transfer: Transfer, message: Message) -> float:
        """Post a send; return the time at which it is due."""
        due_s = self._board.send(transfer, self._pace.now_s) if self._board else self._pace.now_s
        self._transport.send(transfer, self._outgoing.pop(message))
        return due_s

    def _post_receive(
        self, transfer: Transfer, shaped: Shaped, microbatch: Callable[[int, int], Microbatch]
    ) -> None:
        shapes = self._shapes.get(shaped)
        if shapes is None:
            layer, _, _, wire = shaped
            crossing = self._boundaries(layer, microbatch(transfer.pipeline, transfer.microbatch))
            shapes = tuple(shape.sent_in(wire) for shape in crossing)
            if transfer.op is Pass.BACKWARD:
                shapes = tuple(shape for shape in shapes if shape.dtype.is_floating_point)
            self._shapes[shaped] = shapes
        self._transport.post_receive(transfer, shapes)

    def _start_sync(self, sync: Sync) -> float:
        """Begin a sum, unless that was inside a backward; return when it was ready."""
        if sync.bucket not in self._begun:
            self._begin_sum(sync.bucket, self._pace.now_s)
        return self._begun.pop(sync.bucket)

    def _begin_sum(self, bucket: int, ready_s: float) -> None:
        assert isinstance(self._sync, GradientSync)
        self._begun[bucket] = ready_s
        if self._board is not None:
            self._board.join(Sync(bucket), self._rank, self._step, ready_s)
        self._sync.start(bucket)

    def _start_broadcast(self, broadcast: Broadcast) -> float:
        self._join(broadcast)
        self._sync.start_broadcast(broadcast.bucket)
        return self._pace.now_s

    def _finish_broadcasts(self) -> None:
        for bucket in self._sync.finish_broadcasts():
            self._wait_for(Broadcast(bucket))

    def _join(self, collective: Exchange) -> float:
        """Reserve the emulated links of a collective; return the time."""
        if self._board is not None:
            self._board.join(collective, self._rank, self._step, self._pace.now_s)
        return self._pace.now_s

    def _wait_for(self, collective: Exchange) -> float:
        """Wait until a collective that is really over is due on emulated links too; return when that was."""
        due_s = self._board.collective_due_s(collective, self._rank) if self._board else 0.0
        now_s = self._pace.wait(due_s)
        self._sync_ends[collective] = due_s or now_s
        return due_s or now_s

    def _norm_of_all(self, loss_scale: float) -> Tensor:
        """Return [sum of squares, ranks with a non-finite one, loss] over all ranks, unscaled: float64.

        Raises: InputError if a gradient has reached what is not trained.
        """
        self._unreached.check()
        if self._rounds is not None:
            self._rounds.finish()
        elif isinstance(self._sync, GradientSync):
            for bucket in self._sync.finish():
                self._wait_for(Sync(bucket))
        squares, loss = numbers_on_host(self._optimizer.square_sum(), self._stages.take_loss())
        squares /= loss_scale**2
        not_finite = 0.0 if math.isfinite(squares) else 1.0
        totals = torch.tensor([squares, not_finite, loss], dtype=torch.float64)
        if len(self._program.ranks) == 1:
            return totals
        self._join(Norm())
        everyone = range(len(self._program.ranks))
        with PeerTimeout(self._program, self._rank, Norm(), everyone, time.monotonic()):
            dist.all_reduce(totals)
        self._wait_for(Norm())
        return totals

    def _update(
        self, totals: Tensor, learning_rate: float, clip_norm: float, loss_scale: float
    ) -> tuple[float, float]:
        start = self._pace.begin(0.0)
        if float(totals[1]) == 0.0:
            clip = min(1.0, clip_norm / (float(totals[0].sqrt()) + 1e-6))
            self._optimizer.step(learning_rate, clip, loss_scale)
        return start, self._pace.end(start, self._costs.step_s(self._rank))
