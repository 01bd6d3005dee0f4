"""What is kept in the host's memory and moved to the device where it is needed: its bytes and seconds.

Optimizer states are needed once in a step, so they are what costs least to keep elsewhere (Ren et al.,
ZeRO-Offload, USENIX ATC 2021). There the CPU steps; here the states come to the device part by part and go
back, so that the same operations run on the same device and every bit is as without. Frozen weights
never change, so they come before a layer's forward, and before its backward, and are dropped. What blocks
save in a forward goes there, and comes back before their backward (Rhu et al., vDNN, MICRO 2016).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cost_model.cluster import Cluster, HostMemory, Link, Node
from cost_model.profile import ModelProfile

NUM_ROOMS = 3
"""Parts whose states a device has at once: one that comes, one that is worked on, one that goes."""

WEIGHT_ROOMS = 2
"""Layers whose frozen weights a device has at once: one that computes, and one that comes."""

SAVED_ROOMS = 2
"""Layers whose saved activations a device has at once: one that computes, and one whose go, or come."""

FETCH_ROOMS = 2
"""Fetches of sharded weights through a GPU's host that are under way at once: one is used, and one comes."""

GPU_HOST_LINK = Link(latency_s=10e-6, bandwidth_bytes_per_s=12e9)
"""Between a GPU and its host where a cluster file does not say: PCIe 3 with 16 lanes (15.75 GB/s at most)."""

MOST_ROOM_BYTES = 16 * 2**20
LEAST_PARTS = 16


def room_bytes(states_bytes: float) -> float:
    """Return the bytes of a part of the states that are on the host: a sixteenth of them, at most 16 MiB.

    A move of 16 MiB takes a millisecond or more, so that latency is little of it.
    """
    return min(MOST_ROOM_BYTES, states_bytes / LEAST_PARTS)


def offloaded_step_s(
    resident_s: float, update_s: float, states_bytes: float, link: Link, num_sharing: int
) -> float:
    """Return the seconds of a step: of what has its states on the device, then of the parts on the host.

        in:    s0 | s1 | s2 |        s3       a room is free when what was in it is back
        step:  resident | u0 | u1 | u2 | u3
        out:                 | s0 | s1 | s2 | s3

    update_s, states_bytes: of all parts together. link: to the host, full duplex. num_sharing: devices that
    step at this time over that link, each with an equal part of it.

    >>> link = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)
    >>> offloaded_step_s(3.0, 8.0, 16.0, link, num_sharing=1)  # moves of 1 s, updates of 0.5 s
    19.5
    """
    if not states_bytes:
        return resident_s + update_s
    num_parts = math.ceil(states_bytes / room_bytes(states_bytes))
    move_s = link.transfer_s(states_bytes / num_parts * num_sharing)
    came_s, done_s = 0.0, resident_s
    went_s = [0.0] * NUM_ROOMS
    for _ in range(num_parts):
        came_s = max(came_s, went_s[-NUM_ROOMS]) + move_s
        done_s = max(done_s, came_s) + update_s / num_parts
        went_s = [*went_s[1:], max(done_s, went_s[-1]) + move_s]
    return went_s[-1]


def step_on_host_s(
    resident_s: float, update_s: float, states_bytes: float, moved_bytes: float, link: Link, num_sharing: int
) -> float:
    """Return the seconds of a step: of what has its states on the device, beside what the host's CPU steps.

        down:  g0 | g1 | g2 |        g3       a room is free when what was in it is stepped
        CPU:        u0      | u1      | u2
        up:                 | w0      | w1

    update_s: of the CPU, as if no other device shared it. states_bytes: in how many parts the step is made
    (`room_bytes`). moved_bytes: of all gradients, and of all weights. num_sharing: devices that step at this
    time; each has an equal part of the link and of the CPU.

    >>> link = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)
    >>> step_on_host_s(3.0, 32.0, 32.0, 16.0, link, num_sharing=1)  # moves of 1 s, updates of 2 s
    34.0
    """
    num_parts = math.ceil(states_bytes / room_bytes(states_bytes)) if states_bytes else 1
    move_s, each_s = (
        link.transfer_s(moved_bytes / num_parts * num_sharing),
        update_s / num_parts * num_sharing,
    )
    went_s, came_s, done_s = 0.0, 0.0, [0.0] * NUM_ROOMS
    for _ in range(num_parts):
        went_s = max(went_s, done_s[-NUM_ROOMS]) + move_s
        done_s = [*done_s[1:], max(done_s[-1], went_s) + each_s]
        came_s = max(came_s, done_s[-1]) + move_s
    return max(resident_s, came_s)


def lent_by(node: Node, profile: ModelProfile) -> HostMemory | None:
    """Return what a node lends to plans, with the rate at which its CPU steps; None if it lends nothing.

    The rate that the cluster file states; else the least of those that were measured where the kinds of its
    devices were profiled; None where neither is known.
    """
    host = node.host_memory
    if host is None or host.step_bytes_per_s is not None:
        return host
    measured = [
        profile.kinds[kind].host_step_bytes_per_s
        for kind in {device.kind for device in node.devices} & profile.kinds.keys()
    ]
    return replace(host, step_bytes_per_s=min((rate for rate in measured if rate is not None), default=None))


