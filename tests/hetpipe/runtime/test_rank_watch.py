"""The launcher's look at its ranks, by a clock and a table that the test sets."""

from pathlib import Path

import numpy as np
import pytest

from hetpipe.runtime import rank_watch
from hetpipe.runtime.heartbeats import BETWEEN, FIRST, LATER, LOOK_S, NOBODY, SEVERAL, Column
from hetpipe.runtime.rank_watch import (
    LEAST_HANG_S,
    LEAST_WAIT_S,
    SILENCE_S,
    START_SILENCE_S,
    STOPPED_S,
    Found,
    Watch,
)

NAMES = ("a/0", "a/1", "a/2", "b/0", "b/1", "b/2")
PARTS = tuple(f"layer {rank}" for rank in range(6))


class Seen:
    """Two ranks, numbers 3 and 5, and the time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.stopped: set[int] = set()
        self.told: list[str] = []
        monkeypatch.setattr(rank_watch.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(rank_watch, "SILENCE_S", SILENCE_S)  # which other tests never reach
        monkeypatch.setattr(rank_watch, "START_SILENCE_S", START_SILENCE_S)
        self.watch = Watch(folder / "beats", (3, 5), lambda rank: rank in self.stopped, NAMES, PARTS)
        self.rows = np.memmap(folder / "beats", dtype=np.int64, mode="r+").reshape(-1, len(Column))
        self.rows[:, Column.PEER] = NOBODY

    def phase(self, *phases: int) -> None:
        self.rows[:, Column.PHASE] = phases

    def peer(self, *peers: int) -> None:
        self.rows[:, Column.PEER] = peers

    def after(self, seconds: float, *, moving: int | None = None, steps: bool = False) -> Found | None:
        """Look on for so long, as the launcher does; the first thing that is found.

        moving: the row that does meanwhile. steps: whether steps come to an end.
        """
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            if moving is not None:
                self.rows[moving, Column.MOVES] += 1
            if steps:
                self.rows[:, Column.STEPS] += 1
            if (found := self.watch.look(set())) is not None:
                return found
            if (told := self.watch.silence(set())) is not None:
                self.told.append(told)
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
    assert found.rank == 5
    assert found.text == "rank 5 (b/2, layer 5) was stopped for 5 s (SIGSTOP, or a debugger)"


def test_a_job_that_was_suspended_as_a_whole_is_left_alone(seen: Seen):
    """The launcher was stopped too, and finds its ranks stopped for a moment more."""
    seen.phase(LATER, LATER)
    seen.stopped = {3, 5}
    assert seen.after(1) is None
    seen.now_s += 3600
    assert seen.after(STOPPED_S - 1) is None


@pytest.mark.parametrize("other", [LATER, BETWEEN])
def test_one_that_hangs_beside_one_that_waits_in_a_loop_is_named(seen: Seen, other: int):
    """Rank 3 waits for it in the step, or has done its part and waits for all."""
    seen.phase(other, LATER)
    seen.peer(5 if other == LATER else SEVERAL, NOBODY)
    assert seen.after(LEAST_HANG_S - 1, moving=0) is None
    found = seen.after(2, moving=0)
    assert found is not None
    assert found.rank == 5
    assert found.text.startswith("rank 5 (b/2, layer 5) hangs: it has not moved for 8 s within a step (until")
    assert found.text.endswith("; b/0 waits for it") is (other == LATER)


@pytest.mark.parametrize("moving", [None, 0])
def test_where_all_wait_it_is_said_who_waits_for_whom(seen: Seen, moving: int | None):
    seen.phase(LATER, LATER)
    seen.peer(5, 0)
    assert seen.after(LEAST_WAIT_S - 1, moving=moving) is None
    found = seen.after(2, moving=moving)
    assert found is not None
    assert found.rank == -1
    assert found.text == (
        "no rank has moved for 10 s within a step: a device hangs, or a link is cut (b/0 waits for b/2; "
        "b/2 waits for a/0)"
    )


@pytest.mark.parametrize("phase", [BETWEEN, FIRST])
def test_between_steps_and_in_the_first_one_any_pause_may_be_long(seen: Seen, phase: int):
    seen.phase(phase, LATER)
    seen.peer(NOBODY, 3)
    assert seen.after(1000) is None


def test_who_computes_long_without_a_standstill_is_left_alone(seen: Seen):
    seen.phase(LATER, LATER)
    seen.peer(5, NOBODY)
    assert seen.after(100, moving=1) is None


def test_who_is_used_to_long_pauses_is_given_longer(seen: Seen):
    seen.phase(FIRST, FIRST)
    seen.peer(5, NOBODY)
    assert seen.after(6) is None  # a pause of the first step
    seen.phase(LATER, LATER)
    seen.after(1, moving=1)
    assert seen.after(29) is None
    found = seen.after(3)
    assert found is not None
    assert found.rank == 5


def test_a_silence_is_told_once_with_who_waits_for_whom(seen: Seen):
    seen.phase(LATER, LATER)
    seen.after(3, steps=True, moving=1)
    seen.phase(LATER, BETWEEN)
    seen.peer(5, NOBODY)
    seen.after(SILENCE_S - 1)
    assert seen.told == []
    assert seen.after(50) is None
    assert seen.told == [
        "no step is over for 10 s: b/2 is between steps (data, callbacks, checkpoints); b/0 waits for b/2"
    ]
    seen.after(1, steps=True)
    seen.after(100)  # silences of twice the longest so far are no news
    assert len(seen.told) == 1
    seen.after(100)
    assert len(seen.told) == 2


def test_a_long_first_step_is_told_too(seen: Seen):
    seen.phase(FIRST, FIRST)
    seen.peer(5, NOBODY)
    seen.after(START_SILENCE_S + 1)
    assert seen.told == [
        "the first step is not over for 60 s: b/2 computes (layer 5), at one place for 60 s; "
        "b/0 waits for b/2"
    ]


def test_kills_of_the_kernel_for_want_of_memory_count_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_watch, "_COUNTS", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\ndrop_slab 0\n")
    watch = Watch(tmp_path / "beats", (0,), lambda rank: False)
    assert not watch.out_of_memory
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 4\ndrop_slab 0\n")
    assert watch.out_of_memory
