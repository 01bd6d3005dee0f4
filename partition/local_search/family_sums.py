"""How long sums of families go on after the last backwards: `estimates.sync_tail` for copies of few chains.

Copies whose devices are on nodes with the same stages are as far at all times: each kind of copy counts
once, and a node is known by the places of chains that it holds. So sets of many pipelines have a few kinds of
copies on a few kinds of nodes, whatever the cuts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cost_model.collective_choice import most_parts
from partition.estimates.pipeline_clock import Seconds
from partition.local_search.families import FamilySet, FamilySpace, Layout


class _Holders:
    """Who holds the places of chains that are laid out beside each other; kinds of nodes are numbers.

    kinds: of each chain its kinds of copies, each as (kind of node, whether the place in front is on the same
    node) by place.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        held: dict[str, tuple[object, ...]] = {}
        for index, layout in enumerate(layouts):
            for node, places in layout.held.items():
                held[node] = (*held.get(node, ()), (index, places))
        numbers: dict[object, int] = {}
        kind_of = {node: numbers.setdefault(places, len(numbers)) for node, places in held.items()}
        self.num_kinds = len(numbers)
        self.kinds = [
            list(
                dict.fromkeys(
                    tuple(
                        (kind_of[device.node], before.node == device.node)
                        for before, device in pairwise((row[0], *row))
                    )
                    for row in layout.rows
                )
            )
            for layout in layouts
        ]
        self._layouts = tuple(layouts)
        self._nodes: dict[tuple[int, ...], frozenset[str]] = {}

    def nodes(self, places: tuple[int, ...]) -> frozenset[str]:
        """Return the nodes that hold one of these places, one of each chain."""
        if places not in self._nodes:
            pairs = list(zip(self._layouts, places, strict=True))
            self._nodes[places] = frozenset(row[place].node for layout, place in pairs for row in layout.rows)
        return self._nodes[places]


@dataclass
class _Copy:
    """A kind of copies: when the last backward of the stage that was looked at last is over, and sent on."""

    places: tuple[tuple[int, bool], ...]
    done_s: float
    sent_s: float


class FamilySums:
    """The sums of families on their devices; remembers who holds what, and how fast that is summed."""

    def __init__(self, space: FamilySpace) -> None:
        self._space, self._latency_s = space, space.problem.cluster.network.latency_s
        self._holders: dict[tuple[int, ...], tuple[Sequence[Layout], _Holders]] = {}
        self._paces: dict[frozenset[str], float] = {}

    def exposed_s(self, families: FamilySet, layouts: Sequence[Layout], seconds: Sequence[Seconds]) -> float:
        """Return the seconds for which the sums of layers go on. seconds: of a microbatch of each family.

        As `Tail.exposed_s`, layers between two neighbouring cuts of any of the families one after another,
        last ones first.
        """
        holders = self._holders_of(layouts)
        free, begun = [-math.inf] * holders.num_kinds, [-math.inf] * holders.num_kinds
        copies = [
            [_Copy(places, begin_s, begin_s) for places in kinds]
            for kinds, begin_s in zip(holders.kinds, map(_begin_s, seconds), strict=True)
        ]
        number = sum(family.outline.copies for family in families)
        at = [len(family.cuts) for family in families]  # place whose rows come next, or just came
        over_s = 0.0
        for start, stop in reversed(list(pairwise(sorted(_stops(families) | {0})))):
            for index, (family, full) in enumerate(zip(families, seconds, strict=True)):
                if family.cuts[at[index] - 1][1] == stop:
                    at[index] -= 1
                    place = at[index]
                    link_s = full.link_s[place] if place < len(full.link_s) else (0.0,) * 4
                    takes_s = link_s[1] + link_s[3] + full.backward_s[place]
                    for copy in copies[index]:
                        _go_on(copy, place, takes_s, free, begun)
            num_bytes, sum_s = self._sum(start, stop, holders.nodes(tuple(at)), number)
            if not sum_s:
                continue
            parts = most_parts(stop - start, num_bytes)
            ready_s = first_s = held_s = -math.inf
            for place, kinds, family, full in zip(at, copies, families, seconds, strict=True):
                ahead_s = early_s = 0.0
                if place == 0:  # what is above it in its last backward is summed within that
                    layer_s = full.backward_s[0] / family.cuts[0][1]
                    ahead_s = layer_s * start
                    early_s = ahead_s + layer_s * (stop - start) * (1 - 1 / parts)
                for copy in kinds:
                    ready_s = max(ready_s, copy.done_s - ahead_s)
                    first_s = max(first_s, copy.done_s - early_s)
                    held_s = max(held_s, free[copy.places[place][0]])
            end_s = max(max(first_s, held_s) + sum_s, ready_s + 1 / parts * sum_s)
            for place, kinds in zip(at, copies, strict=True):
                for copy in kinds:
                    node = copy.places[place][0]
                    free[node], begun[node] = end_s, first_s
            over_s = max(over_s, end_s)
        return max(over_s, *(copy.done_s for kinds in copies for copy in kinds))

    def _holders_of(self, layouts: Sequence[Layout]) -> _Holders:
        key = tuple(map(id, layouts))  # which are kept here, so that no other has their id
        if key not in self._holders:
            self._holders[key] = layouts, _Holders(layouts)
        return self._holders[key][1]

    def _sum(self, start: int, stop: int, nodes: frozenset[str], copies: int) -> tuple[float, float]:
        """Return the bytes of layers, and the seconds of their sum over nodes."""
        num_bytes = sum(self._space.layer_bytes[start:stop])
        if len(nodes) == 1 or num_bytes <= 0:
            return num_bytes, 0.0
        members = min(copies, len(nodes)) if self._space.inside_first else copies
        share = (members - 1) / members * self._pace(nodes)
        return num_bytes, num_bytes * share + 2 * (members - 1) * self._latency_s

    def _pace(self, nodes: frozenset[str]) -> float:
        """Return the seconds of a byte on the slowest card of some nodes."""
        if nodes not in self._paces:
            self._paces[nodes] = max(self._space.card_s_per_byte.get(node, 0.0) for node in nodes)
        return self._paces[nodes]


def _stops(families: FamilySet) -> set[int]:
    return {stop for family in families for _, stop, _ in family.cuts}


def _begin_s(full: Seconds) -> float:
    """Return when the last backward of a chain begins: at 0 it is over at the first stage."""
    return -(sum(link[1] + link[3] for link in full.link_s) + sum(full.backward_s))


def _go_on(copy: _Copy, place: int, takes_s: float, free: Sequence[float], begun: Sequence[float]) -> None:
    """Add the backward of a place, and the message that goes on from there, once cards are free for it."""
    done_s = copy.sent_s + takes_s
    sent_s, (node, same) = done_s, copy.places[place]
    if not same:
        for card in (node, copy.places[place - 1][0]):
            if done_s >= begun[card]:
                sent_s = max(sent_s, free[card])
    copy.done_s, copy.sent_s = done_s, sent_s
