"""The seconds of what moves between devices and their hosts: optimizer states, weights, saved activations."""

from cost_model.cluster import Cluster, Device, HostMemory
from cost_model.errors import InputError
from cost_model.host_memory import (
    WEIGHT_ROOMS,
    lent_by,
    moved_ends_s,
    offloaded_step_s,
    saved_bytes_on_host,
    step_on_host_s,
)
from cost_model.layer_costs import Prices
from cost_model.profile import ModelProfile
from partition.estimates.plan_memory import offloaded_bytes, stepped_bytes, weights_on_host
from partition.plan import FROZEN_WEIGHTS, OPTIMIZER_STATES, OPTIMIZER_STEP, SAVED_ACTIVATIONS, Plan, Stage


def plan_step_s(plan: Plan, prices: Prices, cluster: Cluster, device: str) -> float:
    """Return the seconds of the optimizer step of a device, moves of states from and to its host included.

    Raises: InputError if the plan keeps states on a host that has no memory for plans.
    """
    place, profile = cluster.device(device), prices.profile
    stepped, offloaded = stepped_bytes(plan, profile, device), offloaded_bytes(plan, profile, device)
    if not offloaded:
        return prices.update_s(place, stepped)
    host = _host_of(profile, cluster, device, OPTIMIZER_STATES)
    states_bytes = profile.on(place.kind).optimizer_bytes_per_parameter_byte * offloaded
    resident_s = prices.update_s(place, stepped - offloaded)
    sharing = sum(bool(plan.offloaded_layers(other.name)) for other in cluster.node_of(device).devices)
    if not plan.offloaded_layers(device, OPTIMIZER_STEP):
        update_s = prices.update_s(place, offloaded)
        return offloaded_step_s(resident_s, update_s, states_bytes, host.link, sharing)
    if host.step_bytes_per_s is None:
        raise InputError(
            f"the plan lets the host of {device!r} make the optimizer step, and node {place.node!r} of the "
            "cluster has no host_optimizer, nor was its rate measured; give it that, profile here, or take "
            "optimizer step out of the plan"
        )
    update_s = offloaded / host.step_bytes_per_s
    return step_on_host_s(resident_s, update_s, states_bytes, offloaded, host.link, sharing)


def weight_moves_s(plan: Plan, profile: ModelProfile, cluster: Cluster, device: str) -> dict[int, float]:
    """Return the seconds in which a layer's frozen weights come from the host, by layer.

    The devices of a node that move weights or saved activations have an equal part of its link each. Weights
    of so few layers that all have room on the device stay there.

    Raises: InputError if the plan keeps weights on a host that has no memory for plans.
    """
    if not plan.offloaded_layers(device, FROZEN_WEIGHTS):
        return {}
    link = _host_of(profile, cluster, device, FROZEN_WEIGHTS).link
    away = _coming_weights(plan, profile, cluster.device(device))
    sharing = _num_sharing(plan, profile, cluster, device) if away else 0
    return {layer: link.transfer_s(num_bytes * sharing) for layer, num_bytes in away.items()}


def saved_moves_s(
    plan: Plan, profile: ModelProfile, cluster: Cluster, stage: Stage, samples: int
) -> dict[int, float]:
    """Return the seconds in which what a layer saves of a microbatch goes, or comes back, by layer.

    The link is shared as that of `weight_moves_s`.

    Raises: InputError if the plan keeps activations on a host that has no memory for plans.
    """
    if SAVED_ACTIVATIONS not in stage.offload:
        return {}
    link = _host_of(profile, cluster, stage.device, SAVED_ACTIVATIONS).link
    sharing = _num_sharing(plan, profile, cluster, stage.device)
    moved = saved_bytes_on_host(profile.on(cluster.device(stage.device).kind), *stage.layers)
    return {layer: link.transfer_s(samples * each * sharing) for layer, each in moved.items()}


def stage_visits(
    prices: Prices, device: Device, stage: Stage, samples: int, *, backward: bool
) -> list[tuple[int, float]]:
    """Return the layers of a stage in the order in which a pass computes them, with their seconds.

    With recompute the forward of a segment comes right before its backward. No backward, no visits.
    """

    def forwards(start: int, stop: int) -> list[tuple[int, float]]:
        return [(layer, prices.forward_s(device, layer, layer + 1, samples)) for layer in range(start, stop)]

    if not backward:
        return forwards(*stage.layers)
    found: list[tuple[int, float]] = []
    if stage.stop <= prices.first_trained:
        return found
    for start, stop in reversed(stage.segments if stage.recompute else (stage.layers,)):
        found += forwards(start, stop) if stage.recompute else []
        visits = [
            (layer, prices.backward_s(device, layer, layer + 1, samples)) for layer in range(start, stop)
        ]
        found += [visit for visit in reversed(visits) if visit[0] >= prices.first_trained]
    return found


def moves_added_s(plan: Plan, prices: Prices, cluster: Cluster) -> float:
    """Return the most seconds by which moves make the passes of any device longer in a step."""
    most = 0.0
    for name, places in plan.places.items():
        device, added = cluster.device(name), 0.0
        weights_s = weight_moves_s(plan, prices.profile, cluster, name)
        for number, index in places:
            pipeline = plan.pipelines[number]
            stage, size = pipeline.stages[index], pipeline.microbatch_size
            saved_s = saved_moves_s(plan, prices.profile, cluster, stage, size)
            if not saved_s and weights_s.keys().isdisjoint(range(*stage.layers)):
                continue
            for backward in (False, True):
                visits = stage_visits(prices, device, stage, size, backward=backward)
                ends_s = moved_ends_s(visits, weights_s, saved_s, forward=not backward) or [0.0]
                added += pipeline.num_microbatches * (ends_s[-1] - sum(seconds for _, seconds in visits))
        most = max(most, added)
    return most


def _coming_weights(plan: Plan, profile: ModelProfile, device: Device) -> dict[int, float]:
    """Return the bytes of the frozen weights that come to a device again and again, by layer."""
    away = weights_on_host(plan, profile.on(device.kind), device.name)
    return away if len(away) > WEIGHT_ROOMS else {}


def _num_sharing(plan: Plan, profile: ModelProfile, cluster: Cluster, device: str) -> int:
    """Return how many devices of a device's node move weights or saved activations."""
    return sum(
        bool(_coming_weights(plan, profile, other))
        or any(
            SAVED_ACTIVATIONS in plan.pipelines[number].stages[index].offload
            for number, index in plan.places.get(other.name, ())
        )
        for other in cluster.node_of(device).devices
    )


def _host_of(profile: ModelProfile, cluster: Cluster, device: str, what: str) -> HostMemory:
    node = cluster.node_of(device)
    host = lent_by(node, profile)
    if host is None:
        raise InputError(
            f"the plan keeps {what} of {device!r} in its host's memory, and node {node.name!r} of "
            "the cluster has no host_memory; give it that and host_link, or take offload out of the plan"
        )
    return host
