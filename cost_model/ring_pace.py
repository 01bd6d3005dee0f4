"""About how long a ring of many members takes, and the next one whose members differ in a few."""

from collections.abc import Sequence

from cost_model.communication import Network

PACE_BYTES = 2**20
"""A message whose seconds per byte stand for all: links may differ by size."""


class MovingRing:
    """A ring whose members may be replaced; owns the load that a round puts on each resource.

    A round lasts as long as the busiest resource carries its messages, or as long as the mean hop if that is
    longer, since the data go all the way around.
    """

    def __init__(self, network: Network, names: Sequence[str]) -> None:
        self._network, self._names = network, list(names)
        self._loads: dict[int, float] = {}
        self._latency_s = self._hops_s = 0.0
        for index in range(len(names)):
            self._add(index, 1)

    def move(self, index: int, name: str) -> None:
        """Put a device in the place of a member."""
        before = (index - 1) % len(self._names)
        self._add(before, -1)
        self._add(index, -1)
        self._names[index] = name
        self._add(before, 1)
        self._add(index, 1)

    def all_reduce_s(self, num_bytes: float) -> float:
        """Seconds of an all-reduce between the members, on an idle network."""
        count = len(self._names)
        chunk = num_bytes / count
        hop_s = (self._latency_s + self._hops_s * chunk) / count
        return 2 * (count - 1) * max(max(self._loads.values()) * chunk, hop_s)

    def _add(self, index: int, sign: int) -> None:
        """The message of a member; times are for each byte of a message, latency apart."""
        names = self._names
        route = self._network.route(names[index], names[(index + 1) % len(names)])
        seconds = sign * route.link.occupancy_s(PACE_BYTES) / PACE_BYTES
        self._latency_s += sign * route.link.latency_s
        self._hops_s += seconds
        loads = self._loads
        for resource in route.resources:
            loads[resource] = loads.get(resource, 0.0) + seconds
