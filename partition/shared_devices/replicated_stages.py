"""Stages replicated on groups of devices, whatever the sizes of the groups: two devices may feed three."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cost_model.cluster import Device
from partition.estimates.arrays import Floats
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.shared_pipelines import Draft, SharedPipeline
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimedStage

MOST_ELEMENTS = 110_000  # of an array over groups and layers: more devices are taken several at a time
MOST_UNITS = 16
WORK = 2_000_000  # elements of all programmes together
LONGER = 1.5
MUCH_WORSE = 1.2
RING_BYTES = 2**20  # a message whose seconds per byte stand for all: links may differ by size
PERIODS = 5
CLOSE = 0.02
HELD_BACK = (0, 2)
"""Microbatches for which a device's memory keeps room beyond its windows: each of its pipelines rounds up."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers [start, stop) on each of some devices, which share the samples."""

    devices: tuple[Device, ...]
    start: int
    stop: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class _Choices:
    """What every group that begins at one unit costs, by [last unit, start, stop]; recompute first False.

    busy_s: of one microbatch, the mean of the devices; total_s: of all, sync and optimizer in it; rate:
    microbatches a second of all devices together.
    """

    busy_s: tuple[Floats, Floats]
    total_s: tuple[Floats, Floats]
    rate: tuple[Floats, Floats]


