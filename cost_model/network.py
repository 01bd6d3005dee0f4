"""What messages cost: R2, R3, R5 and R7 of docs/clock.md.

The simulator and the emulated links share `reserve` and the decompositions here, so that what is predicted is
what runs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Protocol

from cost_model.cluster import EMULATED, Cluster, Device, Link
from cost_model.collectives import (
    Collective,
    node_broadcast,
    node_reduce,
    ring_all_reduce,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)
from cost_model.measured_links import MeasuredAllReduce, slower
from cost_model.network_resources import Resources

NORM_BYTES = 32.0  # sum of squares, non-finite flag, loss and its weight, as float64

LARGE_RING = 64
"""Rings of more members are computed all members at a time (`large_rings`)."""


class FreeAt(Protocol):
    """When each resource of a network is free again, by its number: a list, or a dict of zeros."""

    def __getitem__(self, resource: int, /) -> float: ...
    def __setitem__(self, resource: int, free_s: float, /) -> None: ...


def idle() -> FreeAt:
    """Return all resources, free from the start; it holds those that were asked for."""
    return defaultdict(float)


@dataclass(frozen=True, slots=True)
class Route:
    """How a message gets from one device to another: the channel, and the shared resources it occupies.

    resources: indices into Network.resources, each a first-in first-out queue.
    """

    link: Link
    resources: tuple[int, ...]


class Network:
    """The resources of a cluster that messages queue for: links and network cards, each direction apart.

    Between nodes a message occupies the sender's card, the link of the node pair and the receiver's card;
    inside a node the channel of the device pair.

    measured: links by "kind>kind"; all_reduces: what was measured between real devices. Both count where
    the links of the cluster are not slower. as_in_file: the same without them.
    """

    def __init__(
        self,
        cluster: Cluster,
        measured: Mapping[str, Link] | None = None,
        all_reduces: Sequence[MeasuredAllReduce] = (),
    ) -> None:
        self._devices = {device.name: device for device in cluster.devices}
        self._interconnects = {node.name: node.interconnect or cluster.network for node in cluster.nodes}
        self._between = {frozenset(entry.nodes): entry.link for entry in cluster.links}
        self._network = cluster.network
        self._measured = measured or {}
        self._all_reduces = tuple(all_reduces)
        self.as_in_file = Network(cluster) if all_reduces else self
        self._all_reduce_s: dict[tuple[tuple[str, ...], float], float | None] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        self.resources = Resources(cluster.nodes)

    def route(self, source: str, destination: str) -> Route:
        """Return the route between two devices (names), which differ."""
        key = (source, destination)
        if key not in self._routes:
            self._routes[key] = self._find_route(self._devices[source], self._devices[destination])
        return self._routes[key]

    def _find_route(self, source: Device, destination: Device) -> Route:
        here, there = source.node, destination.node
        link = self._interconnects[here]
        if here != there:
            link = self._between.get(frozenset((here, there)), self._network)
        if EMULATED not in (source.kind, destination.kind):
            link = slower(link, self._measured.get(f"{source.kind}>{destination.kind}"))
        return Route(link, self.resources.of_route(source.name, destination.name))

    def by_node(self, names: Sequence[str]) -> list[list[str]]:
        """Return devices (names) by their node, nodes in order of first appearance."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self._devices[name].node, []).append(name)
        return list(found.values())

    def measured_all_reduce_s(self, num_bytes: float, names: Sequence[str]) -> float | None:
        """Return the seconds of an all-reduce between devices (names) as measured; None where it was not.

        Measured for as many devices of each of their kinds, else for the next larger group of these kinds.
        Never less than the ring takes over links as the cluster has them.
        """
        if not self._all_reduces:
            return None
        key = (tuple(names), num_bytes)
        if key not in self._all_reduce_s:
            group = self.measured_group(names)
            self._all_reduce_s[key] = (
                None
                if group is None
                else max(group.sum_s(num_bytes), all_reduce_s(self.as_in_file, num_bytes, names))
            )
        return self._all_reduce_s[key]

    def measured_group(self, names: Sequence[str]) -> MeasuredAllReduce | None:
        """Return what was measured for as many devices of each kind (names), or the next larger group."""
        kinds = Counter(self._devices[name].kind for name in names)
        if EMULATED in kinds:
            return None
        large_enough = (
            entry
            for entry in self._all_reduces
            if set(entry.kinds) == set(kinds) and kinds <= Counter(entry.kinds)
        )
        return min(large_enough, key=lambda entry: len(entry.kinds), default=None)


