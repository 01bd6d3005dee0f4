"""What the ranks of a host are seen to do, for their launcher: who is stopped, and whether all hang.

A thread of each rank looks twice a second where its main thread is, and counts in shared memory how often
that has changed. A rank that waits for a message does not move; where none does, for far longer than ever
before in this run, a device hangs or a link is cut, and no message will say so.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np

LOOK_S = 0.5
"""So often a rank looks where its main thread is, and the launcher at what they saw."""
STOPPED_S = 5.0
"""So long a rank may be stopped by a signal."""
LEAST_HANG_S = 10.0
HANG_FACTOR = 5.0
"""So many times the longest pause of all ranks so far is a hang."""

_COUNTS = Path("/proc/vmstat")
"""Of the kernel, among them how many processes it has killed for want of memory (Linux)."""

_FIRST, _LATER = 2, 1  # what a row says within a step, else 0

_here: "Heart | None" = None


class Heart:
    """The row of a rank: whether it is within a step, and how often its main thread has moved."""

    def __init__(self, path: Path, row: int) -> None:
        """Open the row, and look from now on; to be called in the main thread."""
        self._row = np.memmap(path, dtype=np.int64, mode="r+").reshape(-1, 2)[row]
        self._main = threading.get_ident()
        threading.Thread(target=self._look, daemon=True, name="hetpipe heart").start()

    @contextmanager
    def within_step(self, *, first: bool) -> Iterator[None]:
        """Say that a step is under way; first: one from which is learnt how long a pause may be."""
        self._row[0] = _FIRST if first else _LATER
        try:
            yield
        finally:
            self._row[0] = 0

    def _look(self) -> None:
        before: list[tuple[int, int]] = []
        while True:
            time.sleep(LOOK_S)
            now = _place_of(sys._current_frames().get(self._main))
            self._row[1] += now != before
            before = now


def _place_of(frame: FrameType | None) -> list[tuple[int, int]]:
    """Return where a thread is: the code and the instruction of each of its frames."""
    place = []
    while frame is not None:
        place.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return place


def begin(path: Path, row: int) -> None:
    """Begin to tell, as a rank, what its main thread does."""
    global _here
    _here = Heart(path, row)


@contextmanager
def within_step(*, first: bool) -> Iterator[None]:
    """Say, in a rank that a launcher watches, that a step is under way; first: as for `Heart.within_step`."""
    if _here is None:
        yield
        return
    with _here.within_step(first=first):
        yield


class Watch:
    """The launcher's look at its ranks."""

    def __init__(self, path: Path, ranks: Sequence[int], is_stopped: Callable[[int], bool]) -> None:
        """Make the table of these ranks; is_stopped: whether a signal has stopped one."""
        path.write_bytes(bytes(16 * max(1, len(ranks))))
        self._rows = np.memmap(path, dtype=np.int64, mode="r").reshape(-1, 2)
        self._ranks, self._is_stopped = ranks, is_stopped
        self._stopped_since_s: dict[int, float] = {}
        self._moves: list[int] = []
        self._moved_s = self._looked_s = time.monotonic()
        self._longest_s = 0.0
        self._kills = _memory_kills()

    @property
    def out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of this host for want of memory since the start."""
        return _memory_kills() > self._kills

    def look(self, ended: Mapping[int, object] | set[int]) -> tuple[int, str] | None:
        """Return a rank that has been stopped for too long and what to say of it; -1 where all hang.

        ended: ranks to leave out. What passes while nobody looks counts as no pause: the caller was busy.
        """
        now_s = time.monotonic()
        was_away, self._looked_s = now_s - self._looked_s > 4 * LOOK_S, now_s
        if was_away:
            self._stopped_since_s.clear()
            self._moved_s = now_s
        for rank in self._ranks:
            if rank in ended or not self._is_stopped(rank):
                self._stopped_since_s.pop(rank, None)
            elif now_s - self._stopped_since_s.setdefault(rank, now_s) > STOPPED_S:
                return rank, f"was stopped for {STOPPED_S:g} s (SIGSTOP, or a debugger)"
        return self._hanging(now_s, all_here=not ended)

    def _hanging(self, now_s: float, *, all_here: bool) -> tuple[int, str] | None:
        within, moves = self._rows.T.tolist()
        pause_s = now_s - self._moved_s
        if not all_here or not all(within):
            self._moves, self._moved_s = moves, now_s
            return None
        if _FIRST in within:
            self._longest_s = max(self._longest_s, pause_s)
        if moves != self._moves:
            self._longest_s = max(self._longest_s, pause_s)
            self._moves, self._moved_s = moves, now_s
            return None
        if _FIRST in within or pause_s <= max(LEAST_HANG_S, HANG_FACTOR * self._longest_s):
            return None
        return -1, (
            f"no rank has moved for {pause_s:.0f} s within a step (until then {self._longest_s:.1f} s at "
            "most): a device hangs, or a link is cut"
        )


def _memory_kills() -> int:
    try:
        lines = _COUNTS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