class ReplicatedStages:
    """Groups of consecutive devices of an order and their cuts, by dynamic programming.

    State: (first unit of devices that is not placed, first layer that is not placed), from the last ones
    backwards, for one order, microbatch size and period. Label: one pair (makespan bound Z, window W): those
    of least Z. Transition: a group of the next units that holds layers [start, stop), with or without
    recompute, where memory takes what the window needs in flight.
    Source: PipeDream (Narayanan et al., SOSP 2019, section 3.1), replicated stages over the first layers and
    devices. Here devices differ, memory takes what the period needs in flight, fill and drain count, and
    devices at either end may be left out.
    Complexity: O(units^2 * layers^2) a period; at most PERIODS periods.
    """

    def __init__(self, tables: ProblemTables, costs: PipelineCosts) -> None:
        self.tables, self.costs = tables, costs
        self._class_of = tables.classes.class_indices()
        self._rings: dict[tuple[str, ...], tuple[float, float]] = {}

    def drafts(self, ceiling_s: float = math.inf) -> Iterator[Draft]:
        """Yield the best groups of each order and microbatch size but those clearly above ceiling_s."""
        problem = self.tables.problem
        orders = self._orders()
        groups = [_units(order, self._most_units()) for order in orders]
        work = sum(len(units) ** 2 / 2 for units in groups) * (self.tables.num_layers + 1) ** 2
        sizes = _sizes(problem.microbatch_sizes, max(1, int(WORK / max(work, 1.0))))
        for units in groups:
            for size in sizes:
                programme = _Programme(self, units, size)
                for held_back in HELD_BACK:
                    for found in programme.groupings(ceiling_s, held_back):
                        yield self.draft(found, size)

    def class_of(self, device: Device) -> int:
        return self._class_of[device.name]

    def ring_s(self, names: tuple[str, ...]) -> tuple[float, float]:
        """Return (seconds, seconds per byte) of a ring all-reduce, in rounds of the busiest link or card."""
        count, network = len(names), self.costs.network
        if count == 1:
            return 0.0, 0.0
        if names not in self._rings:
            loads: dict[int, float] = {}
            latency = 0.0
            for one, other in zip(names, (*names[1:], names[0]), strict=True):
                route = network.route(one, other)
                latency = max(latency, route.link.latency_s)
                for resource in route.resources:
                    loads[resource] = (
                        loads.get(resource, 0.0) + route.link.occupancy_s(RING_BYTES) / RING_BYTES
                    )
            rounds = 2 * (count - 1)
            self._rings[names] = (rounds * latency, rounds / count * max(loads.values()))
        return self._rings[names]

    def _most_units(self) -> int:
        ends = self.tables.num_layers + 1
        return max(4, min(MOST_UNITS, int(math.sqrt(2 * MOST_ELEMENTS) / ends)))

    def _orders(self) -> list[tuple[Device, ...]]:
        """Return the devices as in the file; by memory; by speed, both ways; alike orders once."""
        devices = self.tables.problem.cluster.devices
        whole_s = self.tables.at(1).busy_s[:, 0, -1]

        def seconds(device: Device) -> float:
            return float(whole_s[self.class_of(device)])

        orders = [
            sorted(devices, key=lambda device: -device.usable_bytes),
            sorted(devices, key=seconds),
            sorted(devices, key=lambda device: -seconds(device)),
            list(devices),
        ]
        distinct = {tuple(map(self.class_of, order)): tuple(order) for order in reversed(orders)}
        return list(reversed(distinct.values()))

    def draft(self, groups: Sequence[Group], size: int) -> Draft:
        """Return the common refinement of the groups' shares of the samples, whole microbatches each."""
        batch = self.tables.problem.global_batch_size
        count = -(-batch // size)
        holders = [self._shares(group, size, count) for group in groups]
        edges = sorted({edge for shares in holders for edge, _ in shares})
        pipelines, first = [], 0
        for edge in edges:
            stages = []
            for group, shares in zip(groups, holders, strict=True):
                device = next(device for end, device in shares if first < end)
                stages.append(TimedStage(device, group.start, group.stop, group.recompute))
            samples = min(edge * size, batch) - first * size
            pipelines.append(SharedPipeline(tuple(stages), size, samples))
            first = edge
        return tuple(pipelines)

    def _shares(self, group: Group, size: int, count: int) -> list[tuple[int, Device]]:
        """Return (microbatch before which a device's share ends, device): the group is done soonest."""
        at = self.tables.at(size)
        table = at.busy_s + at.forward_s if group.recompute else at.busy_s
        busy = [float(table[self.class_of(device), group.start, group.stop]) for device in group.devices]
        rate = sum(1 / max(seconds, 1e-300) for seconds in busy)
        shares = [int(count / (rate * max(seconds, 1e-300))) for seconds in busy]
        for _ in range(count - sum(shares)):
            index = min(range(len(busy)), key=lambda k: ((shares[k] + 1) * busy[k], k))
            shares[index] += 1
        order = sorted(range(len(busy)), key=lambda k: (-shares[k], k))
        ends, end = [], 0
        for index in order:
            if shares[index]:
                end += shares[index]
                ends.append((end, group.devices[index]))
        return ends


class _Programme:
    """The dynamic programme for one order of units, some devices each, and one microbatch size."""

    def __init__(self, owner: ReplicatedStages, units: Sequence[tuple[Device, ...]], size: int) -> None:
        self._owner, self._units, self._size = owner, units, size
        self._tables = owner.tables
        self._ends = self._tables.num_layers
        self._count = self._tables.problem.global_batch_size / size
        self._classes = [[owner.class_of(device) for device in unit] for unit in units]
        at = self._tables.at(size)
        again_s = at.busy_s + at.forward_s
        self._busy_s = [np.maximum(busy, 1e-300) for busy in (at.busy_s, again_s)]
        self._rates = [
            np.stack([(1 / busy[unit]).sum(axis=0) for unit in self._classes]) for busy in self._busy_s
        ]
        self._caps = [at.caps_for(1, recompute=recompute) for recompute in (False, True)]
        self._choices = [self._choices_from(first) for first in range(len(units))]
        self._links = [self._link(unit) for unit in range(1, len(units))]

    def groupings(self, ceiling_s: float, held_back: int) -> list[tuple[Group, ...]]:
        """Return groups for a few periods, from the shortest that the devices could have."""
        rooms = self._rooms(held_back)
        period = 1 / sum(float(rate[0, -1]) for rate in self._rates[0])
        found: dict[tuple[Group, ...], None] = {}
        for _ in range(PERIODS):
            if period * self._count > ceiling_s:
                break
            solved = self._solve(period, rooms)
            if solved is None:
                period *= LONGER
                continue
            value, own, groups = solved
            if value > MUCH_WORSE * ceiling_s:
                break
            found[groups] = None
            if own < period * (1 + CLOSE):
                break
            period = own
        return list(found)

    def _choices_from(self, first: int) -> _Choices:
        class_rows = self._classes[first:]
        counts = np.cumsum([len(unit) for unit in class_rows])
        alike = np.array(
            [len({e for unit in class_rows[: k + 1] for e in unit}) == 1 for k in range(len(class_rows))]
        )
        # whole microbatches where the devices are alike
        share = np.where(alike, np.ceil(np.ceil(self._count) / counts), self._count / counts)[:, None, None]
        optimizer = np.stack([self._tables.optimizer_s[unit].max(axis=0) for unit in class_rows])
        late = np.maximum.accumulate(optimizer) + self._sync_s(first)
        rates = [np.maximum(np.cumsum(rate[first:], axis=0), 1e-300) for rate in self._rates]
        busy = [counts[:, None, None] / rate for rate in rates]
        total = [np.where(self._tables.stages, share * mean + late, np.inf) for mean in busy]
        return _Choices((busy[0], busy[1]), (total[0], total[1]), (rates[0], rates[1]))

    def _rooms(self, held_back: int) -> list[list[Floats]]:
        """Return by first unit and recompute the longest window, in periods, whose microbatches memory takes.

        A device has so many in flight as its share of the group's rate times the window over the period.
        """
        held = []
        for busy, caps in zip(self._busy_s, self._caps, strict=True):
            left = np.where(self._tables.stages, caps - held_back, 0.0)
            room = np.where(left > 0, left * np.where(left > 0, busy, 0.0), 0.0)
            held.append(np.stack([room[unit].min(axis=0) for unit in self._classes]))
        return [
            [
                np.minimum.accumulate(least[first:]) * rate
                for least, rate in zip(held, choices.rate, strict=True)
            ]
            for first, choices in enumerate(self._choices)
        ]

    def _sync_s(self, first: int) -> Floats:
        """Return the seconds to sum the gradients of layers [start, stop), by [last unit, start, stop]."""
        trained = np.maximum(self._tables.bytes.trained, 0.0) * self._tables.problem.gradient_share
        rows, devices = [], list[Device]()
        for unit in self._units[first:]:
            devices += unit
            latency, per_byte = self._owner.ring_s(tuple(device.name for device in devices))
            rows.append(latency + per_byte * trained)
        return np.stack(rows)

    def _link(self, unit: int) -> Floats:
        """Return seconds both ways of a microbatch from the unit before, by layer after the link."""
        one, other = self._units[unit - 1][-1], self._units[unit][0]
        inner = range(1, self._ends)
        row = [self._owner.costs.hop_s(one, other, layer, self._size) for layer in inner]
        return np.array([np.inf, *row, np.inf][: self._ends + 1])

    def _solve(
        self, period: float, rooms: Sequence[Sequence[Floats]]
    ) -> tuple[float, float, tuple[Group, ...]] | None:
        """Return (Z, own period, groups) where memory takes what a period needs in flight; None if none."""
        count, ends = len(self._units), self._ends
        makespan = np.full((count + 1, ends + 1), np.inf)  # [first unit, first layer], window too
        window = np.zeros((count + 1, ends + 1))
        makespan[:, ends] = 0.0
        picks: list[tuple[Floats, Floats]] = []
        with np.errstate(invalid="ignore", over="ignore"):
            for first in range(count - 1, -1, -1):
                choices = self._choices[first]
                link_trip_s = np.zeros((count - first, 1, ends + 1))
                for last in range(first, count - 1):
                    link_trip_s[last - first, 0, :ends] = self._links[last][:ends]
                after, following = makespan[first + 1 :, None, :], window[first + 1 :, None, :]
                trips = [busy + link_trip_s + following for busy in choices.busy_s]
                allowed = [
                    np.clip(trip / period, 1e-9, self._count) <= room * (1 + 1e-9)
                    for trip, room in zip(trips, rooms[first], strict=True)
                ]
                values = [
                    np.where(ok, np.maximum(total, busy + link_trip_s + after), np.inf)
                    for ok, total, busy in zip(allowed, choices.total_s, choices.busy_s, strict=True)
                ]
                again = values[1] < values[0]
                value = np.where(again, values[1], values[0])
                flat = value.transpose(1, 0, 2).reshape(ends + 1, -1)
                pick = flat.argmin(axis=1)
                rows = np.arange(ends + 1)
                best = flat[rows, pick]
                trip = np.where(again, trips[1], trips[0]).transpose(1, 0, 2).reshape(ends + 1, -1)
                makespan[first, :ends] = best[:ends]
                window[first, :ends] = np.where(np.isfinite(best), trip[rows, pick], 0.0)[:ends]
                flags = again.transpose(1, 0, 2).reshape(ends + 1, -1)[rows, pick]
                picks.append((pick, flags))
        first = int(makespan[:count, 0].argmin())
        value_s = float(makespan[first, 0])
        if not math.isfinite(value_s):
            return None
        groups, own, start = [], 0.0, 0
        picks.reverse()
        while start < ends:
            pick, flags = picks[first]
            last, stop = divmod(int(pick[start]), ends + 1)
            flag = bool(flags[start])
            devices = tuple(d for unit in self._units[first : first + last + 1] for d in unit)
            own = max(own, float(self._choices[first].busy_s[flag][last, start, stop]) / len(devices))
            groups.append(Group(devices, start, stop, flag))
            first, start = first + last + 1, stop
        return value_s, own, tuple(groups)


def _units(order: Sequence[Device], most: int) -> list[tuple[Device, ...]]:
    """Return the order in at most so many consecutive runs, as equal in length as may be."""
    count = min(most, len(order))
    edges = [round(index * len(order) / count) for index in range(count + 1)]
    return [tuple(order[start:stop]) for start, stop in pairwise(edges)]


def _sizes(sizes: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the sizes, evenly spread, the smallest among them."""
    count = min(most, len(sizes))
    if count == 1:
        return [sizes[0]]
    return sorted({sizes[round(index * (len(sizes) - 1) / (count - 1))] for index in range(count)})
