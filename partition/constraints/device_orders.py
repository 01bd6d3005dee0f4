"""Arrangements of devices in pipelines, where some of a plan is forced."""

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
_Weighed = tuple[float, float, tuple[Order, ...]]
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
        self._options = self._of_all_orders(orders) if orders is not None else self._dealt()

    def best(self) -> list[Arrangement]:
        """Return the arrangements that fit, with most samples a second."""
        fitting = [option for option in self._options if option[0] <= 0]
        return [
            self.named(option[2])
            for option in sorted(fitting, key=lambda option: option[1:])[: 2 * self.effort.kept]
        ]

    def leanest(self) -> Arrangement:
        """Return the arrangement that lacks fewest bytes; none where the pins allow none at all."""
        able = [option for option in self._options if math.isfinite(option[0])]
        return self.named(min(able)[2]) if able else ()

    def named(self, orders: Sequence[Order]) -> Arrangement:
        """Return orders of classes as devices, each used once."""
        left = [list(group) for group in self.members]
        return tuple(tuple(left[class_index].pop(0) for class_index in order) for order in orders)

    def _rate(self, order: Order) -> float:
        """Return the samples a second at best, over the microbatch sizes; 0 where the order does not fit."""
        periods = [(self.cutter.period_s(order, size), size) for size in self.problem.microbatch_sizes]
        return max(size / period if period > 0 else math.inf for period, size in periods)

    def _of_all_orders(self, orders: Sequence[Order]) -> list[_Weighed]:
        """Return the best arrangements over all orders: of each set of devices, then sets joined.

        A dynamic programme over numbers of pipelines. State: devices used, by class; labels: the arrangements
        that `_kept` keeps; transition: one more pipeline, from the best orders of a set of devices.
        """
        sets: dict[Counts, list[_Weighed]] = defaultdict(list)
        for order in orders:
            cut = self.cutter.lean(order)
            if math.isfinite(cut.missing_bytes):
                used = tuple(order.count(class_index) for class_index in range(len(self.counts)))
                sets[used].append((max(0.0, cut.missing_bytes), -self._rate(order), (order,)))
        singles = {used: self._kept(options) for used, options in sets.items()}
        level: dict[Counts, list[_Weighed]] = singles
        done: list[_Weighed] = []
        for pipelines in self._numbers():
            if pipelines > 1:
                level = self._joined(level, singles)
            if self.problem.forced.num_pipelines in (None, pipelines):
                done += [
                    option for used, options in level.items() if self._complete(used) for option in options
                ]
        return done

    def _numbers(self) -> range:
        forced = self.problem.forced.num_pipelines
        return range(1, (forced or min(self.most, self.problem.global_batch_size)) + 1)

    def _complete(self, used: Counts) -> bool:
        return all(used[class_index] for class_index in self.pins)

    def _joined(
        self, level: dict[Counts, list[_Weighed]], singles: dict[Counts, list[_Weighed]]
    ) -> dict[Counts, list[_Weighed]]:
        """Return arrangements with one pipeline more; pipelines come in order, so that none is met twice."""
        found: dict[Counts, list[_Weighed]] = defaultdict(list)
        for used, options in level.items():
            for extra, more in singles.items():
                total = tuple(map(sum, zip(used, extra, strict=True)))
                if sum(total) > self.most or any(map(int.__gt__, total, self.counts)):
                    continue
                found[total] += [
                    (max(option[0], one[0]), option[1] + one[1], (*option[2], *one[2]))
                    for option in options
                    for one in more
                    if option[2][-1] >= one[2][0]
                ]
        return {used: self._kept(options) for used, options in found.items()}

    def _dealt(self) -> list[_Weighed]:
        """Return arrangements of too many devices for all orders: dealt out by memory or speed."""
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
            option
            for number in numbers
            if number <= min(self.most, self.problem.global_batch_size)
            for ranking in self._rankings()
            for use in sorted({self.most, *(pinned + number * k for k in (1, 2, 4))})
            if number <= use <= self.most
            for option in self._deal(number, ranking[: use - pinned])
        ]

    def _rankings(self) -> Iterator[list[int]]:
        """Give the classes of the free devices, those with most memory or speed first."""
        size = self.cutter.tables.at(min(self.problem.microbatch_sizes))
        free = [
            class_index
            for class_index, count in enumerate(self.counts)
            for _ in range(count)
            if class_index not in self.pins
        ]
        memory = self.cutter.tables.usable_bytes
        yield sorted(free, key=lambda class_index: (-memory[class_index], class_index))
        yield sorted(free, key=lambda class_index: (size.busy_s[class_index, 0, -1], class_index))

    def _deal(self, number: int, free: Sequence[int]) -> Iterator[_Weighed]:
        """Give arrangements: pins go to the first pipeline with room, free devices where layers lack most."""
        layers = self.cutter.tables.num_layers
        chains: list[list[int]] = [[] for _ in range(number)]
        for class_index, pin in sorted(self.pins.items(), key=lambda item: (item[1].start, item[1].stop)):
            able = [chain for chain in chains if not chain or self.pins[chain[-1]].stop <= pin.start]
            if not able:
                return
            max(able, key=lambda chain: self.pins[chain[-1]].stop if chain else -1).append(class_index)
        gaps: list[tuple[int, list[int]]] = []
        parts: list[list[list[int]]] = []
        for chain in chains:
            row: list[list[int]] = []
            stop = 0
            for start, class_indices in [
                *((self.pins[class_index].start, [class_index]) for class_index in chain),
                (layers, []),
            ]:
                if start > stop:
                    row.append([])
                    gaps.append((start - stop, row[-1]))
                row.append(class_indices)
                stop = self.pins[class_indices[0]].stop if class_indices else layers
            parts.append(row)
        memory = self.cutter.tables.usable_bytes
        for class_index in free:
            open_gaps = [gap for gap in gaps if len(gap[1]) < gap[0]]
            if open_gaps:
                held = [sum(memory[other] for other in gap[1]) / gap[0] for gap in open_gaps]
                open_gaps[held.index(min(held))][1].append(class_index)
        if any(not gap for _, gap in gaps):
            return
        for flip in (False, True):
            orders = tuple(
                tuple(class_index for part in row for class_index in (reversed(part) if flip else part))
                for row in parts
            )
            missing = max(self.cutter.lean(order).missing_bytes for order in orders)
            yield (max(0.0, missing), -sum(self._rate(order) for order in orders), orders)

    def _kept(self, options: list[_Weighed]) -> list[_Weighed]:
        """Return the options with most samples a second, and the one that lacks fewest bytes."""
        fastest = sorted(options, key=lambda option: (option[0] > 0, option[1], option[2]))[
            : self.effort.kept
        ]
        leanest = min(options)
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
