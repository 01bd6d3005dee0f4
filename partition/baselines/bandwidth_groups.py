"""Devices grouped by what is between them: fast links sum in HexiScale, and split samples in Zorse.

Both cut the graph of the devices by bandwidth. Networks here have two levels, inside nodes and between them,
so that the cuts are known: what shares a node belongs together, or must be parted.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, pairwise

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from partition.baselines.drafts import Drafts, check_few_devices
from partition.baselines.layer_splits import layer_bytes, proportional_cuts
from partition.baselines.strategy import TooManyDevicesError, least_of, missing_bytes
from partition.baselines.whole_models import sharded
from partition.estimates.batch_split import in_proportion, share_out
from partition.estimates.group_sharding import roomier_plans, sharded_plans
from partition.estimates.pipeline_costs import Layout, PipelineCosts
from partition.estimates.ranking import best_plan
from partition.estimates.shared_pipelines import Draft, SharedLayers, refined
from partition.estimates.step_estimate import StepEstimate
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache
from partition.plan import Plan
from partition.problem import Evaluate, Problem


def hexiscale(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Make pipelines of unlike devices that take layers by memory, so that sums pass the fast links.

    HexiScale, FlashFlex before (Yan et al., arXiv 2409.01143, 2024): METIS parts the graph into pipelines
    with bandwidths reversed, then each pipeline into stages; a path goes along fast links; layers are in
    proportion to memory. Here the devices of a node are dealt out to the pipelines, and stand in a row in
    each; their numbers are powers of two, where the paper moves up and down at random. Shares end together,
    where theirs are given by hand. No tensor is sharded, so that their gain by it is not in here.

    Raises: TooManyDevicesError where no number of pipelines leaves each device a layer; InfeasibleError of
        the variant that lacks least.
    """
    devices, num_layers = problem.cluster.devices, problem.profile.num_layers
    counts = [count for count in _powers_of_two(len(devices)) if len(devices) <= count * num_layers]
    if not counts:
        raise TooManyDevicesError(
            f"hexiscale: no power of two of pipelines leaves each of {len(devices)} devices one of the "
            f"{num_layers} layers; let `auto` choose"
        )
    costs, estimated, errors = PipelineCosts(problem), [], []
    timings, estimate, batch = TimingCache(costs), StepEstimate(costs), problem.global_batch_size
    weights = {
        size: tuple(layer_bytes(problem, size)) for size in {min(s, batch) for s in problem.microbatch_sizes}
    }
    for count in counts:
        dealt = [devices[place::count] for place in range(count)]
        shared: list[tuple[float, int, list[TimedPipeline], list[int]]] = []
        for size in sorted(weights):
            timed = [_by_memory(timings, order, weights[size], size) for order in dealt]
            if all(each.timing.fits for each in timed):
                step_s, shares = share_out(timed, batch)
                shared += [(step_s, size, timed, shares)] if any(shares) else []
            elif lacking := _lacking(timed, costs, size):
                errors.append(lacking)
        if shared:  # the soonest without sums, which are the same whatever the size
            _, _, timed, shares = min(shared, key=lambda entry: entry[:2])
            pairs = zip(timed, shares, strict=True)
            plan = problem.plan("hexiscale", tuple(each.pipeline(own) for each, own in pairs if own))
            estimated.append((estimate.estimate_s(plan), plan))
    if estimated:
        return best_plan(problem, evaluate, estimated)
    raise least_of("hexiscale", errors)


