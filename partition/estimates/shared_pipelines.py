"""Pipelines that may share devices, before their in_flight is known: what fits, and a cheap estimate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cost_model.memory import StageShape, device_memory
from cost_model.network import NORM_BYTES
from partition.estimates.closed_forms import in_flight_windows
from partition.estimates.gradient_sync import SyncCosts
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedStage
from partition.plan import Pipeline, Plan, Stage

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


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Of one microbatch: forward and backward per stage, links (there, back, slower one's occupation)."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    links_s: tuple[tuple[float, float, float], ...]

    @property
    def busy_s(self) -> list[float]:
        return [sum(pair) for pair in zip(self.forward_s, self.backward_s, strict=True)]

    @property
    def hops_s(self) -> list[float]:
        return [there + back for there, back, _ in self.links_s]


class SharedPipelineCosts:
    """Turns drafts into plans; remembers the prices of stages."""

    def __init__(self, costs: PipelineCosts) -> None:
        self.costs, self._sync = costs, SyncCosts(costs)
        self._stage_s: dict[tuple[str, float, int, int, int, bool], tuple[float, float]] = {}
        self._least: dict[object, float] = {}
        self._more: dict[tuple[int, int, int, bool], float] = {}

    def plans(self, draft: Draft) -> list[tuple[float, Plan]]:
        """(estimate in seconds, plan) with what it needs in flight and a little more, as far as memory goes.

        Empty where memory does not take one microbatch of each pipeline.
        """
        if not self.fits(draft):
            return []
        seconds = [self._seconds(entry, entry.microbatch_size) for entry in draft]
        loads = self._loads(draft, seconds)
        step_s = max(loads.values())
        tries = dict.fromkeys(self._flights(draft, seconds, step_s, extra) for extra in EXTRA_IN_FLIGHT)
        plans = [self._plan(draft, flights) for flights in tries]
        return [(self._estimate_s(plan, draft, seconds, loads), plan) for plan in plans]

    def _plan(self, draft: Draft, flights: Flights) -> Plan:
        pipelines = tuple(
            Pipeline(
                min(entry.microbatch_size, entry.num_samples),
                entry.num_samples,
                tuple(
                    Stage((stage.device.name,), (stage.start, stage.stop), flight, stage.recompute)
                    for stage, flight in zip(entry.stages, row, strict=True)
                ),
            )
            for entry, row in zip(draft, flights, strict=True)
        )
        problem = self.costs.problem
        return Plan("auto", problem.profile.model, problem.global_batch_size, pipelines)

    def fits(self, draft: Draft) -> bool:
        """Whether memory takes one microbatch of each pipeline."""
        return all(self._spare(places) >= 0 for places in _places(draft).values())

    def _seconds(self, pipeline: SharedPipeline, samples: int) -> _Seconds:
        busy = [self._busy(stage, samples) for stage in pipeline.stages]
        links = []
        for left, right in pairwise(pipeline.stages):
            if left.device.name == right.device.name:
                links.append((0.0, 0.0, 0.0))
                continue
            there, back, latency, latency_back = self.costs.message_s(
                left.device, right.device, right.start, samples
            )
            links.append((there + latency, back + latency_back, max(there, back)))
        return _Seconds(tuple(f for f, _ in busy), tuple(b for _, b in busy), tuple(links))

    def _busy(self, stage: TimedStage, samples: int) -> tuple[float, float]:
        """Seconds of forward and backward of one microbatch."""
        device = stage.device
        key = (device.kind, device.speed, stage.start, stage.stop, samples, stage.recompute)
        if key not in self._stage_s:
            prices = self.costs.prices
            self._stage_s[key] = (
                prices.forward_s(device, stage.start, stage.stop, samples),
                prices.backward_s(device, stage.start, stage.stop, samples, recompute=stage.recompute),
            )
        return self._stage_s[key]

    def _loads(self, draft: Draft, seconds: Sequence[_Seconds]) -> dict[str, float]:
        """Seconds for which each device computes in a step."""
        loads: dict[str, float] = {}
        for entry, full in zip(draft, seconds, strict=True):
            whole, rest = divmod(entry.num_samples, entry.microbatch_size)
            for stage, busy in zip(entry.stages, full.busy_s, strict=True):
                load = whole * busy + (sum(self._busy(stage, rest)) if rest else 0.0)
                loads[stage.device.name] = loads.get(stage.device.name, 0.0) + load
        return loads

    def _flights(self, draft: Draft, seconds: Sequence[_Seconds], step_s: float, extra: int) -> Flights:
        """in_flight of all stages: what a step of step_s needs and `extra`, as far as memory allows it.

        A pipeline's period is the step over its microbatches. Each device begins with 1 for every stage and
        gives what is left to the stage that has the smallest part of what it needs.
        """
        wanted = []
        for entry, full in zip(draft, seconds, strict=True):
            most = min(entry.num_microbatches, MOST_IN_FLIGHT)
            period = step_s / entry.num_microbatches
            needed = (1,) * len(entry.stages)
            if period > 0:
                needed = in_flight_windows(full.busy_s, full.hops_s, period)
            wanted.append([*(min(need + extra, most) for need in needed[:-1]), min(needed[-1], most)])
        flights = [[1] * len(entry.stages) for entry in draft]
        for places in _places(draft).values():
            spare = self._spare(places)
            growing = {
                (pipeline, stage): self._more_bytes(entry.stages[stage], entry.microbatch_size)
                for pipeline, stage, entry in places
            }
            while growing:
                pipeline, stage = least = min(
                    growing, key=lambda at: flights[at[0]][at[1]] / wanted[at[0]][at[1]]
                )
                if flights[pipeline][stage] >= wanted[pipeline][stage] or growing[least] > spare:
                    del growing[least]
                    continue
                flights[pipeline][stage] += 1
                spare -= growing[least]
        return tuple(tuple(accumulate(row, min)) for row in flights)

    def _spare(self, places: Iterable[tuple[int, int, SharedPipeline]]) -> float:
        """Bytes left on a device with one microbatch of each of its stages in flight."""
        stages = [(entry.stages[index], entry.microbatch_size) for _, index, entry in places]
        key = tuple(sorted((s.start, s.stop, samples, s.recompute) for s, samples in stages))
        if key not in self._least:
            shapes = [StageShape(start, stop, 1, samples, again) for start, stop, samples, again in key]
            self._least[key] = device_memory(self.costs.problem.profile, shapes).total_bytes
        return stages[0][0].device.usable_bytes - self._least[key]

    def _more_bytes(self, stage: TimedStage, samples: int) -> float:
        """Bytes of one more microbatch in flight."""
        key = (stage.start, stage.stop, samples, stage.recompute)
        if key not in self._more:
            one, two = (
                device_memory(
                    self.costs.problem.profile,
                    [StageShape(stage.start, stage.stop, flight, samples, stage.recompute)],
                ).total_bytes
                for flight in (1, 2)
            )
            self._more[key] = two - one
        return self._more[key]

    def _estimate_s(
        self, plan: Plan, draft: Draft, seconds: Sequence[_Seconds], loads: dict[str, float]
    ) -> float:
        """Seconds of a step: the largest of the devices' loads, each with the way there and back.

        A device's gradient sync hides behind the way back to the first stage. Pipelines take no less than
        their round trips over in_flight, links no less than their messages.
        """
        there: dict[str, float] = {}
        home: dict[str, float] = {}
        bound = 0.0
        for entry, full, made in zip(draft, seconds, plan.pipelines, strict=True):
            ahead = behind = 0.0
            trip = sum(full.busy_s) + sum(full.hops_s)
            count = entry.num_samples / entry.microbatch_size
            for index, stage in enumerate(entry.stages):
                name = stage.device.name
                there[name] = min(ahead, there.get(name, ahead))
                home[name] = min(behind, home.get(name, behind))
                bound = max(bound, ahead + behind + count * trip / made.in_flight(index))
                if index < len(full.links_s):
                    out, back, occupied = full.links_s[index]
                    ahead += full.forward_s[index] + out
                    behind += full.backward_s[index] + back
                    trip -= full.forward_s[index] + out + full.backward_s[index] + back
                    bound = max(bound, ahead + behind + (count - 1) * occupied)
        bound = max(bound, self._network_s(draft))
        sync = self._sync.of_plan_s(plan)
        step = max(there[name] + load + max(home[name], sync.get(name, 0.0)) for name, load in loads.items())
        cluster, prices = self.costs.problem.cluster, self.costs.prices
        optimizer = max(prices.optimizer_s(cluster.device(name), plan.layers_of(name)) for name in loads)
        norm = self._sync.ring_s(NORM_BYTES, plan.device_names)
        return max(step, bound) + optimizer + norm

    def _network_s(self, draft: Draft) -> float:
        """Seconds for which the busiest link or network card carries the messages of a step."""
        loads: dict[int, float] = {}
        network, prices = self.costs.network, self.costs.prices
        for entry in draft:
            for left, right in pairwise(entry.stages):
                one, other = left.device.name, right.device.name
                if one == other:
                    continue
                num_bytes = prices.boundary_bytes(right.start, entry.num_samples)
                for route in (network.route(one, other), network.route(other, one)):
                    seconds = route.link.occupancy_s(num_bytes)
                    for resource in route.resources:
                        loads[resource] = loads.get(resource, 0.0) + seconds
        return max(loads.values(), default=0.0)


def _places(draft: Draft) -> dict[str, list[tuple[int, int, SharedPipeline]]]:
    """(index of the pipeline, stage, pipeline) of each device."""
    found: dict[str, list[tuple[int, int, SharedPipeline]]] = {}
    for index, entry in enumerate(draft):
        for stage, placed in enumerate(entry.stages):
            found.setdefault(placed.device.name, []).append((index, stage, entry))
    return found