def with_measured_rates(cluster: Cluster, profile: ModelProfile) -> Cluster:
    """Return the cluster whose nodes lend what `lent_by` says."""
    nodes = tuple(replace(node, host_memory=lent_by(node, profile)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def is_around(layer: int, num_layers: int, name: str) -> bool:
    """Return whether a layer is what a model does around its blocks, at times that nobody knows.

    The first and the last; an encoder-decoder has decoder-embeddings in the middle.
    """
    return not 0 < layer < num_layers - 1 or name.endswith("-embeddings")


def movable_bytes(profile: ModelProfile, layer: int) -> float:
    """Return the bytes of a layer's frozen weights that may be kept on the host.

    None of layers around the blocks (`is_around`), nor of what layers share.
    """
    if is_around(layer, profile.num_layers, profile.layers[layer].name) or profile.shares_frozen(layer):
        return 0.0
    return profile.layers[layer].unreached_bytes


def movable_saved_bytes(profile: ModelProfile, layer: int) -> float:
    """Return the bytes of a sample that a layer saves for its backward and that may be kept on the host.

    None of layers around the blocks (`is_around`), nor of those that have no backward.
    """
    if layer < profile.first_trained or is_around(layer, profile.num_layers, profile.layers[layer].name):
        return 0.0
    return profile.layers[layer].saved_bytes_per_sample


def saved_bytes_on_host(profile: ModelProfile, start: int, stop: int) -> dict[int, float]:
    """Return the bytes of a sample that a stage of layers [start, stop) keeps on the host, by layer.

    Its input, which the first one saves, stays: it is there for the stage's own end.
    """
    moved = {layer: movable_saved_bytes(profile, layer) for layer in range(start, stop)}
    moved[start] = max(0.0, moved[start] - _input_bytes(profile, start))
    return {layer: num_bytes for layer, num_bytes in moved.items() if num_bytes}


def _input_bytes(profile: ModelProfile, start: int) -> float:
    return profile.layers[start - 1].output_bytes_per_sample if start else 0.0


def saved_bytes_beside_host(
    profile: ModelProfile,
    layers: tuple[int, int],
    samples: int,
    in_flight: int,
    *,
    first_of: float | None = None,
) -> float:
    """Return the saved bytes, workspace too, on the device of a stage whose blocks keep theirs on the host.

    All microbatches in flight have there what does not move; the one at work has the saved bytes of two
    blocks (`SAVED_ROOMS`), and the workspace of the one that computes. first_of: if all microbatches of a
    step are in flight, the bytes of gradients that are there from its start: the others are made by the first
    backward, layer by layer, and this is what is needed beyond all of them.
    """
    start, stop = layers
    moved = saved_bytes_on_host(profile, start, stop)
    own, most, first, trained = samples * profile.layers[start].prefix_bytes_per_sample, 0.0, 0.0, 0.0
    for layer in range(start, stop):
        own += samples * (profile.layers[layer].saved_bytes_per_sample - moved.get(layer, 0.0))
        need = own + samples * (moved.get(layer, 0.0) + moved.get(layer - 1, 0.0))
        need += profile.layers[layer].workspace_at(samples) + _waiting_bytes(profile, layer, start, stop)
        trained += profile.layers[layer].trained_bytes
        most, first = max(most, need), max(first, need - max(0.0, trained - (first_of or 0.0)))
    if first_of is None:
        return (in_flight - 1) * own + most
    later = (in_flight - 2) * own + most if in_flight > 1 else 0.0
    return max(later, (in_flight - 1) * own + first)


def _waiting_bytes(profile: ModelProfile, layer: int, start: int, stop: int) -> float:
    """Return the gradients of shared weights that wait, while a layer works, for an earlier layer's.

    Where it is that layer's turn, also the tensor that both are added into.
    """
    waiting = 0.0
    for index in range(layer + 1, stop) if profile.shares_weights else ():
        for others, kept in profile.shared_weight_bytes(index, trained=True):
            inside = [other for other in others if other >= start]
            if inside and inside[0] <= layer:
                waiting += kept * (2 if inside[0] == layer else 1)
    return waiting


def moved_ends_s(
    visits: Sequence[tuple[int, float]],
    weights_s: Mapping[int, float],
    saved_s: Mapping[int, float] | None = None,
    *,
    forward: bool = False,
) -> list[float]:
    """Return when each visit of a layer ends, from 0 on, where some of what layers need is on the host.

        in:       l0 | l1 |    | l2      a room is free when the visit before the last one is over
        compute:       v0      | v1 | v2
        out:                   | l0 | l1 a layer computes when what the one before the last saved has gone

    visits: (layer, seconds of compute), in order. weights_s: of the layers whose weights come; those of a
    layer that is visited twice in a row stay. saved_s: of what layers save, which goes in a forward, and
    comes in a backward; a forward is over when all has gone.

    >>> moved_ends_s([(0, 3.0), (1, 1.0), (2, 1.0)], {0: 2.0, 1: 2.0, 2: 2.0})
    [5.0, 6.0, 8.0]
    >>> moved_ends_s([(0, 3.0), (1, 1.0), (2, 1.0)], {}, {0: 2.0, 1: 2.0}, forward=True)
    [3.0, 4.0, 7.0]
    """
    saved_s = saved_s or {}
    ends, came_s, went_s = [0.0, 0.0], 0.0, [0.0, 0.0]
    for place, (layer, seconds) in enumerate(visits):
        again = place > 0 and visits[place - 1][0] == layer
        move_s = 0.0 if again else weights_s.get(layer, 0.0)
        move_s += 0.0 if forward else saved_s.get(layer, 0.0)
        ready_s = went_s[-2]
        if move_s:
            came_s = max(came_s, ends[-2]) + move_s
            ready_s = max(ready_s, came_s)
        ends.append(max(ends[-1], ready_s) + seconds)
        goes_s = saved_s.get(layer, 0.0) if forward else 0.0
        went_s.append(max(ends[-1], went_s[-1]) + goes_s if goes_s else went_s[-1])
    return [*ends[2:-1], max(ends[-1], went_s[-1])] if visits else []
