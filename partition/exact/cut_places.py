"""What the places of an order of devices choose from when it is cut: stages, and the links behind them.

Legend:
    place       a device in an order
    band        the stages of one class that memory takes: a device holds a few layers of many
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_model.cluster import Device
from partition.estimates.arrays import Floats
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimingCache

MOST_BYTES = 20e6  # of what places take, that is kept
PLACE_BYTES = 1_000  # about what a place takes beside tables that are kept
ALMOST = 1e-6  # of a period: an in_flight that is whole but for rounding is not rounded up

BandKey = tuple[int, int, bool, int]
"""Class, microbatch size, whether stages may recompute, and what more may be in flight before each."""

Cuts = tuple[Floats, Floats, npt.NDArray[np.int64]]
"""Makespan bound and window by first layer; which of a place's stages, by first layer from its `low` on."""


@dataclass(frozen=True)
class Band:
    """The stages of one class that memory takes, by [start, any]; caps 0 where none is.

    Arrays over [start, stop) would be empty for the most part. plain: how many in a row are without
    recompute, which come first.
    """

    stop: npt.NDArray[np.int64]
    busy_s: Floats
    caps: Floats
    plain: int

    @classmethod
    def of(cls, busy_s: Floats, caps: Floats) -> "Band":
        ends = len(caps) - 1
        starts, stops = np.nonzero(caps >= 1)
        width = int((stops - starts).max(initial=1))
        start = np.arange(ends)[:, None]
        wanted = start + np.arange(1, width + 1)
        stop = np.minimum(wanted, ends)
        held = np.where(wanted <= ends, caps[start, stop], 0.0)
        return cls(stop, busy_s[start, stop], held, width)

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

    def of_stages(self, table: Floats) -> Floats:
        """Return what a table by [start, stop] says of these stages."""
        return np.asarray(table[np.arange(len(self.stop))[:, None], self.stop])

    def with_others(self, other: "Band") -> "Band":
        """Return both side by side."""
        return Band(
            np.hstack([self.stop, other.stop]),
            np.hstack([self.busy_s, other.busy_s]),
            np.hstack([self.caps, other.caps]),
            self.plain,
        )


class _Kept:
    """Tables that are made once while there is room for them."""

    def __init__(self) -> None:
        self._tables: dict[object, Floats] = {}
        self._num_bytes = 0

    def once(self, key: object, made: Callable[[], Floats]) -> Floats:
        """Return the table of a key."""
        found = self._tables.get(key)
        if found is None:
            if self._num_bytes > MOST_BYTES:
                self._tables.clear()
                self._num_bytes = 0
            found = self._tables[key] = made()
            self._num_bytes += found.nbytes
        return found


