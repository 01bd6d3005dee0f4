"""What is kept in the host's memory and moved to the device where it is needed: its bytes and seconds.

Optimizer states are needed once in a step, so they are what costs least to keep elsewhere (Ren et al.,
ZeRO-Offload, USENIX ATC 2021). There the CPU steps; here the states come to the device part by part and go
back, so that the same operations run on the same device and every bit is as without. Frozen weights
never change, so they come before a layer's forward, and before its backward, and are dropped.
"""

import math
from collections.abc import Mapping, Sequence

from cost_model.cluster import Link
from cost_model.profile import ModelProfile

NUM_ROOMS = 3
"""Parts whose states a device has at once: one that comes, one that is worked on, one that goes."""

WEIGHT_ROOMS = 2
"""Layers whose frozen weights a device has at once: one that computes, and one that comes."""

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


def fetched_ends_s(visits: Sequence[tuple[int, float]], moves_s: Mapping[int, float]) -> list[float]:
    """Return when each visit of a layer ends, from 0 on, where weights of some layers come from the host.

        in:       l0 | l1 |    | l2      a room is free when the visit before the last one is over
        compute:       v0      | v1 | v2

    visits: (layer, seconds of compute), in order. moves_s: of the layers whose weights come; those of a layer
    that is visited twice in a row stay.

    >>> fetched_ends_s([(0, 3.0), (1, 1.0), (2, 1.0)], {0: 2.0, 1: 2.0, 2: 2.0})
    [5.0, 6.0, 8.0]
    """
    ends, came_s = [0.0, 0.0], 0.0
    for place, (layer, seconds) in enumerate(visits):
        ready_s = 0.0
        if layer in moves_s and (not place or visits[place - 1][0] != layer):
            ready_s = came_s = max(came_s, ends[-2]) + moves_s[layer]
        ends.append(max(ends[-1], ready_s) + seconds)
    return ends[2:]
