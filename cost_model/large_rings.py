"""Ends of the messages of a ring of many members, whose rounds are computed all members at a time.

Apart from `network`, which starts without NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MOST_ROUNDS = 2_000
MOST_LEVELS = 20_000
"""Where messages share resources and no period shows, so many rounds are computed, and so many levels of
messages that wait for each other; the other rounds go on at their pace."""

_SAME = 1e-9  # relative: two times that differ by less are one
_NEVER = -np.inf

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


def ring_ends_s(
    users: Sequence[tuple[int, ...]],
    occupied_s: Sequence[float],
    latency_s: Sequence[float],
    start_s: Sequence[float],
    num_rounds: int,
    *,
    most_rounds: int = MOST_ROUNDS,
) -> list[float]:
    """Return when the last message of each member has left its resources.

    In a round each member sends one message, which occupies its resources (users) for occupied_s and is at
    the next member latency_s later; that one sends it on in the round after. Messages of a round queue in
    the order of the members. start_s: from when on the first message may go.

    Such a system is linear in the (max, +) algebra, and becomes periodic: from some round on all times grow
    by one amount every so many rounds (Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity,
    1992, section 3.7). Once they do (Brent's cycle finding, BIT 1980, section 2) the rest follows, to
    rounding. Only where messages share resources, and no period shows within most_rounds, is the rest taken
    at the pace of the second half of these: an estimate.

    >>> ring_ends_s([(0,), (1,)], [1.0, 2.0], [0.5, 0.0], [0.0, 0.0], num_rounds=3)
    [5.0, 6.0]
    """
    order = _order_of(tuple(users))
    state = _State(order, *(np.asarray(entry, np.float64) for entry in (occupied_s, latency_s, start_s)))
    limit = num_rounds if order.apart else min(num_rounds, most_rounds, max(16, MOST_LEVELS // order.depth))
    anchor, anchored, power = state.ends.copy(), 1, 1
    half, half_round = anchor, 1
    for done in range(2, limit + 1):
        state.next_round()
        period_s = _same_growth(state.ends, anchor)
        if period_s is not None:
            whole, rest = divmod(num_rounds - done, done - anchored)
            for _ in range(rest):
                state.next_round()
            return state.in_ring(whole * period_s)
        if done == limit // 2:
            half, half_round = state.ends.copy(), done
        if done - anchored == power:
            anchor, anchored, power = state.ends.copy(), done, 2 * power
    pace_s = (state.ends[:-1].max() - half[:-1].max()) / max(1, limit - half_round)
    return state.in_ring((num_rounds - limit) * pace_s)


def _same_growth(ends: Floats, before: Floats) -> float | None:
    """Return by how much all times grew, if all grew by the same."""
    first = float(ends[0] - before[0])
    if abs(float(ends[-2] - before[-2]) - first) > _SAME * first:
        return None
    grown = ends[:-1] - before[:-1]
    least, most = float(grown.min()), float(grown.max())
    return most if most - least <= _SAME * most else None


@dataclass(frozen=True, slots=True)
class _Order:
    """Who waits for whom. Messages are sorted by level: one waits only for lower levels of its round.

    members: the messages by level, as places in the ring; bounds: where the levels begin and end; before:
    of each message the one that arrives at its sender; earlier: those that it waits for in its round; last:
    those that it waits for in the round before. Indices are places in `members`; its length stands for none.
    """

    members: Indices
    bounds: tuple[int, ...]
    before: Indices
    earlier: tuple[Indices, ...]
    last: tuple[Indices, ...]

    @property
    def depth(self) -> int:
        return len(self.bounds) - 1

    @property
    def apart(self) -> bool:
        """Whether no two messages of a round share a resource."""
        return self.depth == 1

    @classmethod
    def of(cls, users: Sequence[tuple[int, ...]]) -> "_Order":
        count = len(users)
        latest = {resource: member for member, resources in enumerate(users) for resource in resources}
        seen: dict[int, int] = {}
        levels: list[int] = []
        earlier: list[list[int]] = []
        last: list[list[int]] = []
        for member, resources in enumerate(users):
            earlier.append(sorted({seen[entry] for entry in resources if entry in seen}))
            last.append(sorted({latest[entry] for entry in resources if entry not in seen}))
            levels.append(1 + max((levels[entry] for entry in earlier[-1]), default=-1))
            seen.update(dict.fromkeys(resources, member))
        members = np.argsort(np.array(levels), kind="stable")
        place = np.empty(count + 1, np.intp)
        place[members] = np.arange(count)
        place[count] = count
        bounds = np.searchsorted(np.array(levels)[members], np.arange(max(levels) + 2))
        return cls(
            members=members,
            bounds=tuple(map(int, bounds)),
            before=place[(members - 1) % count],
            earlier=tuple(place[column[members]] for column in _columns(earlier, count)),
            last=tuple(place[column[members]] for column in _columns(last, count)),
        )


@lru_cache(maxsize=200)
def _order_of(users: tuple[tuple[int, ...], ...]) -> _Order:
    """Return the order of a ring; the same rings are asked for again and again, with other bytes."""
    return _Order.of(users)


def _columns(rows: Sequence[Sequence[int]], none: int) -> list[Indices]:
    """Rows of unequal length as columns, filled up with none."""
    width = max(map(len, rows))
    return [
        np.array([row[index] if index < len(row) else none for row in rows], np.intp)
        for index in range(width)
    ]


class _State:
    """The ends of all messages of the latest round, in the order's places; owns its arrays.

    The last entry of `ends` stands for no message.
    """

    def __init__(self, order: _Order, occupied_s: Floats, latency_s: Floats, start_s: Floats) -> None:
        self._order = order
        self._occupied_s = occupied_s[order.members]
        self._latency_s = latency_s[order.members][order.before]
        self.ends = np.append(start_s[order.members], _NEVER)
        self._ready = self.ends[:-1].copy()
        self._send()

    def next_round(self) -> None:
        ends, order, ready = self.ends, self._order, self._ready
        if order.apart:  # each waits for its own last message, and places are those of the ring
            ready[1:] = ends[:-2]
            ready[0] = ends[-2]
            ready += self._latency_s
            np.maximum(ready, ends[:-1], out=ready)
            np.add(ready, self._occupied_s, out=ends[:-1])
            return
        np.take(ends, order.before, out=ready)
        ready += self._latency_s
        for column in order.last:
            np.maximum(ready, ends[column], out=ready)
        self._send()

    def _send(self) -> None:
        """One round, of messages that may go when `_ready` says, level after level."""
        ends, ready, occupied_s, bounds = self.ends, self._ready, self._occupied_s, self._order.bounds
        np.add(ready[: bounds[1]], occupied_s[: bounds[1]], out=ends[: bounds[1]])
        for start, stop in pairwise(bounds[1:]):
            begin = ready[start:stop]
            for column in self._order.earlier:
                np.maximum(begin, ends[column[start:stop]], out=begin)
            np.add(begin, occupied_s[start:stop], out=ends[start:stop])

    def in_ring(self, more_s: float) -> list[float]:
        """Return the ends, more_s later, in the order of the ring."""
        found = np.empty(len(self._ready))
        found[self._order.members] = self.ends[:-1] + more_s
        return [float(entry) for entry in found]
