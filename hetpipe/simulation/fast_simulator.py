"""How long a step of a plan takes, without its instruction lists: for the planner, which asks it of many.

Of plans whose devices serve one stage each. The rules are those of `simulator`, and so are the results, to
the last bit.
"""

from dataclasses import dataclass

from cost_model.network import FreeAt, idle
from hetpipe.program.costs import ProgramCosts
from hetpipe.simulation.fast_kernel import computed
from hetpipe.simulation.simulation_arrays import clockwork
from partition.plan import Plan

MANY = 300_000
"""Computations from which on the inner loop is compiled: that takes 0.5 s to load, and 2 s more once."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, and for which each rank computes in it."""

    step_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle share of the step over all devices, in [0, 1]."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0


def has_clock(plan: Plan) -> bool:
    """Whether `step_times` knows the rules of a plan: each device serves one stage and has its own states."""
    return not plan.zero and all(len(places) == 1 for places in plan.places.values())


def step_times(costs: ProgramCosts, *, many: int = MANY) -> StepTimes:
    """What `simulate` would find for the program of these costs; its lists need not be there.

    many: computations from which on the compiled loop is taken.
    """
    return _StepClock(costs, many).run()


class _StepClock:
    """Owns the virtual clock of one step; see `hetpipe.simulation.simulator` for the rules."""

    def __init__(self, costs: ProgramCosts, many: int) -> None:
        self._costs, buckets = costs, costs.program.buckets
        self._free_at: FreeAt = idle()
        self._work = clockwork(costs)
        if sum(self._work.end) - sum(self._work.position) < many:
            self._done = computed(self._work, self._free_at)
        else:
            from hetpipe.simulation.compiled_kernel import (
                compiled_clock,  # loads a compiler: only for large plans
            )

            self._work, self._free_at, self._done = compiled_clock(self._work)
        self._buckets_of: list[list[int]] = [[] for _ in self._work.final]
        for index, bucket in enumerate(buckets):
            for rank in bucket.ranks:
                self._buckets_of[rank].append(index)
        self._ready: list[dict[int, float]] = [{} for _ in buckets]
        self._summed: list[dict[int, float]] = [{} for _ in buckets]

    def run(self) -> StepTimes:
        for rank in self._done:
            self._sync(rank)
        work = self._work
        assert list(work.position) == list(work.end), "1F1B does not deadlock"
        clock, busy = list(map(float, work.clock_s)), list(map(float, work.busy_s))
        ready = {
            rank: max([now, *(self._summed[index][rank] for index in self._buckets_of[rank])])
            for rank, now in enumerate(clock)
        }
        due = self._costs.norm_due(self._free_at, ready)
        ends = []
        for rank in ready:
            start = ready[rank] + (due[rank] - ready[rank])
            ends.append(start + self._costs.step_s(rank))
            busy[rank] += ends[-1] - start
        return StepTimes(max(ends), tuple(busy))

    def _sync(self, rank: int) -> None:
        """The SYNCs of a rank, all after its last backward; the last owner's starts the sum."""
        for index in self._buckets_of[rank]:
            ready = self._ready[index]
            ready[rank] = float(self._work.clock_s[rank])
            if len(ready) == len(self._costs.program.buckets[index].ranks):
                self._summed[index] = self._costs.sync_due(self._free_at, index, ready)
