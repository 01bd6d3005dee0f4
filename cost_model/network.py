"""What messages cost: R2, R3 and R5 of docs/clock.md.

The simulator and the emulated links share `reserve`, and the sums made of it in `sum_times`, so that what is
predicted is what runs.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cost_model.cluster import Cluster, Device, Link, is_emulated
from cost_model.measured_links import MeasuredAllReduce, slower
from cost_model.network_resources import Resources

NORM_BYTES = 32.0  # sum of squares, non-finite flag, loss and its weight, as float64


class FreeAt(Protocol):
    """When each resource of a network is free again, by its number: a list, or a dict of zeros."""

    def __getitem__(self, resource: int, /) -> float: ...
    def __setitem__(self, resource: int, free_s: float, /) -> None: ...


def idle() -> defaultdict[int, float]:
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
    the cluster is not slower. as_in_file: the same without them.
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
        self._sums = {node.name: node.all_reduces for node in cluster.nodes if node.all_reduces}
        self.known_s: dict[tuple[tuple[str, ...], float], float | None] = {}  # of measured all-reduces
        self.alone_s: dict[object, float] = {}  # of sums on the idle network
        self.by_nodes_s: dict[object, tuple[float, float]] = {}  # of those inside nodes, and between them
        self.choices: dict[object, object] = {}  # see `collective_choice`
        self.occupied: dict[object, frozenset[int]] = {}  # see `sum_resources.all_reduce_resources`
        # due and free seconds of norms, the latter by place in the order of resources
        self.norms: dict[object, tuple[tuple[float, ...], tuple[float, ...]]] = {}  # see `sum_times.norm_due`
        self.rings: dict[tuple[str, ...], Sequence[Route]] = {}  # see `sum_times.ring_routes`
        self._routes: dict[tuple[str, str], Route] = {}
        self.resources = Resources(cluster.nodes)

    def device(self, name: str) -> Device:
        """Return the device of a name."""
        return self._devices[name]

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
        if not (is_emulated(source.kind) or is_emulated(destination.kind)):
            link = slower(link, self._measured.get(f"{source.kind}>{destination.kind}"))
        return Route(link, self.resources.of_route(source.name, destination.name))

    def by_node(self, names: Sequence[str]) -> list[list[str]]:
        """Return devices (names) by their node, nodes in order of first appearance."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self._devices[name].node, []).append(name)
        return list(found.values())

    def inside_s(self, num_bytes: float, names: Sequence[str]) -> float | None:
        """Return the seconds of an all-reduce between devices (names) of a node that says it; else None.

        That of as many devices, else of the next larger number.
        """
        if not self._sums or len(names) < 2:
            return None
        node = self._devices[names[0]].node
        if node not in self._sums or any(self._devices[name].node != node for name in names):
            return None
        of_size = next((sums for sums in self._sums[node] if sums.num_devices >= len(names)), None)
        return None if of_size is None else of_size.link.transfer_s(num_bytes)

    @property
    def sums_inside(self) -> bool:
        """Whether some node says how long its devices sum."""
        return bool(self._sums)

    def was_measured(self, names: Sequence[str]) -> bool:
        """Return whether an all-reduce between devices (names) was measured: other ways to sum were not."""
        return self.measured_group(names) is not None or self.inside_s(0.0, names) is not None

    def measured_group(self, names: Sequence[str]) -> MeasuredAllReduce | None:
        """Return what was measured for as many devices of each kind (names), or the next larger group."""
        if not self._all_reduces:
            return None
        kinds = Counter(self._devices[name].kind for name in names)
        if any(map(is_emulated, kinds)):
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
