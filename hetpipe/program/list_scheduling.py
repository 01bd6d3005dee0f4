"""The order of computations where stages share a device: a greedy list scheduler on the simulator's clock.

R12 of docs/clock.md; computations and messages go by R1 to R6, sums are not on this clock.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cost_model.errors import InputError
from cost_model.network import idle
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Compute, Direction, Pass, Schedule, Transfer, outgoing
from hetpipe.program.schedules import one_f_one_b

Scheduled = tuple[tuple[Compute, float], ...]
"""The computations of a rank in order, each with the second at which it ends."""

_PASSES = tuple(Pass)
_SAME_TIME = 1e-9  # relative: sums of the same seconds in another order are one time


def list_schedule(costs: ProgramCosts, schedule: Schedule = Schedule.ONE_F_ONE_B) -> tuple[Scheduled, ...]:
    """Return the computations of every rank, in the order in which a device that is free takes what is ready.

    List scheduling (Graham, SIAM J. Appl. Math. 1969): backwards first, never more than in_flight at a
    stage; among equals the pipeline of which the smaller fraction is done, then the lower pipeline, then the
    stage that is nearer to the end of the pass. A device that serves one stage keeps its 1F1B, but for the
    schedule `list`. Messages queue as in `simulate`.

    costs: of a program whose instruction lists need not be there yet. schedule: `gpipe` lets no device begin
    a backward before it has done all its forwards.

    Raises: InputError if in_flight lets no stage go on, naming those that wait.
    """
    return _Scheduler(costs, schedule).run()


@dataclass(slots=True)
class _StageState:
    """Where one stage is: the next microbatch of each pass, and when the inputs of those to come are due."""

    pipeline: int
    stage: int
    num_microbatches: int
    in_flight: int
    order: Iterator[tuple[Pass, int]] | None  # 1F1B where the device serves no other stage
    has_backward: bool
    due: dict[Pass, list[float]] = field(default_factory=lambda: {op: [] for op in Pass})
    upcoming: dict[Pass, int] = field(default_factory=lambda: dict.fromkeys(Pass, 0))
    wanted: Pass | None = None

    def __post_init__(self) -> None:
        if self.stage == 0:
            self.due[Pass.FORWARD] = [0.0] * self.num_microbatches
        self._want()

    def _want(self) -> None:
        if self.order is not None:
            self.wanted = next((op for op, _ in self.order), None)

    def may(self, op: Pass) -> bool:
        """Return whether the schedule allows this pass now, if its inputs are there."""
        if self.order is not None:
            return op is self.wanted
        if op is Pass.BACKWARD:
            return self.has_backward and self.upcoming[op] < self.upcoming[Pass.FORWARD]
        alive = self.upcoming[op] - self.upcoming[Pass.BACKWARD]
        return alive < self.in_flight and self.upcoming[op] < self.num_microbatches

    def due_s(self, op: Pass) -> float | None:
        """Return when the inputs of the next of this pass are there; None if nobody has made them yet."""
        due, index = self.due[op], self.upcoming[op]
        return due[index] if index < len(due) else None

    def take(self, op: Pass) -> Compute:
        compute = Compute(op, self.pipeline, self.stage, self.upcoming[op])
        self.upcoming[op] += 1
        self._want()
        return compute


class _Scheduler:
    """Owns the virtual clock, the queue of times at which ranks look for work, and the network's queues."""

    def __init__(self, costs: ProgramCosts, schedule: Schedule) -> None:
        self._costs = costs
        self._forwards_first = schedule is Schedule.GPIPE
        plan = costs.program.plan
        self._local = costs.program.local_boundaries
        self._free_at = idle()
        self._first_backward = first_backward = costs.program.first_backward
        self._stages: list[list[_StageState]] = [[] for _ in plan.pipelines]
        for index, pipeline in enumerate(plan.pipelines):
            for stage, entry in enumerate(pipeline.stages):
                limit = pipeline.in_flight(stage)
                alone = len(plan.places[entry.device]) == 1 and schedule is not Schedule.LIST
                microbatches, has_backward = range(pipeline.num_microbatches), stage >= first_backward[index]
                order = one_f_one_b(microbatches, limit, backward=has_backward) if alone else None
                state = _StageState(index, stage, len(microbatches), limit, order, has_backward)
                self._stages[index].append(state)
        self._of_rank = [[self._stages[p][s] for p, s in places] for places in plan.places.values()]
        self._totals = [
            p.num_microbatches * (2 * len(p.stages) - first)
            for p, first in zip(plan.pipelines, first_backward, strict=True)
        ]
        self._done = [0] * len(plan.pipelines)
        self._running: list[Compute | None] = [None] * len(self._of_rank)
        self._clock = [0.0] * len(self._of_rank)
        self._lists: list[list[tuple[Compute, float]]] = [[] for _ in self._of_rank]
        self._queue = [(0.0, rank) for rank in range(len(self._of_rank))]

    def run(self) -> tuple[Scheduled, ...]:
        queue = self._queue
        while queue:
            now = queue[0][0]
            at_once = now + _SAME_TIME * now
            ranks: set[int] = set()
            # what ends at one time ends before anybody chooses: a gradient that comes now goes first
            while queue and queue[0][0] <= at_once:
                time_s, rank = heapq.heappop(queue)  # R5
                ranks.add(rank)
                if self._running[rank] is not None and self._clock[rank] <= time_s:
                    self._end(rank)
            for rank in sorted(ranks):
                if self._running[rank] is None:
                    self._begin(rank, at_once)
        self._check_all_done()
        return tuple(map(tuple, self._lists))

    def _end(self, rank: int) -> None:
        """Hand on what the computation of a rank has made."""
        compute, now = self._running[rank], self._clock[rank]
        assert compute is not None
        self._running[rank] = None
        stages = self._stages[compute.pipeline]
        held = self._costs.stages[compute.pipeline]
        made = outgoing(compute, held, self._first_backward[compute.pipeline])
        if made is None:
            if compute.op is Pass.FORWARD:
                stages[compute.stage].due[Pass.BACKWARD].append(now)
            return
        peer_stage = compute.stage + (1 if compute.op is Pass.FORWARD else -1)
        due = now
        if made[1:3] not in self._local:
            send = Transfer(Direction.SEND, compute.op, compute.pipeline, compute.stage, compute.microbatch)
            due = self._costs.send_due(self._free_at, send, now)  # R2 to R4
        stages[peer_stage].due[compute.op].append(due)
        heapq.heappush(self._queue, (due, self._costs.program.rank_of(compute.pipeline, peer_stage)))

    def _begin(self, rank: int, at_once: float) -> None:
        """Start the best of what is ready on a free rank, if anything is."""
        best: tuple[tuple[object, ...], _StageState, Pass, float] | None = None
        states = self._of_rank[rank]
        wait = self._forwards_first and any(
            state.upcoming[Pass.FORWARD] < state.num_microbatches for state in states
        )
        for state in states:
            for op in _PASSES:
                if not state.may(op) or (wait and op is Pass.BACKWARD):
                    continue
                due = state.due_s(op)
                if due is not None and due <= at_once:
                    key = self._priority(state, op)
                    if best is None or key < best[0]:
                        best = (key, state, op, due)
        if best is None:
            return
        _, state, op, due = best
        compute = state.take(op)
        self._done[state.pipeline] += 1
        start = max(self._clock[rank], due)  # R1
        end = start + self._costs.compute_s(rank, compute)
        self._running[rank] = compute
        self._clock[rank] = end
        self._lists[rank].append((compute, end))
        heapq.heappush(self._queue, (end, rank))

    def _priority(self, state: _StageState, op: Pass) -> tuple[object, ...]:
        fraction = self._done[state.pipeline] / self._totals[state.pipeline]
        left = -state.stage if op is Pass.FORWARD else state.stage
        return (op is Pass.FORWARD, fraction, state.pipeline, left)

    def _check_all_done(self) -> None:
        waiting = [
            f"stage {state.stage} of pipeline {state.pipeline} with {state.in_flight} in flight"
            for stages in self._stages
            for state in stages
            if state.upcoming[Pass.BACKWARD if state.has_backward else Pass.FORWARD] < state.num_microbatches
        ]
        if waiting:
            raise InputError(
                f"in_flight lets no stage go on; these wait for each other: {'; '.join(waiting)}; "
                "give the earlier ones more in flight"
            )


def last_backward_s(schedule: Sequence[Scheduled]) -> dict[tuple[int, int], float]:
    """Return when each stage (pipeline, stage) has ended its last backward."""
    return {
        (compute.pipeline, compute.stage): end
        for scheduled in schedule
        for compute, end in scheduled
        if compute.op is Pass.BACKWARD
    }
