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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_model.cluster import Device
from partition.estimates.arrays import Floats
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache

CLOSE = 0.02  # a period this near the one that the cuts were made for will do
LONGER = 1.5
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
        self._links: dict[object, Floats] = {}
        self._no_link = np.zeros(tables.num_layers + 1)
        self._stages: dict[tuple[int, int, bool], _Band] = {}
        self._done: dict[object, tuple[TimedStage, ...] | None] = {}

    def entries(self, devices: Sequence[Device]) -> tuple[int, ...]:
        """Return the class of each device."""
        return tuple(self._class_of[device.name] for device in devices)

    def recut(
        self, devices: Sequence[Device], microbatch_size: int, num_samples: int, *, recompute: bool = True
    ) -> TimedPipeline | None:
        """Return the pipeline with the cuts of least makespan bound Z; None where memory takes no cuts.

        The period that in_flight is for is guessed, then taken from the cuts.
        """
        if len(devices) > self.tables.num_layers:
            return None
        route = self.timings.costs.network.route
        class_indices = self.entries(devices)
        links = tuple(
            (route(a.name, b.name).link, route(b.name, a.name).link) for a, b in itertools.pairwise(devices)
        )
        key = (class_indices, links, microbatch_size, num_samples, recompute)
        if key not in self._done:
            self._done[key] = self._cut(devices, class_indices, microbatch_size, num_samples, recompute)
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
    ) -> tuple[TimedStage, ...] | None:
        size = self.tables.at(microbatch_size)
        whole = size.busy_s[list(class_indices), 0, -1]
        period = float(1 / (1 / np.maximum(whole, 1e-300)).sum())
        count = num_samples / microbatch_size
        places = self._places(devices, class_indices, microbatch_size, count, recompute)
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
        return best[1] if best else None

    def _link(self, one: Device, other: Device, microbatch_size: int) -> tuple[Floats, Floats]:
        """Return [layer] of a link: both ways with latency; the slower way's occupation. 0 at the end."""
        route = self.timings.costs.network.route
        key = (route(one.name, other.name).link, route(other.name, one.name).link, microbatch_size)
        if key not in self._links:
            rows = [
                self.timings.costs.message_s(one, other, layer, microbatch_size)
                for layer in range(1, self.tables.num_layers)
            ]
            table = np.full((2, self.tables.num_layers + 1), np.inf)
            for layer, row in enumerate(rows, 1):
                table[:, layer] = sum(row), max(row[:2])
            self._links[key] = table
        return self._links[key][0], self._links[key][1]

    def _places(
        self,
        devices: Sequence[Device],
        class_indices: Sequence[int],
        size: int,
        count: float,
        recompute: bool,
    ) -> list["_Place"]:
        """Return what the cuts of an order choose from, whatever the period."""
        first_trained, places = self.tables.prices.first_trained, []
        for place, class_index in enumerate(class_indices):
            band = self._band(class_index, size, recompute)
            link_trip_s, link = self._no_link, self._no_link
            if place + 1 < len(class_indices):
                link_trip_s, link = self._link(devices[place], devices[place + 1], size)
            places.append(_Place(band, link_trip_s, link, count, first_trained))
        return places

    def _cut_for(
        self, devices: Sequence[Device], places: Sequence["_Place"], period: float
    ) -> tuple[TimedStage, ...] | None:
        ends = self.tables.num_layers
        makespan, window = np.full(ends + 1, np.inf), np.zeros(ends + 1)  # [first layer]
        makespan[ends] = 0.0
        back = []
        for place in reversed(places):
            cuts = place.compiled_cuts if self.timings.costs.clocks.many else place.cuts
            makespan, window, pick = cuts(makespan, window, period)
            back.append((place.band, pick))
        if not np.isfinite(makespan[0]):
            return None
        start, stages = 0, []
        for device, (band, pick) in zip(devices, reversed(back), strict=True):
            which = int(pick[start])
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

    @cached_property
    def rows(self) -> npt.NDArray[np.intp]:
        """Return each first layer."""
        return np.arange(len(self.stop))

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
"""Makespan bound and window, and which of a place's stages, by first layer."""


@dataclass(frozen=True)
class _Place:
    """A place in an order of devices: the stages it takes, by [start, any], and the link after each.

    trip_s, link_s: a microbatch over the link both ways, and in its slower direction, by [layer]. count:
    microbatches; all are in flight in stages in front of the first trained layer.
    """

    band: _Band
    trip_s: Floats
    link_s: Floats
    count: float
    first_trained: int

    @cached_property
    def pass_s(self) -> Floats:
        """Return the seconds of a microbatch through the stage and over the link, both ways."""
        return np.asarray(self.band.busy_s + self.trip_s[self.band.stop])

    @cached_property
    def total_s(self) -> Floats:
        """Return the seconds of all microbatches and the optimizer."""
        return np.asarray(max(self.count, 1.0) * self.band.busy_s + self.band.optimizer_s)

    @cached_property
    def links_s(self) -> Floats:
        """Return the seconds of all microbatches but one in the link's slower direction."""
        wait = max(self.count - 1, 0.0)
        return np.asarray(wait * self.link_s if wait else np.zeros_like(self.link_s))

    @cached_property
    def spare(self) -> Floats:
        """Return the round trip, in periods, from which on memory does not take what is in flight then."""
        caps, most = self.band.caps, self.most
        held = np.where(caps >= 1, caps, -np.inf)
        if self.first_trained:
            held[(self.band.stop <= self.first_trained) & (caps < most)] = -np.inf
        return np.asarray(np.where(caps >= most, np.inf, held))

    @cached_property
    def most(self) -> float:
        """Return the microbatches of a step; a part of one counts as one."""
        return max(1.0, math.ceil(self.count))

    def cuts(self, makespan: Floats, window: Floats, period: float) -> _Cuts:
        """Return the best stages of the place for a period; makespan, window: of what comes behind it."""
        band, ends = self.band, len(makespan) - 1
        round_trip_s = window[band.stop]
        round_trip_s += self.pass_s
        value = np.maximum(makespan, self.links_s)[band.stop]
        value += self.pass_s
        np.maximum(value, self.total_s, out=value)
        value[round_trip_s / period - ALMOST > self.spare] = np.inf
        pick = value.argmin(axis=1)
        at = band.rows, pick
        longest, windows = np.full(ends + 1, np.inf), np.zeros(ends + 1)
        longest[:ends] = value[at]
        trip_s = round_trip_s[at]
        needed = np.maximum(np.ceil(trip_s / period - ALMOST), 1.0)
        if self.first_trained:
            needed[band.stop[at] <= self.first_trained] = self.most
        windows[:ends] = np.maximum(trip_s, (needed - 1) * period + band.busy_s[at])
        windows[np.isinf(longest)] = 0.0
        return longest, windows, pick

    def compiled_cuts(self, makespan: Floats, window: Floats, period: float) -> _Cuts:
        """Return `cuts`, compiled."""
        from partition.exact.cut_kernel import place_cuts  # loads a compiler

        band = self.band
        arrays = (band.stop, band.busy_s, band.optimizer_s, band.caps, self.trip_s, self.link_s)
        found: _Cuts = place_cuts(*arrays, makespan, window, self.count, period, self.first_trained)
        return found
