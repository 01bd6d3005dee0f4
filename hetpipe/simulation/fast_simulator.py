"""How long a step of a plan takes, without its instruction lists: for the planner, which asks it of many.

Of plans whose devices serve one stage each, and have their states for themselves. The rules are those of
`simulator` (docs/clock.md), and so are the results, to the last bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from cost_model.network import FreeAt, idle
from hetpipe.program.costs import ProgramCosts
from hetpipe.simulation.fast_kernel import N, S, SimulationArrays, ranks_as_they_finish
from hetpipe.simulation.simulation_arrays import SimulationLists, simulation_lists
from partition.estimates.step_estimate import shares_devices
from partition.plan import Plan

MANY = 300_000
"""Computations from which on the inner loop is compiled: that takes 0.5 s to load, and 2 s more once."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, for which each rank computes in it, and at which the sum of each bucket begins."""

    step_s: float
    busy_s: tuple[float, ...]
    sums_begin_s: tuple[float, ...] = field(default=(), compare=False)

    @property
    def bubble(self) -> float:
        """Idle share of the step over all devices, in [0, 1]."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0


def has_clock(plan: Plan) -> bool:
    """Return whether each device of a plan serves one stage and has its own states, as `step_times` asks."""
    return not plan.zero and not shares_devices(plan)


def num_computations(plan: Plan) -> int:
    """Return the forwards and backwards of a step on all devices."""
    return 2 * sum(pipeline.num_microbatches * len(pipeline.stages) for pipeline in plan.pipelines)


def step_times(costs: ProgramCosts, *, many: int = MANY) -> StepTimes:
    """Return what `simulate` would find for the program of these costs; its lists need not be there.

    many: computations from which on the compiled loop is taken.
    """
    return _run(costs, simulation_lists(costs), many)


def _run(costs: ProgramCosts, work: SimulationLists, many: int) -> StepTimes:
    if sum(work.end_place) - sum(work.next_place) < many:
        free_at = idle()
        return _step_times(costs, work, free_at, ranks_as_they_finish(work, free_at))
    from hetpipe.simulation.compiled_kernel import compiled_clock  # loads a compiler: only for large plans

    return _step_times(costs, *compiled_clock(work))


def _step_times(
    costs: ProgramCosts, work: SimulationArrays[N, S], free_at: FreeAt, finished_ranks: Iterator[int]
) -> StepTimes:
    """Return the times of a step once all computations are run: gradient sums, the norm and the optimizer."""
    sums = _GradientSums(costs, free_at)
    for rank in finished_ranks:
        pause = work.next_pause[rank]
        if pause < work.end_pause[rank]:
            sums.join_next(rank, float(work.clock_s[rank]) - float(work.pause_s[pause]))
        else:
            sums.join(rank, float(work.clock_s[rank]))
    ranks = range(len(costs.device_names))
    assert all(work.next_place[rank] == work.end_place[rank] for rank in ranks), "1F1B does not deadlock"
    ready_s = {rank: max([float(work.clock_s[rank]), *sums.of_rank(rank)]) for rank in ranks}
    due_s = costs.norm_due(free_at, ready_s)  # R8
    busy_s, ends_s = [], []
    for rank in ranks:
        start_s = ready_s[rank] + (
            due_s[rank] - ready_s[rank]
        )  # the sum of the simulator's trace, to the bit
        ends_s.append(start_s + costs.step_s(rank))  # R9
        busy_s.append(float(work.busy_s[rank]) + (ends_s[-1] - start_s))
    return StepTimes(max(ends_s), tuple(busy_s), sums.begin_s())  # R11


class _GradientSums:
    """When the sums of the buckets are over (R7). Owns who is ready for which."""

    def __init__(self, costs: ProgramCosts, free_at: FreeAt) -> None:
        self._costs, self._free_at = costs, free_at
        buckets = costs.program.buckets
        self._buckets_of: list[list[int]] = [[] for _ in costs.device_names]
        for index, bucket in enumerate(buckets):
            for rank in bucket.ranks:
                self._buckets_of[rank].append(index)
        self._joined = [0] * len(costs.device_names)  # [rank] how many of its buckets
        self._ready_s: list[dict[int, float]] = [{} for _ in buckets]
        self._due_s: list[dict[int, float]] = [{} for _ in buckets]

    def join(self, rank: int, now_s: float) -> None:
        """Take the SYNCs of a rank that are left at the end of its last backward."""
        while self._joined[rank] < len(self._buckets_of[rank]):
            self.join_next(rank, now_s)

    def join_next(self, rank: int, now_s: float) -> None:
        """Take the next SYNC of a rank; the last owner's starts the sum."""
        index = self._buckets_of[rank][self._joined[rank]]
        self._joined[rank] += 1
        ready_s = self._ready_s[index]
        ready_s[rank] = now_s
        if len(ready_s) == len(self._costs.program.buckets[index].ranks):
            self._due_s[index] = self._costs.sync_due(self._free_at, index, ready_s)

    def begin_s(self) -> tuple[float, ...]:
        """Return when the last owner of each bucket is ready for its sum, in seconds."""
        return tuple(max(ready_s.values()) for ready_s in self._ready_s)

    def of_rank(self, rank: int) -> list[float]:
        """Return when each sum of a rank is over for it, in seconds."""
        return [self._due_s[index][rank] for index in self._buckets_of[rank]]
