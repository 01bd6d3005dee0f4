"""Which devices form which pipelines, in which order, where some of it is forced."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from cost_model.cluster import Device
from partition.constraints.pinned_cuts import Order, PinnedCutter
from partition.estimates.effort import effort_for

Arrangement = tuple[tuple[Device, ...], ...]
"""The devices of each pipeline, from first to last stage."""
Counts = tuple[int, ...]
_Way = tuple[float, float, tuple[Order, ...]]
"""(bytes that the fullest device lacks, negated samples a second at best, the orders)."""


class Arrangements:
    """The arrangements of a problem's devices worth cutting; all are weighed on a small cluster.

    An arrangement is weighed by the sum over its pipelines of samples a second when every device is as busy
    as the busiest, links left out.
    """

    def __init__(self, cutter: PinnedCutter) -> None:
        self.cutter, self.problem = cutter, cutter.problem
        self.members = cutter.tables.classes.members
        self.counts = tuple(len(group) for group in self.members)
        forced, num_devices = self.problem.forced, len(self.problem.cluster.devices)
        self.most = min(num_devices, forced.max_devices or num_devices)
        self.pins = cutter.tables.pins
        self.effort = effort_for(num_devices).forced
        orders = self._orders(min(self.most, cutter.tables.num_layers))
        self.exhaustive = orders is not None
        self._ways = self._weighed(orders) if orders is not None else self._dealt()

    def best(self) -> list[Arrangement]:
        """Those that fit, with most samples a second."""
        fitting = [way for way in self._ways if way[0] <= 0]
        return [
            self.named(way[2]) for way in sorted(fitting, key=lambda way: way[1:])[: 2 * self.effort.kept]
        ]

    def leanest(self) -> Arrangement:
        """The one that lacks fewest bytes; none where the pins allow none at all."""
        able = [way for way in self._ways if math.isfinite(way[0])]
        return self.named(min(able)[2]) if able else ()

    def named(self, orders: Sequence[Order]) -> Arrangement:
        """Classes as devices, each once."""
        left = [list(group) for group in self.members]
        return tuple(tuple(left[entry].pop(0) for entry in order) for order in orders)

    def _rate(self, order: Order) -> float:
        """Samples a second at best, over the microbatch sizes; 0 where the order does not fit."""
        periods = [(self.cutter.period_s(order, size), size) for size in self.problem.microbatch_sizes]
        return max(size / period if period > 0 else math.inf for period, size in periods)

    def _weighed(self, orders: Sequence[Order]) -> list[_Way]:
        """PathRange over all orders: the best of each set of devices, then sets joined to pipelines."""
        sets: dict[Counts, list[_Way]] = defaultdict(list)
        for order in orders:
            cut = self.cutter.lean(order)
            if math.isfinite(cut.missing_bytes):
                used = tuple(order.count(entry) for entry in range(len(self.counts)))
                sets[used].append((max(0.0, cut.missing_bytes), -self._rate(order), (order,)))
        singles = {used: self._kept(ways) for used, ways in sets.items()}
        level: dict[Counts, list[_Way]] = singles
        done: list[_Way] = []
        for pipelines in self._numbers():
            if pipelines > 1:
                level = self._joined(level, singles)
            if self.problem.forced.num_pipelines in (None, pipelines):
                done += [way for used, ways in level.items() if self._complete(used) for way in ways]
        return done

    def _numbers(self) -> range:
        forced = self.problem.forced.num_pipelines
        return range(1, (forced or min(self.most, self.problem.global_batch_size)) + 1)

    def _complete(self, used: Counts) -> bool:
        return all(used[entry] for entry in self.pins)

    def _joined(
        self, level: dict[Counts, list[_Way]], singles: dict[Counts, list[_Way]]
    ) -> dict[Counts, list[_Way]]:
        """PathRange with one pipeline more; pipelines of a way come in order, so that none is met twice."""
        found: dict[Counts, list[_Way]] = defaultdict(list)
        for used, ways in level.items():
            for extra, more in singles.items():
                total = tuple(map(sum, zip(used, extra, strict=True)))
                if sum(total) > self.most or any(map(int.__gt__, total, self.counts)):
                    continue
                found[total] += [
                    (max(way[0], one[0]), way[1] + one[1], (*way[2], *one[2]))
                    for way in ways
                    for one in more
                    if way[2][-1] >= one[2][0]
                ]
        return {used: self._kept(ways) for used, ways in found.items()}

    def _dealt(self) -> list[_Way]:
        """Some ways for a cluster with too many orders: devices dealt out to pipelines by memory or speed."""
        pinned = len(self.pins)
        forced = self.problem.forced.num_pipelines
        depth = max(
            (
                sum(pin.start <= layer < pin.stop for pin in self.pins.values())
                for layer in range(self.cutter.tables.num_layers)
            ),
            default=0,
        )
        numbers = [forced] if forced else range(max(1, depth), max(1, depth) + self.effort.numbers)
        return [
            way
            for number in numbers
            if number <= min(self.most, self.problem.global_batch_size)
            for ranking in self._rankings()
            for use in sorted({self.most, *(pinned + number * k for k in (1, 2, 4))})
            if number <= use <= self.most
            for way in self._deal(number, ranking[: use - pinned])
        ]

    def _rankings(self) -> Iterator[list[int]]:
        """The classes of the free devices, those with most memory or speed first."""
        size = self.cutter.tables.at(min(self.problem.microbatch_sizes))
        free = [
            entry for entry, count in enumerate(self.counts) for _ in range(count) if entry not in self.pins
        ]
        memory = self.cutter.tables.usable_bytes
        yield sorted(free, key=lambda entry: (-memory[entry], entry))
        yield sorted(free, key=lambda entry: (size.busy_s[entry, 0, -1], entry))

    def _deal(self, number: int, free: Sequence[int]) -> Iterator[_Way]:
        """Pins to the first pipeline with room, then each free device to the gap that lacks most layers."""
        layers = self.cutter.tables.num_layers
        chains: list[list[int]] = [[] for _ in range(number)]
        for entry, pin in sorted(self.pins.items(), key=lambda item: (item[1].start, item[1].stop)):
            able = [chain for chain in chains if not chain or self.pins[chain[-1]].stop <= pin.start]
            if not able:
                return
            max(able, key=lambda chain: self.pins[chain[-1]].stop if chain else -1).append(entry)
        gaps: list[tuple[int, list[int]]] = []
        parts: list[list[list[int]]] = []
        for chain in chains:
            row: list[list[int]] = []
            stop = 0
            for start, entries in [*((self.pins[entry].start, [entry]) for entry in chain), (layers, [])]:
                if start > stop:
                    row.append([])
                    gaps.append((start - stop, row[-1]))
                row.append(entries)
                stop = self.pins[entries[0]].stop if entries else layers
            parts.append(row)
        memory = self.cutter.tables.usable_bytes
        for entry in free:
            open_gaps = [gap for gap in gaps if len(gap[1]) < gap[0]]
            if open_gaps:
                held = [sum(memory[other] for other in gap[1]) / gap[0] for gap in open_gaps]
                open_gaps[held.index(min(held))][1].append(entry)
        if any(not gap for _, gap in gaps):
            return
        for flip in (False, True):
            orders = tuple(
                tuple(entry for part in row for entry in (reversed(part) if flip else part)) for row in parts
            )
            missing = max(self.cutter.lean(order).missing_bytes for order in orders)
            yield (max(0.0, missing), -sum(self._rate(order) for order in orders), orders)

    def _kept(self, ways: list[_Way]) -> list[_Way]:
        """Return the ways with most samples a second, and the one that lacks fewest bytes."""
        fastest = sorted(ways, key=lambda way: (way[0] > 0, way[1], way[2]))[: self.effort.kept]
        leanest = min(ways)
        return fastest if leanest in fastest else [*fastest, leanest]

    def _orders(self, most: int) -> list[Order] | None:
        """Return all orders of up to `most` devices, alike ones once; None where they are too many."""
        if math.prod(count + 1 for count in self.counts) > self.effort.most_sets:
            return None
        orders: list[Order] = []
        level: list[Order] = [()]
        for _ in range(most):
            level = [
                (*order, class_index)
                for order, class_index in product(level, range(len(self.counts)))
                if order.count(class_index) < self.counts[class_index]
            ]
            orders += level
            if len(orders) > self.effort.most_orders:
                return None
        return orders
