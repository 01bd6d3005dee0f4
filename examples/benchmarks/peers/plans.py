"""The plans of the contenders: the strategies of the planner, and those of two papers rebuilt."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from cost_model.memory import StageShape, device_memory
from hetpipe.simulation.prediction import evaluator
from partition.baselines.data_parallel import ddp, poplar
from partition.baselines.layer_splits import gpipe_even, proportional_cuts, single, torchgpipe
from partition.estimates.batch_split import share_out
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import memory_on
from partition.estimates.timed_pipeline import TimedStage, TimingCache
from partition.plan import Pipeline, Plan
from partition.problem import Problem
from partition.solver import solve

Cut = Callable[[Problem, Sequence[Device]], list[int]]
"""The cuts, ends included, of a pipeline over devices."""

SHOWN = 3
"""Of each depth so many groupings are shown to the simulator, the best by the time without gradient sync."""


def even_layers(problem: Problem, devices: Sequence[Device]) -> list[int]:
    num_layers = problem.profile.num_layers
    return [stage * num_layers // len(devices) for stage in range(len(devices) + 1)]


def layers_by_memory(problem: Problem, devices: Sequence[Device]) -> list[int]:
    """In proportion to usable memory; layers weigh their states and one sample."""
    shapes = [StageShape(layer, layer + 1, 1, 1) for layer in range(problem.profile.num_layers)]
    weights = [device_memory(problem.profile, [shape]).total_bytes for shape in shapes]
    return proportional_cuts(weights, [device.usable_bytes for device in devices])


def grouped(name: str, cut: Cut) -> Callable[[Problem], Plan]:
    """The best way to group all devices into pipelines of one depth, which share the batch as they are fast.

    Every depth and every grouping is tried, exchangeable devices told apart by nothing.
    """

    def plan(problem: Problem) -> Plan:
        evaluate = evaluator(problem.profile, problem.cluster)
        timings = TimingCache(PipelineCosts(problem))
        devices, batch = problem.cluster.devices, problem.global_batch_size
        shown: list[Plan] = []
        for depth in range(1, len(devices) + 1):
            found: list[tuple[float, Plan]] = []
            for groups in _groupings(devices, depth):
                for size in problem.microbatch_sizes:
                    timed = [timings.pipeline(_stages(problem, group, cut), size) for group in groups]
                    if all(pipeline.timing.fits for pipeline in timed):
                        step_s, shares = share_out(timed, batch)
                        pairs = zip(timed, shares, strict=True)
                        pipelines = tuple(pipeline.pipeline(share) for pipeline, share in pairs if share)
                        found.append((step_s, Plan(name, problem.profile.model, batch, pipelines)))
            found.sort(key=lambda entry: entry[0])
            shown += [entry for _, entry in found[:SHOWN]]
        if not shown:
            raise InfeasibleError(f"{name}: the model fits in no grouping of the devices")
        return min(shown, key=lambda entry: evaluate(entry).step_s)

    return plan


def _groupings(devices: Sequence[Device], depth: int) -> Iterator[list[Sequence[Device]]]:
    """The devices in pipelines of `depth` each; nothing where they do not divide."""
    if len(devices) % depth:
        return
    seen: set[object] = set()
    for order in itertools.permutations(devices):
        groups = [order[start : start + depth] for start in range(0, len(order), depth)]
        key = tuple(sorted(tuple(device.device_class for device in group) for group in groups))
        if key not in seen:
            seen.add(key)
            yield groups


def _stages(problem: Problem, group: Sequence[Device], cut: Cut) -> list[TimedStage]:
    pairs = itertools.pairwise(cut(problem, group))
    return [TimedStage(device, *layers) for device, layers in zip(group, pairs, strict=True)]


def ours(problem: Problem) -> Plan:
    return solve(problem, evaluator(problem.profile, problem.cluster))


def with_flights(plan: Plan, *, gpipe: bool) -> Plan:
    """One pipeline's plan as Schedule1F1B runs it (warmup by distance from the end), or as GPipe does."""
    pipeline = plan.pipelines[0]
    count, last = pipeline.num_microbatches, len(pipeline.stages)
    stages = tuple(
        replace(stage, in_flight=count if gpipe else last - index)
        for index, stage in enumerate(pipeline.stages)
    )
    changed = Pipeline(pipeline.microbatch_size, pipeline.num_samples, stages)
    return Plan(plan.strategy, plan.model, plan.global_batch_size, (changed,))


def checked(plan: Plan, problem: Problem) -> Plan:
    """The plan, if it fits.

    Raises: InfeasibleError if it does not.
    """
    for name in plan.device_names:
        device = problem.cluster.device(name)
        need = memory_on(plan, problem.profile, device).total_bytes
        if need > device.usable_bytes:
            raise InfeasibleError(f"{name} lacks {need - device.usable_bytes:,.0f} bytes")
    return plan


PLANS: Mapping[str, Callable[[Problem], Plan]] = {
    "ours": ours,
    "torch 1F1B, even": lambda problem: with_flights(_judged(gpipe_even, problem), gpipe=False),
    "torch 1F1B, balanced": lambda problem: with_flights(_judged(torchgpipe, problem), gpipe=False),
    "torchgpipe": lambda problem: with_flights(_judged(torchgpipe, problem), gpipe=True),
    "DDP, equal": lambda problem: ddp(problem),
    "DDP, Poplar": lambda problem: poplar(problem),
    "one device": lambda problem: single(problem),
    "as Sailor": grouped("as Sailor", even_layers),
    "as HexiScale": grouped("as HexiScale", layers_by_memory),
}
"""By contender, in the order of the table."""


def _judged(strategy: Callable[..., Plan], problem: Problem) -> Plan:
    return strategy(problem, evaluator(problem.profile, problem.cluster))
