"""Devices that take longer than planned, found while training; noise or a plan that errs for all is none."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cost_model.units import format_seconds
from hetpipe.program.instructions import Program

WINDOW = 20
"""Steps over which a device is looked at."""

SLOW, SLOW_IN_MOST = 1.25, 1.125
"""So many times what was planned is slow: in the median step of the window; in three of four steps of it."""

ENDED = 1.1
"""Below this in the median step of the window, it is over."""

SURE, NORMAL = 5.0, 1.4826
"""So many standard errors lie between the median and what is no more slow; a median absolute deviation times
`NORMAL` is the standard deviation of normal noise."""

KEPT = 200
"""Steps that are looked through for the one since which a device is slow."""

CREDIBLE = (0.5, 2.5)
"""Where the other devices take less or more than so many times their planned time, a plan proves nothing."""

SLOW_KIND = 1.5
"""So many times what was planned is slow from the start on, where no other device of its kind is faster: a
plan may err by a quarter from kind to kind."""

AS_PLANNED = 0.05
"""A device whose first steps are that near to the plan is said to be slow beside the plan."""

LEAST_S = 2e-3
"""Less than that in a step is what the scheduler of a host may do to any process."""


@dataclass(frozen=True, slots=True)
class SlowSpell:
    """A change of what is known of a rank: that it is slow, or, `ended`, that it is not any more.

    since: number of the first slow step. taken: its time over the planned one, median since then; others:
    that of the other ranks. ratio: of the two step by step, median: how many times slower it is beside the
    others, whatever load all had meanwhile. num_steps: so many steps say so. usual: its time over the planned
    one in its first steps, if it is slow beside those, 1.0 if beside the plan; usual_ratio: ratio then.
    """

    rank: int
    since: int
    taken: float
    others: float
    ratio: float
    num_steps: int
    usual: float = 1.0
    usual_ratio: float = 1.0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """A step: by rank its time over the planned one, that of the others (median), and the first over it."""

    step: int
    taken: tuple[float, ...]
    others: tuple[float, ...]
    beside: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Level:
    """What a rank is held against: its own time and that beside the others, over the planned ones.

    error: standard error of the second. least: so many times that is slow.
    """

    own: float
    beside: float
    error: float = 0.0
    least: float = SLOW


@dataclass(slots=True)
class SlowDevices:
    """Watches the busy seconds of all ranks against the planned ones; the same on all ranks.

    A rank is slow that takes `SLOW` times as long, both for itself and beside the others (over their median,
    step by step, so that load of the host and a plan that is wrong for all are no alarm), as in its own first
    `WINDOW` steps; or, if it is so from the start on, as planned, where the plan is right for the others. One
    rank alone is not watched: there is nothing beside it.

    planned_s: busy seconds of a step, by rank; a rank without any is not watched. kinds: of the devices; none
    where all are alike.
    """

    planned_s: Sequence[float]
    kinds: Sequence[str] = ()
    slow: dict[int, SlowSpell] = field(default_factory=dict)
    _seen: deque[_Seen] = field(default_factory=lambda: deque(maxlen=KEPT))
    _usual: tuple[_Level, ...] = ()
    _fastest: dict[int, float] = field(default_factory=dict)  # its own time when the host had least load

    def see(self, step: int, busy_s: Sequence[float]) -> list[SlowSpell]:
        """Take the busy seconds of all ranks in a step, by its number; return what changed with it."""
        watched = [rank for rank, planned in enumerate(self.planned_s) if planned > 0]
        if len(watched) < 2:
            return []
        taken = tuple(
            busy / planned if planned > 0 else 1.0
            for busy, planned in zip(busy_s, self.planned_s, strict=True)
        )
        others = tuple(
            statistics.median([taken[other] for other in watched if other != rank])
            for rank in range(len(taken))
        )
        beside = tuple(value / (other or 1.0) for value, other in zip(taken, others, strict=True))
        self._seen.append(_Seen(step, taken, others, beside))
        if len(self._seen) < WINDOW:
            return []
        window = list(self._seen)[-WINDOW:]
        if not self._usual:
            self._usual = tuple(_usual_level(rank, window) for rank in range(len(taken)))
        found = [self._change(rank, window) for rank in watched]
        return [spell for spell in found if spell is not None]

    def _change(self, rank: int, window: Sequence[_Seen]) -> SlowSpell | None:
        beside = sorted(seen.beside[rank] for seen in window)
        middle = statistics.median(beside)
        if rank in self.slow:
            known = self.slow[rank]
            if middle >= ENDED * known.usual_ratio:
                return None
            del self.slow[rank]
            return self._spell(rank, known.since, WINDOW, _Level(known.usual, known.usual_ratio), ended=True)
        own = statistics.median(seen.taken[rank] for seen in window)
        self._fastest[rank] = min(own, self._fastest.get(rank, own))
        usual = replace(self._usual[rank], own=self._fastest[rank])
        for level in (usual, *self._planned_level(rank, window)):
            long = own >= SLOW * level.own and (own - level.own) * self.planned_s[rank] > LEAST_S
            if long and _is_slow(beside, level):
                break
        else:
            return None
        past = [seen.beside[rank] for seen in self._seen]
        num_slow = num_last_slow(past, (level.beside + middle) / 2)
        spell = self._spell(rank, self._seen[-num_slow].step, num_slow, level)
        self.slow[rank] = spell
        return spell

    def _planned_level(self, rank: int, window: Sequence[_Seen]) -> tuple[_Level, ...]:
        """Return what the plan promises of a rank, in the first steps, where it is right for others."""
        low, high = CREDIBLE
        if len(self._seen) > 2 * WINDOW:
            return ()
        if not low <= statistics.median(seen.others[rank] for seen in window) <= high:
            return ()
        kinds = self.kinds or [""] * len(self.planned_s)
        alike = [
            other
            for other, planned in enumerate(self.planned_s)
            if other != rank and planned > 0 and kinds[other] == kinds[rank]
        ]
        apart = [
            seen.taken[rank] / (statistics.median(seen.taken[other] for other in alike) or 1.0)
            for seen in window
            if alike
        ]
        return (_Level(1.0, 1.0, least=SLOW if apart and statistics.median(apart) >= SLOW else SLOW_KIND),)

    def _spell(
        self, rank: int, since: int, num_steps: int, level: _Level, *, ended: bool = False
    ) -> SlowSpell:
        last = list(self._seen)[-num_steps:]
        return SlowSpell(
            rank,
            since,
            taken=statistics.median(seen.taken[rank] for seen in last),
            others=statistics.median(seen.others[rank] for seen in last),
            ratio=statistics.median(seen.beside[rank] for seen in last),
            num_steps=num_steps,
            usual=level.own,
            usual_ratio=level.beside,
            ended=ended,
        )


def _usual_level(rank: int, window: Sequence[_Seen]) -> _Level:
    beside = [seen.beside[rank] for seen in window]
    own = statistics.median(seen.taken[rank] for seen in window)
    return _Level(own, statistics.median(beside), _deviation(beside) / len(beside) ** 0.5)


def _is_slow(beside: Sequence[float], level: _Level) -> bool:
    """Return whether times beside the others, sorted, are more than noise above a level."""
    middle, lower = statistics.median(beside), beside[len(beside) // 4]
    if middle < level.least * level.beside or lower < SLOW_IN_MOST * level.beside:
        return False
    error = math.hypot(_deviation(beside) / len(beside) ** 0.5, ENDED * level.error)
    return middle - SURE * error >= ENDED * level.beside


@dataclass(slots=True)
class SlowWatch:
    """Says of a run what `SlowDevices` finds in it; told: all sentences so far."""

    program: Program
    found: SlowDevices
    told: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, planned_s: Sequence[float], kinds: Sequence[str] = ()) -> "SlowWatch":
        """Return a watch; planned_s, kinds: busy seconds and kind of device, by rank."""
        return cls(program, SlowDevices(planned_s, kinds))

    def events(self, step: int, busy_s: Sequence[float]) -> list[dict[str, Any]]:
        """Return what is to be told after a step of devices that have become slow, or have been.

        more: in each but the last, of the same step.
        """
        spells = self.found.see(step, busy_s)
        events = [self._event(spell, step) | {"more": spell is not spells[-1]} for spell in spells]
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
            "others": spell.others,
            "ended": spell.ended,
            "text": self._sentence(spell, device),
        }

    def _sentence(self, spell: SlowSpell, device: str) -> str:
        usual_s, others, known = self.found.planned_s[spell.rank], spell.others, "planned"
        taken = spell.taken
        if max(abs(spell.usual - 1), abs(spell.usual_ratio - 1)) > AS_PLANNED:
            usual_s, known = usual_s * spell.usual, "usual"
            taken, others = taken / spell.usual, others * spell.usual_ratio / spell.usual
        steps = f"median of {spell.num_steps} steps"
        times = f"{taken:.2f} times its {known} {format_seconds(usual_s)} per step"
        if spell.ended:
            beside = spell.ratio / spell.usual_ratio  # load that all had is in both of its parts
            return f"{device} is as fast as {known} again beside the others: {beside:.2f} times ({steps})"
        layers = self.program.plan.layers_of(device)
        steps += f"; the others take {others:.2f} times theirs"
        return f"{device} takes {times} since step {spell.since} ({steps}); {_runs(layers)}"


def _runs(layers: Sequence[int]) -> str:
    return f"it runs layers {layers[0]} to {layers[-1]}"


def _deviation(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return NORMAL * statistics.median(abs(value - middle) for value in values)


def num_last_slow(beside: Sequence[float], between: float) -> int:
    """Return how many of the last steps were slow: those whose excess over a level, summed up, is largest."""
    best, total, found = 0.0, 0.0, 1
    for count, value in enumerate(reversed(beside), 1):
        total += min(value, 2 * between) - between
        if total > best:
            best, found = total, count
    return found