def reserve(free_at: FreeAt, route: Route, ready_s: float, num_bytes: float) -> float:
    """Queue one message on its route; return the time at which it is due at the receiver.

    It holds all resources of the route at once (R2), but not for the latency (R3), and is behind all that
    were queued before (R5). free_at: time at which each resource of the network is free again, changed in
    place.

    >>> link = Link(latency_s=1.0, bandwidth_bytes_per_s=2.0)
    >>> free_at = [0.0]
    >>> [reserve(free_at, Route(link, (0,)), 0.0, 8) for _ in range(2)], free_at
    ([5.0, 9.0], [8.0])
    """
    start = ready_s
    for resource in route.resources:
        if free_at[resource] > start:
            start = free_at[resource]
    link = route.link
    if link.__class__ is Link:  # a division, not a call: it runs for each of a million messages
        end = start + num_bytes / link.bandwidth_bytes_per_s
    else:
        end = start + link.occupancy_s(num_bytes)
    for resource in route.resources:
        free_at[resource] = end
    return end + link.latency_s


def all_reduce_due(
    free_at: FreeAt,
    network: Network,
    num_bytes: float,
    ready_s: Mapping[str, float],
    collective: Collective = Collective.RING,
) -> dict[str, float]:
    """Return when each device has the sum (R7), given when each was ready (both by device name).

    The sum begins when its last member is ready, and a rank sends in a round what it received in the rounds
    before. Where an all-reduce was measured, all have it that long after the ring's resources are free.
    """
    names = list(ready_s)
    if len(names) == 1:
        return dict(ready_s)
    begin = max(ready_s.values())
    start_s = dict.fromkeys(names, begin)
    if collective is Collective.TREE:
        return messages_due(free_at, network, tree_all_reduce(num_bytes, network.by_node(names)), start_s)
    if collective is Collective.HIERARCHICAL:
        return _hierarchical_due(free_at, network, num_bytes, start_s)
    routes = ring_routes(network, names)
    measured_s = network.measured_all_reduce_s(num_bytes, names)
    if measured_s is not None:
        used = [resource for route in routes for resource in route.resources]
        end = max(begin, *(free_at[resource] for resource in used)) + measured_s
        for resource in used:
            free_at[resource] = end
        return dict.fromkeys(names, end)
    chunk = num_bytes / len(names)
    if len(names) > LARGE_RING:
        due = _large_ring(free_at, routes, chunk, begin)
    elif apart(routes):
        due = _ring_apart(free_at, routes, chunk, begin)
    else:
        return messages_due(free_at, network, ring_all_reduce(num_bytes, names), start_s)
    return dict(zip(names, due, strict=True))


def _hierarchical_due(
    free_at: FreeAt, network: Network, num_bytes: float, start_s: Mapping[str, float]
) -> dict[str, float]:
    """Return when each device has the sum: trees inside nodes, a ring of their first ones, trees back.

    The ring begins when the last node has its sum.
    """
    groups = network.by_node(list(start_s))
    due = messages_due(free_at, network, node_reduce(num_bytes, groups), start_s)
    due |= all_reduce_due(free_at, network, num_bytes, {group[0]: due[group[0]] for group in groups})
    return messages_due(free_at, network, node_broadcast(num_bytes, groups), due)


def reduce_due(
    free_at: FreeAt, network: Network, num_bytes: float, ready_s: Mapping[str, float], root: str
) -> dict[str, float]:
    """Return when a reduction by a tree is over for each device: at the root (a name) it has the sum.

    As for `all_reduce_due` it begins when its last member is ready.
    """
    rounds = tree_reduce(num_bytes, network.by_node(_root_first(ready_s, root)))
    return messages_due(free_at, network, rounds, dict.fromkeys(ready_s, max(ready_s.values())))


def broadcast_due(
    free_at: FreeAt, network: Network, num_bytes: float, ready_s: Mapping[str, float], root: str
) -> dict[str, float]:
    """Return when each device has what the root (a name) broadcasts by a tree; see `reduce_due`."""
    rounds = tree_broadcast(num_bytes, network.by_node(_root_first(ready_s, root)))
    return messages_due(free_at, network, rounds, dict.fromkeys(ready_s, max(ready_s.values())))


