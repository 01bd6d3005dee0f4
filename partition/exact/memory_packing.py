"""Several pipelines that memory takes, whatever the order of their devices.

`memory_programme` gives all pipelines of which none does with fewer devices, or with less memory; an integer
programme chooses so many of them as are wished for, pinned devices and all, of the devices that there are.
"""

from itertools import islice

from partition.column_generation.master_problem import Limits, solve_master
from partition.exact.memory_programme import Cut, MemoryProgramme
from partition.problem import Problem

MOST_COLUMNS, MOST_STATES = 5000, 2**18


class MemoryPacking(MemoryProgramme):
    """The programme for several pipelines: `solve` and `leanest` give all of them.

    Nothing is proven: a pipeline of fewer samples than a microbatch has may need less.
    """

    def __init__(self, problem: Problem, samples: int) -> None:
        super().__init__(problem, samples, several=True)
        number, pinned = problem.forced.num_pipelines, range(self.num_free, len(self.counts))
        self._limits = Limits(number, number or 0, problem.forced.max_devices, tuple(pinned))
        self.proven = False

    def solve(self, missing_bytes: float) -> list[list[Cut]]:
        """Return pipelines as wished for, whose devices lack no more than that; none if there are none."""
        if self.num_states > MOST_STATES:  # of many pinned devices
            return []
        found = list(islice(self.pipelines(missing_bytes), MOST_COLUMNS))
        if not found:
            return []
        uses, number = [used for used, _ in found], self._limits.most_pipelines
        answer = solve_master(uses, [1.0] * len(uses), self.counts, self._limits, integer=True, enough=number)
        if not answer.met:
            return []
        return [
            cuts
            for (_, cuts), amount in zip(found, answer.amounts, strict=True)
            for _ in range(round(amount))
        ]
