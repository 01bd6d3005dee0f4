"""How much of each group of devices is sharded (ZeRO): no more than its memory asks for.

Devices that hold a layer in common are of one group, and so are those that each of them shares another layer
with. Gradients that are sharded travel in every microbatch, and weights twice, while states alone cost what
an all-reduce does: so a group gets the lowest stage of ZeRO with which its devices have the memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from cost_model.cluster import Cluster, Device
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding
from partition.estimates.optimizer_sharding import SHARES, fits, unsharded, with_state_owners
from partition.estimates.plan_memory import plan_memories
from partition.plan import Pipeline, Plan
from partition.problem import Problem, check_plan

ROOMS = (2.0,)
"""So many times their memory devices have in the problems to search in, where gradients and weights are to be
sharded: what two replicas share each of them holds half of."""


def layer_groups(plan: Plan) -> list[set[int]]:
    """Return the layers of each group of devices that share some.

    >>> from partition.plan import Stage
    >>> cut = [Stage(("a/0",), (0, 2), 1), Stage(("a/1",), (2, 3), 1)]
    >>> other = [Stage(("b/0",), (0, 2), 1), Stage(("b/1",), (2, 3), 1)]
    >>> layer_groups(Plan("x", "x", 2, (Pipeline(1, 1, tuple(cut)), Pipeline(1, 1, tuple(other)))))
    [{0, 1}, {2}]
    """
    groups: list[set[int]] = []
    for name in plan.device_names:
        layers = set(plan.layers_of(name))
        joined = [group for group in groups if group & layers]
        groups = [group for group in groups if not group & layers] + [layers.union(*joined)]
    return sorted(groups, key=min)


def least_sharded(
    plan: Plan, profile: ModelProfile, cluster: Cluster, most: Sharding = Sharding.WEIGHTS
) -> Plan | None:
    """Return a plan with the lowest stage of ZeRO for each group with which it fits, owners chosen.

    None where none up to most fits, or the plan cannot go layer by layer.
    """
    groups = layer_groups(plan)
    levels = [Sharding.STATES] * len(groups)
    while True:
        tried = _sharded(plan, groups, levels, profile, cluster)
        if tried is None or fits(tried, profile, cluster):
            return tried
        short = {
            layer
            for name, need in plan_memories(tried, profile, cluster).items()
            if need.total_bytes > cluster.device(name).usable_bytes
            for layer in plan.layers_of(name)
        }
        raised = [index for index, group in enumerate(groups) if group & short]
        if not raised or any(levels[index] is most for index in raised):
            return None
        for index in raised:
            levels[index] = Sharding(levels[index] + 1)


def _sharded(
    plan: Plan, groups: list[set[int]], levels: list[Sharding], profile: ModelProfile, cluster: Cluster
) -> Plan | None:
    zero = max(levels)
    by_layer = {layer: int(level) for group, level in zip(groups, levels, strict=True) for layer in group}
    each = tuple(by_layer[layer] for layer in range(plan.num_layers))
    try:
        made = replace(
            plan,
            pipelines=_by_layer(plan.pipelines) if zero.by_layer else plan.pipelines,
            zero=int(zero),
            layer_zero=None if len(set(levels)) == 1 else each,
        )
        check_plan(made, profile, cluster)
    except InputError:  # a device serves several stages, weights are in 16 bits, and the like
        return None
    return with_state_owners(made, profile, cluster)


def _by_layer(pipelines: Iterable[Pipeline]) -> tuple[Pipeline, ...]:
    """Return pipelines whose stages recompute layer by layer where they do at all."""
    return tuple(
        replace(
            pipeline,
            stages=tuple(replace(stage, segment_layers=int(stage.recompute)) for stage in pipeline.stages),
        )
        for pipeline in pipelines
    )


def sharded_plans(problem: Problem, plans_of: Callable[[Problem], Iterable[Plan]]) -> Iterator[Plan]:
    """Yield plans that fit memory since states, gradients or weights of some groups are sharded.

    plans_of: a search, which knows nothing of sharding: it is given problems with smaller optimizer states.
    """
    easier = (unsharded(problem, share) for share in SHARES)
    return sharded_out_of(problem, chain.from_iterable(map(plans_of, easier)))


def roomier_plans(problem: Problem, plans_of: Callable[[Problem], Iterable[Plan]]) -> Iterator[Plan]:
    """Yield the same out of problems without optimizer states whose devices have more memory."""
    free = unsharded(problem, 0.0)
    easier = (_with_room(free, times) for times in ROOMS)
    return sharded_out_of(problem, chain.from_iterable(map(plans_of, easier)))


def sharded_out_of(
    problem: Problem, plans: Iterable[Plan], most: Sharding = Sharding.WEIGHTS
) -> Iterator[Plan]:
    """Yield those of some plans that fit memory once they are sharded, up to most, each once."""
    seen = set()
    for plan in plans:
        if plan.pipelines in seen or max(plan.num_holders) == 1:
            continue  # devices that share no layers have nothing to shard
        seen.add(plan.pipelines)
        sharded = least_sharded(plan, problem.profile, problem.cluster, most)
        if sharded is not None:
            yield sharded


def _with_room(problem: Problem, times: float) -> Problem:
    def change(device: Device) -> Device:
        return replace(device, memory_bytes=device.memory_bytes + (times - 1) * device.usable_bytes)

    return replace(problem, cluster=problem.cluster.with_devices(change))
