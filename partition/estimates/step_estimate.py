"""The closed-form seconds of a step of any plan, whether its pipelines share devices or not.

Between the two only `_apart_s` and `_crossing_s` differ: what a device waits in one pipeline it computes for
another, so that Z of each alone says little where devices are shared.
"""

from collections.abc import Sequence
from itertools import pairwise

from cost_model.memory import trained_bytes
from cost_model.network import NORM_BYTES
from partition.estimates.closed_forms import makespan_bound_s
from partition.estimates.gradient_sync import SyncCosts
from partition.estimates.host_moves import moves_added_s, plan_step_s
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import stepped_bytes
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache, timed_stages
from partition.plan import Plan

Timed = Sequence[tuple[TimedPipeline, int]]
"""Pipelines, and the samples of each."""


class StepEstimate:
    """Estimates of the plans of one problem; remembers the timings of pipelines and the bytes of sums."""

    def __init__(self, costs: PipelineCosts) -> None:
        self.costs, self._sync = costs, SyncCosts(costs)
        self._timings = TimingCache(costs)

    def estimate_s(self, plan: Plan) -> float:
        """Return the closed-form seconds of a step of any plan.

        What pipelines take, with what moves from and to hosts add to the passes of a device
        at most; then the longest optimizer step and the norm.
        """
        timed = self.timed(plan)
        shared = shares_devices(plan)
        if len(plan.pipelines) == 1 and not shared and not plan.offloads:
            ((pipeline, _),) = timed
            return self.alone_s(pipeline, [stage.in_flight for stage in plan.pipelines[0].stages])
        seconds, sync_s = self._crossing_s(plan, timed) if shared else self._apart_s(plan, timed)
        norm_s = self._sync.ring_s(NORM_BYTES, plan.device_names)
        if plan.offloads:
            seconds += moves_added_s(plan, self.costs.prices, self.costs.problem.cluster)
        return seconds + self._optimizer_s(plan) + sync_s + norm_s

    def alone_s(self, pipeline: TimedPipeline, in_flight: Sequence[int]) -> float:
        """Return Z of a pipeline that does the batch, with tied weights' sums, norm and optimizer step."""
        costs, timing = self.costs, pipeline.timing
        layout = tuple((stage.device, stage.start, stage.stop) for stage in pipeline.stages)
        bound_s = timing.bound_s(costs.problem.global_batch_size, in_flight)
        return bound_s + costs.tied_sync_s(layout) + costs.norm_s(pipeline.devices) + timing.optimizer_s

    def pipeline(self, stages: Sequence[TimedStage], microbatch_size: int) -> TimedPipeline:
        """Return stages with their timing."""
        return self._timings.pipeline(stages, microbatch_size)

    def least_s(self, plan: Plan) -> float:
        """Return seconds that no simulated step of a plan undercuts.

        Of its busiest device, and Z of the full microbatches of each pipeline alone: with what is in flight,
        unless devices are shared, whose order may be one of more in flight. Layer by layer none is recomputed
        in front of the first trained one; then no recompute is counted at all.
        """
        timed = self.timed(plan)
        if plan.sharding.by_layer and self.costs.prices.first_trained:
            timed = [(self._without_recompute(pipeline), num_samples) for pipeline, num_samples in timed]
        longest_s, shared = max(busy_s(timed).values()), shares_devices(plan)
        for (pipeline, num_samples), entry in zip(timed, plan.pipelines, strict=True):
            timing, full = pipeline.timing, num_samples // pipeline.microbatch_size
            if not full:
                continue
            flights = [full] * len(entry.stages)
            if not shared:
                first = timing.first_backward
                flights[first:] = [min(stage.in_flight, full) for stage in entry.stages[first:]]
            rest_s = [(full - 1) * max(link[:2]) for link in timing.full.link_s]
            z_s = makespan_bound_s(
                timing.busy_s, timing.round_trips_s, full, link_rest_s=rest_s, in_flight=flights
            )
            longest_s = max(longest_s, z_s)
        return longest_s

    def _without_recompute(self, pipeline: TimedPipeline) -> TimedPipeline:
        stages = [stage._replace(recompute=False) for stage in pipeline.stages]
        return self.pipeline(stages, pipeline.microbatch_size)

    def timed(self, plan: Plan) -> Timed:
        """Return the pipelines of a plan, with their samples."""
        cluster = self.costs.problem.cluster
        return [
            (self.pipeline(timed_stages(cluster, entry), entry.microbatch_size), entry.num_samples)
            for entry in plan.pipelines
        ]

    def _apart_s(self, plan: Plan, timed: Timed) -> tuple[float, float]:
        """Return (longest Z or busiest device, gradient sync after it of who has most of it)."""
        longest_s = max(
            pipeline.timing.bound_s(num_samples, [stage.in_flight for stage in entry.stages])
            for (pipeline, num_samples), entry in zip(timed, plan.pipelines, strict=True)
        )
        sync_s = self._sync.exposed_s([pipeline for pipeline, _ in timed])
        return max(longest_s, *busy_s(timed).values()), sync_s

    def _crossing_s(self, plan: Plan, timed: Timed) -> tuple[float, float]:
        """Return (the largest load of a device, and the way there and back; no sync after it).

        A device's gradient sync hides behind the way back to the first stage. Pipelines take no less than
        their round trips over in_flight, links no less than their messages.
        """
        before_s: dict[str, float] = {}  # by device, from the first stage to its earliest stage
        after_s: dict[str, float] = {}  # by device, back from there to the first stage
        bound_s = self._network_s(timed)
        for (pipeline, num_samples), entry in zip(timed, plan.pipelines, strict=True):
            full, ahead_s, behind_s = pipeline.timing.full, 0.0, 0.0
            round_trip_s = sum(pipeline.timing.busy_s) + sum(pipeline.timing.round_trips_s)
            count = num_samples / pipeline.microbatch_size
            hops = zip(full.forward_s, full.backward_s, (*full.link_s, (0.0,) * 4), strict=True)
            for index, (forward_s, backward_s, link) in enumerate(hops):
                name = pipeline.stages[index].device.name
                before_s[name] = min(ahead_s, before_s.get(name, ahead_s))
                after_s[name] = min(behind_s, after_s.get(name, behind_s))
                flight = entry.in_flight(index) if index >= pipeline.timing.first_backward else count
                bound_s = max(bound_s, ahead_s + behind_s + count * round_trip_s / flight)
                there_s, back_s = forward_s + (link[0] + link[2]), backward_s + (link[1] + link[3])
                ahead_s, behind_s = ahead_s + there_s, behind_s + back_s
                round_trip_s -= there_s + back_s
                bound_s = max(bound_s, ahead_s + behind_s + (count - 1) * max(link[:2]))
        sync_s = self._sync.of_plan_s(plan)
        step_s = max(
            before_s[name] + load_s + max(after_s[name], sync_s.get(name, 0.0))
            for name, load_s in busy_s(timed).items()
        )
        return max(step_s, bound_s), 0.0

    def _optimizer_s(self, plan: Plan) -> float:
        """Return the seconds of the longest optimizer step."""
        problem, longest_s = self.costs.problem, 0.0
        if plan.offloads:
            prices, cluster = self.costs.prices, problem.cluster
            return max(plan_step_s(plan, prices, cluster, name) for name in plan.device_names)
        if plan.state_owners is not None:
            return max(
                self.costs.prices.update_s(
                    problem.cluster.device(name), stepped_bytes(plan, problem.profile, name)
                )
                for name in plan.device_names
            )
        whole = trained_bytes(problem.profile, range(plan.num_layers))
        for name in plan.device_names:
            device = problem.cluster.device(name)
            if self.costs.prices.update_s(device, whole) > longest_s:  # else no layers would be longer
                longest_s = max(longest_s, self.costs.prices.optimizer_s(device, plan.layers_of(name)))
        return longest_s

    def _network_s(self, timed: Timed) -> float:
        """Return the seconds for which the busiest link or network card carries the messages of a step."""
        loads: dict[int, float] = {}
        network, prices = self.costs.network, self.costs.prices
        for pipeline, num_samples in timed:
            for left, right in pairwise(pipeline.stages):
                one, other = left.device.name, right.device.name
                if one == other:
                    continue
                num_bytes = prices.boundary_bytes(right.start, num_samples, left.device, right.device)
                back = [network.route(other, one)] if prices.takes_gradient(right.start) else []
                for route in (network.route(one, other), *back):
                    seconds = route.link.occupancy_s(num_bytes)
                    for resource in route.resources:
                        loads[resource] = loads.get(resource, 0.0) + seconds
        return max(loads.values(), default=0.0)


def shares_devices(plan: Plan) -> bool:
    """Return whether a device has several stages of a plan."""
    return sum(len(pipeline.stages) for pipeline in plan.pipelines) > len(plan.device_names)


def busy_s(timed: Timed) -> dict[str, float]:
    """Return the seconds for which each device computes in a step."""
    seconds: dict[str, float] = {}
    for pipeline, num_samples in timed:
        for stage, spent in zip(pipeline.stages, pipeline.timing.total_s(num_samples), strict=True):
            seconds[stage.device.name] = seconds.get(stage.device.name, 0.0) + spent
    return seconds
