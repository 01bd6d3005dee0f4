"""The choice of the collective that sums gradients soonest on an idle network."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from cost_model.collectives import Collective, ring_all_reduce, tree_all_reduce
from cost_model.network import Network, idle
from cost_model.sum_times import all_reduce_s, apart, messages_due, ring_routes

_Found = TypeVar("_Found")

TIE = 1e-9  # what differs by less is one time
BUCKET_BYTES = 25 * 2.0**20
"""The least bytes at which the sum of a run of layers is cut into parts: smaller ones are mostly latency."""
MOST_PARTS = 16
"""Of a run of layers: what the last one leaves to be waited for hardly shrinks any more."""


def most_parts(num_layers: int, num_bytes: float) -> int:
    """Return into how many parts the sum of a run of layers of so many bytes may be cut."""
    return int(max(min(num_layers, MOST_PARTS, num_bytes // BUCKET_BYTES), 1))


def ring_and_collective(
    network: Network, num_bytes: float, names: Sequence[str]
) -> tuple[list[str], Collective]:
    """Return devices (names) in the order of `ring_order`, and which collective is cheaper for these."""

    def find() -> tuple[list[str], Collective]:
        ring = ring_order(network, num_bytes, names)
        return ring, cheaper_collective(network, num_bytes, ring)

    return _once(network, ("cheaper", num_bytes, *names), find)


def _once(network: Network, key: object, find: Callable[[], _Found]) -> _Found:
    """Return what is found of a network, remembered there by key."""
    if key not in network.choices:
        network.choices[key] = find()
    return cast(_Found, network.choices[key])


def cheaper_collective(network: Network, num_bytes: float, names: Sequence[str]) -> Collective:
    """Return which collective sums soonest on an idle network; of those that take as long the first of all.

    Where the all-reduce was measured it is the ring: nobody measured the others. The hierarchical one is
    asked for where the owners are on several nodes, on one of them at least two; bounds of the ring from
    below and above mostly settle it.
    """
    flat = ring_or_tree(network, num_bytes, names)
    if network.was_measured(names) or not 1 < len(network.by_node(names)) < len(names):
        return flat
    hierarchical_s = all_reduce_s(network, num_bytes, names, Collective.HIERARCHICAL)
    if flat is Collective.RING:
        if hierarchical_s < _ring_at_least_s(network, num_bytes, names) * (1 - TIE):
            return Collective.HIERARCHICAL
        if hierarchical_s >= _ring_at_most_s(network, num_bytes, names):
            return flat
    flat_s = all_reduce_s(network, num_bytes, names, flat)
    return Collective.HIERARCHICAL if hierarchical_s < flat_s * (1 - TIE) else flat


def ring_order(network: Network, num_bytes: float, names: Sequence[str]) -> list[str]:
    """Return devices (names) in the order of their ring: node by node, where that takes less time alone.

    Each node has then one edge in and one out. Else they stay in the order given.
    """
    given = list(names)
    by_node = [name for group in network.by_node(names) for name in group]
    if by_node == given or len(network.by_node(names)) in (1, len(given)):
        return given
    if _ring_at_most_s(network, num_bytes, by_node) <= _ring_at_least_s(network, num_bytes, given) * (
        1 - TIE
    ):
        return by_node
    by_node_s = all_reduce_s(network, num_bytes, by_node)
    return by_node if by_node_s < all_reduce_s(network, num_bytes, given) * (1 - TIE) else given


def ring_or_tree(network: Network, num_bytes: float, names: Sequence[str]) -> Collective:
    """Return which of the two sums sooner; the ring where both take as long, and where it was measured.

    What the first owner sends and receives bounds the tree from below, and rounds that begin when the one
    before is over bound the ring from above: where these say enough, neither is gone through.
    """
    return _once(network, ("flat", num_bytes, *names), lambda: _ring_or_tree(network, num_bytes, names))


def _ring_or_tree(network: Network, num_bytes: float, names: Sequence[str]) -> Collective:
    if network.was_measured(names):
        return Collective.RING
    if network.sums_inside:  # which are no rounds of messages
        tree_s, ring_s = (
            all_reduce_s(network, num_bytes, names, way) for way in (Collective.TREE, Collective.RING)
        )
        return Collective.TREE if tree_s < ring_s * (1 - TIE) else Collective.RING
    rounds = tree_all_reduce(num_bytes, network.by_node(names))
    least_s = _tree_s(network, rounds, names, of_first=True)
    if least_s >= _ring_at_most_s(network, num_bytes, names):
        return Collective.RING
    ring_s = all_reduce_s(network, num_bytes, names) * (1 - TIE)
    if least_s >= ring_s or _tree_s(network, rounds, names, of_first=False) >= ring_s:
        return Collective.RING
    return Collective.TREE


def _ring_at_most_s(network: Network, num_bytes: float, names: Sequence[str]) -> float:
    """Return no fewer seconds than the ring takes alone: a message that waits hurries no other.

    Where none waits for another one of its round, a round takes the longest occupation, and each hop what
    it takes beyond that: a message and those before it pass it twice at most.
    """
    routes, num_rounds = ring_routes(network, names), 2 * (len(names) - 1)
    if not apart(routes):
        rounds = ring_all_reduce(num_bytes, names)
        return num_rounds * max(messages_due(idle(), network, rounds[:1], dict.fromkeys(names, 0.0)).values())
    chunk = num_bytes / len(names)
    busy_s = [route.link.occupancy_s(chunk) for route in routes]
    longest_s = max(busy_s)
    hops_s = [route.link.latency_s + busy - longest_s for route, busy in zip(routes, busy_s, strict=True)]
    most = max(0.0, *hops_s)
    return num_rounds * longest_s + min(num_rounds * most, 2 * sum(hop for hop in hops_s if hop > 0))


def _ring_at_least_s(network: Network, num_bytes: float, names: Sequence[str]) -> float:
    """Return no more seconds than the ring takes: its busiest resource carries a message each round.

    And what a member gives passes a hop in each: on average over the members the mean hop.
    """
    chunk, total_s = num_bytes / len(names), 0.0
    busy_s: dict[int, float] = defaultdict(float)
    for route in ring_routes(network, names):
        spent = route.link.occupancy_s(chunk)
        total_s += spent + route.link.latency_s
        for resource in route.resources:
            busy_s[resource] += spent
    return 2 * (len(names) - 1) * max(total_s / len(names), *busy_s.values())


def _tree_s(
    network: Network,
    rounds: Sequence[Sequence[tuple[str, str, float]]],
    names: Sequence[str],
    *,
    of_first: bool,
) -> float:
    """Return the seconds of the rounds on an idle network.

    of_first: of those messages alone that the first one sees.
    """
    if of_first:
        rounds = [[entry for entry in messages if names[0] in entry[:2]] for messages in rounds]
    return max(messages_due(idle(), network, rounds, dict.fromkeys(names, 0.0)).values())
