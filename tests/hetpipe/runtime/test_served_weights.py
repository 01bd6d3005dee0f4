"""Weights that owners hand in for those that fetch them: no more is held than what is fetched now."""

from dataclasses import replace
from typing import Any

import pytest

import runtime_mains
from hetpipe.runtime.processes import RankGroup, run_ranks
from partition.plan import Pipeline
from random_cases import MODULES
from runtime_mains import case_of, stages


@pytest.mark.slow
def test_owners_hold_the_messages_of_one_evaluation() -> None:
    plain = case_of(
        "pairs", Pipeline(1, 2, stages((0, 0, 3, 1), (1, 3, 6, 1))), Pipeline(1, 2, stages((2, 0, 6, 1)))
    )
    owners = ("n/0", "n/0", "n/2", "n/2", "n/1", "n/1")
    case = runtime_mains.lowered_again(plain, replace(plain.program.plan, zero=3, state_owners=owners))
    assert case.program.plan.fetches_apart
    events: list[dict[str, Any]] = []
    names = case.program.device_names
    ranks = RankGroup(names, (1,) * len(names), preload=MODULES)
    run_ranks(runtime_mains.messages_handed_in, (case, 3), ranks, events.append)
    counts = [event["counts"] for event in sorted(events, key=lambda event: event["rank"])]
    assert len(counts) == 3
    for first, *more, after_step in counts:
        assert first > 0 and set(more) == {first} and after_step == 0
