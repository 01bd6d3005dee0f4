"""Devices that may stand for one another, and the links between such classes."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cost_model.cluster import Cluster, Device, Node

ClassOrder = tuple[int, ...]
"""Classes of devices in the order of the stages."""


@dataclass(frozen=True, slots=True)
class DeviceClasses:
    """Devices grouped: any of a group may stand for any other.

    links: for each two classes (first <= second), pairs of different devices that stand for every kind of
        channel between them; none for a class of one device with itself. Empty where nobody asks.
    """

    members: tuple[tuple[Device, ...], ...]
    links: dict[tuple[int, int], tuple[tuple[Device, Device], ...]] = dataclasses.field(
        compare=False, default_factory=dict
    )

    @classmethod
    def by(cls, devices: Iterable[Device], key: Callable[[Device], object]) -> "DeviceClasses":
        """Devices of one key together, without links; in order of first appearance."""
        groups: dict[object, list[Device]] = {}
        for device in devices:
            groups.setdefault(key(device), []).append(device)
        return cls(tuple(map(tuple, groups.values())))

    @classmethod
    def of(cls, devices: Iterable[Device]) -> "DeviceClasses":
        """By `device_class`: those of one node that are alike."""
        return cls.by(devices, lambda device: device.device_class)

    def merged(self) -> "DeviceClasses":
        """Classes of one kind, speed and memory together."""
        groups: dict[object, list[int]] = {}
        for entry, (device, *_) in enumerate(self.members):
            groups.setdefault((device.kind, device.speed, device.usable_bytes), []).append(entry)
        return self.joined(list(groups.values()))

    def joined(self, parts: Sequence[Sequence[int]]) -> "DeviceClasses":
        """Classes together, with the channels of all of them."""
        links = {
            (first, second): tuple(
                pair for one in parts[first] for other in parts[second] for pair in self.channels(one, other)
            )
            for first in range(len(parts))
            for second in range(first, len(parts))
        }
        return DeviceClasses(
            tuple(tuple(device for entry in part for device in self.members[entry]) for part in parts), links
        )

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(group) for group in self.members)

    def entries(self) -> dict[str, int]:
        """The class of each device, by its name."""
        return {device.name: entry for entry, group in enumerate(self.members) for device in group}

    def pair(self, first: int, second: int) -> tuple[Device, Device]:
        """Two different devices that stand for two classes, or for the same one twice."""
        return self.members[first][0], self.members[second][1 if first == second else 0]

    def devices(self, order: ClassOrder) -> tuple[Device, ...]:
        """A device for each place of an order, each device once, in the order of the cluster."""
        unused = [iter(group) for group in self.members]
        return tuple(next(unused[entry]) for entry in order)

    def channels(self, first: int, second: int) -> tuple[tuple[Device, Device], ...]:
        """Pairs (device of first, device of second), one for every kind of channel between the classes."""
        if first <= second:
            return self.links[first, second]
        return tuple((one, other) for other, one in self.links[second, first])


def equal_devices(cluster: Cluster) -> DeviceClasses:
    """Classes by (kind, speed, memory, node shape): equal nodes are one class, however many there are."""
    shapes = {node.name: _node_shape(node, cluster) for node in cluster.nodes}
    members = DeviceClasses.by(
        cluster.devices,
        lambda device: (device.kind, device.speed, device.usable_bytes, shapes[device.node]),
    ).members
    links = {}
    for first, group in enumerate(members):
        for second in range(first, len(members)):
            links[first, second] = _channels(group, members[second], cluster)
    return DeviceClasses(members, links)


def _node_shape(node: Node, cluster: Cluster) -> object:
    """What distinguishes a node: its devices, its interconnect, and links to other nodes of its own."""
    devices = tuple(sorted((device.kind, device.speed, device.usable_bytes) for device in node.devices))
    own = tuple(
        sorted(
            (next(name for name in link.nodes if name != node.name), *dataclasses.astuple(link.link))
            for link in cluster.links
            if node.name in link.nodes
        )
    )
    return (devices, node.interconnect, own)


def _channels(
    first: Iterable[Device], second: Iterable[Device], cluster: Cluster
) -> tuple[tuple[Device, Device], ...]:
    """A pair inside a node, a pair over the network, and one for each link of its own, where there is one."""
    here, there = _by_node(first), _by_node(second)
    pairs: list[tuple[Device, Device]] = []
    inside = ((one, other) for name in here if name in there for one in here[name] for other in there[name])
    pairs += list(_first_pair(inside))
    own = {frozenset(link.nodes) for link in cluster.links}
    across = (
        (here[one][0], there[other][0])
        for one in here
        for other in there
        if one != other and frozenset((one, other)) not in own
    )
    pairs += _first_pair(across)
    for link in cluster.links:
        for one, other in (link.nodes, link.nodes[::-1]):
            if one in here and other in there:
                pairs.append((here[one][0], there[other][0]))
    return tuple(pairs)


def _first_pair(pairs: Iterable[tuple[Device, Device]]) -> list[tuple[Device, Device]]:
    return next(([pair] for pair in pairs if pair[0].name != pair[1].name), [])


def _by_node(devices: Iterable[Device]) -> dict[str, list[Device]]:
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    return nodes
