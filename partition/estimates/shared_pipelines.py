"""Pipelines that may share devices, before their in_flight is known: what fits, and a cheap estimate."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cost_model.cluster import Device
from cost_model.memory import StageShape, device_memory
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.step_estimate import StepEstimate, Timed, busy_s
from partition.estimates.timed_pipeline import TimedStage
from partition.plan import Pipeline, Plan

EXTRA_IN_FLIGHT = (0, 1)  # a device that serves others too may keep a microbatch waiting
MOST_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class SharedPipeline:
    """A pipeline without in_flight; its devices may serve other pipelines of the draft too."""

    stages: tuple[TimedStage, ...]
    microbatch_size: int
    num_samples: int

    @property
    def num_microbatches(self) -> int:
        return -(-self.num_samples // self.microbatch_size)

    def planned(self, in_flight: Iterable[int], costs: PipelineCosts) -> Pipeline:
        """Return the pipeline of a plan, recomputed by the segments that need least memory."""
        size, placed = min(self.microbatch_size, self.num_samples), zip(self.stages, in_flight, strict=True)
        stages = tuple(stage.leanest(costs, size, flight) for stage, flight in placed)
        return Pipeline(size, self.num_samples, stages)


Draft = tuple[SharedPipeline, ...]


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """Layers [start, stop) on each of some devices, in the order in which they take the samples of a step.

    shares: devices and the samples of each; all layers of a draft have as many in all.
    """

    start: int
    stop: int
    shares: tuple[tuple[Device, int], ...]


def refined(rows: Sequence[SharedLayers], microbatch_size: int) -> Draft:
    """Return rows of layers as pipelines: the common refinement of their shares of the samples.

    Neighbouring layers that a pipeline has on one device are one stage.
    """
    ends = [list(accumulate(samples for _, samples in row.shares)) for row in rows]
    pipelines = []
    for begin, end in pairwise(sorted({0}.union(*ends))):
        stages: list[TimedStage] = []
        for row, row_ends in zip(rows, ends, strict=True):
            device, _ = row.shares[bisect_right(row_ends, begin)]
            if stages and stages[-1].device.name == device.name:
                stages[-1] = stages[-1]._replace(stop=row.stop)
            else:
                stages.append(TimedStage(device, row.start, row.stop))
        pipelines.append(SharedPipeline(tuple(stages), min(microbatch_size, end - begin), end - begin))
    return tuple(pipelines)


Flights = tuple[tuple[int, ...], ...]
"""in_flight by pipeline and stage."""


class SharedPipelineCosts:
    """A maker of plans from drafts; remembers what stages need."""

    def __init__(self, costs: PipelineCosts) -> None:
        self.costs, self._estimate = costs, StepEstimate(costs)
        self._least: dict[object, float] = {}
        self._alone: dict[tuple[StageShape, str], float] = {}

    def plans(self, draft: Draft) -> list[tuple[float, Plan]]:
        """Return (estimate in seconds, plan) with what it needs in flight and with a little more.

        As far as memory goes; empty where it does not take one microbatch of each pipeline.
        """
        if not self.fits(draft):
            return []
        estimate, problem = self._estimate, self.costs.problem
        timed = [
            (estimate.pipeline(shared.stages, shared.microbatch_size), shared.num_samples) for shared in draft
        ]
        step_s = max(busy_s(timed).values())
        tries = dict.fromkeys(self._flights(draft, timed, step_s, extra) for extra in EXTRA_IN_FLIGHT)
        plans = []
        for flights in tries:
            rows = zip(draft, flights, strict=True)
            pipelines = tuple(shared.planned(row, self.costs) for shared, row in rows)
            plans.append(problem.plan("auto", pipelines))
        return [(estimate.estimate_s(plan), plan) for plan in plans]

    def fits(self, draft: Draft) -> bool:
        """Return whether memory takes one microbatch of each pipeline."""
        return all(self._spare(places) >= 0 for places in _places(draft).values())

    def _flights(self, draft: Draft, timed: Timed, step_s: float, extra: int) -> Flights:
        """Return in_flight of all stages: what a step of step_s needs and `extra`, as far as memory goes.

        A pipeline's period is the step over its microbatches. Each device begins with 1 for every stage and
        gives what is left to the stage that has the smallest part of what it needs.
        """
        wanted = []
        for shared, (each, _) in zip(draft, timed, strict=True):
            most = min(shared.num_microbatches, MOST_IN_FLIGHT)
            needed = each.timing.windows(step_s / shared.num_microbatches)
            wanted.append([*(min(need + extra, most) for need in needed[:-1]), min(needed[-1], most)])
        flights = [
            [self._least_in_flight(shared, stage) for stage in range(len(shared.stages))] for shared in draft
        ]
        left: dict[str, float] = {}
        for name, places in _places(draft).items():
            spare = self._spare(places)
            growing = {(pipeline, stage): shared for pipeline, stage, shared in places}
            while growing:
                pipeline, stage = least = min(
                    growing, key=lambda at: flights[at[0]][at[1]] / wanted[at[0]][at[1]]
                )
                shared, flight = growing[least], flights[pipeline][stage]
                more = self._more_bytes(shared.stages[stage], shared.microbatch_size, flight)
                if flight >= wanted[pipeline][stage] or more > spare:
                    del growing[least]
                    continue
                flights[pipeline][stage] += 1
                spare -= more
            left[name] = spare
        flights = [list(accumulate(row, min)) for row in flights]
        self._make_room_for_gradients(draft, flights, left)
        return tuple(map(tuple, flights))

    def _make_room_for_gradients(
        self, draft: Draft, flights: list[list[int]], left: Mapping[str, float]
    ) -> None:
        """Lower in_flight before stages whose devices lack memory for the gradients that wait there.

        left: bytes left on each device without them.
        """
        spare = dict(left)
        stages = [
            (shared, row, stage)
            for shared, row in zip(draft, flights, strict=True)
            for stage in range(len(row) - 1, 0, -1)
        ]
        for shared, row, stage in stages:
            placed = shared.stages[stage]
            each = self.costs.gradient_bytes(placed.device, placed.start, placed.stop, shared.microbatch_size)
            if each > 0 and row[stage - 1] > row[stage]:
                taken = min(row[stage - 1] - row[stage], max(0, int(spare[placed.device.name] / each)))
                row[stage - 1] = row[stage] + taken
                spare[placed.device.name] -= taken * each

    def _spare(self, places: Iterable[tuple[int, int, SharedPipeline]]) -> float:
        """Return the bytes left on a device with the fewest microbatches in flight of each of its stages."""
        stages = [
            (shared.stages[index], shared.microbatch_size, self._least_in_flight(shared, index))
            for _, index, shared in places
        ]
        kind = stages[0][0].device.kind
        key = kind, *sorted((s.start, s.stop, *numbers, s.recompute) for s, *numbers in stages)
        if key not in self._least:
            shapes = [self._shape(*entry) for entry in stages]
            self._least[key] = device_memory(self.costs.problem.profile.on(kind), shapes).total_bytes
        return stages[0][0].device.usable_bytes - self._least[key]

    def _least_in_flight(self, shared: SharedPipeline, stage: int) -> int:
        """Return 1, but all microbatches where there is no backward."""
        has_backward = shared.stages[stage].stop > self.costs.prices.first_trained
        return 1 if has_backward else shared.num_microbatches

    def _more_bytes(self, stage: TimedStage, samples: int, in_flight: int) -> float:
        """Return the bytes of one more microbatch than are in flight."""
        flight = in_flight if stage.recompute else 1
        return self._alone_bytes(stage, samples, flight + 1) - self._alone_bytes(stage, samples, flight)

    def _alone_bytes(self, stage: TimedStage, samples: int, in_flight: int) -> float:
        key = shape, kind = self._shape(stage, samples, in_flight), stage.device.kind
        if key not in self._alone:
            self._alone[key] = device_memory(self.costs.problem.profile.on(kind), [shape]).total_bytes
        return self._alone[key]

    def _shape(self, stage: TimedStage, samples: int, in_flight: int) -> StageShape:
        shape = StageShape(stage.start, stage.stop, in_flight, samples, stage.recompute)
        if not stage.recompute:
            return shape
        return shape._replace(segment_layers=self.costs.segment_layers(shape, stage.device.kind))


def _places(draft: Draft) -> dict[str, list[tuple[int, int, SharedPipeline]]]:
    """Return (index of the pipeline, stage, pipeline) by device."""
    found: dict[str, list[tuple[int, int, SharedPipeline]]] = {}
    for index, shared in enumerate(draft):
        for stage, placed in enumerate(shared.stages):
            found.setdefault(placed.device.name, []).append((index, stage, shared))
    return found
