"""cluster.toml: the file in which a user writes a cluster down, with units (docs/files.md)."""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter

from cost_model.cluster import (
    CPU,
    FASTEST,
    SLOWEST,
    Cluster,
    Device,
    HostMemory,
    Link,
    Node,
    NodeAllReduce,
    NodeLink,
    is_emulated,
)
from cost_model.errors import InputError
from cost_model.known_clusters import cluster_path
from cost_model.strict_files import STRICT, read_toml, validate
from cost_model.units import parse_bandwidth, parse_bytes, parse_fraction_or_bytes, parse_seconds
from cost_model.vendors import driver_bytes

Bytes = Annotated[float, BeforeValidator(parse_bytes)]
Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
DEFAULT_RESERVE = "10 %"
MOST_DEVICES = 100_000


class _Channel(BaseModel):
    model_config = STRICT
    bandwidth: Bandwidth
    latency: Seconds

    def link(self) -> Link:
        return Link(latency_s=self.latency, bandwidth_bytes_per_s=self.bandwidth)


class _NodeLink(_Channel):
    nodes: tuple[str, str]


class _AllReduce(_Channel):
    devices: Annotated[int, Field(ge=2)]


class _Devices(BaseModel):
    model_config = STRICT
    kind: Annotated[str, Field(min_length=1)]
    memory: Bytes
    count: Annotated[int, Field(ge=1)] = 1
    speed: Annotated[float, Field(ge=SLOWEST, le=FASTEST)] = 1.0
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    watts: Annotated[float, Field(ge=0)] | None = None
    driver_memory: Bytes | None = None


class _Node(BaseModel):
    model_config = STRICT
    name: Name
    devices: Annotated[tuple[_Devices, ...], Field(min_length=1)]
    interconnect: _Channel | None = None
    all_reduces: tuple[_AllReduce, ...] = ()
    host_memory: Bytes | None = None
    host_link: _Channel | None = None
    host_optimizer: Bandwidth | None = None
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9:][A-Za-z0-9_.:-]*$")] | None = None


class _ClusterFile(BaseModel):
    model_config = STRICT
    name: str = "cluster"
    reserve: str = DEFAULT_RESERVE
    driver_memory: Bytes | None = None
    network: _Channel
    nodes: Annotated[tuple[_Node, ...], Field(min_length=1)]
    links: tuple[_NodeLink, ...] = ()


_ADAPTER = TypeAdapter(_ClusterFile)


def read_cluster(path: Path | str) -> Cluster:
    """Read the cluster that a cluster.toml describes, or one that comes with hetpipe, by its name.

    Raises: InputError naming file, key, value and remedy.
    """
    path = cluster_path(path)
    return cluster_from_data(read_toml(path), str(path))


def cluster_from_data(data: object, source: str) -> Cluster:
    """Return the cluster of data shaped like cluster.toml; source names it in errors."""
    file = validate(_ADAPTER, data, source)
    num_devices = sum(devices.count for node in file.nodes for devices in node.devices)
    if num_devices > MOST_DEVICES:
        raise InputError(f"{source}: has {num_devices:,} devices; {MOST_DEVICES:,} are the most")
    counts: Counter[str] = Counter()
    for devices in (devices for node in file.nodes for devices in node.devices):
        counts[devices.kind] += devices.count
    try:
        return Cluster(
            name=file.name,
            network=file.network.link(),
            nodes=tuple(_node(node, file, counts) for node in file.nodes),
            links=tuple(NodeLink(nodes=link.nodes, link=link.link()) for link in file.links),
        )
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _node(node: _Node, file: _ClusterFile, counts: Mapping[str, int]) -> Node:
    kinds = [devices for devices in node.devices for _ in range(devices.count)]
    is_gpu = [kind.kind != CPU and not is_emulated(kind.kind) for kind in kinds]
    gpus_before = list(accumulate(is_gpu, initial=0))
    devices = tuple(
        Device(
            name=f"{node.name}/{index}",
            node=node.name,
            kind=kind.kind,
            memory_bytes=kind.memory,
            reserve_bytes=parse_fraction_or_bytes(file.reserve, kind.memory),
            speed=kind.speed,
            price_per_hour=kind.price_per_hour,
            watts=kind.watts,
            gpu=gpus_before[index] if is_gpu[index] else None,
            driver_bytes=next(
                (given for given in (kind.driver_memory, file.driver_memory) if given is not None),
                driver_bytes(kind.kind, counts),
            ),
        )
        for index, kind in enumerate(kinds)
    )
    interconnect = node.interconnect.link() if node.interconnect else None
    sums = tuple(NodeAllReduce(entry.devices, entry.link()) for entry in node.all_reduces)
    if sums and sums[-1].num_devices > len(devices):
        raise InputError(
            f"node {node.name!r}: all_reduces has {sums[-1].num_devices} devices, the node {len(devices)}; "
            "take that entry out, or give the node its `devices`"
        )
    return Node(node.name, devices, interconnect, node.host, sums, _host_memory(node))


def _host_memory(node: _Node) -> HostMemory | None:
    if node.host_memory is None and node.host_link is None and node.host_optimizer is None:
        return None
    if node.host_memory is None and node.host_link is None:
        raise InputError(
            f"node {node.name!r}: has host_optimizer and no host_memory; give host_memory and host_link, or "
            "leave it out: the host steps what is in its memory"
        )
    if node.host_memory is None or node.host_link is None:
        given, missing = (
            ("host_memory", "host_link") if node.host_link is None else ("host_link", "host_memory")
        )
        raise InputError(
            f"node {node.name!r}: has {given} and no {missing}; give both, or neither: how much of the "
            "host's memory plans may fill, and the bandwidth and latency between it and the devices"
        )
    return HostMemory(node.host_memory, node.host_link.link(), node.host_optimizer)


def with_links(text: str, links: Sequence[NodeLink], source: str) -> str:
    """Return the text of a cluster.toml with these links between nodes, in place of what it says of them.

    The rest of it stays as it is, down to the comments.

    Raises: InputError if it gives links in another way than as [[links]].
    """
    before = cluster_from_data(tomllib.loads(text), source)
    new = {frozenset(link.nodes) for link in links}
    parts = re.split(r"^(?=[ \t]*\[)", text, flags=re.MULTILINE)
    kept = "".join(part for part in parts if _pair_of(part) not in new).rstrip()
    added = "".join(
        f'\n\n[[links]]\nnodes = ["{link.nodes[0]}", "{link.nodes[1]}"]\n'
        f'bandwidth = "{link.link.bandwidth_bytes_per_s * 8e-6:.5g} Mbit/s"\n'
        f'latency = "{link.link.latency_s * 1e3:.4g} ms"'
        for link in links
    )
    changed = f"{kept}{added}\n"
    remedy = f"{source}: give each link as a table of its own, under [[links]]; measured ones replace some"
    try:
        after = cluster_from_data(tomllib.loads(changed), source)
    except (tomllib.TOMLDecodeError, InputError):
        raise InputError(remedy) from None
    old = {frozenset(link.nodes) for link in before.links}
    if replace(after, links=()) != replace(before, links=()) or (
        {frozenset(link.nodes) for link in after.links} != old | new
    ):
        raise InputError(remedy)
    return changed


def _pair_of(part: str) -> frozenset[str]:
    """Return the nodes of a [[links]] table; nobody of any other part of the file."""
    if not re.match(r"[ \t]*\[\[\s*links\s*\]\]", part):
        return frozenset()
    try:
        return frozenset(tomllib.loads(part)["links"][0].get("nodes", ()))
    except (tomllib.TOMLDecodeError, TypeError):
        return frozenset()
