"""The best cuts of a pipeline whose devices and their order are given, by dynamic programming.

State: (place in the order, first layer of its stage), from the last place backwards, for one period.
Label: one pair (makespan bound Z, window) of `partition.estimates.closed_forms`: those of the stages of least
Z, the first stop of equals. Not exact, since a larger Z with a shorter window may fit where this does not.
Transition: the stage [start, stop) with or without recompute, where its device's memory takes the in_flight
that the window asks for; then the link.
Source: PipeDream (Narayanan et al., SOSP 2019, section 3.1), with Z in place of the period and the order of
the devices given.
Complexity: O(places * layers * width) a period, width: the most layers that a device holds; up to 8 periods.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_model.cluster import Device
from partition.estimates.arrays import Floats
from partition.estimates.effort import SEVERAL_ORDERS
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache

CLOSE = 0.02  # a period this near the one that the cuts were made for will do
LONGER = 1.5
LONGER_PERIODS = 4  # that are tried for few devices
MOST_BYTES = 20e6  # of what places take, that is kept
ALMOST = 1e-6  # of a period: an in_flight that is whole but for rounding is not rounded up


class CutOptimizer:
    """Cuts pipelines anew for their own devices and links; remembers what it did.

    optimizer_s: seconds of the optimizer step by [class, start, stop], with what else the bytes of a stage
    cost after its last backward; None: those of the tables.
    """

    def __init__(
        self, tables: ProblemTables, timings: TimingCache, optimizer_s: Floats | None = None
    ) -> None:
        self.tables, self.timings = tables, timings
        self._optimizer_s = tables.optimizer_s if optimizer_s is None else optimizer_s
        self._class_of = tables.classes.class_indices()
        self._links: dict[object, tuple[Floats, Floats]] = {}
        self._no_link = np.zeros(tables.num_layers + 1)
        self._stages: dict[tuple[int, int, bool], _Band] = {}
        self._kept: dict[object, Floats] = {}
        self._kept_bytes = 0
        self._done: dict[object, tuple[TimedStage, ...] | None] = {}

    def entries(self, devices: Sequence[Device]) -> tuple[int, ...]:
        """Return the class of each device."""
        return tuple(self._class_of[device.name] for device in devices)

    def recut(
        self,
        devices: Sequence[Device],
        microbatch_size: int,
        num_samples: int,
        *,
        recompute: bool = True,
        period_s: float | None = None,
    ) -> TimedPipeline | None:
        """Return the pipeline with the cuts of least makespan bound Z; None where memory takes no cuts.

        The period that in_flight is for is guessed, then taken from the cuts. period_s: the first guess,
        where one is known; it counts if these devices are asked for the first time.
        """
        if len(devices) > self.tables.num_layers:
            return None
        class_indices, links_of = self.entries(devices), self.timings.links
        links = tuple(links_of(one, other) for one, other in itertools.pairwise(devices))
        key = (class_indices, links, microbatch_size, num_samples, recompute)
        if key not in self._done:
            guess_s = period_s or self._least_period_s(class_indices, microbatch_size)
            self._done[key] = self._cut(
                devices, class_indices, microbatch_size, num_samples, recompute, guess_s
            )
        found = self._done[key]
        if found is None:
            return None
        stages = tuple(
            TimedStage(device, stage.start, stage.stop, stage.recompute)
            for device, stage in zip(devices, found, strict=True)
        )
        return self.timings.pipeline(stages, microbatch_size)

    def _cut(
        self,
        devices: Sequence[Device],
        class_indices: Sequence[int],
        microbatch_size: int,
        num_samples: int,
        recompute: bool,
        period: float,
    ) -> tuple[TimedStage, ...] | None:
        count = num_samples / microbatch_size
        places = self._places(devices, class_indices, microbatch_size, count, recompute)
        if not places:
            return None
        best: tuple[float, tuple[TimedStage, ...]] | None = None
        for _ in range(8):
            stages = self._cut_for(devices, places, period)
            if stages is None:
                if best is not None:
                    break
                period *= LONGER
                continue
            pipeline = self.timings.pipeline(stages, microbatch_size)
            if not pipeline.timing.fits:
                period *= LONGER
                continue
            seconds = pipeline.timing.quick_s(max(1, num_samples // microbatch_size))
            if best is None or seconds < best[0]:
                best = (seconds, stages)
            own = pipeline.timing.period_s
            if abs(own / period - 1) < CLOSE or (best is not None and seconds > best[0]):
                break
            period = max(own, 1e-300)  # where all times are zero, so is it
        few = len(self.tables.problem.cluster.devices) <= SEVERAL_ORDERS
        if best is None or not few or not any(stage.recompute for stage in best[1]):
            return best[1] if best else None
        # Z knows nothing of gradients that wait for the stage before: with these memory may take so few
        # microbatches that stages are recomputed in vain
        pipeline = self.timings.pipeline(best[1], microbatch_size)
        longer = [self._cut_for(devices, places, period) for period in _longer_periods(pipeline)]
        found = [stages for stages in dict.fromkeys([best[1], *longer]) if stages is not None]
        if len(found) == 1:
            return best[1]
        timings = [self.timings.pipeline(stages, microbatch_size).timing for stages in found]
        clocks = [timing.time_s(num_samples) if timing.fits else math.inf for timing in timings]
        return found[clocks.index(min(clocks))]

    def _least_period_s(self, class_indices: Sequence[int], microbatch_size: int) -> float:
        """Return the period of places that are all always busy."""
        whole = self.tables.at(microbatch_size).busy_s[list(class_indices), 0, -1]
        return float(1 / (1 / np.maximum(whole, 1e-300)).sum())

    def _link(self, one: Device, other: Device, microbatch_size: int) -> tuple[Floats, Floats]:
        """Return [layer] of a link: both ways with latency; the slower way's occupation. 0 at the end."""
        key = (self.timings.links(one, other), microbatch_size)
        if key not in self._links:
            rows = [
                self.timings.costs.message_s(one, other, layer, microbatch_size)
                for layer in range(1, self.tables.num_layers)
            ]
            table = np.full((2, self.tables.num_layers + 1), np.inf)
            for layer, row in enumerate(rows, 1):
                table[:, layer] = sum(row), max(row[:2])
            self._links[key] = table[0], table[1]
        return self._links[key]

    def _places(
        self,
        devices: Sequence[Device],
        class_indices: Sequence[int],
        size: int,
        count: float,
        recompute: bool,
    ) -> list["_Place | _CompiledPlace"]:
        """Return what the cuts of an order choose from, whatever the period; nothing where there are none."""
        places: list[_Place | _CompiledPlace] = []
        bands = [self._band(class_index, size, recompute) for class_index in class_indices]
        starts = _starts(bands)
        if any(low > high for low, high in starts):
            return []
        for place, (class_index, band) in enumerate(zip(class_indices, bands, strict=True)):
            trip_s, link = self._no_link, self._no_link
            if place + 1 < len(bands):
                trip_s, link = self._link(devices[place], devices[place + 1], size)
            if self.timings.costs.clocks.many:
                first_trained = self.tables.prices.first_trained
                places.append(_CompiledPlace(band, trip_s, link, count, first_trained))
            else:
                key = (class_index, size, recompute)
                places.append(self._place(key, band, (trip_s, link), count, starts[place]))
        return places

    def _place(
        self, key: object, band: "_Band", link: tuple[Floats, Floats], count: float, starts: tuple[int, int]
    ) -> "_Place":
        """Return a place by its band (of a key), the link behind it, microbatches, and where it may begin."""
        first_trained, most, wait = self.tables.prices.first_trained, max(1.0, math.ceil(count)), count - 1
        rows = slice(starts[0], starts[1] + 1)
        # `_link` keeps the rows, so that no other has their id
        pass_s = self._once((key, id(link[0])), lambda: band.busy_s + link[0][band.stop])
        total_s = self._once((key, count), lambda: max(count, 1.0) * band.busy_s + band.optimizer_s)
        spare = self._once((key, "spare", most), lambda: band.spare(most, first_trained))
        size, width = starts[1] + 1 - starts[0], band.stop.shape[1]
        return _Place(
            band,
            most,
            first_trained,
            starts[0],
            np.arange(0, size * width, width),
            band.stop[rows],
            band.busy_s[rows],
            pass_s[rows],
            total_s[rows],
            wait * link[1] if wait > 0 else np.zeros_like(link[1]),
            spare[rows],
        )

    def _once(self, key: object, made: Callable[[], Floats]) -> Floats:
        """Return a table, made once while there is room for it."""
        found = self._kept.get(key)
        if found is None:
            if self._kept_bytes > MOST_BYTES:
                self._kept.clear()
                self._kept_bytes = 0
            found = self._kept[key] = made()
            self._kept_bytes += found.nbytes
        return found

    def _cut_for(
        self, devices: Sequence[Device], places: Sequence["_Place | _CompiledPlace"], period: float
    ) -> tuple[TimedStage, ...] | None:
        ends = self.tables.num_layers
        makespan, window = np.full(ends + 1, np.inf), np.zeros(ends + 1)  # [first layer]
        makespan[ends] = 0.0
        back = []
        for place in reversed(places):
            makespan, window, pick = place.cuts(makespan, window, period)
            back.append((place.band, pick, place.low))
        if not np.isfinite(makespan[0]):
            return None
        start, stages = 0, []
        for device, (band, pick, low) in zip(devices, reversed(back), strict=True):
            which = int(pick[start - low])
            end = int(band.stop[start, which])
            stages.append(TimedStage(device, start, end, which >= band.plain))
            start = end
        return tuple(stages)

    def _band(self, class_index: int, microbatch_size: int, recompute: bool) -> "_Band":
        key = (class_index, microbatch_size, recompute)
        if key not in self._stages:
            size, optimizer_s = self.tables.at(microbatch_size), self._optimizer_s[class_index]
            busy_s = size.busy_s[class_index]
            band = _Band.of(busy_s, optimizer_s, size.caps(recompute=False)[class_index])
            if recompute:
                again_s = busy_s + size.forward_s[class_index]
                band = band.with_others(
                    _Band.of(again_s, optimizer_s, size.caps(recompute=True)[class_index])
                )
            self._stages[key] = band
        return self._stages[key]


