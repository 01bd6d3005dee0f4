"""Where the planner's time goes: seconds in its parts, measured around their functions."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import partition.column_generation.pipeline_pool
import partition.local_search.starts
from partition.column_generation.master_problem import MasterProgramme
from partition.column_generation.pricing_problem import PricingProblem
from partition.exact.chain_dp import ChainProgramme
from partition.exact.cluster_split import ClusterSplit
from partition.exact.count_dp import CountProgramme
from partition.problem import Evaluate

LP, DP, MILP, SIMULATOR, REST = "LP", "DP", "MILP", "simulator", "rest"
PARTS = (LP, DP, MILP, SIMULATOR, REST)

_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (MasterProgramme, "__init__", LP),
    (MasterProgramme, "solve", LP),
    (PricingProblem, "__init__", DP),
    (PricingProblem, "solve", DP),
    (CountProgramme, "__init__", DP),
    (ClusterSplit, "split", DP),
    (ChainProgramme, "roots", DP),
    (partition.local_search.starts, "rounded", MILP),
    (partition.column_generation.pipeline_pool, "solve_master", MILP),
)


class Shares:
    """CPU seconds by part; those of a part inside another count for the inner one.

    Linear programmes that integer ones ask for count for these.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._part, self._since = REST, time.process_time()

    def _enter(self, part: str) -> str:
        now, before = time.process_time(), self._part
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def of(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, its seconds counted; of a generator those until it is used up."""

        def counted(*args: Any, **options: Any) -> Any:
            before = self._enter(MILP if (part, self._part) == (LP, MILP) else part)
            try:
                result = function(*args, **options)
                return iter(list(result)) if isinstance(result, Iterator) else result
            finally:
                self._enter(before)

        return counted

    def evaluator(self, evaluate: Evaluate) -> Evaluate:
        return self.of(evaluate, SIMULATOR)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """While this is open the parts are counted."""
        given = [(owner, name, getattr(owner, name)) for owner, name, _ in _FUNCTIONS]
        for owner, name, part in _FUNCTIONS:
            setattr(owner, name, self.of(getattr(owner, name), part))
        self._part, self._since = REST, time.process_time()
        try:
            yield
        finally:
            self._enter(REST)
            for owner, name, function in given:
                setattr(owner, name, function)
