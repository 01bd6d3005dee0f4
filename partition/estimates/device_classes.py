"""Devices that may stand for one another, and the links between such classes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cost_model.cluster import Cluster, Device, Node

ClassOrder = tuple[int, ...]
"""Classes of devices in the order of the stages."""


@dataclass(frozen=True, slots=True)
class DeviceClasses:
    """A grouping of devices in which any of a group may stand for any other.

    pinned: names of devices that stand for themselves alone: a class each.
    links: for each two classes (first <= second), pairs of different devices that stand for every kind of
        channel between them; none for a class of one device with itself. Empty where nobody asks.
    """

    members: tuple[tuple[Device, ...], ...]
    links: dict[tuple[int, int], tuple[tuple[Device, Device], ...]] = dataclasses.field(
        compare=False, default_factory=dict
    )
    pinned: frozenset[str] = frozenset()

    @classmethod
    def by(cls, devices: Iterable[Device], key: Callable[[Device], object]) -> "DeviceClasses":
        """Group devices by a key, without links; classes come in order of first appearance."""
        groups: dict[object, list[Device]] = {}
        for device in devices:
            groups.setdefault(key(device), []).append(device)
        return cls(tuple(map(tuple, groups.values())))

    @classmethod
    def of(cls, devices: Iterable[Device]) -> "DeviceClasses":
        """Group devices by `device_class`: those of one node that are alike."""
        return cls.by(devices, lambda device: device.device_class)

    def merged(self) -> "DeviceClasses":
        """Return these with classes of one kind, speed and memory merged, pinned devices but for."""
        groups: dict[object, list[int]] = {}
        for class_index, (device, *_) in enumerate(self.members):
            own = device.name if device.name in self.pinned else ""
            key = (device.kind, device.speed, device.usable_bytes, own)
            groups.setdefault(key, []).append(class_index)
        return self.merged_into(list(groups.values()))

    def merged_into(self, parts: Sequence[Sequence[int]]) -> "DeviceClasses":
        """Return a class for each part, its classes merged, with the channels of all of them."""
        links = {
            (first, second): tuple(
                pair for one in parts[first] for other in parts[second] for pair in self.channels(one, other)
            )
            for first in range(len(parts))
            for second in range(first, len(parts))
        }
        return DeviceClasses(
            tuple(
                tuple(device for class_index in part for device in self.members[class_index])
                for part in parts
            ),
            links,
            self.pinned,
        )

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(group) for group in self.members)

    def class_indices(self) -> dict[str, int]:
        """Return the class of each device, by its name."""
        return {device.name: index for index, group in enumerate(self.members) for device in group}

    def pair(self, first: int, second: int) -> tuple[Device, Device]:
        """Return two different devices that stand for two classes, or for the same one twice."""
        return self.members[first][0], self.members[second][1 if first == second else 0]

    def devices(self, order: ClassOrder) -> tuple[Device, ...]:
        """Return a device for each place of an order, each device once, in the order of the cluster."""
        unused = [iter(group) for group in self.members]
        return tuple(next(unused[class_index]) for class_index in order)

    def channels(self, first: int, second: int) -> tuple[tuple[Device, Device], ...]:
        """Return pairs (device of first, of second), one for every kind of channel between the classes."""
        if first <= second:
            return self.links[first, second]
        return tuple((one, other) for other, one in self.links[second, first])


def equal_devices(cluster: Cluster, pinned: Iterable[str] = ()) -> DeviceClasses:
    """Group devices by (kind, speed, memory, node shape): equal nodes are one class, however many.

    Each pinned device (names) is a class of its own.
    """
    alone = frozenset(pinned)
    shapes = {node.name: _node_shape(node, cluster) for node in cluster.nodes}
    members = DeviceClasses.by(
        cluster.devices,
        lambda device: (
            *(device.kind, device.speed, device.usable_bytes, shapes[device.node]),
            device.name if device.name in alone else "",
        ),
    ).members
    nodes = [_by_node(group) for group in members]
    links = {
        (first, second): _channels(nodes[first], nodes[second], cluster)
        for first in range(len(members))
        for second in range(first, len(members))
    }
    return DeviceClasses(members, links, alone)


def _node_shape(node: Node, cluster: Cluster) -> object:
    """Return what tells nodes apart: devices, interconnect, sums, and their own links to other nodes."""
    devices = tuple(sorted((device.kind, device.speed, device.usable_bytes) for device in node.devices))
    own = tuple(
        sorted(
            (next(name for name in link.nodes if name != node.name), *dataclasses.astuple(link.link))
            for link in cluster.links
            if node.name in link.nodes
        )
    )
    return (devices, node.interconnect, node.all_reduces, own)


_Nodes = Mapping[str, Sequence[Device]]
"""The devices of a class by their node."""


def _channels(firsts: _Nodes, seconds: _Nodes, cluster: Cluster) -> tuple[tuple[Device, Device], ...]:
    """Return a pair inside a node, one over the network, and one for each own link, where there is one."""
    pairs: list[tuple[Device, Device]] = []
    inside = (
        (one, other) for name in firsts if name in seconds for one in firsts[name] for other in seconds[name]
    )
    pairs += list(_first_pair(inside))
    own = {frozenset(link.nodes) for link in cluster.links}
    across = (
        (firsts[one][0], seconds[other][0])
        for one in firsts
        for other in seconds
        if one != other and frozenset((one, other)) not in own
    )
    pairs += _first_pair(across)
    for link in cluster.links:
        for one, other in (link.nodes, link.nodes[::-1]):
            if one in firsts and other in seconds:
                pairs.append((firsts[one][0], seconds[other][0]))
    return tuple(pairs)


def _first_pair(pairs: Iterable[tuple[Device, Device]]) -> list[tuple[Device, Device]]:
    return next(([pair] for pair in pairs if pair[0].name != pair[1].name), [])


def _by_node(devices: Iterable[Device]) -> dict[str, list[Device]]:
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    return nodes


def swapped(order: ClassOrder, place: int, other: int) -> ClassOrder:
    """Return an order of classes with two of its places swapped."""
    classes = list(order)
    classes[place], classes[other] = classes[other], classes[place]
    return tuple(classes)
