"""Plans that the tests of a module ask for over and over: a problem has one plan, so each is made once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from partition import solver
from partition.explanation import gains, pareto


@contextmanager
def each_plan_once() -> Iterator[None]:
    """Within it a plan of a problem is made once, a bound proved once, a set of devices planned once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "PipelineSearch", once(solver.PipelineSearch, 1))  # of a problem
        patch.setattr(solver, "_plan", once(solver._plan, 2))  # of a strategy for it
        patch.setattr(solver, "best_bound", once(solver.best_bound, 1))  # of a search, for so many seconds
        patch.setattr(pareto, "auto", once(pareto.auto, 1))  # on a set of devices
        patch.setattr(gains, "auto", once(gains.auto, 1))  # of a problem
        yield


def once(make: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return what makes as it does, and gives the same for the same options and so many first arguments."""
    known: list[tuple[Any, Any]] = []

    def made(*given: Any, **options: Any) -> Any:
        key = (given[:count], options)
        for before, result in known:
            if before == key:
                return result
        known.append((key, make(*given, **options)))
        return known[-1][1]

    return made