def _longer_periods(pipeline: TimedPipeline) -> list[float]:
    """Return periods longer than a pipeline's own, up to that for which one microbatch in flight will do."""
    own, timing = pipeline.timing.period_s, pipeline.timing
    ratio = (sum(timing.busy_s) + sum(timing.round_trips_s)) / own if own else 1.0
    return [own * ratio ** (step / LONGER_PERIODS) for step in range(1, LONGER_PERIODS + 1) if ratio > 1]


@dataclass(frozen=True)
class _Band:
    """The stages of one class that memory takes, by [start, any]; caps 0 where none is.

    A device holds a few layers of many: arrays over [start, stop) would be empty for the most part. plain:
    how many in a row are without recompute, which come first.
    """

    stop: npt.NDArray[np.int64]
    busy_s: Floats
    optimizer_s: Floats
    caps: Floats
    plain: int

    @classmethod
    def of(cls, busy_s: Floats, optimizer_s: Floats, caps: Floats) -> "_Band":
        ends = len(caps) - 1
        starts, stops = np.nonzero(caps >= 1)
        width = int((stops - starts).max(initial=1))
        start = np.arange(ends)[:, None]
        wanted = start + np.arange(1, width + 1)
        stop = np.minimum(wanted, ends)
        held = np.where(wanted <= ends, caps[start, stop], 0.0)
        return cls(stop, busy_s[start, stop], optimizer_s[start, stop], held, width)

    @property
    def width(self) -> int:
        """Return the most layers of a stage, or more."""
        return max(self.plain, int(self.stop.shape[1]) - self.plain)

    def spare(self, most: float, first_trained: int) -> Floats:
        """Return the round trip, in periods, from which on memory does not take what is in flight then.

        most: microbatches of a step, all in flight in stages in front of the first trained layer.
        """
        held = np.where(self.caps >= 1, self.caps, -np.inf)
        if first_trained:
            held[(self.stop <= first_trained) & (self.caps < most)] = -np.inf
        return np.asarray(np.where(self.caps >= most, np.inf, held))

    def with_others(self, other: "_Band") -> "_Band":
        """Return both side by side."""
        return _Band(
            np.hstack([self.stop, other.stop]),
            np.hstack([self.busy_s, other.busy_s]),
            np.hstack([self.optimizer_s, other.optimizer_s]),
            np.hstack([self.caps, other.caps]),
            self.plain,
        )


