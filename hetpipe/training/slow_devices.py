"""Devices that take longer than planned, found while training; noise or a plan that errs for all is none."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_model.units import format_seconds
from hetpipe.program.instructions import Program

WINDOW = 20
"""Steps over which a device is looked at."""

SLOW, SLOW_IN_MOST = 1.25, 1.125
"""So many times what was planned is slow: in the median step of the window; in three of four steps of it."""

ENDED = 1.1
"""Below this in the median step of the window, it is over."""

SURE, NORMAL = 4.0, 1.4826
"""So many standard errors lie between the median and what is no more slow; a median absolute deviation times
`NORMAL` is the standard deviation of normal noise."""

KEPT = 200
"""Steps that are looked through for the one since which a device is slow."""


@dataclass(frozen=True, slots=True)
class SlowSpell:
    """A change of what is known of a rank: that it is slow, or, `ended`, that it is not any more.

    since: number of the first slow step. taken: its time over the planned one, median since then; others:
    that of the other ranks. ratio: of the two step by step, median: how many times slower it is beside the
    others, whatever load all had meanwhile. num_steps: so many steps say so.
    """

    rank: int
    since: int
    taken: float
    others: float
    ratio: float
    num_steps: int
    ended: bool = False


@dataclass(slots=True)
class SlowDevices:
    """Watches the busy seconds of all ranks against the planned ones; the same on all ranks.

    A rank is slow that takes `SLOW` times as long as planned both beside the others (over their median, step
    by step, so that load of the host and a plan that is wrong for all are no alarm) and for itself (over the
    plan, or over its own first `WINDOW` steps). One rank alone is not watched: there is nothing beside it.

    planned_s: busy seconds of a step, by rank; a rank without any is not watched.
    """

    planned_s: Sequence[float]
    slow: dict[int, SlowSpell] = field(default_factory=dict)
    _taken: deque[tuple[int, tuple[float, ...]]] = field(default_factory=lambda: deque(maxlen=KEPT))
    _first: list[tuple[float, ...]] = field(default_factory=list)

    def see(self, step: int, busy_s: Sequence[float]) -> list[SlowSpell]:
        """Take the busy seconds of all ranks in a step, by its number; return what changed with it."""
        taken = tuple(
            busy / planned if planned > 0 else 1.0
            for busy, planned in zip(busy_s, self.planned_s, strict=True)
        )
        self._taken.append((step, taken))
        if len(self._first) < WINDOW:
            self._first.append(taken)
        watched = [rank for rank, planned in enumerate(self.planned_s) if planned > 0]
        if len(self._taken) < WINDOW or len(watched) < 2:
            return []
        found = [self._change(rank) for rank in watched]
        return [spell for spell in found if spell is not None]

    def _change(self, rank: int) -> SlowSpell | None:
        beside = self._beside(rank)
        window = sorted(beside[-WINDOW:])
        middle = statistics.median(window)
        if rank in self.slow:
            known = self.slow[rank]
            if middle >= ENDED:
                return None
            del self.slow[rank]
            return self._spell(rank, known.since, WINDOW, ended=True)
        if middle < SLOW or window[WINDOW // 4] < SLOW_IN_MOST or not self._slow_itself(rank):
            return None
        if middle - SURE * _deviation(window) / WINDOW**0.5 < ENDED:
            return None
        num_slow = _num_last_slow(beside, (1 + middle) / 2)
        spell = self._spell(rank, self._taken[-num_slow][0], num_slow)
        self.slow[rank] = spell
        return spell

    def _slow_itself(self, rank: int) -> bool:
        now = statistics.median(taken[rank] for _, taken in list(self._taken)[-WINDOW:])
        usual = statistics.median(taken[rank] for taken in self._first)
        return now >= SLOW or now >= SLOW * usual > 0

    def _beside(self, rank: int) -> list[float]:
        """Return, step by step, the time of a rank over the planned one, over that of the other ranks."""
        return [taken[rank] / (self._others(rank, taken) or 1.0) for _, taken in self._taken]

    def _others(self, rank: int, taken: Sequence[float]) -> float:
        return statistics.median(
            value for other, value in enumerate(taken) if other != rank and self.planned_s[other] > 0
        )

    def _spell(self, rank: int, since: int, num_steps: int, *, ended: bool = False) -> SlowSpell:
        last = [taken for _, taken in list(self._taken)[-num_steps:]]
        return SlowSpell(
            rank,
            since,
            taken=statistics.median(taken[rank] for taken in last),
            others=statistics.median(self._others(rank, taken) for taken in last),
            ratio=statistics.median(self._beside(rank)[-num_steps:]),
            num_steps=num_steps,
            ended=ended,
        )


@dataclass(slots=True)
class SlowWatch:
    """Says of a run what `SlowDevices` finds in it; told: all sentences so far."""

    program: Program
    found: SlowDevices
    told: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, planned_s: Sequence[float]) -> "SlowWatch":
        """Return a watch; planned_s: busy seconds by rank."""
        return cls(program, SlowDevices(planned_s))

    def events(self, step: int, busy_s: Sequence[float]) -> list[dict[str, Any]]:
        """Return what is to be told after a step of devices that have become slow, or have been."""
        events = [self._event(spell, step) for spell in self.found.see(step, busy_s)]
        self.told += [event["text"] for event in events]
        return events

    def now(self) -> dict[str, Any]:
        """Return what the metrics of a step say: by name, how many times slower than planned a device is."""
        names = self.program.device_names
        slow = {names[rank]: spell.ratio for rank, spell in self.found.slow.items()}
        return {"slow": slow} if slow else {}

    def _event(self, spell: SlowSpell, step: int) -> dict[str, Any]:
        device = self.program.device_names[spell.rank]
        return {
            "event": "slow",
            "step": step,
            "device": device,
            "since": spell.since,
            "ratio": spell.ratio,
            "ended": spell.ended,
            "text": self._sentence(spell, device),
        }

    def _sentence(self, spell: SlowSpell, device: str) -> str:
        steps = f"median of {spell.num_steps} steps; the others take {spell.others:.2f} times theirs"
        planned = f"its planned {format_seconds(self.found.planned_s[spell.rank])} per step"
        if spell.ended:
            return f"{device} is as fast as planned again: {spell.taken:.2f} times {planned} ({steps})"
        layers = self.program.plan.layers_of(device)
        return (
            f"{device} takes {spell.taken:.2f} times {planned} since step {spell.since} ({steps}); it runs "
            f"layers {layers[0]} to {layers[-1]}"
        )


def _deviation(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return NORMAL * statistics.median(abs(value - middle) for value in values)


def _num_last_slow(beside: Sequence[float], between: float) -> int:
    """Return how many of the last steps were slow: those whose excess over a level, summed up, is largest."""
    best, total, found = 0.0, 0.0, 1
    for count, value in enumerate(reversed(beside), 1):
        total += min(value, 2 * between) - between
        if total > best:
            best, found = total, count
    return found
