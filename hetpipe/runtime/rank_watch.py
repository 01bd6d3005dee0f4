"""What the ranks of a host are seen to do, by their launcher: who is stopped, who hangs, who waits for whom.

A rank that waits for others is no more to blame than they are, whatever its loops do meanwhile. One that
neither waits nor moves within a step, for far longer than ever before in this run, hangs; so does a device,
or a link, where all wait.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetpipe.runtime.heartbeats import BETWEEN, FIRST, LATER, LOOK_S, NOBODY, Column

STOPPED_S = 5.0
"""So long a rank may be stopped by a signal."""
LEAST_HANG_S, LEAST_WAIT_S = 8.0, 9.0
"""So long a rank may not move within a step, or all of them: who hangs is named before those who wait."""
HANG_FACTOR = 5.0
"""So many times its longest pause so far is a hang."""
SILENCE_S, SILENCE_FACTOR = 10.0, 3.0
"""After so long without a step, or so many times the longest one so far, it is told who waits for whom."""
START_SILENCE_S = 60.0
"""The same before the first step is over."""
MOST_NAMED = 6

_COUNTS = Path("/proc/vmstat")
"""Of the kernel, among them how many processes it has killed for want of memory (Linux)."""


@dataclass(frozen=True, slots=True)
class Found:
    """A rank that is lost, what is to be said of it, and for how long it had given no sign.

    rank: -1 where it is none of them alone.
    """

    rank: int
    text: str
    silent_s: float


@dataclass(slots=True)
class _Rank:
    """What was last seen of a rank: what it did, since when, and its longest pause in the steps so far."""

    seen: tuple[int, ...] = ()
    since_s: float = 0.0
    longest_s: float = 0.0
    stopped_s: float | None = None


class Watch:
    """The launcher's look at its ranks."""

    def __init__(
        self,
        path: Path,
        ranks: Sequence[int],
        is_stopped: Callable[[int], bool],
        names: Sequence[str] = (),
        parts: Sequence[str] = (),
    ) -> None:
        """Make the table of these ranks; is_stopped: whether a signal has stopped one.

        names: of the devices of all ranks of the run; parts: what they run, for sentences.
        """
        path.write_bytes(bytes(8 * len(Column) * max(1, len(ranks))))
        self._rows = np.memmap(path, dtype=np.int64, mode="r").reshape(-1, len(Column))
        self._ranks, self._is_stopped, self._names, self._parts = ranks, is_stopped, names, parts
        now_s = time.monotonic()
        self._states = {rank: _Rank(since_s=now_s) for rank in ranks}
        self._looked_s = self._stepped_s = now_s
        self._steps = 0
        self._longest_step_s = self._longest_wait_s = self._pause_s = 0.0
        self._told = False
        self._kills = _memory_kills()

    @property
    def out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of this host for want of memory since the start."""
        return _memory_kills() > self._kills

    def silent_s(self, rank: int) -> float:
        """Return the seconds since a rank gave its last sign of life; 0.0 if it gave none yet."""
        beat_ns = int(self._rows[self._ranks.index(rank), Column.BEAT_NS])
        return (time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else 0.0

    def look(self, ended: Collection[int]) -> Found | None:
        """Return a rank that has been stopped for too long, or hangs, or that all do.

        ended: ranks to leave out. What passes while nobody looks counts as no pause: the caller was busy.
        """
        now_s, rows = time.monotonic(), self._rows.tolist()
        if now_s - self._looked_s > 4 * LOOK_S:
            self._was_away(now_s)
        self._looked_s = now_s
        for rank, row in zip(self._ranks, rows, strict=False):
            self._see(rank, row, now_s)
        self._count_steps(rows, now_s)
        return self._stopped(ended, now_s) or self._hanging(rows, ended, now_s)

    def silence(self, ended: Collection[int]) -> str | None:
        """Return, once for each silence, who waits for whom where no step was over for long; else None.

        Of ranks that train alone: of which it is known what they run.
        """
        now_s, least_s = self._looked_s, SILENCE_S if self._steps else START_SILENCE_S
        silent_s = now_s - self._stepped_s
        if (
            self._told
            or ended
            or not self._parts
            or silent_s <= max(least_s, SILENCE_FACTOR * self._longest_step_s)
        ):
            return None
        self._told = True
        rows = dict(zip(self._ranks, self._rows.tolist(), strict=False))
        order = sorted(rows, key=lambda rank: rows[rank][Column.PEER] != NOBODY)  # whom others wait for first
        words = [f"{self._name(rank)} {self._doing(rank, rows[rank], now_s)}" for rank in order[:MOST_NAMED]]
        if len(order) > MOST_NAMED:
            words.append(f"{len(order) - MOST_NAMED} more")
        over = "no step is over" if self._steps else "the first step is not over"
        return f"{over} for {silent_s:.0f} s: {'; '.join(words)}"

    def named(self, rank: int) -> str:
        """Return how errors call a rank: its number, its device, and what runs there."""
        part = f", {self._parts[rank]}" if rank < len(self._parts) else ""
        return f"rank {rank} ({self._name(rank)}{part})"

    def _name(self, rank: int) -> str:
        return self._names[rank] if 0 <= rank < len(self._names) else f"rank {rank}"

    def _doing(self, rank: int, row: Sequence[int], now_s: float) -> str:
        if self._states[rank].stopped_s is not None:
            return "is stopped (SIGSTOP, or a debugger)"
        if row[Column.PEER] != NOBODY:
            peer = row[Column.PEER]
            return f"waits for {self._name(peer) if peer >= 0 else 'others'}"
        if row[Column.PHASE] == BETWEEN:
            return "is between steps (data, callbacks, checkpoints)" if self._steps else "starts"
        part = f" ({self._parts[rank]})" if rank < len(self._parts) else ""
        return f"computes{part}, at one place for {now_s - self._states[rank].since_s:.0f} s"

    def _was_away(self, now_s: float) -> None:
        for state in self._states.values():
            state.since_s, state.stopped_s = now_s, None
        self._stepped_s = now_s

    def _see(self, rank: int, row: Sequence[int], now_s: float) -> None:
        state, waits = self._states[rank], row[Column.PEER] != NOBODY
        moves = 0 if waits else row[Column.MOVES]  # who waits may do so in a loop
        seen = (row[Column.PHASE], moves, row[Column.STEPS], row[Column.PEER], row[Column.WAITS])
        if row[Column.PHASE] == FIRST and not waits:
            state.longest_s = max(state.longest_s, now_s - state.since_s)
        if seen != state.seen:
            was_within = bool(state.seen) and state.seen[0] != BETWEEN and state.seen[3] == NOBODY
            if was_within:
                state.longest_s = max(state.longest_s, now_s - state.since_s)
            state.seen, state.since_s = seen, now_s
        if not self._is_stopped(rank):
            state.stopped_s = None
        elif state.stopped_s is None:
            state.stopped_s = now_s

    def _count_steps(self, rows: Sequence[Sequence[int]], now_s: float) -> None:
        steps = sum(row[Column.STEPS] for row in rows)
        if steps != self._steps:
            if self._steps:
                self._longest_step_s = max(self._longest_step_s, now_s - self._stepped_s)
            self._steps, self._stepped_s, self._told = steps, now_s, False

    def _stopped(self, ended: Collection[int], now_s: float) -> Found | None:
        for rank, state in self._states.items():
            if rank not in ended and state.stopped_s is not None and now_s - state.stopped_s > STOPPED_S:
                text = f"{self.named(rank)} was stopped for {STOPPED_S:g} s (SIGSTOP, or a debugger)"
                return Found(rank, text, self.silent_s(rank))
        return None

    def _hanging(self, rows: Sequence[Sequence[int]], ended: Collection[int], now_s: float) -> Found | None:
        by_rank = dict(zip(self._ranks, rows, strict=False))
        for rank, row in by_rank.items():
            state = self._states[rank]
            pause_s = now_s - state.since_s
            computes = row[Column.PHASE] == LATER and row[Column.PEER] == NOBODY and rank not in ended
            if computes and pause_s > max(LEAST_HANG_S, HANG_FACTOR * state.longest_s):
                text = (
                    f"{self.named(rank)} hangs: it has not moved for {pause_s:.0f} s within a step (until "
                    f"then {state.longest_s:.1f} s at most){self._waiting_for(rank, by_rank)}"
                )
                return Found(rank, text, pause_s)
        return None if ended else self._all_waiting(by_rank, now_s)

    def _all_waiting(self, by_rank: Mapping[int, Sequence[int]], now_s: float) -> Found | None:
        pause_s = now_s - max((state.since_s for state in self._states.values()), default=now_s)
        if any(row[Column.PHASE] == BETWEEN for row in by_rank.values()):
            self._pause_s = 0.0
            return None
        is_first = any(row[Column.PHASE] == FIRST for row in by_rank.values())
        if is_first or pause_s < self._pause_s:  # one is over
            self._longest_wait_s = max(self._longest_wait_s, self._pause_s)
        self._pause_s = pause_s
        if is_first:
            return None
        longest_s = max(self._longest_wait_s, *(state.longest_s for state in self._states.values()), 0.0)
        if pause_s <= max(LEAST_WAIT_S, HANG_FACTOR * longest_s):
            return None
        waits = "; ".join(
            f"{self._name(rank)} {self._doing(rank, row, now_s)}"
            for rank, row in list(by_rank.items())[:MOST_NAMED]
        )
        text = (
            f"no rank has moved for {pause_s:.0f} s within a step: a device hangs, or a link is cut ({waits})"
        )
        return Found(-1, text, pause_s)

    def _waiting_for(self, rank: int, by_rank: Mapping[int, Sequence[int]]) -> str:
        waiting = [other for other, row in by_rank.items() if row[Column.PEER] == rank]
        if not waiting:
            return ""
        return f"; {' and '.join(map(self._name, waiting))} {'wait' if len(waiting) > 1 else 'waits'} for it"


def _memory_kills() -> int:
    try:
        lines = _COUNTS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
