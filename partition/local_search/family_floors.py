"""Bounds from below of what families are estimated to take, before anything is cut.

Legend:
    w_i     seconds of a microbatch of the whole model on place i of the chain, both ways
    s(l)    the least share that layer l has of the whole model's seconds, over the classes of the chain
    x_i     sum of s(l) over the layers of place i; the places have sum of s(l) in all
    n       microbatches of a copy, a smaller last one by its share
    A_i     seconds of the links in front of place i, both ways, were each cut where least bytes cross

A place computes for at least n x_i w_i, while the first forward and the last backward pass those before it:

    T >= A_i + n x_i w_i + sum over j < i of x_j w_j

By weak duality each y >= 0 with n y_i + sum over j > i of y_j >= 1 / w_i gives T >= (sum of s(l) + sum of
y_i A_i) / sum of y_i. That forgets that layers are whole and that memory is short. So for some T each place
in turn takes as many layers as it can, as if those before it were on the fastest class of the chain: to begin
later is never worse then, and where layers are left in the end no cuts take T (as the probe of Pinar and
Aykanat, JPDC 64, 2004). The messages of the busiest card are counted where least bytes cross; sums are not.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from cost_model.cluster import Device
from partition.estimates.arrays import Floats
from partition.estimates.device_classes import ClassOrder
from partition.local_search.families import Counts, FamilySpace, Layout, Outline
from partition.local_search.family_cuts import ROUNDING, card_messages_s, with_messages_s
from partition.local_search.starts import SearchSpace

PRECISION = 1e-2  # relative: how far a step with whole layers may be above what is returned
WIDER = 1.25  # times a step that is too short: the next one that is tried


class _Row(NamedTuple):
    """Of a class, by layer: seconds of a microbatch through those before it; where what begins there ends."""

    until_s: list[float]
    most: list[int]


class FamilyFloors:
    """Floors of outlines; remembers what places of one class, and links, take at least."""

    def __init__(self, search: SearchSpace, space: FamilySpace) -> None:
        self._search, self._space = search, space
        self._layer_s: dict[tuple[int, int], Floats] = {}
        self._whole: dict[tuple[ClassOrder, int], tuple[list[float], float]] = {}
        self._messages: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self._rows: dict[tuple[int, int], _Row] = {}
        self._least_until: dict[tuple[frozenset[int], int], list[float]] = {}
        self._clocks: dict[object, float] = {}
        self._rough: dict[object, float] = {}
        self._floors: dict[object, float] = {}

    def floor_s(self, outline: Outline, taken: Counts) -> float:
        """Return seconds that no cut of an outline is estimated below, whether links are shared or not."""
        key = (outline, taken)
        if key not in self._floors:
            self._floors[key] = self._with_links_s(outline, self._space.layout(outline, taken))
        return self._floors[key]

    def clock_s(self, chain: ClassOrder, copies: int, size: int, links_s: Sequence[float] = ()) -> float:
        """Return a floor of copies of a chain. links_s: of each link both ways, where that is known."""
        key = (chain, copies, size, tuple(links_s))
        if key not in self._clocks:
            self._clocks[key] = self._clock_s(chain, copies, size, links_s)
        return self._clocks[key]

    def rough_s(self, chain: ClassOrder, copies: int, size: int) -> float:
        """Return a lower floor, sooner known, that forgets that layers are whole."""
        key = (chain, copies, size)
        if key not in self._rough:
            self._rough[key] = self._clock_s(chain, copies, size, (), whole_layers=False)
        return self._rough[key]

    def of_both_s(self, first: Outline, vector: Counts, copies: int) -> float:
        """Return seconds that no family with a second one beside is estimated below, however it is filled."""
        chain = tuple(c for c, m in enumerate(vector) for _ in range(m))
        rate = first.copies * self._rate(first.chain, first.microbatch_size) + copies * self._rate(chain)
        return self._search.problem.global_batch_size / rate * ROUNDING

    def of_batch_s(self, first: Outline, vector: Counts, copies: int) -> float:
        """Return a higher one, later known: of what each of both takes for the whole batch at least.

        Neither takes less for a part of the batch than its share of that.
        """
        second_s = min(
            self.rough_s(order, copies, size)
            for order in self._space.orders(vector)
            for size in self._search.problem.microbatch_sizes
        )
        first_s = self._of_first_s(first)
        return first_s * second_s / (first_s + second_s) if second_s and first_s < math.inf else 0.0

    def most_beside_s(self, first: Outline, step_s: float) -> float:
        """Return what a second family may take for the whole batch so that both do it in a step."""
        first_s = self._of_first_s(first)
        return first_s * step_s / (first_s - step_s) if step_s < first_s < math.inf else math.inf

    def _of_first_s(self, first: Outline) -> float:
        """Return a floor of the whole batch in microbatches of its size, or smaller ones."""
        sizes = [size for size in self._search.problem.microbatch_sizes if size <= first.microbatch_size]
        return min(self.rough_s(first.chain, first.copies, size) for size in sizes)

    def _rate(self, chain: ClassOrder, most: float = math.inf) -> float:
        """Return the most samples a second of a chain in microbatches of a size or a smaller one."""
        rates = []
        for size in self._search.problem.microbatch_sizes:
            if size <= most:
                places_s, in_all = self._places(chain, size)
                per_s = sum(1 / max(whole_s, 1e-300) for whole_s in places_s)
                rates.append(size * per_s / max(in_all, 1e-300))
        return max(rates)

    def _with_links_s(self, outline: Outline, layout: Layout) -> float:
        size = outline.microbatch_size
        links_s = [self._link_s(*pair, size) for pair in pairwise(layout.row)]

        def message_s(one: Device, other: Device, _: int) -> tuple[float, float]:
            return self._message_s(one, other, size)[:2]

        count = -(-self._share(outline.copies) // size)
        clock_s = self.clock_s(outline.chain, outline.copies, size, links_s)
        return with_messages_s(clock_s, card_messages_s([(layout, count, message_s)]))

    def _share(self, copies: int) -> int:
        """Return the samples of a copy."""
        return -(-self._search.problem.global_batch_size // copies)

    def _clock_s(
        self,
        chain: ClassOrder,
        copies: int,
        size: int,
        links_s: Sequence[float],
        *,
        whole_layers: bool = True,
    ) -> float:
        if len(chain) > self._search.problem.profile.num_layers:
            return math.inf
        places_s, in_all = self._places(chain, size)
        whole, rest = divmod(self._share(copies), size)
        part = self._least_part(chain, size, rest) if rest else 0.0
        count, behind, before = max(whole + part, 1.0), 0.0, sum(links_s)
        for place in range(len(chain) - 1, -1, -1):
            price = max(0.0, (1 / max(places_s[place], 1e-300) - behind) / count)
            behind += price
            in_all += price * before
            before -= links_s[place - 1] if links_s and place else 0.0
        least_s = in_all / behind
        if whole_layers:
            least_s = self._with_whole_layers_s(chain, size, count, links_s, least_s)
        return least_s * (1.0 if whole else part) * ROUNDING

    def _with_whole_layers_s(
        self, chain: ClassOrder, size: int, count: float, links_s: Sequence[float], low_s: float
    ) -> float:
        """Return the least step in which a chain has all layers, to PRECISION below; low_s: none is below."""
        rows = [self._row(c, size) for c in chain]
        before_s = self._least_until_s(frozenset(chain), size)
        hops_s = [0.0, *accumulate(links_s)] if links_s else [0.0] * len(chain)

        def enough(step_s: float) -> bool:
            done = 0
            for row, hop_s in zip(rows, hops_s, strict=True):
                spare_s = (step_s - hop_s - before_s[done]) / count
                if spare_s > 0:
                    last = bisect_right(row.until_s, row.until_s[done] + spare_s * (1 + 1e-12)) - 1
                    done = max(done, min(last, row.most[done]))
            return done == len(before_s) - 1

        if not enough(math.inf):
            return math.inf
        if low_s <= 0 or enough(low_s):
            return low_s
        high_s = low_s * WIDER
        while not enough(high_s):
            low_s, high_s = high_s, high_s * WIDER
        while high_s > low_s * (1 + PRECISION):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if enough(middle_s) else (middle_s, high_s)
        return low_s

    def _least_until_s(self, classes: frozenset[int], size: int) -> list[float]:
        """Return seconds of a microbatch through the layers before each, on the fastest of some classes."""
        key = (classes, size)
        if key not in self._least_until:
            rows = [self._row(c, size).until_s for c in classes]
            self._least_until[key] = list(map(min, zip(*rows, strict=True)))
        return self._least_until[key]

    def _row(self, c: int, size: int) -> "_Row":
        """Return what layers take on a class, and how many of them it holds."""
        if (c, size) not in self._rows:
            tables, name = self._search.tables.at(size), self._space.members[c][0].name
            at = self._search.classes.class_indices()[name]
            held = (tables.caps(recompute=False)[at] >= 1) | (tables.caps(recompute=True)[at] >= 1)
            ends = np.arange(len(held))
            most = np.maximum.accumulate(np.where(held, ends, 0).max(axis=1))
            until_s = [0.0, *accumulate(self._seconds(c, size).tolist())]
            self._rows[c, size] = _Row(until_s, np.maximum(most, ends).tolist())
        return self._rows[c, size]

    def _places(self, chain: ClassOrder, size: int) -> tuple[list[float], float]:
        """Return the seconds of the whole model on each place, and the sum of the least shares of layers."""
        key = (chain, size)
        if key not in self._whole:
            rows = {c: self._seconds(c, size) for c in set(chain)}
            sums = {c: float(row.sum()) for c, row in rows.items()}
            shares = [rows[c] / max(sums[c], 1e-300) for c in rows]
            least = float(np.min(shares, axis=0).sum())
            self._whole[key] = [sums[c] for c in chain], least
        return self._whole[key]

    def _seconds(self, c: int, size: int) -> Floats:
        """Return the seconds of a microbatch both ways by layer, on a device of a class."""
        if (c, size) not in self._layer_s:
            costs, device = self._search.costs, self._space.members[c][0]
            layers = range(self._search.problem.profile.num_layers)
            row = [costs.busy_s(device, layer, layer + 1, size) for layer in layers]
            self._layer_s[c, size] = np.array(row)
        return self._layer_s[c, size]

    def _least_part(self, chain: ClassOrder, size: int, rest: int) -> float:
        """Return the least seconds of a smaller microbatch as a share of a full one's, of any layer."""
        parts = []
        for c in set(chain):
            full, small = self._seconds(c, size), self._seconds(c, rest)
            parts.append((small[full > 0] / full[full > 0]).min(initial=1.0))
        return float(min(parts))

    def _link_s(self, one: Device, other: Device, size: int) -> float:
        return sum(self._message_s(one, other, size)[2:])

    def _message_s(self, one: Device, other: Device, size: int) -> tuple[float, float, float, float]:
        """Return the least seconds of a message both ways, without latency and with it."""
        key = (self._search.costs.channel(one, other), size)
        if key not in self._messages:
            layers = range(1, self._search.problem.profile.num_layers)
            rows = [self._search.costs.message_s(one, other, layer, size) for layer in layers]
            there, back, late, late_back = (min(column) for column in zip(*rows, strict=True))
            self._messages[key] = there, back, there + late, back + late_back
        return self._messages[key]