def _root_first(names: Iterable[str], root: str) -> list[str]:
    return [root, *(name for name in names if name != root)]


def ring_routes(network: Network, names: Sequence[str]) -> list[Route]:
    """Return the routes from each member (a name) of a ring to the next."""
    return [network.route(*pair) for pair in zip(names, [*names[1:], names[0]], strict=True)]


def all_reduce_resources(network: Network, names: Sequence[str], collective: Collective) -> set[int]:
    """Return what the messages of an all-reduce between devices (names) occupy."""
    groups = network.by_node(names)
    if collective is Collective.RING:
        rounds, ring = [], names
    elif collective is Collective.TREE:
        rounds, ring = tree_all_reduce(0.0, groups), names[:1]
    else:
        rounds = node_reduce(0.0, groups) + node_broadcast(0.0, groups)
        ring = [group[0] for group in groups]
    routes = [network.route(source, to) for messages in rounds for source, to, _ in messages]
    routes += ring_routes(network, ring) if len(ring) > 1 else []
    return {resource for route in routes for resource in route.resources}


def apart(routes: Sequence[Route]) -> bool:
    """Return whether no two messages of a round share a resource."""
    used = [resource for route in routes for resource in route.resources]
    return len(set(used)) == len(used)


def messages_due(
    free_at: FreeAt,
    network: Network,
    rounds: Sequence[Sequence[tuple[str, str, float]]],
    start_s: Mapping[str, float],
) -> dict[str, float]:
    """Return when each device has got its last message, one by one; a round's are sent before any arrives.

    start_s: when each device may send first.
    """
    due = dict(start_s)
    for messages in rounds:
        arrived = [
            (destination, reserve(free_at, network.route(source, destination), due[source], size))
            for source, destination, size in messages
        ]
        for name, arrival in arrived:
            due[name] = max(due[name], arrival)
    return due


def _ring_apart(free_at: FreeAt, routes: Sequence[Route], chunk: float, begin_s: float) -> list[float]:
    """Return when each rank of a ring has the sum, if no two of its messages share a resource.

    The same sums as `reserve` of each message, a round at a time: the resources of a route are then free at
    one time.
    """
    free = [max(free_at[resource] for resource in route.resources) for route in routes]
    seconds = [route.link.occupancy_s(chunk) for route in routes]
    latencies = [route.link.latency_s for route in routes]
    due = [begin_s] * len(routes)
    for _ in range(2 * (len(routes) - 1)):
        free = list(map(add, map(max, due, free), seconds))
        arrived = list(map(add, free, latencies))
        due = list(map(max, due, [arrived[-1], *arrived[:-1]]))
    for route, end in zip(routes, free, strict=True):
        for resource in route.resources:
            free_at[resource] = end
    return due


def _large_ring(free_at: FreeAt, routes: Sequence[Route], chunk: float, begin_s: float) -> list[float]:
    """Return when each rank of a ring of many has the sum, to rounding; see `ring_ends_s` for estimates."""
    from cost_model.large_rings import ring_ends_s  # NumPy, which small rings do without

    starts = [max(0.0, *(free_at[resource] - begin_s for resource in route.resources)) for route in routes]
    ends = ring_ends_s(
        [route.resources for route in routes],
        [route.link.occupancy_s(chunk) for route in routes],
        [route.link.latency_s for route in routes],
        starts,
        2 * (len(routes) - 1),
    )
    for route, end in zip(routes, ends, strict=True):
        for resource in route.resources:  # its last message is that of the later member
            free_at[resource] = begin_s + end
    arrived = [begin_s + end + route.link.latency_s for route, end in zip(routes, ends, strict=True)]
    return [arrived[-1], *arrived[:-1]]


def all_reduce_s(
    network: Network, num_bytes: float, names: Sequence[str], collective: Collective = Collective.RING
) -> float:
    """Return the seconds of an all-reduce between devices (names), alone, until the last has the sum."""
    ready_s = dict.fromkeys(names, 0.0)
    return max(all_reduce_due(idle(), network, num_bytes, ready_s, collective).values())
