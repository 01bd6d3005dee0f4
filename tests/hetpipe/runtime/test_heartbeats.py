"""The launcher's look at its ranks, by a clock and a table that the test sets."""

from pathlib import Path

import numpy as np
import pytest

from hetpipe.runtime import heartbeats
from hetpipe.runtime.heartbeats import LEAST_HANG_S, LOOK_S, STOPPED_S, Watch


class Seen:
    """Two ranks, numbers 3 and 5, and the time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.stopped: set[int] = set()
        monkeypatch.setattr(heartbeats.time, "monotonic", lambda: self.now_s)
        self.watch = Watch(folder / "beats", (3, 5), lambda rank: rank in self.stopped)
        self.rows = np.memmap(folder / "beats", dtype=np.int64, mode="r+").reshape(-1, 2)

    def after(self, seconds: float, *, moving: bool = False) -> tuple[int, str] | None:
        """Look on for so long, as the launcher does; the first thing that is found."""
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            if moving:
                self.rows[1, 1] += 1
            if (found := self.watch.look(set())) is not None:
                return found
        return None


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(tmp_path, monkeypatch)


def test_a_rank_that_stays_stopped_is_found_and_a_short_stop_is_not(seen: Seen):
    seen.stopped = {5}
    assert seen.after(STOPPED_S - 1) is None
    seen.stopped = set()
    assert seen.after(1) is None
    seen.stopped = {5}
    found = seen.after(STOPPED_S + 1)
    assert found is not None
    assert found[0] == 5


def test_a_job_that_was_suspended_as_a_whole_is_left_alone(seen: Seen):
    """The launcher was stopped too, and finds its ranks stopped for a moment more."""
    seen.stopped = {3, 5}
    assert seen.after(1) is None
    seen.now_s += 3600
    assert seen.after(STOPPED_S - 1) is None


def test_where_all_are_within_a_step_and_none_moves_it_hangs(seen: Seen):
    seen.rows[:, 0] = 1
    assert seen.after(30, moving=True) is None
    assert seen.after(LEAST_HANG_S - 1) is None
    found = seen.after(2)
    assert found is not None
    assert found[0] == -1
    assert "no rank has moved for 10 s" in found[1]


@pytest.mark.parametrize("first", [0, 2])
def test_between_steps_and_in_the_first_one_any_pause_may_be_long(seen: Seen, first: int):
    seen.rows[0, 0], seen.rows[1, 0] = first, 1
    assert seen.after(1000) is None


def test_who_is_used_to_long_pauses_is_given_longer(seen: Seen):
    seen.rows[:, 0] = 2
    assert seen.after(6) is None  # a pause of the first step
    seen.rows[:, 0] = 1
    seen.after(1, moving=True)
    assert seen.after(29) is None
    assert seen.after(3) is not None


def test_kills_of_the_kernel_for_want_of_memory_count_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "_COUNTS", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\ndrop_slab 0\n")
    watch = Watch(tmp_path / "beats", (0,), lambda rank: False)
    assert not watch.out_of_memory
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 4\ndrop_slab 0\n")
    assert watch.out_of_memory
