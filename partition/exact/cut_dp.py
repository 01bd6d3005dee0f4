"""The best cuts of a pipeline whose devices and their order are given, by dynamic programming.

State: (place in the order, first layer of its stage), from the last place backwards, for one period.
Label: one pair (makespan bound Z, window) of `partition.estimates.closed_forms`: those of the stages of least
Z, the first stop of equals. Not exact, since a larger Z with a shorter window may fit where this does not.
Transition: the stage [start, stop) with or without recompute, where its device's memory takes the in_flight
that the window asks for and, unless there are no such cuts, a gradient that waits for the stage before, which
has one microbatch more in flight; then the link.
Source: PipeDream (Narayanan et al., SOSP 2019, section 3.1), with Z in place of the period and the order of
the devices given.
Complexity: O(places * layers * width) a period, width: the most layers that a device holds; up to 8 periods.
"""

import copy
import math
import operator
from collections.abc import Sequence

import numpy as np

from cost_model.cluster import Device
from partition.estimates.arrays import Floats
from partition.estimates.effort import SEVERAL_ORDERS
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache
from partition.exact.cut_places import CompiledPlace, Place, Places
from partition.problem import Problem

CLOSE = 0.02  # a period this near the one that the cuts were made for will do
MORE_BEFORE = (1, 0)  # in flight in the stage before each; the latter where memory takes no cuts else
LONGER = 1.5
LONGER_PERIODS = 4  # that are tried for few devices


class CutOptimizer:
    """Cuts pipelines anew for their own devices and links; remembers what it did.

    optimizer_s: seconds of the optimizer step by [class, start, stop], with what else the bytes of a stage
    cost after its last backward; None: those of the tables. like: another one of the same tables, with which
    it shares what depends on none of these seconds.
    """

    def __init__(
        self,
        tables: ProblemTables,
        timings: TimingCache,
        optimizer_s: Floats | None = None,
        like: "CutOptimizer | None" = None,
    ) -> None:
        self.tables, self.timings, self.problem = tables, timings, tables.problem
        self._class_of = tables.classes.class_indices()
        at_end_s = tables.optimizer_s if optimizer_s is None else optimizer_s
        self._places: Places = Places(tables, timings, at_end_s, None if like is None else like._places)
        self._done: dict[object, TimedPipeline | None] = {}

    def of(self, problem: Problem) -> "CutOptimizer":
        """Return this for the same problem, of which other numbers are forced; what one finds, both know."""
        other = copy.copy(self)
        other.problem = problem
        return other

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
        class_indices, links = self.entries(devices), self.timings.channels(devices)
        key = (class_indices, links, microbatch_size, num_samples, recompute)
        if key not in self._done:
            guess_s = period_s or self._least_period_s(class_indices, microbatch_size)
            asked = links, microbatch_size, num_samples, recompute, guess_s
            cuts = (self._cut(devices, class_indices, *asked, more) for more in MORE_BEFORE)
            self._done[key] = next((found for found in cuts if found is not None), None)
        found = self._done[key]
        if found is None or all(map(operator.is_, found.devices, devices)):
            return found
        stages = tuple(
            stage._replace(device=device) for device, stage in zip(devices, found.stages, strict=True)
        )
        return self.timings.pipeline(stages, microbatch_size, links)

    def _cut(
        self,
        devices: Sequence[Device],
        class_indices: Sequence[int],
        links: tuple[int, ...],
        microbatch_size: int,
        num_samples: int,
        recompute: bool,
        period: float,
        more_before: int,
    ) -> TimedPipeline | None:
        count = num_samples / microbatch_size
        places = self._places.of_order(devices, class_indices, microbatch_size, count, recompute, more_before)
        if not places:
            return None
        best: tuple[float, TimedPipeline] | None = None
        for _ in range(8):
            stages = self._cut_for(devices, places, period)
            if stages is None:
                if best is not None:
                    break
                period *= LONGER
                continue
            pipeline = self.timings.pipeline(stages, microbatch_size, links)
            if not pipeline.timing.fits:
                period *= LONGER
                continue
            seconds = pipeline.timing.quick_s(max(1, num_samples // microbatch_size))
            if best is None or seconds < best[0]:
                best = (seconds, pipeline)
            own = pipeline.timing.period_s
            if abs(own / period - 1) < CLOSE or (best is not None and seconds > best[0]):
                break
            period = max(own, 1e-300)  # where all times are zero, so is it
        few = len(self.tables.problem.cluster.devices) <= SEVERAL_ORDERS
        if best is None or not few or not any(stage.recompute for stage in best[1].stages):
            return best[1] if best else None
        # Z knows nothing of gradients that wait for the stage before: with these memory may take so few
        # microbatches that stages are recomputed in vain
        longer = [self._cut_for(devices, places, period) for period in _longer_periods(best[1])]
        found = [stages for stages in dict.fromkeys([best[1].stages, *longer]) if stages is not None]
        if len(found) == 1:
            return best[1]
        tried = [self.timings.pipeline(stages, microbatch_size, links) for stages in found]
        clocks = [one.timing.time_s(num_samples) if one.timing.fits else math.inf for one in tried]
        return tried[clocks.index(min(clocks))]

    def _least_period_s(self, class_indices: Sequence[int], microbatch_size: int) -> float:
        """Return the period of places that are all always busy."""
        whole = self.tables.at(microbatch_size).busy_s[list(class_indices), 0, -1]
        return float(1 / (1 / np.maximum(whole, 1e-300)).sum())

    def _cut_for(
        self, devices: Sequence[Device], places: Sequence[Place | CompiledPlace], period: float
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


def _longer_periods(pipeline: TimedPipeline) -> list[float]:
    """Return periods longer than a pipeline's own, up to that for which one microbatch in flight will do."""
    own, timing = pipeline.timing.period_s, pipeline.timing
    ratio = (sum(timing.busy_s) + sum(timing.round_trips_s)) / own if own else 1.0
    return [own * ratio ** (step / LONGER_PERIODS) for step in range(1, LONGER_PERIODS + 1) if ratio > 1]