def zorse(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Make a stage of nodes near each other, whose devices share its samples by speed.

    Zorse (Guo et al., arXiv 2507.10392, 2025): groups by a cut of the bandwidths, data parallel inside (ZeRO
    stage 2) with microbatches in proportion to speed; a group gets layers in proportion to its speed. Here
    groups are runs of nodes of about equal speed, of every number up to that of nodes or layers; a
    device has samples, not a part of each microbatch. Devices of a group shard its optimizer states (stage
    1), or nothing, whichever is soonest: stage 2 here sums in each microbatch, where Zorse computes a layer
    for all of them and sums once. So gradients, or weights too, are sharded only where nothing else fits, and
    each device serves one pipeline, as `Plan` asks for. Parameters in host memory are not here.

    Raises: TooManyDevicesError where there are too many; InfeasibleError of the variant that lacks least.
    """
    check_few_devices("zorse", problem)
    drafts = _in_groups(problem)
    with suppress(InfeasibleError):
        drafts.enter_plan(sharded(problem, lambda smaller: _in_groups(smaller).best(None)))
    if not drafts.plans:
        for plan in chain(*(of(problem, _plans_in_groups) for of in (sharded_plans, roomier_plans))):
            drafts.enter_plan(plan)
    return drafts.best(evaluate)


def _plans_in_groups(problem: Problem) -> list[Plan]:
    return _in_groups(problem).plans


def _in_groups(problem: Problem) -> Drafts:
    drafts = Drafts("zorse", problem)
    for size in sorted({min(size, problem.global_batch_size) for size in problem.microbatch_sizes}):
        for groups in _groups(problem, drafts.costs, size):
            drafts.enter(_stages_of(problem, drafts.costs, groups, size))
    return drafts


def _groups(problem: Problem, costs: PipelineCosts, size: int) -> Iterator[list[list[Device]]]:
    """Give the devices in runs of nodes, of every number that leaves each a layer."""
    nodes = [node.devices for node in problem.cluster.nodes if node.devices]
    weights = [sum(_speed(costs, device, size) for device in node) for node in nodes]
    for count in range(1, min(len(nodes), problem.profile.num_layers) + 1):
        cuts = proportional_cuts(weights, [1.0] * count)
        yield [[d for node in nodes[start:stop] for d in node] for start, stop in pairwise(cuts)]


def _stages_of(
    problem: Problem, costs: PipelineCosts, groups: Sequence[Sequence[Device]], size: int
) -> Draft:
    """Return a stage for each group: layers by its speed, samples of a device by its own."""
    first = groups[0][0]
    layers = range(problem.profile.num_layers)
    weights = [costs.busy_s(first, layer, layer + 1, size) for layer in layers]
    speeds = [[_speed(costs, device, size) for device in group] for group in groups]
    cuts = proportional_cuts(weights, list(map(sum, speeds)))
    batch = problem.global_batch_size
    rows = [
        SharedLayers(start, stop, tuple(zip(group, in_proportion(own, batch), strict=True)))
        for (start, stop), group, own in zip(pairwise(cuts), groups, speeds, strict=True)
    ]
    return refined(rows, size)


def _speed(costs: PipelineCosts, device: Device, size: int) -> float:
    """Return how often a second a device could pass a microbatch through the whole model."""
    seconds = costs.busy_s(device, 0, costs.problem.profile.num_layers, size)
    return 1 / seconds if seconds else 1.0


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _by_memory(
    timings: TimingCache, devices: Sequence[Device], weights: tuple[float, ...], size: int
) -> TimedPipeline:
    """Return a pipeline whose layers, of these weights, are in proportion to memory."""
    cuts = pairwise(_cuts(weights, tuple(device.usable_bytes for device in devices)))
    return timings.pipeline([TimedStage(d, *cut) for d, cut in zip(devices, cuts, strict=True)], size)


@lru_cache(maxsize=1_000)
def _cuts(weights: tuple[float, ...], shares: tuple[float, ...]) -> Sequence[int]:
    """Return `proportional_cuts`; of thousands of pipelines most have the same."""
    return proportional_cuts(weights, shares)


def _lacking(timed: Sequence[TimedPipeline], costs: PipelineCosts, size: int) -> InfeasibleError | None:
    """Return the error of the device that lacks most; None where none does."""
    layouts = {id(each.timing): _layout(each) for each in timed}
    found = (costs.shortfall(layout, size) for layout in layouts.values())
    error = max((each for each in found if each is not None), key=missing_bytes, default=None)
    if error is None:
        return None
    return InfeasibleError(
        f"hexiscale: {error}, of layers in proportion to memory; let `auto` choose them",
        device=error.device,
        missing_bytes=error.missing_bytes,
    )


def _layout(pipeline: TimedPipeline) -> Layout:
    return tuple((stage.device, stage.start, stage.stop) for stage in pipeline.stages)
