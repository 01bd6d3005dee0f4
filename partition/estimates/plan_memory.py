"""The bytes that a plan needs on a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cost_model.cluster import Cluster, Device
from cost_model.host_memory import NUM_ROOMS, WEIGHT_ROOMS, movable_bytes, room_bytes, saved_bytes_on_host
from cost_model.memory import (
    DeviceMemory,
    StageShape,
    device_memory,
    state_home_bytes,
    trained_bytes,
    trained_bytes_by_layer,
)
from cost_model.profile import ModelProfile
from cost_model.sharded_memory import Piece, sharded_memory
from cost_model.sharding import Sharding
from partition.estimates.host_fetches import pinned_bytes
from partition.plan import FROZEN_WEIGHTS, OPTIMIZER_STEP, SAVED_ACTIVATIONS, Plan


def plan_memory(plan: Plan, profile: ModelProfile, device: str) -> DeviceMemory:
    """Return the bytes that a plan needs on a device, term by term; profile: as it is `on` its kind."""
    shapes = _shapes(plan, device)
    if plan.sharding.by_layer and plan.state_owners is not None and shapes:
        return _sharded_memory(plan, profile, shapes[0], device, plan.owned_shares(device))
    memory = device_memory(
        profile,
        shapes,
        summed_bytes=summed_bytes(plan, profile, device),
        stepped_bytes=_states_room_bytes(plan, profile, device),
    )
    away = weights_on_host(plan, profile, device)
    if not away:
        return memory
    room = max(away.values()) * min(WEIGHT_ROOMS, len(away))
    return replace(memory, parameter_bytes=memory.parameter_bytes - sum(away.values()) + room)


def memory_without_owner(plan: Plan, profile: ModelProfile, device: str) -> DeviceMemory:
    """Return the bytes that a plan of zero 2 or 3 needs on a device beside what owners keep."""
    return _sharded_memory(plan, profile, _shapes(plan, device)[0], device, {})


def _sharded_memory(
    plan: Plan, profile: ModelProfile, shape: StageShape, device: str, owned: Mapping[int, float]
) -> DeviceMemory:
    """Return `sharded_memory` of a device's stage, given how much of each layer it owns."""
    mine = set(plan.layers_of(device))
    alone = {layer for layer in mine if plan.num_holders[layer] == 1}
    levels = [plan.sharding_of(layer) for layer in range(plan.num_layers)]

    def tied_layers(piece: Piece) -> set[int]:
        return {layer for layer in range(plan.num_layers) if profile.tied_home(layer) == piece.home}

    def share_of(piece: Piece) -> float:
        return owned.get(piece.home, 0.0)

    def is_away(piece: Piece) -> bool:
        return share_of(piece) < 1 and not (piece.home in alone and not piece.tied)

    def is_summed_once(piece: Piece) -> bool:
        if levels[piece.home] is Sharding.STATES:
            return True
        if not piece.tied:
            return False
        tied = tied_layers(piece)
        held = (set(plan.layers_of(name)) for name in plan.device_names)
        return any(tied & layers and not tied <= layers for layers in held)

    def is_shared(piece: Piece) -> bool:
        layers = tied_layers(piece) if piece.tied else {piece.home}
        return any(plan.num_holders[layer] > (layer in mine) for layer in layers)

    def is_fetched(piece: Piece) -> bool:
        return levels[piece.home] is Sharding.WEIGHTS

    ((number, _),) = plan.places[device]
    pipeline = plan.pipelines[number]
    together = min(pipeline.num_samples, pipeline.in_flight(0) * pipeline.microbatch_size)
    return sharded_memory(
        profile, shape, plan.sharding, is_away, is_summed_once, is_shared, is_fetched,
        share_of=share_of, together=together if plan.breadth_first else 0,
    )  # fmt: skip


