"""Which stages keep states, frozen weights or saved activations on their host for want of room."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from cost_model.cluster import Cluster, Device
from cost_model.host_memory import (
    LEAST_PARTS,
    MOST_ROOM_BYTES,
    NUM_ROOMS,
    WEIGHT_ROOMS,
    lent_by,
    movable_bytes,
    movable_saved_bytes,
    saved_bytes_on_host,
)
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.estimates.optimizer_sharding import fits, unsharded
from partition.estimates.plan_memory import memory_on
from partition.plan import FROZEN_WEIGHTS, OPTIMIZER_STATES, OPTIMIZER_STEP, SAVED_ACTIVATIONS, Plan, Stage
from partition.problem import Problem

MovedBytes = Callable[[ModelProfile, int], float]
"""(profile, layer) -> the bytes that move to a host, or from there, with each pass over the layer."""


def has_host_memory(cluster: Cluster) -> bool:
    """Return whether plans may keep anything in the memory of a host."""
    return any(node.host_memory is not None for node in cluster.nodes)


def with_offload(
    plan: Plan, profile: ModelProfile, cluster: Cluster, words: tuple[str, ...] = (OPTIMIZER_STATES,)
) -> Plan:
    """Return the plan with the optimizer states of devices that lack memory on their hosts, where these may.

    All stages of such a device are offloaded, of no other: moves cost time, and the less the fewer share a
    link. Whether all fits then is for `fits` to say. words: what is offloaded (`OFFLOADS`); a stage is given
    those of which it has something that can move, and the step on the CPU where its host makes it. What
    stages that recompute save stays.
    """
    full = {
        device.name
        for device in map(cluster.device, plan.device_names)
        if cluster.node_of(device.name).host_memory is not None
        and memory_on(plan, profile, device).total_bytes > device.usable_bytes
    }
    if not full:
        return plan
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, offload=_possible(stage, words, profile, cluster))
                if stage.device in full
                else stage
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _possible(
    stage: Stage, words: tuple[str, ...], profile: ModelProfile, cluster: Cluster
) -> tuple[str, ...]:
    """Return the words that say something of a stage: that saves, or has frozen weights, that can move."""
    views = [profile.on(kind) for kind in profile.kinds]
    host = lent_by(cluster.node_of(stage.device), profile)
    moves = {
        OPTIMIZER_STEP: host is not None and host.step_bytes_per_s is not None,
        SAVED_ACTIVATIONS: not stage.recompute and bool(saved_bytes_on_host(profile, *stage.layers)),
        FROZEN_WEIGHTS: any(movable_bytes(view, layer) for view in views for layer in range(*stage.layers)),
    }
    return tuple(word for word in words if moves.get(word, True))


def offloaded_plans(problem: Problem, plans_of: Callable[[Problem], Iterable[Plan]]) -> Iterator[Plan]:
    """Yield plans with something on hosts that fit memory, out of plans of problems with less.

    plans_of: a search, which knows nothing of hosts. Devices keep room for what moves: three
    sixteenths of the states, or three times 16 MiB; two layers of frozen weights; what two blocks save. No
    states go to hosts where the optimizer has them on the device alone.
    """
    seen: set[object] = set()
    hosts = [lent_by(node, problem.profile) for node in problem.cluster.nodes]
    hosts_step = any(host is not None and host.step_bytes_per_s is not None for host in hosts)
    resident = problem.profile.resident_states
    for smaller, ways in _smaller_problems(problem):
        choices = [words for words in ways if not (resident and OPTIMIZER_STATES in words)]
        for plan in plans_of(smaller) if choices else ():
            for words in choices:
                if (plan.pipelines, words) in seen:
                    continue
                seen.add((plan.pipelines, words))
                offloaded = with_offload(plan, problem.profile, problem.cluster, words)
                if offloaded.offloads and fits(offloaded, problem.profile, problem.cluster):
                    yield offloaded
                if OPTIMIZER_STATES in words and hosts_step:
                    stepped = with_offload(plan, problem.profile, problem.cluster, (*words, OPTIMIZER_STEP))
                    if stepped != offloaded and fits(stepped, problem.profile, problem.cluster):
                        yield stepped


def _smaller_problems(problem: Problem) -> Iterator[tuple[Problem, tuple[tuple[str, ...], ...]]]:
    """Yield problems to search in, and what of the plans that are found may go to hosts."""
    states, weights, saved = (OPTIMIZER_STATES,), (FROZEN_WEIGHTS,), (SAVED_ACTIVATIONS,)
    for smaller in _without_states(problem):
        yield smaller, (states,)
    if problem.profile.compiled:  # such blocks keep what they save, and their weights, where they are
        return
    bare = _without_frozen(problem)
    if bare is not None:
        yield bare, (weights, (*states, *weights))
        for smaller in _without_states(bare):
            yield smaller, ((*states, *weights),)
    for before, words in ((problem, ()), (bare, weights)):
        lean = None if before is None else _without_saved(before)
        if lean is not None:
            yield lean, ((*words, *saved), (*states, *words, *saved))
            smaller = next(_without_states(lean))
            yield smaller, ((*states, *words, *saved),)


def _without_frozen(problem: Problem) -> Problem | None:
    """Return the problem with no frozen weights that hosts may have, and room for two layers of these.

    A layer takes as long there as its weights do to come, at least. None where nothing is frozen.
    """
    profile, cluster = problem.profile, problem.cluster
    layers = range(profile.num_layers)
    room_bytes = WEIGHT_ROOMS * max(
        movable_bytes(profile.on(kind), i) for kind in profile.kinds for i in layers
    )
    if not room_bytes or any(device.usable_bytes <= room_bytes for device in cluster.devices):
        return None

    def bare(view: ModelProfile) -> tuple[LayerProfile, ...]:
        moved = [movable_bytes(view, layer) for layer in layers]
        return tuple(
            replace(
                layer,
                parameter_bytes=layer.parameter_bytes - num_bytes,
                unreached_bytes=layer.unreached_bytes - num_bytes,
            )
            for layer, num_bytes in zip(view.layers, moved, strict=True)
        )

    kinds = {name: _as_slow_as_moves(problem, name, movable_bytes) for name in profile.kinds}
    kinds = {
        name: replace(kind, held=bare(profile.on(name)) if kind.held else ()) for name, kind in kinds.items()
    }
    smaller = replace(profile, layers=bare(profile), kinds=kinds)
    return _with_reserve(replace(problem, profile=smaller), room_bytes)


def _without_saved(problem: Problem) -> Problem | None:
    """Return the problem whose blocks save nothing, and need room for what two save while they work.

    A pass over a block takes as long there as its saved bytes do to move, at least. None where nothing moves.
    """
    profile = problem.profile
    layers = range(profile.num_layers)
    if not any(movable_saved_bytes(profile, layer) for layer in layers):
        return None
    sizes = sorted({size for kind in profile.kinds.values() for size in kind.microbatch_sizes})

    def lean(view: ModelProfile) -> tuple[LayerProfile, ...]:
        moved = [movable_saved_bytes(view, layer) for layer in layers]
        return tuple(
            replace(
                layer,
                saved_bytes_per_sample=layer.saved_bytes_per_sample - num_bytes,
                workspace_bytes=0.0,
                workspace_by_size=tuple(
                    (size, layer.workspace_at(size) + size * (num_bytes + before)) for size in sizes
                ),
            )
            for layer, num_bytes, before in zip(view.layers, moved, [0.0, *moved], strict=False)
        )

    kinds = {
        name: _as_slow_as_moves(problem, name, movable_saved_bytes, by_sample=True) for name in profile.kinds
    }
    kinds = {
        name: replace(kind, held=lean(profile.on(name)) if kind.held else ()) for name, kind in kinds.items()
    }
    return replace(problem, profile=replace(profile, layers=lean(profile), kinds=kinds))


def _as_slow_as_moves(
    problem: Problem, name: str, moved: MovedBytes, *, by_sample: bool = False
) -> KindProfile:
    """Return a kind's times, those of a pass over a layer no less than a move to or from the fastest host.

    by_sample: whether what moves is of each sample of a microbatch.
    """
    kind, view = problem.profile.kind(name), problem.profile.on(name)
    links = [
        (node.host_memory.link, device.speed)
        for node in problem.cluster.nodes
        for device in node.devices
        if device.kind == name and node.host_memory is not None
    ]

    def slower(layer: int, seconds: tuple[float, ...]) -> tuple[float, ...]:
        each = moved(view, layer)
        if not each:
            return seconds
        sizes = kind.microbatch_sizes if by_sample else (1,) * len(seconds)
        return tuple(
            max(
                before,
                min((link.transfer_s(each * size) * speed for link, speed in links), default=0.0),
            )
            for before, size in zip(seconds, sizes, strict=True)
        )

    times = tuple(
        LayerTimes(slower(layer, each.forward_s), slower(layer, each.backward_s))
        for layer, each in enumerate(kind.layers)
    )
    return replace(kind, layers=times)


def _without_states(problem: Problem) -> Iterator[Problem]:
    """Yield problems to search in, whose plans have room for what moves."""
    yield unsharded(problem, NUM_ROOMS / LEAST_PARTS)
    room_bytes = NUM_ROOMS * MOST_ROOM_BYTES
    if all(device.usable_bytes > 2 * room_bytes for device in problem.cluster.devices):
        yield unsharded(_with_reserve(problem, room_bytes), 0.0)


def _with_reserve(problem: Problem, num_bytes: float) -> Problem:
    """Return the problem with so many bytes less on each device."""

    def change(device: Device) -> Device:
        return replace(device, reserve_bytes=device.reserve_bytes + num_bytes)

    return replace(problem, cluster=problem.cluster.with_devices(change))
