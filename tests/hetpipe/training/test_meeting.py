"""Ranks that have done their part wait for one that has not, as long as it lives."""

from typing import Any

import pytest

import rank_mains
from cost_model.errors import InputError
from hetpipe.runtime.processes import RankGroup, run_ranks

TIMEOUT_S, SLOW_S = 4.0, 7.0


def written(failing: int | None, slow_s: float = SLOW_S) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    group = RankGroup(("here/0", "here/1"), (1, 1), timeout_s=60.0)
    run_ranks(rank_mains.write_slowly, (slow_s, TIMEOUT_S, failing), group, events.append)
    return events


@pytest.mark.slow
def test_a_slow_writer_may_take_longer_than_a_meeting():
    assert [event["found"] for event in written(None)] == [["written by 0", "written by 1"]] * 2


@pytest.mark.slow
def test_the_error_of_a_writer_is_that_of_the_run():
    with pytest.raises(InputError, match="no room is left"):
        written(1, slow_s=0.5)


def test_values_of_any_length_come_out_as_they_went_in():
    """Numbers exactly, texts that need a second message, and what has no end."""
    values = [0.1 + 0.2, 5e-324, float("inf"), -(2**62), None, True, "ä" * 1000, {"a": [1, []]}, ""]
    events: list[dict[str, Any]] = []
    group = RankGroup(("here/0", "here/1"), (1, 1), timeout_s=60.0)
    run_ranks(rank_mains.gather_all, (values,), group, events.append)
    assert [event["found"] for event in events] == [[[0, value] for value in values]] * 2
    assert [event["other"] for event in events] == [[[1, "x" * 1000] for _ in values]] * 2
