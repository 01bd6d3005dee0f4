"""A pipeline on devices of its own, and how long it takes for any number of samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from cost_model.cluster import Device
from partition.estimates.closed_forms import (
    cap_in_flight,
    in_flight_windows,
    makespan_bound_s,
    period_s,
    spread_in_flight,
)
from partition.estimates.pipeline_clock import PipelineClock, Seconds, one_f_one_b_s
from partition.estimates.pipeline_costs import MANY, PipelineCosts
from partition.plan import Pipeline, Stage

EXTRA_IN_FLIGHT = (0, 1, 2, 4, 8, 16)
"""Microbatches in flight that are tried beyond what the period needs, spread over the stages."""
USUAL = 8  # of those, for the clock of any number of microbatches
WARM, WARM_EXTRA = 2, 4  # the clock runs for WARM times the stages or in_flight, and WARM_EXTRA microbatches
SPAN = 4  # microbatches at the end of that, over which the seconds of one more are taken as a mean
MOST_TICKS = 400  # microbatches x stages that the clock runs through at most before it extrapolates
FILLING = 1e-3  # relative: a pace faster than the period by more shows a queue that is filling still
MOST_FILLING_TICKS = 1600  # microbatches x stages up to which the clock then goes on, twice as far each time
MOST_EXACT = 400  # microbatches up to which the best in_flight is sought by the clock


@dataclass(frozen=True, slots=True)
class TimedStage:
    """Layers [start, stop) on a device that serves nothing else."""

    device: Device
    start: int
    stop: int
    recompute: bool = False

    def planned(self, costs: PipelineCosts, samples: int, in_flight: int) -> Stage:
        """Return the stage of a plan, recomputed by the segments that need least memory."""
        layers, again = (self.start, self.stop), 0
        if self.recompute:
            again = costs.segment_layers(*layers, samples, in_flight)
        return Stage((self.device.name,), layers, in_flight, self.recompute, again)


class PipelineTiming:
    """Seconds of pipelines that differ in nothing but the names of their devices.

    time_s(samples) holds no gradient sync; the longest optimizer step is in it.
    """

    def __init__(
        self,
        costs: PipelineCosts,
        stages: Sequence[TimedStage],
        channels: Sequence[tuple[Device, Device]],
        microbatch_size: int,
    ) -> None:
        self.costs, self.stages, self._channels = costs, tuple(stages), tuple(channels)
        self.microbatch_size = microbatch_size
        self.full = self._seconds(microbatch_size)
        self.busy_s = [sum(pair) for pair in zip(self.full.forward_s, self.full.backward_s, strict=True)]
        round_trips_s = [sum(link) for link in self.full.link_s]
        self.caps = [
            costs.cap(stage.device, stage.start, stage.stop, microbatch_size, stage.recompute)
            for stage in stages
        ]
        self.fits = min(self.caps) >= 1
        self.period_s = period_s(self.busy_s, [max(link[:2]) for link in self.full.link_s])
        self.needed = (
            in_flight_windows(self.busy_s, round_trips_s, self.period_s)
            if self.period_s > 0
            else ((1,) * len(self.stages))
        )
        self.optimizer_s = max(
            costs.prices.optimizer_s(stage.device, range(stage.start, stage.stop)) for stage in stages
        )
        self._whole: dict[int, float] = {}
        self._latest = 0
        self._rest: dict[int, float] = {}
        self._best: dict[int, tuple[int, ...]] = {}

    def _seconds(self, samples: int) -> Seconds:
        prices = self.costs.prices
        return Seconds(
            tuple(prices.forward_s(s.device, s.start, s.stop, samples) for s in self.stages),
            tuple(
                prices.backward_s(s.device, s.start, s.stop, samples, recompute=s.recompute)
                for s in self.stages
            ),
            tuple(
                self.costs.message_s(*channel, right.start, samples)
                for channel, (_, right) in zip(self._channels, pairwise(self.stages), strict=True)
            ),
        )

    def flights(self, num_microbatches: int) -> list[tuple[int, ...]]:
        """Return in_flight worth trying, within memory: what the period needs, a few more, all that fit."""
        caps = [min(cap, num_microbatches) for cap in self.caps]
        tries = [self._spread(caps, extra) for extra in (*EXTRA_IN_FLIGHT, num_microbatches)]
        return list(dict.fromkeys([*tries, cap_in_flight(caps, caps)]))

    @cached_property
    def usual(self) -> tuple[int, ...]:
        """Return in_flight for any number of microbatches: what the period needs and more, within memory."""
        return self._spread(self.caps, USUAL)

    def _spread(self, caps: Sequence[int], more: int) -> tuple[int, ...]:
        return spread_in_flight([*self.needed[:-1], 1], [*caps[:-1], 1], more)

    def best_flights(self, num_samples: int) -> tuple[int, ...]:
        """Return the in_flight with which these samples take least time."""
        if num_samples not in self._best:
            self._best[num_samples] = self._best_flights(num_samples)
        return self._best[num_samples]

    def _best_flights(self, num_samples: int) -> tuple[int, ...]:
        num_microbatches = -(-num_samples // self.microbatch_size)
        rest = num_samples - (num_microbatches - 1) * self.microbatch_size
        last = None if rest == self.microbatch_size else self._seconds(rest)
        if num_microbatches > MOST_EXACT:
            return self.usual
        return min(
            self.flights(num_microbatches),
            key=lambda flights: (one_f_one_b_s(self.full, flights, num_microbatches, last), flights),
        )

    def quick_s(self, num_microbatches: int) -> float:
        """Return Z of equal microbatches with all in flight that fits, and the optimizer."""
        round_trips_s = [sum(link) for link in self.full.link_s]
        caps = [min(cap, num_microbatches) for cap in self.caps]
        flights = cap_in_flight(caps, caps)
        return self.optimizer_s + makespan_bound_s(
            self.busy_s, round_trips_s, num_microbatches, in_flight=flights
        )

    def whole_s(self, num_microbatches: int) -> float:
        """Return the seconds of equal microbatches; those of many are extended from the steady state."""
        if num_microbatches > self._warm:
            return max(begin + num_microbatches * each for begin, each in self._lines)
        return self._exact_s(num_microbatches)

    def _exact_s(self, num_microbatches: int) -> float:
        if num_microbatches not in self._whole:
            self._whole[num_microbatches] = self.optimizer_s + self._clock.makespan_s(num_microbatches)
        return self._whole[num_microbatches]

    @cached_property
    def _clock(self) -> PipelineClock:
        """Return the clock with what is usually in flight."""
        return PipelineClock(self.full, self.usual)

    @cached_property
    def _warm(self) -> int:
        """Return the microbatches after which each further one takes as long, as far as that is seen soon."""
        stages, warm = len(self.stages), self._first_warm
        if stages == 1:
            return 1
        # faster than the busiest stage or link: a queue in front of it is still filling
        while self._pace_s(warm) < self.period_s * (1 - FILLING) and 2 * warm * stages <= MOST_FILLING_TICKS:
            warm *= 2
        return warm

    @cached_property
    def _first_warm(self) -> int:
        stages = len(self.stages)
        if stages == 1:
            return 1
        warm = WARM * max(stages, self.usual[0]) + WARM_EXTRA
        return min(warm, max(stages + WARM_EXTRA, MOST_TICKS // stages))

    def _pace_s(self, num_microbatches: int) -> float:
        """Return the seconds of one more microbatch, as a mean of the last few."""
        return (self._exact_s(num_microbatches) - self._exact_s(num_microbatches - SPAN)) / SPAN

    @cached_property
    def _lines(self) -> list[tuple[float, float]]:
        """Return (s, s per microbatch) of lines, of which the longest is what many microbatches take.

        One goes on as the clock did at last. If the queue in front of what is busiest is full only later,
        that may be too short: no step is shorter than the path to it and back, and all microbatches there (Z
        of `partition.estimates.closed_forms`).
        """
        if len(self.stages) == 1:
            return self._floors
        warm_s = self._exact_s(self._warm)
        pace = self._pace_s(self._warm)
        return _longest(
            [(warm_s - self._warm * pace, pace), *self._floors, *self._round_trips], from_count=self._warm
        )

    @cached_property
    def _floors(self) -> list[tuple[float, float]]:
        """Return (s, s per microbatch) of each stage and link: Z is the longest of these lines."""
        if len(self.stages) == 1:
            return [(self.optimizer_s, self.busy_s[0])]
        lines: list[tuple[float, float]] = []
        path_s = 0.0
        links = [*self.full.link_s, (0.0, 0.0, 0.0, 0.0)]
        for busy, link, after in zip(self.busy_s, links, [*self.busy_s[1:], 0.0], strict=True):
            path_s += busy
            lines.append((self.optimizer_s + path_s - busy, busy))
            path_s += sum(link)
            each = max(link[:2])
            lines.append((self.optimizer_s + path_s + after - each, each))
        return lines

    @cached_property
    def _round_trips(self) -> list[tuple[float, float]]:
        """Return (s, s per microbatch) of each stage that waits a round trip for what is in flight."""
        lines, before_s = [], 0.0
        round_trip_s = sum(self.busy_s) + sum(map(sum, self.full.link_s))
        for busy, link, flight in zip(self.busy_s, [*self.full.link_s, (0.0,)], self.usual, strict=True):
            lines.append((self.optimizer_s + before_s, round_trip_s / flight))
            before_s += busy + sum(link)
            round_trip_s -= busy + sum(link)
        return lines

    def _rest_share(self, samples: int) -> float:
        """Return the seconds of a smaller last microbatch as a share of a full one's."""
        if samples not in self._rest:
            small = self._seconds(samples)
            busy = [sum(pair) for pair in zip(small.forward_s, small.backward_s, strict=True)]
            pairs = zip(busy, self.busy_s, strict=True)
            self._rest[samples] = max((one / full if full else 0.0) for one, full in pairs)
        return self._rest[samples]

    def time_s(self, num_samples: int) -> float:
        """Return the seconds of a step of these samples; a smaller last microbatch is interpolated."""
        if num_samples <= 0:
            return 0.0
        whole, rest = divmod(num_samples, self.microbatch_size)
        if rest == 0:
            return self.whole_s(whole)
        before = self.whole_s(whole) if whole else self.optimizer_s
        return before + (self.whole_s(whole + 1) - before) * self._rest_share(rest)

    def most(self, step_s: float, limit: int) -> int:
        """Return the most samples, at most `limit`, that take no longer than a step of step_s seconds."""
        if not self.fits:
            return 0
        whole = self._most_whole(step_s)
        before = self.whole_s(whole) if whole else self.optimizer_s
        share = (step_s - before) / max(self.whole_s(whole + 1) - before, 1e-300)
        if whole * self.microbatch_size >= limit:
            return limit
        rest = 0
        while rest + 1 < self.microbatch_size and self._rest_share(rest + 1) <= share:
            rest += 1
        return min(limit, whole * self.microbatch_size + rest)

    def no_more(self, step_s: float, limit: int) -> int:
        """Return as many samples as `most`, or more; sooner, as long as the clock has not been asked.

        Z of `partition.estimates.closed_forms` says that.
        """
        if self._whole or not self.fits:
            return self.most(step_s, limit)
        late_s, lines = step_s * (1 + 1e-9), [*self._floors, *self._round_trips]
        whole = min((late_s - begin) / each if each > 0 else limit for begin, each in lines)
        return min(limit, (max(0, int(whole)) + 1) * self.microbatch_size - 1)

    def _most_whole(self, step_s: float) -> int:
        """Return the most full microbatches that take no longer than a step."""
        known, least = self._whole, self._latest
        if (  # mostly about as many as for the step that was asked before
            least < self._first_warm
            and known.get(least, math.inf) <= step_s < known.get(least + 1, -math.inf)
        ):
            return least
        self._latest = self._find_most_whole(step_s)
        return self._latest

    def _find_most_whole(self, step_s: float) -> int:
        if self.whole_s(1) > step_s:
            return 0
        limit = self._first_warm - 1
        if step_s >= self._warm_floor_s:
            if self._exact_s(self._warm) <= step_s:
                warm = self._warm
                most = min((step_s - begin) / each if each > 0 else math.inf for begin, each in self._lines)
                return max(warm, int(most)) if most < warm + MANY else warm + MANY
            limit = self._warm - 1
        done, late = 1, limit + 1  # the answer is from the one on, and below the other
        guess = self._latest
        while late - done > 1:
            guess = min(max(guess, done + 1), late - 1)
            spare = step_s - self._exact_s(guess)
            periods = max(1, int(abs(spare) / self.period_s)) if self.period_s > 0 else 1
            if spare >= 0:
                done, guess = guess, guess + periods
            else:
                late, guess = guess, guess - periods
        return done

    @cached_property
    def _warm_floor_s(self) -> float:
        """Return the step below which there is no time for the microbatches of the warmup."""
        return max(begin + self._first_warm * each for begin, each in self._floors)