class Places:
    """A maker of places; remembers bands, links and what it made of them.

    optimizer_s: as of `CutOptimizer`. like: another maker of the same tables, whose bands are shared; and all
    that optimizer_s is not in, where it has the same links.
    """

    def __init__(
        self, tables: ProblemTables, timings: TimingCache, optimizer_s: Floats, like: "Places | None" = None
    ) -> None:
        self._tables, self.timings, self._optimizer_s = tables, timings, optimizer_s
        linked = like if like is not None and like.timings is timings else None
        self._bands: dict[BandKey, Band] = {} if like is None else like._bands
        self._links: dict[object, tuple[Floats, Floats]] = {} if linked is None else linked._links
        self._shared: _Kept = _Kept() if linked is None else linked._shared
        self._own = _Kept()
        self._places: dict[object, Place] = {}
        self._no_link = np.zeros(tables.num_layers + 1)

    def of_order(
        self,
        devices: Sequence[Device],
        class_indices: Sequence[int],
        size: int,
        count: float,
        recompute: bool,
        more_before: int,
    ) -> "list[Place | CompiledPlace]":
        """Return what the cuts of an order choose from, whatever the period; nothing where there are none.

        more_before: microbatches that may be in flight in the stage before each stage, beyond its own.
        """
        places: list[Place | CompiledPlace] = []
        bands = [self._band((index, size, recompute, more_before)) for index in class_indices]
        starts = _starts(bands)
        if any(low > high for low, high in starts):
            return []
        compiled = self.timings.costs.clocks.many
        for place, (class_index, band) in enumerate(zip(class_indices, bands, strict=True)):
            link = self._no_link, self._no_link
            if place + 1 < len(bands):
                link = self._link(devices[place], devices[place + 1], size)
            key = (class_index, size, recompute, more_before)
            if compiled:
                first_trained, at_end_s = self._tables.prices.first_trained, self._at_end_s(key, band)
                places.append(CompiledPlace(band, at_end_s, *link, count, first_trained))
            else:
                places.append(self._place(key, band, link, count, starts[place]))
        return places

    def _place(
        self,
        key: BandKey,
        band: Band,
        link: tuple[Floats, Floats],
        count: float,
        starts: tuple[int, int],
    ) -> "Place":
        """Return a place by its band (of a key), the link behind it, microbatches, and where it may begin."""
        # `_link` keeps the rows, so that no other has their id
        whole = (key, id(link[0]), count, starts)
        if whole in self._places:
            return self._places[whole]
        if len(self._places) * PLACE_BYTES > MOST_BYTES:
            self._places.clear()
        first_trained, most, wait = self._tables.prices.first_trained, max(1.0, math.ceil(count)), count - 1
        rows = slice(starts[0], starts[1] + 1)
        pass_s = self._shared.once((key, id(link[0])), lambda: band.busy_s + link[0][band.stop])
        spare = self._shared.once((key, "spare", most), lambda: band.spare(most, first_trained))
        total_s = self._own.once(
            (key, count), lambda: max(count, 1.0) * band.busy_s + self._at_end_s(key, band)
        )
        size, width = starts[1] + 1 - starts[0], band.stop.shape[1]
        self._places[whole] = Place(
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
        return self._places[whole]

    def _at_end_s(self, key: BandKey, band: Band) -> Floats:
        """Return the seconds of the optimizer step of a band's stages, and what else comes then."""
        return self._own.once(key, partial(band.of_stages, self._optimizer_s[key[0]]))

    def _band(self, key: BandKey) -> Band:
        if key not in self._bands:
            class_index, microbatch_size, recompute, more_before = key
            size = self._tables.at(microbatch_size)
            caps, busy_s = partial(size.caps, more_before=more_before), size.busy_s[class_index]
            band = Band.of(busy_s, caps(recompute=False)[class_index])
            if recompute:
                again_s = busy_s + size.forward_s[class_index]
                band = band.with_others(Band.of(again_s, caps(recompute=True)[class_index]))
            self._bands[key] = band
        return self._bands[key]

    def _link(self, one: Device, other: Device, microbatch_size: int) -> tuple[Floats, Floats]:
        """Return [layer] of a link: both ways with latency; the slower way's occupation. 0 at the end."""
        key = (self.timings.costs.channel(one, other), microbatch_size)
        if key not in self._links:
            message_s, ends = self.timings.costs.message_s, self._tables.num_layers
            table = np.full((2, ends + 1), np.inf)
            for layer in range(1, ends):
                row = message_s(one, other, layer, microbatch_size)
                table[:, layer] = sum(row), max(row[:2])
            self._links[key] = table[0], table[1]
        return self._links[key]


def _starts(bands: Sequence[Band]) -> list[tuple[int, int]]:
    """Return the first and the last layer that a stage of each place may begin with, as far as widths say.

    The stages in front hold all layers before it, those from it on all that are left, and each at least one.
    """
    ends, count = len(bands[0].stop), len(bands)
    before = [0, *itertools.accumulate(band.width for band in bands)]
    return [
        (max(place, ends - before[-1] + before[place]), min(before[place], ends - count + place))
        for place in range(count)
    ]


class Place(NamedTuple):
    """A place in an order of devices: the stages it takes, by [start, any], and the link after each.

    most: microbatches; all are in flight in stages in front of the first trained layer. links_s: all but one
    of them in the link's slower direction, by [layer].

    Of stages that begin with layer `low` or one of the next, by [start, any]: stop; busy_s; pass_s, of a
    microbatch there and over the link, both ways; total_s, of all and the optimizer; spare, as of the band.
    at: where the rows begin.
    """

    band: Band
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

    def cuts(self, makespan: Floats, window: Floats, period: float) -> Cuts:
        """Return the best stages of the place for a period; makespan, window: of what comes behind it."""
        stop = self.stop
        round_trip_s = window.take(stop)
        round_trip_s += self.pass_s
        value = np.maximum(makespan, self.links_s).take(stop)
        value += self.pass_s
        np.maximum(value, self.total_s, out=value)
        periods = round_trip_s / period
        periods -= ALMOST
        np.putmask(value, periods > self.spare, np.inf)
        pick = value.argmin(1)
        at = self.at + pick
        longest, windows = np.empty((2, len(makespan)))
        longest.fill(np.inf)
        rows = slice(self.low, self.low + len(pick))
        longest[rows] = value.take(at)
        if self.low == 0 and len(pick) == 1:
            return longest, windows, pick  # nothing is in front that would ask for the window
        windows.fill(0.0)
        needed = np.ceil(periods.take(at))
        np.maximum(needed, 1.0, out=needed)
        if self.first_trained:
            needed[stop.take(at) <= self.first_trained] = self.most
        needed -= 1
        needed *= period
        needed += self.busy_s.take(at)
        np.maximum(round_trip_s.take(at), needed, out=windows[rows])
        return longest, windows, pick


@dataclass(frozen=True, slots=True)
class CompiledPlace:
    """The same, its inner loop compiled. trip_s, link_s: of a microbatch over the link behind, by [layer]."""

    band: Band
    optimizer_s: Floats
    trip_s: Floats
    link_s: Floats
    count: float
    first_trained: int
    low: int = 0

    def cuts(self, makespan: Floats, window: Floats, period: float) -> Cuts:
        """Return `Place.cuts`, of all first layers."""
        from partition.exact.cut_kernel import place_cuts  # loads a compiler

        band = self.band
        arrays = (band.stop, band.busy_s, self.optimizer_s, band.caps, self.trip_s, self.link_s)
        found: Cuts = place_cuts(*arrays, makespan, window, self.count, period, self.first_trained)
        return found
