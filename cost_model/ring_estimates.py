"""About what a sum costs (R7 of docs/clock.md), for the loops of a search that ask it very often."""

from collections.abc import Sequence
from itertools import pairwise

from cost_model.network import Network, Route, idle, reserve
from cost_model.sum_times import apart, ring_routes

PACE_ROUNDS = 16
"""Rounds whose pace an estimate takes for that of all, where the messages of a ring share resources."""


def all_reduce_estimate_s(network: Network, num_bytes: float, names: Sequence[str]) -> float:
    """Return about the seconds of the ring between devices (names) on an idle network, for a search.

    Takes as long as a few rounds. Where no messages share a resource: 2 (n - 1) rounds of the slowest one,
    plus what the stretch of the ring with the most latency adds, which the data crosses beside them. Where
    they do, the pace of the first rounds is taken for that of all. Within 20 % of `all_reduce_s` on random
    rings, mostly within 2 %.
    """
    count = len(names)
    if count == 1:
        return 0.0
    group = network.measured_group(names)
    if group is not None:
        return max(group.sum_s(num_bytes), all_reduce_estimate_s(network.as_in_file, num_bytes, names))
    inside_s = network.inside_s(num_bytes, names)
    if inside_s is not None:
        return inside_s
    routes = ring_routes(network, names)
    chunk, num_rounds = num_bytes / count, 2 * (count - 1)
    if not apart(routes):
        return _estimate_shared_s(routes, chunk, num_rounds)
    seconds = [route.link.occupancy_s(chunk) for route in routes]
    slowest = max(seconds)
    more = [busy - slowest + route.link.latency_s for busy, route in zip(seconds, routes, strict=True)]
    total = sum(more)
    if total > 0:  # twice around, but for two hops
        return num_rounds * slowest + 2 * total - min(a + b for a, b in pairwise([*more, more[0]]))
    # the largest sum of a stretch (Kadane; Bentley, CACM 27(9), 1984), of a ring opened twice
    best = most = 0.0
    for entry in (*more, *more):
        best = max(best, 0.0) + entry
        most = max(most, best)
    return num_rounds * slowest + most


def sum_estimate_s(
    network: Network, num_bytes: float, names: Sequence[str], parts: int = 1
) -> tuple[float, Sequence[str]]:
    """Return about the seconds of a sum over devices (names), and the members of its ring in their order.

    The ring of all, node by node where that is sooner; or inside nodes first and then a ring of the first
    ones. Trees over nodes are left out. parts: into which it may be cut, so that some are inside of nodes
    while others are between them.
    """
    ring_s = all_reduce_estimate_s(network, num_bytes, names)
    groups = network.by_node(names) if len(names) > 2 else []
    if not 1 < len(groups) < len(names):
        return ring_s, names
    ring = names
    by_node = [name for group in groups for name in group]
    if by_node != list(names) and (by_node_s := all_reduce_estimate_s(network, num_bytes, by_node)) < ring_s:
        ring_s, ring = by_node_s, by_node
    if network.was_measured(names):
        return ring_s, ring
    inside_s, between_s = by_nodes_estimate_s(network, num_bytes, groups)
    hierarchical_s = 2 * inside_s / parts + max(between_s, inside_s * (1 - 1 / parts))
    return (hierarchical_s, [group[0] for group in groups]) if hierarchical_s < ring_s else (ring_s, ring)


def by_nodes_estimate_s(
    network: Network, num_bytes: float, groups: Sequence[Sequence[str]]
) -> tuple[float, float]:
    """Return about the seconds of a reduction inside nodes, and of the ring between them behind it.

    groups: devices (names) by node. The broadcast inside nodes at the end takes as long as the reduction.
    """
    inside_s = max(_tree_s(network, num_bytes, group) for group in groups)
    return inside_s, all_reduce_estimate_s(network, num_bytes, [group[0] for group in groups])


def _tree_s(network: Network, num_bytes: float, names: Sequence[str]) -> float:
    """Return about the seconds of a reduction over the devices (names) of a node, over its slowest link."""
    inside_s = network.inside_s(num_bytes, names)
    if inside_s is not None:
        return inside_s
    links = [network.route(name, names[0]).link for name in names[1:]]
    hop_s = max((link.occupancy_s(num_bytes) + link.latency_s for link in links), default=0.0)
    return (len(names) - 1).bit_length() * hop_s


def _estimate_shared_s(routes: Sequence[Route], chunk: float, num_rounds: int) -> float:
    free_at = idle()
    due = [0.0] * len(routes)
    half_s = 0.0
    for done in range(1, min(num_rounds, PACE_ROUNDS) + 1):
        arrived = [reserve(free_at, route, ready, chunk) for route, ready in zip(routes, due, strict=True)]
        due = list(map(max, due, [arrived[-1], *arrived[:-1]]))
        if done == PACE_ROUNDS // 2:
            half_s = max(due)
    pace_s = (max(due) - half_s) / (PACE_ROUNDS - PACE_ROUNDS // 2)
    return max(due) + max(0, num_rounds - PACE_ROUNDS) * pace_s
