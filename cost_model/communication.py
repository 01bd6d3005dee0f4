"""What messages cost. The simulator and the emulated links share `reserve` and the decompositions here,
so that what is predicted is what runs."""

from collections import Counter
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import permutations
from operator import add
from typing import TypeVar

from cost_model.cluster import EMULATED, Cluster, Device, Link
from cost_model.measured_links import MeasuredAllReduce, slower

Rank = TypeVar("Rank", int, str)

NORM_BYTES = 32.0  # sum of squares, non-finite flag, loss and its weight, as float64


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
    the links of the cluster are not slower.
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
        self._as_in_file = Network(cluster) if all_reduces else self
        self._all_reduce_s: dict[tuple[tuple[str, ...], float], float | None] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        self.resources: list[str] = []
        for node in cluster.nodes:
            self.resources += (f"card {node.name} out", f"card {node.name} in")
        for one, other in permutations(cluster.nodes, 2):
            self.resources.append(f"link {one.name}>{other.name}")
        for node in cluster.nodes:
            pairs = permutations(node.devices, 2)
            self.resources += (f"link {one.name}>{other.name}" for one, other in pairs)
        self._index = {name: index for index, name in enumerate(self.resources)}

    def route(self, source: str, destination: str) -> Route:
        """The route between two devices (names), which differ."""
        key = (source, destination)
        if key not in self._routes:
            self._routes[key] = self._find_route(self._devices[source], self._devices[destination])
        return self._routes[key]

    def _find_route(self, source: Device, destination: Device) -> Route:
        here, there = source.node, destination.node
        names: tuple[str, ...] = (f"link {source.name}>{destination.name}",)
        link = self._interconnects[here]
        if here != there:
            names = (f"card {here} out", f"link {here}>{there}", f"card {there} in")
            link = self._between.get(frozenset((here, there)), self._network)
        if EMULATED not in (source.kind, destination.kind):
            link = slower(link, self._measured.get(f"{source.kind}>{destination.kind}"))
        return Route(link, tuple(self._index[name] for name in names))

    def measured_all_reduce_s(self, num_bytes: float, names: Sequence[str]) -> float | None:
        """Seconds of an all-reduce between devices (names) as measured; None where it was not.

        Measured for as many devices of each of their kinds, else for the next larger group of these kinds.
        Never less than the ring takes over links as the cluster has them.
        """
        if not self._all_reduces:
            return None
        key = (tuple(names), num_bytes)
        if key not in self._all_reduce_s:
            group = self._measured_group(names)
            self._all_reduce_s[key] = (
                None
                if group is None
                else max(group.sum_s(num_bytes), all_reduce_s(self._as_in_file, num_bytes, names))
            )
        return self._all_reduce_s[key]

    def _measured_group(self, names: Sequence[str]) -> MeasuredAllReduce | None:
        kinds = Counter(self._devices[name].kind for name in names)
        if EMULATED in kinds:
            return None
        large_enough = (
            entry
            for entry in self._all_reduces
            if set(entry.kinds) == set(kinds) and kinds <= Counter(entry.kinds)
        )
        return min(large_enough, key=lambda entry: len(entry.kinds), default=None)


def reserve(free_at: MutableSequence[float], route: Route, ready_s: float, num_bytes: float) -> float:
    """Queue one message on its route; gives the time at which it is due at the receiver.

    free_at: time at which each resource of the network is free again, changed in place. The latency does
    not occupy the link.

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


def ring_all_reduce(num_bytes: float, ranks: Sequence[Rank]) -> list[list[tuple[Rank, Rank, float]]]:
    """The messages of a ring all-reduce: rounds of (source, destination, bytes).

    2 (n - 1) rounds in which each rank sends num_bytes / n to its neighbour (Patarasuk and Yuan, JPDC
    2009, section 3).
    """
    num_ranks = len(ranks)
    chunk = num_bytes / num_ranks
    ring = [(ranks[i], ranks[(i + 1) % num_ranks], chunk) for i in range(num_ranks)]
    return [list(ring) for _ in range(2 * (num_ranks - 1))]


def all_reduce_due(
    free_at: MutableSequence[float], network: Network, num_bytes: float, ready_s: Mapping[str, float]
) -> dict[str, float]:
    """Time at which each device has the sum, given when each was ready (both by device name).

    Where it was measured, all have it that long after the last is ready and the ring's resources are free.
    Otherwise the ring starts when its last member is ready, and a rank sends in a round what it received in
    the round before.
    """
    names = list(ready_s)
    if len(names) == 1:
        return dict(ready_s)
    begin = max(ready_s.values())
    rounds = ring_all_reduce(num_bytes, names)
    routes = [network.route(source, destination) for source, destination, _ in rounds[0]]
    used = [resource for route in routes for resource in route.resources]
    measured_s = network.measured_all_reduce_s(num_bytes, names)
    if measured_s is not None:
        end = max(begin, *(free_at[resource] for resource in used)) + measured_s
        for resource in used:
            free_at[resource] = end
        return dict.fromkeys(names, end)
    chunks = [size for _, _, size in rounds[0]]
    if len(set(used)) == len(used):
        return dict(zip(names, _ring_apart(free_at, routes, chunks, begin), strict=True))
    due = [begin] * len(names)
    for messages in rounds:
        arrived = [
            reserve(free_at, route, ready, size)
            for route, ready, (_, _, size) in zip(routes, due, messages, strict=True)
        ]
        due = list(map(max, due, [arrived[-1], *arrived[:-1]]))
    return dict(zip(names, due, strict=True))


def _ring_apart(
    free_at: MutableSequence[float], routes: Sequence[Route], chunks: Sequence[float], begin_s: float
) -> list[float]:
    """When each rank of a ring has the sum, if no two of its messages share a resource.

    The same sums as `reserve` of each message, a round at a time: the resources of a route are then free at
    one time, so that a ring of a thousand devices takes a second instead of many.
    """
    free = [max(free_at[resource] for resource in route.resources) for route in routes]
    seconds = [route.link.occupancy_s(size) for size, route in zip(chunks, routes, strict=True)]
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


def all_reduce_s(network: Network, num_bytes: float, names: Sequence[str]) -> float:
    """Seconds of an all-reduce between devices (names) on an idle network, until the last has the sum."""
    free_at = [0.0] * len(network.resources)
    return max(all_reduce_due(free_at, network, num_bytes, dict.fromkeys(names, 0.0)).values())
