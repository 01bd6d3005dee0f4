"""What messages queue for, numbered: network cards and links, each direction apart.

A cluster of thousands of nodes has millions of links, so numbers are computed and names made when asked for.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from cost_model.cluster import Node


class Resources:
    """The names of all resources by number: cards, links between nodes, links inside nodes.

    The numbers depend on the nodes alone, so that all ranks of a run have the same.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._names = [node.name for node in nodes]
        self._devices = [[device.name for device in node.devices] for node in nodes]
        self._places = {
            device: (here, index)
            for here, devices in enumerate(self._devices)
            for index, device in enumerate(devices)
        }
        self._links = 2 * len(nodes)
        between = len(nodes) * (len(nodes) - 1)
        inside = (len(devices) * (len(devices) - 1) for devices in self._devices)
        self._starts = list(accumulate(chain([self._links + between], inside)))

    def of_route(self, source: str, destination: str) -> tuple[int, ...]:
        """Return what a message between two devices (names) occupies (R2 of docs/clock.md).

        Card, link and card, or a link inside a node.
        """
        (here, one), (there, other) = self._places[source], self._places[destination]
        if here == there:
            return (self._starts[here] + _pair(one, other, len(self._devices[here])),)
        return (2 * here, self._links + _pair(here, there, len(self._names)), 2 * there + 1)

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, resource: int) -> str:
        """Return the name of one resource."""
        if not 0 <= resource < len(self):
            raise IndexError(f"there are {len(self)} resources, none has number {resource}")
        if resource < self._links:
            return f"card {self._names[resource // 2]} {'in' if resource % 2 else 'out'}"
        names, start = self._names, self._links
        if resource >= self._starts[0]:
            node = next(index for index, stop in enumerate(self._starts[1:]) if resource < stop)
            names, start = self._devices[node], self._starts[node]
        source, other = divmod(resource - start, len(names) - 1)
        return f"link {names[source]}>{names[other + (other >= source)]}"


def _pair(source: int, destination: int, count: int) -> int:
    """Return the number of an ordered pair of different ones among count."""
    return source * (count - 1) + destination - (destination > source)
