"""What messages cost. The simulator and the emulated links share `reserve` and the decompositions here,
so that what is predicted is what runs."""

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cost_model.cluster import EMULATED, Cluster, Link

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
    """

    def __init__(self, cluster: Cluster, measured: Mapping[str, Link] | None = None) -> None:
        self.resources: list[str] = []
        index: dict[str, int] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        for source in cluster.devices:
            for destination in cluster.devices:
                if source.name == destination.name:
                    continue
                names: tuple[str, ...] = (f"link {source.name}>{destination.name}",)
                if source.node != destination.node:
                    names = (
                        f"card {source.node} out",
                        f"link {source.node}>{destination.node}",
                        f"card {destination.node} in",
                    )
                for name in names:
                    if name not in index:
                        index[name] = len(self.resources)
                        self.resources.append(name)
                link = cluster.link(source.name, destination.name)
                if EMULATED not in (source.kind, destination.kind):
                    link = _slower(link, (measured or {}).get(f"{source.kind}>{destination.kind}"))
                route = Route(link, tuple(index[name] for name in names))
                self._routes[source.name, destination.name] = route

    def route(self, source: str, destination: str) -> Route:
        """The route between two devices (names), which differ."""
        return self._routes[source, destination]


def _slower(link: Link, measured: Link | None) -> Link:
    if measured is None:
        return link
    return Link(
        latency_s=max(link.latency_s, measured.latency_s),
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, measured.bandwidth_bytes_per_s),
    )


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
    end = start + num_bytes / route.link.bandwidth_bytes_per_s
    for resource in route.resources:
        free_at[resource] = end
    return end + route.link.latency_s


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

    The ring starts when its last member is ready. A rank sends in a round what it received in the round
    before.
    """
    names = list(ready_s)
    if len(names) == 1:
        return dict(ready_s)
    begin = max(ready_s.values())
    due = dict.fromkeys(names, begin)
    for messages in ring_all_reduce(num_bytes, names):
        arrived = {
            destination: reserve(free_at, network.route(source, destination), due[source], size)
            for source, destination, size in messages
        }
        due = {name: max(due[name], arrived[name]) for name in names}
    return due


def all_reduce_s(network: Network, num_bytes: float, names: Sequence[str]) -> float:
    """Seconds of an all-reduce between devices (names) on an idle network, until the last has the sum."""
    free_at = [0.0] * len(network.resources)
    return max(all_reduce_due(free_at, network, num_bytes, dict.fromkeys(names, 0.0)).values())
