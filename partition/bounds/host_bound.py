"""A lower bound for plans whose optimizer states may be in the memory of hosts, their moves counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from cost_model.cluster import Cluster, Device, HostMemory
from cost_model.errors import InfeasibleError
from cost_model.host_memory import LEAST_PARTS, MOST_ROOM_BYTES, NUM_ROOMS

SAFETY = 1e-6  # relative: more than the solver's tolerance, so that rounding never proves a false bound


@dataclass(frozen=True, slots=True)
class HostClass:
    """Devices of one kind, speed and memory on nodes whose hosts lend the same."""

    devices: tuple[Device, ...]
    host: HostMemory | None

    @property
    def usable_bytes(self) -> float:
        return sum(device.usable_bytes for device in self.devices)


@dataclass(frozen=True, slots=True)
class LayerBound:
    """What a layer takes at the least: seconds by class, and bytes on whatever holds it.

    compute_s: of the whole batch. update_s: of its optimizer step. held_bytes: parameters and gradients,
    but frozen weights that a host may have, which move for nothing. state_bytes: optimizer states.
    """

    compute_s: tuple[float, ...]
    update_s: tuple[float, ...]
    held_bytes: float
    state_bytes: float


def host_classes(cluster: Cluster) -> list[HostClass]:
    """Return the devices of a cluster by kind, speed, memory and what their host lends."""
    found: dict[tuple[str, float, float, HostMemory | None], list[Device]] = {}
    for node in cluster.nodes:
        for device in node.devices:
            key = device.kind, device.speed, device.usable_bytes, node.host_memory
            found.setdefault(key, []).append(device)
    return [HostClass(tuple(devices), host) for (*_, host), devices in found.items()]


def host_bound_s(
    cluster: Cluster, classes: Sequence[HostClass], layers: Sequence[LayerBound], *, sharded: bool
) -> float:
    """Return the value of a linear programme: no plan of zero 0, or 1, is faster, wherever its states are.

    It minimises C + S: computing, then the optimizer step, which waits for all. Variables are the shares of
    each layer's batch, of its states in device memory, and of those on hosts, by class; sharded: states may
    be with others than those who compute. States that come from a host pass its link in S, once each way;
    those of a host whose CPU steps need not, and cost nothing. Proof: docs/bounds.md.

    Raises: InfeasibleError if the states of the model do not even fit when cut up at will.
    """
    held, states = (sum(each) for each in zip(*((x.held_bytes, x.state_bytes) for x in layers), strict=True))
    lent = {host: 0.0 for host in (each.host for each in classes) if host is not None}
    links = dict.fromkeys(lent, 0)
    for node in cluster.nodes:
        if node.host_memory is not None and node.devices:
            lent[node.host_memory] += node.host_memory.memory_bytes
            links[node.host_memory] += 1
    room = sum(each.usable_bytes for each in classes)
    missing = max(held - room, held + states - room - sum(lent.values()))
    if missing > 0:
        raise InfeasibleError(
            "parameters, gradients and optimizer states, beside frozen weights that hosts may have, need "
            f"{held + states:,.0f} bytes, of which hosts "
            f"may have {min(states, sum(lent.values())):,.0f}; all devices together have {room:,.0f} usable: "
            "add a device or memory",
            missing_bytes=missing,
        )
    unit_s = sum(min(layer.compute_s) for layer in layers) or 1.0
    moving = NUM_ROOMS * min(1 / LEAST_PARTS, MOST_ROOM_BYTES / states) if states else 0.0
    programme = pulp.LpProblem("hosts", pulp.LpMinimize)
    computing, stepping = (programme.add_variable(name, lowBound=0) for name in ("compute", "step"))
    programme += computing + stepping
    places = [(layer, index) for layer in range(len(layers)) for index in range(len(classes))]
    share, inside, outside = (
        {place: programme.add_variable(f"{name}_{place[0]}_{place[1]}", 0, 1) for place in places}
        for name in ("share", "inside", "outside")
    )
    for layer, _ in enumerate(layers):
        programme += pulp.lpSum(share[layer, index] for index, _ in enumerate(classes)) == 1
        where = [inside[layer, index] + outside[layer, index] for index, _ in enumerate(classes)]
        if sharded:
            programme += pulp.lpSum(where) == 1
        for index, part in enumerate(where):
            if not sharded:
                programme += part == share[layer, index]
            if classes[index].host is None:
                programme += outside[layer, index] == 0
    for index, each in enumerate(classes):
        count, usable = len(each.devices), each.usable_bytes
        steps = each.host is not None and each.host.step_bytes_per_s is not None
        away, room_share = (0.0, 0.0) if steps else (1.0, moving)
        programme += (
            pulp.lpSum(
                costs.compute_s[index] / unit_s * share[layer, index] for layer, costs in enumerate(layers)
            )
            <= count * computing
        )
        programme += (
            pulp.lpSum(
                costs.update_s[index] / unit_s * (inside[layer, index] + away * outside[layer, index])
                for layer, costs in enumerate(layers)
            )
            <= count * stepping
        )
        programme += (
            pulp.lpSum(
                costs.held_bytes / usable * share[layer, index]
                + costs.state_bytes / usable * (inside[layer, index] + room_share * outside[layer, index])
                for layer, costs in enumerate(layers)
            )
            <= 1 + SAFETY
        )
    for host, memory_bytes in lent.items():
        kept = pulp.lpSum(
            costs.state_bytes / memory_bytes * outside[layer, index]
            for layer, costs in enumerate(layers)
            for index, each in enumerate(classes)
            if each.host == host
        )
        programme += kept <= 1 + SAFETY
        moved = links[host] * host.link.bandwidth_bytes_per_s * unit_s / memory_bytes
        if host.step_bytes_per_s is None:
            programme += kept <= moved * stepping
    status = programme.solve(pulp.HiGHS(msg=False))
    if status == pulp.LpStatusInfeasible:
        raise InfeasibleError(
            "parameters, gradients and optimizer states fit no devices and hosts, not even when cut up at "
            "will: add a device or memory, or lend more memory of hosts"
        )
    assert status == pulp.LpStatusOptimal, pulp.LpStatus[status]
    return max(0.0, float(programme.objective.value()) * unit_s * (1 - SAFETY))
