"""Pipelines that may share devices, before their in_flight is known: what fits, and a cheap estimate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cost_model.memory import StageShape, device_memory
from cost_model.network import NORM_BYTES
from partition.estimates.closed_forms import in_flight_windows
from partition.estimates.gradient_sync import SyncCosts
from partition.estimates.pipeline_clock import Seconds
from partition.estimates.pipeline_costs import PipelineCosts
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


Draft = tuple[SharedPipeline, ...]
Flights = tuple[tuple[int, ...], ...]
"""in_flight by pipeline and stage."""


def _busy_s(full: Seconds) -> list[float]:
    return [sum(pair) for pair in zip(full.forward_s, full.backward_s, strict=True)]


def _transfers_s(full: Seconds) -> list[tuple[float, float, float]]:
    """Return (forward transfer, backward transfer, what the slower one occupies) of each link, in seconds."""
    return [
        (forward_s + latency_s, backward_s + latency_back_s, max(forward_s, backward_s))
        for forward_s, backward_s, latency_s, latency_back_s in full.link_s
    ]


def _round_trips_s(full: Seconds) -> list[float]:
    return [forward_s + backward_s for forward_s, backward_s, _ in _transfers_s(full)]


class SharedPipelineCosts:
    """A maker of plans from drafts; remembers the prices of stages."""

    def __init__(self, costs: PipelineCosts) -> None:
        self.costs, self._sync = costs, SyncCosts(costs)
        self._stage_s: dict[tuple[str, float, int, int, int, bool], tuple[float, float]] = {}
        self._least: dict[object, float] = {}
        self._alone: dict[StageShape, float] = {}

    def plans(self, draft: Draft) -> list[tuple[float, Plan]]:
        """Return (estimate in seconds, plan) with what it needs in flight and with a little more.

        As far as memory goes; empty where it does not take one microbatch of each pipeline.
        """
        if not self.fits(draft):
            return []
        seconds = [self._seconds(pipeline, pipeline.microbatch_size) for pipeline in draft]
        loads = self._loads(draft, seconds)
        step_s = max(loads.values())
        tries = dict.fromkeys(self._flights(draft, seconds, step_s, extra) for extra in EXTRA_IN_FLIGHT)
        plans = [self._plan(draft, flights) for flights in tries]
        return [(self._estimate_s(plan, draft, seconds, loads), plan) for plan in plans]

    def _plan(self, draft: Draft, flights: Flights) -> Plan:
        pipelines = tuple(
            Pipeline(
                min(shared.microbatch_size, shared.num_samples),
                shared.num_samples,
                tuple(
                    stage.planned(self.costs, min(shared.microbatch_size, shared.num_samples), flight)
                    for stage, flight in zip(shared.stages, row, strict=True)
                ),
            )
            for shared, row in zip(draft, flights, strict=True)
        )
        problem = self.costs.problem
        return Plan("auto", problem.profile.model, problem.global_batch_size, pipelines)

    def fits(self, draft: Draft) -> bool:
        """Return whether memory takes one microbatch of each pipeline."""
        return all(self._spare(places) >= 0 for places in _places(draft).values())

    def _seconds(self, pipeline: SharedPipeline, samples: int) -> Seconds:
        """Return the seconds of a microbatch; messages within a device take none."""
        busy = [self._busy(stage, samples) for stage in pipeline.stages]
        links = tuple(
            (0.0, 0.0, 0.0, 0.0)
            if left.device.name == right.device.name
            else self.costs.message_s(left.device, right.device, right.start, samples)
            for left, right in pairwise(pipeline.stages)
        )
        return Seconds(tuple(f for f, _ in busy), tuple(b for _, b in busy), links)

    def _busy(self, stage: TimedStage, samples: int) -> tuple[float, float]:
        """Return the seconds of forward and backward of one microbatch."""
        device = stage.device
        key = (device.kind, device.speed, stage.start, stage.stop, samples, stage.recompute)
        if key not in self._stage_s:
            prices = self.costs.prices
            self._stage_s[key] = (
                prices.forward_s(device, stage.start, stage.stop, samples),
                prices.backward_s(device, stage.start, stage.stop, samples, recompute=stage.recompute),
            )
        return self._stage_s[key]

    def _loads(self, draft: Draft, seconds: Sequence[Seconds]) -> dict[str, float]:
        """Return the seconds for which each device computes in a step."""
        loads: dict[str, float] = {}
        for shared, full in zip(draft, seconds, strict=True):
            whole, rest = divmod(shared.num_samples, shared.microbatch_size)
            for stage, busy in zip(shared.stages, _busy_s(full), strict=True):
                load = whole * busy + (sum(self._busy(stage, rest)) if rest else 0.0)
                loads[stage.device.name] = loads.get(stage.device.name, 0.0) + load
        return loads

    def _flights(self, draft: Draft, seconds: Sequence[Seconds], step_s: float, extra: int) -> Flights:
        """Return in_flight of all stages: what a step of step_s needs and `extra`, as far as memory goes.

        A pipeline's period is the step over its microbatches. Each device begins with 1 for every stage and
        gives what is left to the stage that has the smallest part of what it needs.
        """
        wanted = []
        for shared, full in zip(draft, seconds, strict=True):
            most = min(shared.num_microbatches, MOST_IN_FLIGHT)
            period = step_s / shared.num_microbatches
            needed = (1,) * len(shared.stages)
            if period > 0:
                needed = in_flight_windows(_busy_s(full), _round_trips_s(full), period)
            wanted.append([*(min(need + extra, most) for need in needed[:-1]), min(needed[-1], most)])
        flights = [[1] * len(shared.stages) for shared in draft]
        for places in _places(draft).values():
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
        return tuple(tuple(accumulate(row, min)) for row in flights)

    def _spare(self, places: Iterable[tuple[int, int, SharedPipeline]]) -> float:
        """Return the bytes left on a device with one microbatch of each of its stages in flight."""
        stages = [(shared.stages[index], shared.microbatch_size) for _, index, shared in places]
        key = tuple(sorted((s.start, s.stop, samples, s.recompute) for s, samples in stages))
        if key not in self._least:
            shapes = [self._shape(stage, samples, 1) for stage, samples in stages]
            self._least[key] = device_memory(self.costs.problem.profile, shapes).total_bytes
        return stages[0][0].device.usable_bytes - self._least[key]

    def _more_bytes(self, stage: TimedStage, samples: int, in_flight: int) -> float:
        """Return the bytes of one more microbatch than are in flight."""
        flight = in_flight if stage.recompute else 1
        return self._alone_bytes(stage, samples, flight + 1) - self._alone_bytes(stage, samples, flight)

    def _alone_bytes(self, stage: TimedStage, samples: int, in_flight: int) -> float:
        shape = self._shape(stage, samples, in_flight)
        if shape not in self._alone:
            self._alone[shape] = device_memory(self.costs.problem.profile, [shape]).total_bytes
        return self._alone[shape]

    def _shape(self, stage: TimedStage, samples: int, in_flight: int) -> StageShape:
        planned = stage.planned(self.costs, samples, in_flight)
        again, each = planned.recompute, planned.segment_layers
        return StageShape(*planned.layers, in_flight, samples, again, segment_layers=each)

    def _estimate_s(
        self, plan: Plan, draft: Draft, seconds: Sequence[Seconds], loads: dict[str, float]
    ) -> float:
        """Return the seconds of a step: the largest load of a device, and the way there and back.

        A device's gradient sync hides behind the way back to the first stage. Pipelines take no less than
        their round trips over in_flight, links no less than their messages.
        """
        before_s: dict[str, float] = {}  # by device, from the first stage to its earliest stage
        after_s: dict[str, float] = {}  # by device, back from there to the first stage
        bound_s = 0.0
        for shared, full, pipeline in zip(draft, seconds, plan.pipelines, strict=True):
            ahead_s = behind_s = 0.0
            transfers_s = _transfers_s(full)
            round_trip_s = sum(_busy_s(full)) + sum(_round_trips_s(full))
            count = shared.num_samples / shared.microbatch_size
            for index, stage in enumerate(shared.stages):
                name = stage.device.name
                before_s[name] = min(ahead_s, before_s.get(name, ahead_s))
                after_s[name] = min(behind_s, after_s.get(name, behind_s))
                bound_s = max(bound_s, ahead_s + behind_s + count * round_trip_s / pipeline.in_flight(index))
                if index < len(transfers_s):
                    forward_transfer_s, backward_transfer_s, occupied_s = transfers_s[index]
                    forward_s, backward_s = full.forward_s[index], full.backward_s[index]
                    ahead_s += forward_s + forward_transfer_s
                    behind_s += backward_s + backward_transfer_s
                    round_trip_s -= forward_s + forward_transfer_s + backward_s + backward_transfer_s
                    bound_s = max(bound_s, ahead_s + behind_s + (count - 1) * occupied_s)
        bound_s = max(bound_s, self._network_s(draft))
        sync_s = self._sync.of_plan_s(plan)
        step_s = max(
            before_s[name] + load_s + max(after_s[name], sync_s.get(name, 0.0))
            for name, load_s in loads.items()
        )
        cluster, prices = self.costs.problem.cluster, self.costs.prices
        optimizer_s = max(prices.optimizer_s(cluster.device(name), plan.layers_of(name)) for name in loads)
        norm_s = self._sync.ring_s(NORM_BYTES, plan.device_names)
        return max(step_s, bound_s) + optimizer_s + norm_s

    def _network_s(self, draft: Draft) -> float:
        """Return the seconds for which the busiest link or network card carries the messages of a step."""
        loads: dict[int, float] = {}
        network, prices = self.costs.network, self.costs.prices
        for shared in draft:
            for left, right in pairwise(shared.stages):
                one, other = left.device.name, right.device.name
                if one == other:
                    continue
                num_bytes = prices.boundary_bytes(right.start, shared.num_samples)
                for route in (network.route(one, other), network.route(other, one)):
                    seconds = route.link.occupancy_s(num_bytes)
                    for resource in route.resources:
                        loads[resource] = loads.get(resource, 0.0) + seconds
        return max(loads.values(), default=0.0)


def _places(draft: Draft) -> dict[str, list[tuple[int, int, SharedPipeline]]]:
    """Return (index of the pipeline, stage, pipeline) by device."""
    found: dict[str, list[tuple[int, int, SharedPipeline]]] = {}
    for index, shared in enumerate(draft):
        for stage, placed in enumerate(shared.stages):
            found.setdefault(placed.device.name, []).append((index, stage, shared))
    return found
