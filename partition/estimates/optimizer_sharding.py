"""Who owns each layer where states, gradients or weights are sharded (ZeRO), by free memory.

Whole layers where they fit, since each message is of one; else ranges of some, so that the load of each
device is what its memory takes. An owner is one of the devices that hold the layer (Rajbhandari, Rasley,
Ruwase and He, SC 2020, section 5, for equal devices, which cut the numbers of all layers evenly).
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from cost_model.cluster import Cluster, Device
from cost_model.memory import state_home_bytes
from cost_model.profile import ModelProfile
from cost_model.sharding import OwnerRange, Sharding
from partition.estimates.plan_memory import host_bytes, memories_without_owner, plan_memories
from partition.plan import Plan
from partition.problem import Problem

SHARES = (0.5, 0.125, 0.0)
"""Of the optimizer states, which the problems to search in leave on each device.

With none at all stages fill the memory, by recompute too, and then the states find no room; an eighth won
4.2 and 4.1 % on two of 33 problems with tight memory, and 0.7 and 2.1 % on two more.
"""


CUTS = 1024
"""Where a layer may be cut: at multiples of one over this, which read well and are exact."""


def with_state_owners(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """Return the plan, zero 1 at least, with an owner for each layer; any that it names already stay.

    Neighbouring layers with the same owners are cut into one block for each, by the memory that is free
    there, so that few buckets come of it; where a block would not fit, layer by layer to whoever has most.
    Where that does not fit either, and ranges of layers do, blocks end inside layers (`_ranges`). Whether all
    fits is for `plan_memory` to say.
    """
    if plan.state_owners is not None:
        return plan
    nobody = replace(plan, zero=max(plan.zero, Sharding.STATES))
    free, kept = _free_bytes(nobody, profile, cluster), _kept_bytes(nobody, profile)
    left = dict(free)
    whole = _with_whole_layers(nobody, left, kept)
    if min(left.values()) >= 0 or min(free.values()) < 0:  # it fits, or none does: quick to tell
        return whole
    if profile.whole_states or plan.offloads or fits(whole, profile, cluster):
        return whole
    cut = _with_ranges(nobody, free, kept)
    return cut if cut is not None and fits(cut, profile, cluster) else whole


def _kept_bytes(plan: Plan, profile: ModelProfile) -> list[float]:
    """Return what the owner of each layer keeps of it that others do not."""
    ratio = profile.optimizer_bytes_per_parameter_byte
    return [
        (ratio + plan.sharding_of(layer) - Sharding.STATES) * state_home_bytes(profile, [layer])
        for layer in range(plan.num_layers)
    ]


def _with_whole_layers(plan: Plan, free: dict[str, float], states: Sequence[float]) -> Plan:
    """Return the plan with owners of whole layers; free: bytes of each device, of which they take theirs."""
    holders = _holders(plan)
    owners = [names[0] for names in holders]
    for layers in sorted(_runs(holders), key=lambda run: (len(holders[run[0]]), run[0])):
        if plan.sharding.by_layer and len(holders[layers[0]]) == 1:
            continue  # counted where it is
        chosen = _blocks([states[layer] for layer in layers], holders[layers[0]], free)
        for layer, name in zip(layers, chosen, strict=True):
            owners[layer] = name
            free[name] -= states[layer]
    return replace(plan, state_owners=tuple(owners))


def _with_ranges(plan: Plan, free: Mapping[str, float], kept: Sequence[float]) -> Plan | None:
    """Return the plan with owners of blocks that end inside layers; None if all of them end between."""
    holders, left = _holders(plan), dict(free)
    found: list[OwnerRange] = []
    for layers in sorted(_runs(holders), key=lambda run: (len(holders[run[0]]), run[0])):
        names = holders[layers[0]]
        if len(names) == 1:
            if not plan.sharding.by_layer:  # else counted where it is
                left[names[0]] -= sum(kept[layer] for layer in layers)
            found += [OwnerRange(layer, names[0], 0.0, 1.0) for layer in layers]
            continue
        for each in _ranges(layers, [kept[layer] for layer in layers], names, left):
            found.append(each)
            left[each.device] -= each.share * kept[each.layer]
    owners = {each.layer: each.device for each in found if each.start == 0}
    cut = sorted((each for each in found if each.share < 1), key=lambda each: (each.layer, each.start))
    if not cut:
        return None
    state_owners = tuple(owners.get(layer, names[0]) for layer, names in enumerate(holders))
    return replace(plan, state_owners=state_owners, owner_ranges=tuple(cut))


def _ranges(
    layers: range, sizes: Sequence[float], names: Sequence[str], free: Mapping[str, float]
) -> Iterator[OwnerRange]:
    """Yield the block of each device in a run of layers, layer by layer, in the order of the names.

    Of what is still to be dealt out a device gets the share that its free memory has of that of all who are
    left. The block ends between two layers where one of the next ends leaves each side what it can take, and
    room for where others are cut. sizes: what an owner keeps of each layer, in bytes.
    """
    ends = [0.0, *accumulate(sizes)]
    room = [max(0.0, free[name]) for name in names]
    start, rounding = 0.0, len(names) * max(sizes) / CUTS
    for index, name in enumerate(names):
        last = index + 1 == len(names)
        here, later = room[index], sum(room[index + 1 :])
        share = here / (here + later) if here + later > 0 else 0.0
        ideal = ends[-1] if last else start + share * (ends[-1] - start)
        stop = next(
            (
                end
                for end in sorted(ends, key=lambda end: abs(end - ideal))[:2]
                if start <= end <= start + here and ends[-1] - end + rounding <= later
            ),
            ideal,
        )
        stop = ends[-1] if last else stop
        for layer, first, size in zip(layers, ends, sizes, strict=False):
            if size > 0:
                low, high = (_cut_at(end, first, size) for end in (start, stop))
                if low < high:
                    yield OwnerRange(layer, name, low, high)
        start = stop


def _cut_at(end: float, first: float, size: float) -> float:
    """Return where in a layer a block ends, in [0, 1], on one of `CUTS`; first: bytes before the layer."""
    return round(min(1.0, max(0.0, (end - first) / size)) * CUTS) / CUTS


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


def owned_elsewhere(problem: Problem, plan: Plan) -> Problem:
    """Return a problem without optimizer states, whose devices lack the memory of those that they own.

    plan: one that shards its optimizer states; stages that fit there as they are fit with these owners.
    """
    needs = plan_memories(plan, problem.profile, problem.cluster)

    def change(device: Device) -> Device:
        owned = needs[device.name].optimizer_bytes if device.name in needs else 0
        return replace(device, memory_bytes=device.memory_bytes - owned)

    return replace(unsharded(problem, 0.0), cluster=problem.cluster.with_devices(change))