def _longest(lines: Sequence[tuple[float, float]], from_count: int) -> list[tuple[float, float]]:
    """Return the lines that may be the longest for so many microbatches or more."""
    kept: list[tuple[float, float]] = []
    longest_s = -math.inf
    for each, begin in sorted(((each, begin) for begin, each in lines), reverse=True):
        if begin + from_count * each > longest_s:
            longest_s = begin + from_count * each
            kept.append((begin, each))
    return kept


@dataclass(frozen=True, slots=True)
class TimedPipeline:
    """A pipeline on named devices, with its timing."""

    stages: tuple[TimedStage, ...]
    timing: PipelineTiming

    @property
    def microbatch_size(self) -> int:
        return self.timing.microbatch_size

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(stage.device for stage in self.stages)

    def pipeline(self, num_samples: int) -> Pipeline:
        """Return the pipeline for these samples, with the in_flight that suits them best."""
        size, flights = min(self.microbatch_size, num_samples), self.timing.best_flights(num_samples)
        placed = zip(self.stages, flights, strict=True)
        stages = tuple(stage.planned(self.timing.costs, size, flight) for stage, flight in placed)
        return Pipeline(microbatch_size=size, num_samples=num_samples, stages=stages)


class TimingCache:
    """A maker of pipelines; those that differ only in the names of their devices share one timing."""

    def __init__(self, costs: PipelineCosts) -> None:
        self.costs = costs
        self._timings: dict[object, PipelineTiming] = {}

    @property
    def timings(self) -> list[PipelineTiming]:
        """Return all timings so far, in the order in which they were made."""
        return list(self._timings.values())

    def pipeline(self, stages: Sequence[TimedStage], microbatch_size: int) -> TimedPipeline:
        channels = [(left.device, right.device) for left, right in pairwise(stages)]
        return TimedPipeline(tuple(stages), self.timing(stages, channels, microbatch_size))

    def timing(
        self, stages: Sequence[TimedStage], channels: Sequence[tuple[Device, Device]], microbatch_size: int
    ) -> PipelineTiming:
        route = self.costs.network.route
        key = (
            microbatch_size,
            tuple(
                (s.device.kind, s.device.speed, s.device.usable_bytes, s.start, s.stop, s.recompute)
                for s in stages
            ),
            tuple((route(a.name, b.name).link, route(b.name, a.name).link) for a, b in channels),
        )
        if key not in self._timings:
            self._timings[key] = PipelineTiming(self.costs, stages, channels, microbatch_size)
        return self._timings[key]
