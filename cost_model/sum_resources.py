"""What sums of gradients occupy of a network, and for how long: the messages of `sum_times`, without when."""

from collections.abc import Mapping, Sequence
from itertools import chain

from cost_model.collectives import Collective, node_broadcast, node_reduce, tree_all_reduce
from cost_model.network import Network
from cost_model.sum_times import measured_all_reduce_s, ring_routes

_Rounds = Sequence[Sequence[tuple[str, str, float]]]
"""Messages from a device (a name) to another one, of so many bytes, round by round."""


def all_reduce_resources(network: Network, names: Sequence[str], collective: Collective) -> frozenset[int]:
    """Return what the messages of an all-reduce between devices (names) occupy."""
    key = (collective, *names)
    if key not in network.occupied:
        network.occupied[key] = _find_resources(network, names, collective)
    return network.occupied[key]


def _find_resources(network: Network, names: Sequence[str], collective: Collective) -> frozenset[int]:
    groups = network.by_node(names)
    rounds, ring = _rounds_and_ring(0.0, groups, names, collective)
    routes = [network.route(source, to) for messages in rounds for source, to, _ in messages]
    routes += ring_routes(network, ring) if len(ring) > 1 else []
    for group in groups if network.sums_inside else []:
        routes += ring_routes(network, group) if network.inside_s(0.0, group) is not None else []
    return frozenset(resource for route in routes for resource in route.resources)


def _rounds_and_ring(
    num_bytes: float, groups: Sequence[Sequence[str]], names: Sequence[str], collective: Collective
) -> tuple[_Rounds, Sequence[str]]:
    """Return the messages of an all-reduce beside those of a ring, and the members of that, one for none."""
    if collective is Collective.RING:
        return [], names
    if collective is Collective.TREE:
        return tree_all_reduce(num_bytes, groups), names[:1]
    leaders = [group[0] for group in groups]
    return node_reduce(num_bytes, groups) + node_broadcast(num_bytes, groups), leaders


def all_reduce_holds_s(
    network: Network, num_bytes: float, names: Sequence[str], collective: Collective
) -> dict[int, float]:
    """Return the seconds for which an all-reduce between devices (names) holds each resource."""
    rounds, ring = _rounds_and_ring(num_bytes, network.by_node(names), names, collective)
    return messages_hold_s(network, rounds, ring_holds_s(network, num_bytes, ring))


def messages_hold_s(
    network: Network,
    rounds: _Rounds,
    beside_s: Mapping[int, float] | None = None,
) -> dict[int, float]:
    """Return the seconds for which messages hold each resource; beside_s: for which others do."""
    held_s = dict(beside_s or {})
    for source, to, size in chain.from_iterable(rounds):
        route = network.route(source, to)
        for resource in route.resources:
            held_s[resource] = held_s.get(resource, 0.0) + route.link.occupancy_s(size)
    return held_s


def ring_holds_s(network: Network, num_bytes: float, names: Sequence[str]) -> dict[int, float]:
    """Return the seconds for which the ring between devices (names) holds each resource that it occupies."""
    routes = ring_routes(network, names) if len(names) > 1 else []
    measured_s = measured_all_reduce_s(network, num_bytes, names) if routes else None
    if measured_s is not None:
        return {resource: measured_s for route in routes for resource in route.resources}
    rounds, chunk = 2 * (len(names) - 1), num_bytes / len(names)
    held: dict[int, float] = {}
    for route in routes:
        seconds = rounds * route.link.occupancy_s(chunk)
        for resource in route.resources:
            held[resource] = held.get(resource, 0.0) + seconds
    return held