def _shapes(plan: Plan, device: str) -> list[StageShape]:
    """Return what memory needs to know of each stage of a device."""
    shapes = []
    for number, index in plan.places.get(device, ()):
        pipeline = plan.pipelines[number]
        stage = pipeline.stages[index]
        shapes.append(
            StageShape(
                stage.start,
                stage.stop,
                pipeline.in_flight(index),
                pipeline.microbatch_size,
                stage.recompute,
                pipeline.num_microbatches,
                stage.segment_layers,
                pipeline.in_flight(index - 1) if index else None,
                SAVED_ACTIVATIONS in stage.offload,
            )
        )
    return shapes


def memory_on(plan: Plan, profile: ModelProfile, device: Device) -> DeviceMemory:
    """Return the bytes that a plan needs on a device, whose kind may have its own."""
    return plan_memory(plan, profile.on(device.kind), device.name)


def plan_memories(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, DeviceMemory]:
    """Return `plan_memory` of each device; devices alike, with a stage each, are counted once."""
    return _once_each(plan, profile, cluster, plan_memory, owners_count=plan.state_owners is not None)


def memories_without_owner(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, DeviceMemory]:
    """Return `memory_without_owner` of each device."""
    return _once_each(plan, profile, cluster, memory_without_owner, owners_count=False)


def _once_each(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    memory_of: Callable[[Plan, ModelProfile, str], DeviceMemory],
    *,
    owners_count: bool,
) -> dict[str, DeviceMemory]:
    known: dict[object, DeviceMemory] = {}
    found, views = {}, {kind: profile.on(kind) for kind in profile.kinds}
    for name in plan.device_names:
        view = views.get(cluster.device(name).kind, profile)
        key: object = name
        if len(plan.places[name]) == 1:
            ((number, index),) = plan.places[name]
            pipeline = plan.pipelines[number]
            stage, flight = pipeline.stages[index], pipeline.in_flight(index)
            size, count = pipeline.microbatch_size, pipeline.num_microbatches
            stage_key = (*stage.layers, stage.recompute, stage.segment_layers, stage.offload)
            before = pipeline.in_flight(index - 1) if index else 0
            owned = tuple(plan.owned_shares(name).items()) if owners_count else ()
            key = (*stage_key, flight, before, size, count, pipeline.num_samples, id(view.layers), owned)
        if key not in known:
            known[key] = memory_of(plan, view, name)
        found[name] = known[key]
    return found


def stepped_bytes(plan: Plan, profile: ModelProfile, device: str) -> float:
    """Return the parameter bytes whose optimizer states a device has, and which it therefore updates."""
    if plan.state_owners is None:
        return trained_bytes(profile, plan.layers_of(device))
    shares = plan.owned_shares(device).items()
    return sum(share * state_home_bytes(profile, [layer]) for layer, share in shares)


def offloaded_bytes(plan: Plan, profile: ModelProfile, device: str) -> float:
    """Return the parameter bytes whose optimizer states a device keeps in its host's memory."""
    layers = plan.offloaded_layers(device)
    if not layers:
        return 0.0
    if plan.state_owners is not None:
        return state_home_bytes(profile, layers & plan.owned_shares(device).keys())
    held = trained_bytes_by_layer(profile, plan.layers_of(device))
    return sum(held[layer] for layer in layers)


def weights_on_host(plan: Plan, profile: ModelProfile, device: str) -> dict[int, float]:
    """Return the bytes of frozen weights that a device keeps in its host's memory, by layer."""
    found = {layer: movable_bytes(profile, layer) for layer in plan.offloaded_layers(device, FROZEN_WEIGHTS)}
    return {layer: num_bytes for layer, num_bytes in sorted(found.items()) if num_bytes}


def saved_on_host(plan: Plan, profile: ModelProfile, device: str) -> float:
    """Return the most bytes of saved activations that a device has in its host's memory at once."""
    total = 0.0
    for number, index in plan.places.get(device, ()):
        pipeline = plan.pipelines[number]
        stage = pipeline.stages[index]
        if SAVED_ACTIVATIONS in stage.offload:
            each = sum(saved_bytes_on_host(profile, *stage.layers).values())
            total += pipeline.in_flight(index) * pipeline.microbatch_size * each
    return total


