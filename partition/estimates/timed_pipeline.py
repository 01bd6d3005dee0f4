"""Stages on devices, and how long they take for any number of samples."""

import math
import operator
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise, starmap
from typing import NamedTuple

from cost_model.cluster import Cluster, Device
from cost_model.memory import StageShape
from partition.estimates.closed_forms import (
    cap_in_flight,
    in_flight_windows,
    makespan_bound_s,
    period_s,
    spread_in_flight,
    within_waiting,
)
from partition.estimates.extended_clock import ExtendedClock
from partition.estimates.pipeline_clock import Seconds
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.stage_needs import MANY
from partition.plan import Pipeline, Stage

EXTRA_IN_FLIGHT = (0, 1, 2, 4, 8, 16)
"""Microbatches in flight that are tried beyond what the period needs, spread over the stages."""
PERIODS = 12  # tried, for the shortest that memory takes
USUAL = 8  # of those, for the clock of any number of microbatches
MOST_EXACT = 400  # microbatches up to which the best in_flight is sought by the clock


class TimedStage(NamedTuple):
    """Layers [start, stop) on a device."""

    device: Device
    start: int
    stop: int
    recompute: bool = False

    def planned(self, in_flight: int, segment_layers: int = 0) -> Stage:
        """Return the stage of a plan."""
        layers = (self.start, self.stop)
        return Stage((self.device.name,), layers, in_flight, self.recompute, segment_layers)

    def leanest(self, costs: PipelineCosts, samples: int, in_flight: int) -> Stage:
        """Return the stage of a plan, recomputed by the segments that need least memory."""
        if not self.recompute:
            return self.planned(in_flight)
        shape = StageShape(self.start, self.stop, in_flight, samples, recompute=True)
        return self.planned(in_flight, costs.segment_layers(shape, self.device.kind))


def timed_stages(cluster: Cluster, pipeline: Pipeline) -> tuple[TimedStage, ...]:
    """Return the stages of a plan's pipeline."""
    return tuple(
        TimedStage(cluster.device(stage.device), *stage.layers, stage.recompute) for stage in pipeline.stages
    )


