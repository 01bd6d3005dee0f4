"""HetPipe's virtual workers: pipelines of a few devices each, which share the samples of a step.

Source: Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters", USENIX ATC
2020, sections 3 (allocation of GPUs to virtual workers) and 7 (partition of the model inside one).

What differs: steps are synchronous, all workers sum their gradients after each; theirs go on with weights
that are stale by so many waves (wave synchronous parallel), through parameter servers. As a fast worker there
does more waves, it gets more samples here, so that all end together. Inside a worker the cuts are those of
`partition.exact.cut_dp` and the orders of devices are few: by memory, by speed both ways, as in the file.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from cost_model.cluster import Cluster, Device
from cost_model.errors import InfeasibleError
from partition.baselines.layer_splits import layer_bytes, proportional_cuts
from partition.baselines.strategy import TooManyDevicesError, least_of
from partition.estimates.batch_split import share_out
from partition.estimates.device_classes import equal_devices
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.ranking import best_plan
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.step_estimate import StepEstimate
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache
from partition.exact.cut_dp import CutOptimizer
from partition.plan import Plan
from partition.problem import Evaluate, Problem

Workers = list[tuple[Device, ...]]
Allocation = Callable[[Cluster], Workers]


def node_partition(cluster: Cluster) -> Workers:
    """Return a worker for each node (NP)."""
    return [node.devices for node in cluster.nodes if node.devices]


def equal_distribution(cluster: Cluster) -> Workers:
    """Return workers that have one device of each node, as far as there are enough (ED)."""
    nodes = node_partition(cluster)
    longest = max(map(len, nodes))
    return [tuple(node[place] for node in nodes if place < len(node)) for place in range(longest)]


def hybrid_distribution(cluster: Cluster, speed_of: Callable[[Device], float]) -> Workers:
    """Return two workers for each pair of a fast and a slow node, with half of both (HD).

    The fastest node goes with the slowest; one is left alone where their number is odd. One worker where a
    node of the pair has a single device.
    """
    nodes = sorted(node_partition(cluster), key=lambda node: -sum(map(speed_of, node)))
    workers: Workers = []
    while nodes:
        pair = [nodes.pop(0), *nodes[-1:]]
        del nodes[-1:]
        count = min(2, *map(len, pair)) if len(pair) > 1 else 1
        workers += [tuple(d for node in pair for d in node[part::count]) for part in range(count)]
    return workers


def hetpipe_np(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Make a pipeline of each node; see `node_partition`."""
    return _planned("hetpipe-np", problem, evaluate, node_partition)


def hetpipe_ed(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Make equal pipelines, each with one device of every node; see `equal_distribution`."""
    return _planned("hetpipe-ed", problem, evaluate, equal_distribution)


def hetpipe_hd(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Make pipelines of fast and slow nodes in pairs; see `hybrid_distribution`."""
    costs, size = PipelineCosts(problem), min(problem.microbatch_sizes)
    layers = problem.profile.num_layers

    def speed_of(device: Device) -> float:
        seconds = costs.busy_s(device, 0, layers, size)
        return 1 / seconds if seconds else 1.0

    return _planned("hetpipe-hd", problem, evaluate, partial(hybrid_distribution, speed_of=speed_of))


def _planned(name: str, problem: Problem, evaluate: Evaluate | None, allocate: Allocation) -> Plan:
    """Return the best plan of these workers over microbatch sizes.

    Raises: TooManyDevicesError where a worker has more devices than there are layers; InfeasibleError of the
        size that lacks least.
    """
    workers, num_layers = allocate(problem.cluster), problem.profile.num_layers
    longest = max(map(len, workers))
    if longest > num_layers:
        raise TooManyDevicesError(
            f"{name}: a virtual worker of {longest} devices for the {num_layers} layers of "
            f"{problem.profile.model!r}, each needs one; let `auto` choose"
        )
    costs = PipelineCosts(problem)
    cut = CutOptimizer(ProblemTables(problem, equal_devices(problem.cluster)), TimingCache(costs))
    estimate, estimated, errors = StepEstimate(costs), [], []
    for size in sorted({min(size, problem.global_batch_size) for size in problem.microbatch_sizes}):
        share = -(-problem.global_batch_size // len(workers))
        try:
            timed = [_worker(name, cut, costs, worker, size, share) for worker in workers]
        except InfeasibleError as error:
            errors.append(error.with_traceback(None))  # which has this frame, that has all errors
            continue
        _, shares = share_out(timed, problem.global_batch_size)
        if not any(shares):
            continue
        pairs = zip(timed, shares, strict=True)
        plan = problem.plan(name, tuple(each.pipeline(samples) for each, samples in pairs if samples))
        estimated.append((estimate.estimate_s(plan), plan))
    if estimated:
        return best_plan(problem, evaluate, estimated)
    raise least_of(name, errors)


def _worker(
    name: str, cut: CutOptimizer, costs: PipelineCosts, devices: Sequence[Device], size: int, share: int
) -> TimedPipeline:
    """Return the soonest pipeline over the devices of a worker.

    Raises: InfeasibleError if no order fits, of layers in proportion to memory.
    """
    orders = list(_orders(devices, costs, size))
    made = [cut.recut(order, size, share, recompute=False) for order in orders]
    found = [each for each in made if each is not None]
    if found:
        return min(found, key=lambda each: each.timing.time_s(share))
    order = orders[0]
    cuts = proportional_cuts(layer_bytes(costs.problem, size), [device.usable_bytes for device in order])
    stages = [TimedStage(device, *cut) for device, cut in zip(order, pairwise(cuts), strict=True)]
    lacking = costs.shortfall(tuple((each.device, each.start, each.stop) for each in stages), size)
    if lacking is None:
        return cut.timings.pipeline(stages, size)
    raise InfeasibleError(
        f"{name}: {lacking}, with layers in proportion to memory; let `auto` choose the devices",
        device=lacking.device,
        missing_bytes=lacking.missing_bytes,
    )


def _orders(devices: Sequence[Device], costs: PipelineCosts, size: int) -> Iterator[tuple[Device, ...]]:
    """Give the devices by memory, by speed both ways and as they are; alike orders once."""
    layers = costs.problem.profile.num_layers

    def seconds(device: Device) -> float:
        return costs.busy_s(device, 0, layers, size)

    orders = (
        sorted(devices, key=lambda device: -device.usable_bytes),
        sorted(devices, key=seconds),
        sorted(devices, key=lambda device: -seconds(device)),
        list(devices),
    )
    distinct = {
        tuple((d.kind, d.speed, d.usable_bytes, d.node) for d in order): order for order in reversed(orders)
    }
    yield from (tuple(order) for order in reversed(distinct.values()))
