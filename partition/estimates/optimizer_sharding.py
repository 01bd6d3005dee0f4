"""Who owns each layer where states, gradients or weights are sharded (ZeRO), by free memory.

Whole layers, so that memory is known without the model's parameters; each layer's owner is one of the
devices that hold the layer (Rajbhandari, Rasley, Ruwase and He, SC 2020, section 5, for equal devices).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from cost_model.cluster import Cluster
from cost_model.memory import state_home_bytes
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding
from partition.estimates.plan_memory import host_bytes, memories_without_owner, plan_memories
from partition.plan import Plan
from partition.problem import Problem

SHARES = (0.5, 0.125, 0.0)
"""Of the optimizer states, which the problems to search in leave on each device.

With none at all stages fill the memory, by recompute too, and then the states find no room; an eighth won
4.2 and 4.1 % on two of 33 problems with tight memory, and 0.7 and 2.1 % on two more.
"""


def with_state_owners(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """Return the plan, zero 1 at least, with an owner for each layer; any that it names already stay.

    Neighbouring layers with the same owners are cut into one block for each, by the memory that is free
    there, so that few buckets come of it; where a block would not fit, layer by layer to whoever has most.
    Whether all fits is for `plan_memory` to say.
    """
    if plan.state_owners is not None:
        return plan
    holders = _holders(plan)
    nobody = replace(plan, zero=max(plan.zero, Sharding.STATES))
    free = _free_bytes(nobody, profile, cluster)
    ratio = profile.optimizer_bytes_per_parameter_byte
    states = [
        (ratio + nobody.sharding_of(layer) - Sharding.STATES) * state_home_bytes(profile, [layer])
        for layer in range(plan.num_layers)
    ]
    owners = [names[0] for names in holders]
    for layers in sorted(_runs(holders), key=lambda run: (len(holders[run[0]]), run[0])):
        if plan.sharding.by_layer and len(holders[layers[0]]) == 1:
            continue  # counted where it is
        chosen = _blocks([states[layer] for layer in layers], holders[layers[0]], free)
        for layer, name in zip(layers, chosen, strict=True):
            owners[layer] = name
            free[name] -= states[layer]
    return replace(nobody, state_owners=tuple(owners))


def _holders(plan: Plan) -> list[tuple[str, ...]]:
    """Return the devices that hold each layer, in order of rank."""
    held: list[list[str]] = [[] for _ in range(plan.num_layers)]
    for name in plan.device_names:
        for layer in plan.layers_of(name):
            held[layer].append(name)
    return list(map(tuple, held))


def _runs(holders: Sequence[tuple[str, ...]]) -> list[range]:
    """Return the runs of neighbouring layers with the same holders."""
    runs, start = [], 0
    for stop in range(1, len(holders) + 1):
        if stop == len(holders) or holders[stop] != holders[start]:
            runs.append(range(start, stop))
            start = stop
    return runs


def _blocks(states: Sequence[float], names: tuple[str, ...], free: Mapping[str, float]) -> list[str]:
    """Choose owners for the layers of a run: blocks in proportion to free memory, else layer by layer."""
    room = [max(0.0, free[name]) for name in names]
    ends = list(accumulate(room))
    total, chosen, before = sum(states), [], 0.0
    for size in states:
        # where the middle of the layer falls, if all the room were filled evenly
        place = (before + size / 2) / total * ends[-1] if total > 0 else 0.0
        chosen.append(names[min(bisect_right(ends, place), len(names) - 1)])
        before += size
    held = dict.fromkeys(names, 0.0)
    for name, size in zip(chosen, states, strict=True):
        held[name] += size
    if all(held[name] <= free[name] for name in names):
        return chosen
    left, packed = dict(free), [names[0]] * len(states)
    for layer in sorted(range(len(states)), key=lambda layer: -states[layer]):
        packed[layer] = max(names, key=lambda name: left[name])
        left[packed[layer]] -= states[layer]
    return packed


def _free_bytes(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, float]:
    """Return the bytes usable on each device beside all that a plan needs there but what owners keep."""
    if plan.sharding.by_layer:
        needs = memories_without_owner(plan, profile, cluster)
        return {name: cluster.device(name).usable_bytes - need.total_bytes for name, need in needs.items()}
    return {
        name: cluster.device(name).usable_bytes - (need.total_bytes - need.optimizer_bytes)
        for name, need in plan_memories(plan, profile, cluster).items()
    }


def fits(plan: Plan, profile: ModelProfile, cluster: Cluster) -> bool:
    """Return whether every device has the memory that a plan needs there, and every host."""
    held = host_bytes(plan, profile, cluster)
    hosts = {node.name: node.host_memory for node in cluster.nodes if node.name in held}
    return all(
        need.total_bytes <= cluster.device(name).usable_bytes
        for name, need in plan_memories(plan, profile, cluster).items()
    ) and all(host is not None and held[name] <= host.memory_bytes for name, host in hosts.items())


def unsharded(problem: Problem, share: float) -> Problem:
    """Return a problem to search in, whose optimizer states are only this share of what they are."""
    ratio = share * problem.profile.optimizer_bytes_per_parameter_byte
    return replace(problem, profile=replace(problem.profile, optimizer_bytes_per_parameter_byte=ratio))
