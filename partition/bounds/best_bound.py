"""Lower bounds on the time of a step: the fractional bound, and which pipeline bound a problem gets."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import pulp

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from cost_model.host_memory import movable_bytes, with_measured_rates
from cost_model.layer_costs import Prices
from cost_model.memory import StageShape, device_memory
from cost_model.profile import ModelProfile
from partition.bounds.card_bound import lone_layer_bound_s, summed_layers_bound_s, whole_pipeline_bound_s
from partition.bounds.card_columns_bound import card_columns_bound_s, device_columns_bound_s
from partition.bounds.column_bound import ColumnBound
from partition.bounds.host_bound import SAFETY, LayerBound, host_bound_s, host_classes
from partition.bounds.merged_classes import merged
from partition.bounds.node_bound import NodeBound
from partition.bounds.sync_tables import SyncTables
from partition.column_generation.master_problem import Limits
from partition.estimates.offloading import has_host_memory
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.step_estimate import shares_devices
from partition.exact.cluster_split import GROWTH, ClusterSplit
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan
from partition.problem import Forced, Problem

PROOF_S = 14.0  # of CPU time that a proof may take, if nobody says otherwise
WITHOUT_SUMS = 0.4  # of it, for the bound without sums where one with them comes behind it
PROOF_S_PER_DEVICE, MOST_PROOF_S = 0.1, 120.0
MUCH_WORK, MOST_WORK = 7e7, 4.2e8  # of the integer bound, a second: else on fewer classes, or not at all
COARSE, FINE_WORK = 10.0, 0.4  # growth of the grid, unless a fine one takes less than this share
SLIGHT, LOST = 0.1, 0.3  # of speed and memory lost by merged classes: for any, and where columns are dear
MANY_CELLS = 15_000  # classes and layers times layers, from which on columns are dear
WHOLE = "whole pipelines, by Z and Little's law"
SYNC_MATTERS = (
    0.01  # of the step, that sums and busy cards add: with less a bound that counts sums is not tried
)


@dataclass(frozen=True, slots=True)
class Bound:
    """The lower bounds for the plans of a problem; pipeline_s is None where it was not worked out.

    held_by: why the pipeline bound did not go on: time, or pipelines that are as good as the bound allows.
    forced: what the plans of the pipeline bounds respect.
    sync_s: the pipeline bound with the sums of gradients between nodes; None where it was not worked out.
    zero: the stage of ZeRO of the plans that these bounds speak about.
    """

    fractional_s: float
    fractional_space: str
    pipeline_s: float | None = None
    pipeline_space: str = ""
    held_by: str = ""
    microbatch_sizes: tuple[int, ...] = ()
    sync_s: float | None = None
    sync_space: str = ""
    forced: Forced = field(default_factory=Forced)
    zero: int = 0

    def of(self, plan: Plan) -> tuple[float, str]:
        """Return (seconds, space) of the best bound that speaks about a plan."""
        found = self.fractional_s, self.fractional_space
        for bound_s, space in ((self.pipeline_s, self.pipeline_space), (self.sync_s, self.sync_space)):
            if bound_s is not None and bound_s > found[0] and self._within(plan):
                found = bound_s, space
        return found

    def with_pipelines(self, problem: Problem, pipeline_s: float, held_by: str, states: str = "") -> "Bound":
        """Return it with a pipeline bound of a problem. states: where those of its plans are, in words."""
        return replace(
            self,
            pipeline_s=pipeline_s,
            pipeline_space=f"{pipeline_space(problem)}, {states}gradient sync excluded",
            held_by=held_by,
            microbatch_sizes=tuple(problem.microbatch_sizes),
            forced=problem.forced,
        )

    def _within(self, plan: Plan) -> bool:
        """Return whether a plan is one of those that the pipeline bound speaks about."""
        return (
            plan.zero == self.zero
            and self.forced.allows(plan)
            and not shares_devices(plan)
            and all(
                pipeline.microbatch_size in self.microbatch_sizes
                or (pipeline.num_microbatches == 1 and pipeline.microbatch_size < max(self.microbatch_sizes))
                for pipeline in plan.pipelines
            )
        )


def best_bound(search: PipelineSearch, *, proof_s: float | None = None, step_s: float | None = None) -> Bound:
    """Return the fractional bound and, within its seconds, the pipeline bounds.

    proof_s: CPU seconds of this process that the pipeline bounds may take, so that what else the machine does
        changes nothing; 0 for none of them, None for what suits the devices.
    step_s: simulated, of the best plan that is known; None leaves out the bound that counts sums.
    """
    problem = search.problem
    fractional_s = fractional_bound_s(problem)
    bound = Bound(fractional_s, bound_space(problem))
    proof_s = proof_seconds(problem) if proof_s is None else proof_s
    if proof_s <= 0 or fractional_s <= 0 or search.best is None:
        return bound
    end_s = time.process_time() + proof_s
    if len(problem.cluster.nodes) == 1 or (step_s or 0.0) <= search.best * (1 + SYNC_MATTERS):
        step_s = None  # there is nothing to count
    most = problem.forced.num_pipelines
    pipeline_s, held_by = pipeline_bound_s(
        search, fractional_s, proof_s if step_s is None else proof_s * WITHOUT_SUMS, most_pipelines=most
    )
    bound = bound.with_pipelines(problem, pipeline_s, held_by)
    if step_s is None:
        return bound
    sync_s = sync_bound_s(search, pipeline_s, step_s, end_s - time.process_time())
    space = f"{pipeline_space(problem, exactly=True)}, optimizer states unsharded, gradient sync included"
    return replace(bound, sync_s=sync_s, sync_space=space)


def proof_seconds(problem: Problem) -> float:
    """Return the CPU seconds that suit a proof for so many devices."""
    return min(MOST_PROOF_S, max(PROOF_S, PROOF_S_PER_DEVICE * len(problem.cluster.devices)))


def offloaded_bound(problem: Problem, *, sharded: bool) -> Bound:
    """Return a bound for plans with optimizer states on hosts; sharded: and between devices, zero 1."""
    if not sharded:
        return Bound(fractional_bound_s(problem), bound_space(problem))
    bound_s = _host_bound_s(problem, sharded=True)
    return Bound(bound_s, f"{bound_space(problem)}, optimizer states sharded")


def pipeline_space(problem: Problem, *, exactly: bool = False) -> str:
    """Name the plans that the pipeline bounds speak about; exactly: of as many pipelines as are forced."""
    sizes = ", ".join(map(str, problem.microbatch_sizes))
    number, pins = problem.forced.num_pipelines, problem.forced.pins
    most = "" if exactly else "at most "
    which = "pipelines" if number is None else f"{most}{number} pipeline{'s' * (number > 1)}"
    kept = " with pinned layers" if pins else ""
    states = " and keep nothing on hosts" if has_host_memory(problem.cluster) else ""
    return f"{which}{kept} that share no device{states}, microbatches of {sizes} and a smaller last one"


def sync_bound_s(search: PipelineSearch, low_s: float, step_s: float, seconds: float) -> float:
    """Return seconds that no plan of pipelines that share no device undercuts, sums between nodes counted.

    Either some layer is on one node only: then all pipelines have a stage there, so there are no more of them
    than a node has devices, and their samples pass its card; no such plan is where more are forced. Or every
    layer is on two nodes or more: then each stage's sums pass its node's card (`SyncTables`), beside the
    samples. The lesser bound holds. What nodes can do, and whole pipelines with the cards that they pass,
    bound both cases.

    low_s: the bound without sums; step_s: of a plan that is known, simulated with its sums.
    """
    end_s, tables = time.process_time() + seconds, _alike_merged(search)
    number = search.problem.forced.num_pipelines
    most = max(len(node.devices) for node in search.problem.cluster.nodes)
    most = most if number is None else min(most, number)
    summed_s = summed_layers_bound_s(tables, low_s, max(low_s, step_s))
    summed_s, _ = pipeline_bound_s(
        search, summed_s, seconds / 8, ceiling_s=step_s, most_pipelines=number, sums=True
    )
    lone_s = max(low_s, lone_layer_bound_s(tables))
    if lone_s < step_s:
        left_s = (end_s - time.process_time()) / 6
        lone_s, _ = pipeline_bound_s(search, lone_s, left_s, ceiling_s=step_s, most_pipelines=most)
    whole_s, high_s = whole_pipeline_bound_s(tables), max(low_s, step_s)
    nodes_end_s = time.process_time() + (end_s - time.process_time()) / 6
    nodes_s = NodeBound(tables).bound_s(summed_s, lone_s, high_s, whole_s, nodes_end_s)
    known_s = max(summed_s, nodes_s), max(lone_s, nodes_s)
    return card_columns_bound_s(tables, known_s, high_s, whole_s, end_s)


def pipeline_bound_s(
    search: PipelineSearch,
    low_s: float,
    seconds: float,
    *,
    ceiling_s: float | None = None,
    most_pipelines: int | None = None,
    sums: bool = False,
) -> tuple[float, str]:
    """Return (seconds, what held the bound): no plan of pipelines that share no device is faster.

    Each device serves one stage of one pipeline. What held it is as in `Bound`.

    Where the device counts allow it the integer bound of `cluster_split`, else the column bound, within a
    time budget. search: it has searched already. low_s: a bound that is known; ceiling_s: where this one
    ends, at the search's best clock if nobody says otherwise. most_pipelines: of the plans it speaks about,
    None for any number. sums: of plans in which every layer is on two nodes or more, sums counted.
    """
    assert search.best is not None
    end_s, alike = time.process_time() + seconds, _alike_merged(search)
    ceiling_s = search.best if ceiling_s is None else ceiling_s
    for plain, growth, most_work in _coarser(search, alike, seconds):
        if ClusterSplit.work(plain, growth) <= most_work:
            tables = SyncTables(plain.problem, plain.classes) if sums else plain
            split = ClusterSplit(tables, ceiling_s, True, growth, Limits(most_pipelines))
            return max(low_s, split.bound_s(low_s, end_s=end_s)), WHOLE
    pool = search.columns.pool if search.columns and not sums else None
    tables = SyncTables(alike.problem, alike.classes) if sums else alike
    if not sums:
        half_s = time.process_time() + (end_s - time.process_time()) / 2
        low_s = device_columns_bound_s(alike, low_s, ceiling_s, half_s)
    proof = ColumnBound(tables, end_s - time.process_time(), pool, most_pipelines=most_pipelines)
    bound_s = proof.bound_s(low_s, ceiling_s)
    return bound_s, "time" if proof.exhausted else "parts of pipelines, by Z and Little's law"


def _alike_merged(search: PipelineSearch) -> ProblemTables:
    """Return tables of the search's classes with equal devices as one class, wherever these are.

    A class has all links that a part of it has, so that a bound holds, and hardly suffers.
    """
    classes = search.classes.merged()
    if len(classes.members) == len(search.classes.members):
        return search.tables
    return ProblemTables(search.problem, classes)


def _coarser(
    search: PipelineSearch, alike: ProblemTables, seconds: float
) -> Iterator[tuple[ProblemTables, float, float]]:
    """Yield (tables, growth of the grid, most work) of integer bounds, the closest first.

    With the classes of the search, then with equal devices as one, then with unequal ones: few of them where
    the column bound, the other one, gets far, and none where each device holds the model alone.
    """
    most_work = MOST_WORK * seconds
    if alike is not search.tables:
        yield search.tables, GROWTH, MUCH_WORK * seconds
    cells = len(alike.classes.members) * alike.num_layers**2
    whole = alike.at(min(search.problem.microbatch_sizes)).caps(recompute=False)[:, 0, -1] >= 1
    fewer = () if whole.all() else merged(alike, LOST if cells > MANY_CELLS else SLIGHT)
    for tables in chain([alike], fewer):
        yield tables, GROWTH, FINE_WORK * most_work
        yield tables, COARSE, most_work


def bound_space(problem: Problem) -> str:
    """Return in words which plans the fractional bound speaks about."""
    hosts = ", optimizer states, frozen weights and saved activations on devices or hosts"
    hosts = hosts if has_host_memory(problem.cluster) else ""
    largest = max(_largest(problem, device.kind) for device in problem.cluster.devices)
    return f"all plans with microbatches up to {largest}{hosts}, gradient sync and transfers excluded"


def _largest(problem: Problem, kind: str) -> int:
    """Return the largest microbatch that a plan may use on a kind; smaller ones occur as a last one."""
    return min(problem.global_batch_size, max(*problem.microbatch_sizes, *problem.sizes_of(kind)))


def fractional_bound_s(problem: Problem) -> float:
    """Return the value of a linear programme: no plan of the batch without recompute is faster.

    It minimises T over shares[layer, class], the fraction of the batch for which a class computes a layer;
    shares of a layer add up to 1. The devices of a class are not busy for longer than count * T: samples at
    the best microbatch size there is (of all, not only those of the problem), and the share of the
    optimizer's work, since who computes a layer holds it whole. Their memory takes the states of their
    shares; where hosts lend memory, optimizer states may be there (`host_bound_s`). Valid for plans that
    share devices too.

    Raises: InfeasibleError if the states of the model do not even fit when cut up at will.
    """
    if has_host_memory(problem.cluster):
        return _host_bound_s(problem, sharded=False)
    groups: dict[tuple[str, float, float], list[Device]] = {}
    for device in problem.cluster.devices:
        groups.setdefault((device.kind, device.speed, device.usable_bytes), []).append(device)
    members = list(groups.values())
    layers, classes = range(problem.profile.num_layers), range(len(members))
    states = [sum(_state_bytes(problem, layer)) for layer in layers]
    usable = [sum(device.usable_bytes for device in group) for group in members]
    if sum(states) > sum(usable):
        raise InfeasibleError(
            f"the states of {problem.profile.model!r} alone need {sum(states):,.0f} bytes, all devices "
            f"together have {sum(usable):,.0f} usable; add a device or memory",
            missing_bytes=sum(states) - sum(usable),
        )
    prices = Prices(problem.profile)
    seconds = [[sum(_seconds(problem, prices, layer, group[0])) for group in members] for layer in layers]
    unit_s = sum(map(min, seconds)) or 1.0
    programme = pulp.LpProblem("fractional", pulp.LpMinimize)
    step = programme.add_variable("step", lowBound=0)
    share = [
        [programme.add_variable(f"share_{layer}_{index}", 0, 1) for index in classes] for layer in layers
    ]
    programme += step
    for layer in layers:
        programme += pulp.lpSum(share[layer]) == 1
    for index, count in enumerate(map(len, members)):
        busy = pulp.lpSum(seconds[layer][index] / unit_s * share[layer][index] for layer in layers)
        held = pulp.lpSum(states[layer] / usable[index] * share[layer][index] for layer in layers)
        programme += busy <= count * step
        programme += held <= 1 + SAFETY
    status = programme.solve(pulp.HiGHS(msg=False))
    assert status == pulp.LpStatusOptimal, pulp.LpStatus[status]
    return max(0.0, float(programme.objective.value()) * unit_s * (1 - SAFETY))


def _host_bound_s(problem: Problem, *, sharded: bool) -> float:
    cluster = with_measured_rates(problem.cluster, problem.profile)
    classes, prices = host_classes(cluster), Prices(problem.profile)
    layers = []
    for layer in range(problem.profile.num_layers):
        seconds = [_seconds(problem, prices, layer, each.devices[0]) for each in classes]
        compute_s, update_s = zip(*seconds, strict=True)
        layers.append(LayerBound(compute_s, update_s, *_state_bytes(problem, layer)))
    return host_bound_s(cluster, classes, layers, sharded=sharded)


def _state_bytes(problem: Problem, layer: int) -> tuple[float, float]:
    """Return bytes of parameters and gradients of a layer, and of its optimizer states, tied ones left out.

    On the kind that needs least.
    """
    kinds = {device.kind for device in problem.cluster.devices}
    held, states = zip(*(_states_on(problem.profile.on(kind), layer) for kind in kinds), strict=True)
    lends = has_host_memory(problem.cluster)
    away = max(movable_bytes(problem.profile.on(kind), layer) for kind in kinds) if lends else 0.0
    return max(0.0, min(held) - away), min(states)


def _states_on(profile: ModelProfile, layer: int) -> tuple[float, float]:
    memory = device_memory(profile, [StageShape(layer, layer + 1, 0, 1)])
    tied = profile.tied_bytes(layer)  # and their gradients
    shared = sum(num_bytes for _, num_bytes in profile.shared_weight_bytes(layer))
    held = memory.parameter_bytes + memory.gradient_bytes - shared - tied
    return held, max(0.0, memory.optimizer_bytes - profile.optimizer_bytes_per_parameter_byte * tied)


def _seconds(problem: Problem, prices: Prices, layer: int, device: Device) -> tuple[float, float]:
    """Return the least seconds that any plan needs for a layer: for the whole batch, for its optimizer step.

    Per-sample seconds fall or rise all the way between two measured sizes, so that the ends are enough.
    """
    profile, batch = problem.profile, problem.global_batch_size
    largest = _largest(problem, device.kind)
    sizes = {1, largest, *(size for size in profile.kind(device.kind).microbatch_sizes if size < largest)}
    forward_backward = min(
        (prices.forward_s(device, layer, layer + 1, size) + prices.backward_s(device, layer, layer + 1, size))
        / size
        for size in sizes
    )
    optimizer = prices.optimizer_s(device, [layer])
    trained = device_memory(profile, [StageShape(layer, layer + 1, 0, 1)]).gradient_bytes
    own = 1 - profile.tied_bytes(layer) / trained if trained else 1.0
    return batch * forward_backward, max(0.0, own) * optimizer
