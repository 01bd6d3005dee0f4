"""Plans after a short search, for tests of what is done with a plan: any plan does, if it is valid."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from partition.estimates.effort import Effort, effort_for
from partition.local_search import starts


def little_effort(*given: Any, **options: Any) -> Effort:
    """Return the effort for a cluster, without what takes longest: walks, and changes by the simulator."""
    effort = effort_for(*given, **options)
    return replace(
        effort,
        starts=replace(effort.starts, every_order=False),
        search=replace(effort.search, walks=None, walks_near=None, walks_far=None),
        simulator=None,
        choice=replace(
            effort.choice,
            exact_chains=0,
            simulated_baselines=False,
            far_from_columns=math.inf,
            undecided=math.inf,
        ),
    )


@contextlib.contextmanager
def short_searches() -> Iterator[None]:
    """Within it every search is short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starts, "effort_for", little_effort)
        yield