class PipelineTiming:
    """Seconds of pipelines that differ in nothing but the names of their devices.

    What a microbatch takes and needs (full, busy_s, total_s, windows) holds for any pipeline. What fits, and
    what samples take by the clock (time_s, most, no_more, best_flights), holds where devices serve nothing
    else; there is no gradient sync in it, but the longest optimizer step.
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
        first_trained = costs.prices.first_trained
        self.first_backward = sum(stage.stop <= first_trained for stage in stages)
        self._seconds: dict[int, Seconds] = {}
        self.full = self.seconds(microbatch_size)
        self.busy_s, self.round_trips_s = self.full.busy_s, self.full.round_trips_s
        self.period_s = period_s(self.busy_s, [max(link[:2]) for link in self.full.link_s])
        self._rest: dict[int, float] = {}
        self._best: dict[int, tuple[float, tuple[int, ...]]] = {}

    def seconds(self, samples: int) -> Seconds:
        """Return the seconds of a microbatch."""
        if samples not in self._seconds:
            forward_s, backward_s = zip(*self._passes_s(samples), strict=True)
            messages = zip(self._channels, self.stages[1:], strict=True)
            message_s = self.costs.message_s
            link_s = tuple([message_s(*channel, right.start, samples) for channel, right in messages])
            self._seconds[samples] = Seconds(forward_s, backward_s, link_s)
        return self._seconds[samples]

    def _passes_s(self, samples: int) -> list[tuple[float, float]]:
        """Return the seconds of a microbatch forward and backward by stage."""
        pass_s = self.costs.prices.pass_s
        return [
            pass_s(device, start, stop, samples, recompute=again)
            for device, start, stop, again in self.stages
        ]

    def total_s(self, num_samples: int) -> list[float]:
        """Return the seconds for which each stage computes; the last microbatch may be smaller."""
        whole, rest = divmod(num_samples, self.microbatch_size)
        if not rest:
            return [whole * busy for busy in self.busy_s]
        pairs = zip(self.busy_s, self.seconds(rest).busy_s, strict=True)
        return [whole * busy + small for busy, small in pairs]

    def windows(self, each_s: float) -> tuple[int, ...]:
        """Return the in_flight that 1F1B needs for one microbatch every each_s, whatever memory says."""
        if each_s <= 0:
            return (1,) * len(self.stages)
        return in_flight_windows(self.busy_s, self.round_trips_s, each_s)

    @cached_property
    def caps(self) -> tuple[int, ...]:
        """Return the in_flight of each stage that memory takes if its device serves nothing else."""
        return tuple(
            self.costs.cap(s.device, s.start, s.stop, self.microbatch_size, s.recompute) for s in self.stages
        )

    @cached_property
    def fits(self) -> bool:
        """Return whether memory takes a microbatch if each device serves one stage."""
        return min(self.caps) >= 1

    def room(self, limit: int) -> int:
        """Return the most samples, at most `limit`, whose outputs memory takes where all are in flight."""
        if not self.fits:
            return 0
        return min(limit, min(self.caps[: self.first_backward], default=MANY) * self.microbatch_size)

    def _within(self, num_microbatches: int, in_flight: Sequence[int]) -> tuple[int, ...]:
        """Return in_flight of all stages, given those with a backward, lowered to what takes its messages."""
        lowered = within_waiting(in_flight, lambda at, flight: self._waiting[at](flight), self._reached)
        return self._behind(num_microbatches, lowered)

    @cached_property
    def _waiting(self) -> list[Callable[[int], int]]:
        """Return `StageBytes.waiting` of the stages with a backward, given what is in flight."""
        stages, of = self.stages[self.first_backward :], self.costs.stage_bytes
        held = [of(s.device, s.start, s.stop, self.microbatch_size, recompute=s.recompute) for s in stages]
        return [partial(one.waiting, s.device.usable_bytes) for one, s in zip(held, stages, strict=True)]

    def _behind(self, num_microbatches: int, in_flight: Sequence[int]) -> tuple[int, ...]:
        """Return in_flight of all stages, given those with a backward: before them are all microbatches."""
        return (num_microbatches,) * self.first_backward + tuple(in_flight)

    @cached_property
    def optimizer_s(self) -> float:
        """Return the seconds of the longest optimizer step."""
        return max(self.costs.optimizer_s(s.device, s.start, s.stop) for s in self.stages)

    def bound_s(self, num_samples: int, in_flight: Sequence[int]) -> float:
        """Return Z of these samples as if the devices served nothing else, without the optimizer step."""
        num_microbatches = -(-num_samples // self.microbatch_size)
        others = max(0, num_samples - self.microbatch_size)
        messages = zip(self._channels, self.stages[1:], strict=True)
        in_flight = self._behind(num_microbatches, in_flight[self.first_backward :])
        return makespan_bound_s(
            self.busy_s,
            self.round_trips_s,
            num_microbatches,
            total_s=self.total_s(num_samples),
            link_rest_s=[self.costs.link_s(*pair, right.start, others) for pair, right in messages],
            in_flight=[min(flight, num_microbatches) for flight in in_flight],
        )

    def most_in_flight(self, num_microbatches: int) -> tuple[int, ...]:
        """Return the most that memory takes at each stage, gradients that wait for the stage before aside."""
        caps = self._caps_of(num_microbatches)
        return self._behind(num_microbatches, cap_in_flight(caps, caps))

    def needed_in_flight(self, num_microbatches: int) -> tuple[int, ...]:
        """Return the in_flight that the pipeline's own period needs, or the shortest that memory takes."""
        return self.within_memory(num_microbatches, self._behind(num_microbatches, self._reached))

    def within_memory(self, num_microbatches: int, wanted: Sequence[int]) -> tuple[int, ...]:
        """Return in_flight of all stages that is as near to what is wanted as memory allows."""
        capped = cap_in_flight(wanted[self.first_backward :], self._caps_of(num_microbatches))
        return self._within(num_microbatches, capped)

    def flights(self, num_microbatches: int) -> list[tuple[int, ...]]:
        """Return in_flight worth trying, within memory: what the period needs, a few more, all that fit."""
        caps, needed = self._caps_of(num_microbatches), self._needed[self.first_backward :]
        tries = [self._spread(caps, extra) for extra in (*EXTRA_IN_FLIGHT, num_microbatches)]
        tries += [cap_in_flight(needed, caps), cap_in_flight(caps, caps)]
        return list(dict.fromkeys(self._within(num_microbatches, flights) for flights in tries))

    def _caps_of(self, num_microbatches: int) -> list[int]:
        """Return the caps of the stages that have a backward."""
        return [min(cap, num_microbatches) for cap in self.caps[self.first_backward :]]

    @cached_property
    def usual(self) -> tuple[int, ...]:
        """Return in_flight for any number of microbatches: what the period needs and more, within memory."""
        return self._within(MANY, self._spread(self.caps[self.first_backward :], USUAL))

    @cached_property
    def _needed(self) -> tuple[int, ...]:
        return self.windows(self.period_s)

    @cached_property
    def _reached(self) -> tuple[int, ...]:
        """Return the in_flight of the shortest period that memory takes, of the stages with a backward.

        Where the pipeline's own needs more than memory takes somewhere, a longer one keeps steps between
        stages that are as even as the round trips are long; to cap what the own one needs does not.
        """
        needed = self._needed[self.first_backward :]
        if self._holds(needed) or not self.fits:
            return needed
        low, high = 1.0, (sum(self.busy_s) + sum(self.round_trips_s)) / self.period_s
        found = (1,) * len(needed)
        for _ in range(PERIODS):
            ratio = math.sqrt(low * high)
            flights = self.windows(ratio * self.period_s)[self.first_backward :]
            if self._holds(flights):
                high, found = ratio, flights
            else:
                low = ratio
        return found

    def _holds(self, flights: Sequence[int]) -> bool:
        """Return whether memory takes an in_flight of the stages with a backward, gradients that wait too."""
        return all(map(operator.le, flights, self.caps[self.first_backward :])) and all(
            before <= flight or before <= flight + waiting(flight)
            for (before, flight), waiting in zip(pairwise(flights), self._waiting[1:], strict=True)
        )

    def _spread(self, caps: Sequence[int], more: int) -> tuple[int, ...]:
        needed = self._reached
        return spread_in_flight([*needed[:-1], 1], [*caps[:-1], 1], more)

    def best_flights(self, num_samples: int) -> tuple[int, ...]:
        """Return the in_flight with which these samples take least time."""
        return self._best_of(num_samples)[1]

    def least_s(self, num_samples: int) -> float:
        """Return the seconds of these samples with that in_flight, and of the optimizer.

        No simulated step with the pipeline is shorter; 0 of so many microbatches that it takes long to say.
        """
        return self._best_of(num_samples)[0]

    def _best_of(self, num_samples: int) -> tuple[float, tuple[int, ...]]:
        if num_samples not in self._best:
            self._best[num_samples] = self._find_best(num_samples)
        return self._best[num_samples]

    def _find_best(self, num_samples: int) -> tuple[float, tuple[int, ...]]:
        num_microbatches = -(-num_samples // self.microbatch_size)
        rest = num_samples - (num_microbatches - 1) * self.microbatch_size
        last = None if rest == self.microbatch_size else self.seconds(rest)
        if num_microbatches > MOST_EXACT:
            return 0.0, self._behind(num_microbatches, self.usual[self.first_backward :])
        clocks = self.costs.clocks
        least_s, best = min(
            (clocks.of(self.full, flights).makespan_s(num_microbatches, last), flights)
            for flights in self.flights(num_microbatches)
        )
        return least_s + self.optimizer_s, best

    def quick_s(self, num_microbatches: int) -> float:
        """Return Z of equal microbatches with all in flight that fits, and the optimizer."""
        flights = self.most_in_flight(num_microbatches)
        return self.optimizer_s + makespan_bound_s(
            self.busy_s, self.round_trips_s, num_microbatches, in_flight=flights
        )

    @cached_property
    def clock(self) -> ExtendedClock:
        """Return the clock of equal microbatches, with what is usually in flight."""
        return ExtendedClock(self.full, self.usual, self.period_s, self.optimizer_s, self.costs.clocks)

    def _rest_share(self, samples: int) -> float:
        """Return the seconds of a smaller last microbatch as a share of a full one's."""
        if samples not in self._rest:
            pairs = zip(map(sum, self._passes_s(samples)), self.busy_s, strict=True)
            self._rest[samples] = max((one / full if full else 0.0) for one, full in pairs)
        return self._rest[samples]

    def time_s(self, num_samples: int) -> float:
        """Return the seconds of a step of these samples; a smaller last microbatch is interpolated."""
        if num_samples <= 0:
            return 0.0
        whole, rest = divmod(num_samples, self.microbatch_size)
        if rest == 0:
            return self.clock.whole_s(whole)
        before = self.clock.whole_s(whole) if whole else self.optimizer_s
        return before + (self.clock.whole_s(whole + 1) - before) * self._rest_share(rest)

    def most(self, step_s: float, limit: int) -> int:
        """Return the most samples, at most `limit`, that take no longer than a step of step_s seconds."""
        if not self.fits:
            return 0
        clock, size = self.clock, self.microbatch_size
        if self.first_backward:
            limit = self.room(limit)
        whole = clock.most_whole(step_s)
        if whole * size >= limit:
            return limit
        if size == 1:
            return whole
        before = clock.whole_s(whole) if whole else self.optimizer_s
        share = (step_s - before) / max(clock.whole_s(whole + 1) - before, 1e-300)
        rest = 0
        while rest + 1 < size and self._rest_share(rest + 1) <= share:
            rest += 1
        return min(limit, whole * size + rest)

    def no_more(self, step_s: float, limit: int) -> int:
        """Return as many samples as `most`, or more; sooner, as long as the clock has not been asked."""
        if not self.fits or self.clock.asked:
            return self.most(step_s, limit)
        whole = self.clock.no_more(step_s, limit)
        return min(self.room(limit), (max(0, int(whole)) + 1) * self.microbatch_size - 1)


class TimedPipeline(NamedTuple):
    """A pipeline on named devices, with its timing."""

    stages: tuple[TimedStage, ...]
    timing: PipelineTiming

    @property
    def microbatch_size(self) -> int:
        return self.timing.microbatch_size

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(stage.device for stage in self.stages)

    def pipeline(self, num_samples: int, flights: Sequence[int] = ()) -> Pipeline:
        """Return the pipeline for these samples, with the in_flight given, or what suits them best."""
        size = min(self.microbatch_size, num_samples)
        flights = flights or self.timing.best_flights(num_samples)
        placed = zip(self.stages, flights, strict=True)
        stages = tuple(stage.leanest(self.timing.costs, size, flight) for stage, flight in placed)
        return Pipeline(microbatch_size=size, num_samples=num_samples, stages=stages)


class TimingCache:
    """A maker of pipelines; those that differ only in the names of devices, none pinned, share one timing."""

    def __init__(self, costs: PipelineCosts) -> None:
        self.costs = costs
        self._pinned = {pin.device for pin in costs.problem.forced.pins}
        self._timings: dict[object, PipelineTiming] = {}
        self._numbers: dict[object, int] = {}
        self._devices: dict[str, int] = {}

    @property
    def timings(self) -> list[PipelineTiming]:
        """Return all timings so far, in the order in which they were made."""
        return list(self._timings.values())

    def pipeline(
        self, stages: Sequence[TimedStage], microbatch_size: int, links: tuple[int, ...] | None = None
    ) -> TimedPipeline:
        """Return stages with their timing. links: their `channels`, where these are known."""
        channels = [(left.device, right.device) for left, right in pairwise(stages)]
        return TimedPipeline(tuple(stages), self.timing(stages, channels, microbatch_size, links))

    def channels(self, devices: Sequence[Device]) -> tuple[int, ...]:
        """Return the `PipelineCosts.channel` of each device with the next one."""
        return tuple(starmap(self.costs.channel, pairwise(devices)))

    def timing(
        self,
        stages: Sequence[TimedStage],
        channels: Sequence[tuple[Device, Device]],
        microbatch_size: int,
        links: tuple[int, ...] | None = None,
    ) -> PipelineTiming:
        links = links if links is not None else tuple(starmap(self.costs.channel, channels))
        alike = self._alike
        key = (
            microbatch_size,
            tuple([(alike(device), start, stop, again) for device, start, stop, again in stages]),
            links,
        )
        found = self._timings.get(key)
        if found is None:
            found = self._timings[key] = PipelineTiming(self.costs, stages, channels, microbatch_size)
        return found

    def _alike(self, device: Device) -> int:
        """Return a number that devices share which may stand for one another, as no pinned one may."""
        found = self._devices.get(device.name)
        if found is None:
            own = device.name if device.name in self._pinned else ""
            kind = (device.kind, device.speed, device.usable_bytes, own)
            found = self._devices[device.name] = self._numbers.setdefault(kind, len(self._numbers))
        return found
