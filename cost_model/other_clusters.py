"""A cluster less some devices, or with some of them slower or smaller."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.strict_files import did_you_mean


def without(cluster: Cluster, names: Iterable[str]) -> Cluster:
    """Return the cluster less some devices ("old/3") or nodes ("old"); the others keep their names.

    Raises: InputError for an unknown name, or if nothing is left.
    """
    devices, nodes = [device.name for device in cluster.devices], [node.name for node in cluster.nodes]
    gone: set[str] = set()
    for name in names:
        if name in nodes:
            of_node = {device.name for device in cluster.devices if device.node == name}
            if not of_node:
                raise InputError(f"node {name!r} has no devices left")
            gone |= of_node
        elif name in devices:
            gone.add(name)
        else:
            near = did_you_mean(name, [*devices, *nodes])
            raise InputError(f"{name!r} is to be left out: the cluster has no such device or node; {near}")
    if gone >= set(devices):
        raise InputError(f"what is left out leaves none of the {len(devices)} devices; leave out fewer")
    kept = tuple(
        replace(node, devices=tuple(d for d in node.devices if d.name not in gone)) for node in cluster.nodes
    )
    return replace(cluster, nodes=kept)


def slowed(cluster: Cluster, times: Mapping[str, float]) -> Cluster:
    """Return the cluster with some devices, by name, so many times slower than they are."""
    nodes = []
    for node in cluster.nodes:
        devices = (replace(found, speed=found.speed / times.get(found.name, 1.0)) for found in node.devices)
        nodes.append(replace(node, devices=tuple(devices)))
    return replace(cluster, nodes=tuple(nodes))


def with_room(cluster: Cluster, usable_bytes: Mapping[str, float]) -> Cluster:
    """Return the cluster with some devices, by name, of which a plan may fill so much and no more."""
    nodes = []
    for node in cluster.nodes:
        devices = (
            replace(found, memory_bytes=usable_bytes[found.name] + found.reserve_bytes + found.driver_bytes)
            if found.name in usable_bytes
            else found
            for found in node.devices
        )
        nodes.append(replace(node, devices=tuple(devices)))
    return replace(cluster, nodes=tuple(nodes))