_Cuts = tuple[Floats, Floats, npt.NDArray[np.int64]]
"""Makespan bound and window by first layer; which of a place's stages, by first layer from its `low` on."""


def _starts(bands: Sequence[_Band]) -> list[tuple[int, int]]:
    """Return the first and the last layer that a stage of each place may begin with, as far as widths say.

    The stages in front hold all layers before it, those from it on all that are left, and each at least one.
    """
    ends, count = len(bands[0].stop), len(bands)
    before = [0, *itertools.accumulate(band.width for band in bands)]
    return [
        (max(place, ends - before[-1] + before[place]), min(before[place], ends - count + place))
        for place in range(count)
    ]


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in an order of devices: the stages it takes, by [start, any], and the link after each.

    most: microbatches; all are in flight in stages in front of the first trained layer. links_s: all but one
    of them in the link's slower direction, by [layer].

    Of stages that begin with layer `low` or one of the next, by [start, any]: stop; busy_s; pass_s, of a
    microbatch there and over the link, both ways; total_s, of all and the optimizer; spare, as of the band.
    at: where the rows begin.
    """

    band: _Band
    most: float
    first_trained: int
    low: int
    at: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    busy_s: Floats
    pass_s: Floats
    total_s: Floats
    links_s: Floats
    spare: Floats

    def cuts(self, makespan: Floats, window: Floats, period: float) -> _Cuts:
        """Return the best stages of the place for a period; makespan, window: of what comes behind it."""
        stop = self.stop
        round_trip_s = window.take(stop)
        round_trip_s += self.pass_s
        value = np.maximum(makespan, self.links_s).take(stop)
        value += self.pass_s
        np.maximum(value, self.total_s, out=value)
        value[round_trip_s / period - ALMOST > self.spare] = np.inf
        pick = value.argmin(axis=1)
        at = self.at + pick
        longest, windows = np.empty((2, len(makespan)))
        longest.fill(np.inf)
        rows = slice(self.low, self.low + len(pick))
        longest[rows] = value.take(at)
        if self.low == 0 and len(pick) == 1:
            return longest, windows, pick  # nothing is in front that would ask for the window
        trip_s = round_trip_s.take(at)
        needed = np.ceil(trip_s / period - ALMOST)
        np.maximum(needed, 1.0, out=needed)
        if self.first_trained:
            needed[stop.take(at) <= self.first_trained] = self.most
        needed -= 1
        needed *= period
        needed += self.busy_s.take(at)
        windows.fill(0.0)
        windows[rows] = np.maximum(trip_s, needed)
        return longest, windows, pick


@dataclass(frozen=True, slots=True)
class _CompiledPlace:
    """The same, its inner loop compiled. trip_s, link_s: of a microbatch over the link behind, by [layer]."""

    band: _Band
    trip_s: Floats
    link_s: Floats
    count: float
    first_trained: int
    low: int = 0

    def cuts(self, makespan: Floats, window: Floats, period: float) -> _Cuts:
        """Return `_Place.cuts`, of all first layers."""
        from partition.exact.cut_kernel import place_cuts  # loads a compiler

        band = self.band
        arrays = (band.stop, band.busy_s, band.optimizer_s, band.caps, self.trip_s, self.link_s)
        found: _Cuts = place_cuts(*arrays, makespan, window, self.count, period, self.first_trained)
        return found