def _states_room_bytes(plan: Plan, profile: ModelProfile, device: str) -> float:
    """Return the parameter bytes for whose states a device needs room: those it keeps, and what moves."""
    offloaded, ratio = offloaded_bytes(plan, profile, device), profile.optimizer_bytes_per_parameter_byte
    moving = NUM_ROOMS * room_bytes(ratio * offloaded) / ratio if ratio else 0.0
    if plan.offloaded_layers(device, OPTIMIZER_STEP):
        moving = 0.0
    return stepped_bytes(plan, profile, device) - offloaded + moving


def _stepped_on_host_bytes(plan: Plan, profile: ModelProfile, device: str) -> float:
    """Return the bytes of weights, and gradients in rooms, that a host has which makes a device's step."""
    if not plan.offloaded_layers(device, OPTIMIZER_STEP):
        return 0.0
    offloaded, ratio = offloaded_bytes(plan, profile, device), profile.optimizer_bytes_per_parameter_byte
    return offloaded + (NUM_ROOMS * room_bytes(ratio * offloaded) / ratio if ratio else 0.0)


@dataclass(frozen=True, slots=True)
class HostUse:
    """The bytes that a plan keeps in a host's memory, by what they are, and the most that may be there.

    state_bytes: with the weights and gradients that its CPU steps. saved_bytes: what microbatches in flight
    keep for their backward. fetched_bytes: pinned for sharded weights that GPUs fetch (`host_fetches`).
    """

    state_bytes: float
    frozen_bytes: float
    saved_bytes: float
    capacity_bytes: float
    fetched_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.frozen_bytes + self.saved_bytes + self.fetched_bytes


def host_bytes(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, float]:
    """Return the bytes that a plan keeps in the memory of each host, by node; nodes without any left out."""
    return {node: use.total_bytes for node, use in host_uses(plan, profile, cluster).items()}


def host_uses(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, HostUse]:
    """Return what a plan keeps in the memory of each host, by node; nodes without any left out.

    What is pinned for fetches is counted where a node lends memory; else nobody has said how much there is.
    """
    found: dict[str, HostUse] = {}
    for node, pinned in pinned_bytes(plan, profile, cluster).items():
        lent = next(each.host_memory for each in cluster.nodes if each.name == node)
        if lent is not None:
            found[node] = HostUse(0.0, 0.0, 0.0, lent.memory_bytes, pinned)
    for name in plan.device_names if plan.offloads else ():
        device = cluster.device(name)
        view = profile.on(device.kind)
        states = offloaded_bytes(plan, view, name) * view.optimizer_bytes_per_parameter_byte
        states += _stepped_on_host_bytes(plan, view, name)
        frozen = sum(weights_on_host(plan, view, name).values())
        saved = saved_on_host(plan, view, name)
        if states or frozen or saved:
            room = cluster.node_of(name).host_memory
            before = found.get(
                device.node, HostUse(0.0, 0.0, 0.0, room.memory_bytes if room is not None else 0.0)
            )
            found[device.node] = replace(
                before,
                state_bytes=before.state_bytes + states,
                frozen_bytes=before.frozen_bytes + frozen,
                saved_bytes=before.saved_bytes + saved,
            )
    return found


def summed_bytes(plan: Plan, profile: ModelProfile, device: str) -> float:
    """Return the bytes of the gradients that a device sums with others: of shared layers, of tied ones."""
    mine = set(plan.layers_of(device))
    others = {layer for layer, count in enumerate(plan.num_holders) if count > (layer in mine)}
    total = trained_bytes(profile, mine & others)
    for group in profile.tied_groups:
        members = set(group)
        if members & mine and members & others and not members & mine & others:
            total += max(map(profile.tied_bytes, group))
    return total
