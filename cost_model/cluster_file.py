"""cluster.toml: the file in which a user writes a cluster down, with units (docs/files.md)."""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter

from cost_model.cluster import CPU, Cluster, Device, Link, Node, NodeAllReduce, NodeLink, is_emulated
from cost_model.errors import InputError
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
    speed: Annotated[float, Field(ge=1e-9, le=1e9)] = 1.0
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    watts: Annotated[float, Field(ge=0)] | None = None
    driver_memory: Bytes | None = None


class _Node(BaseModel):
    model_config = STRICT
    name: Name
    devices: Annotated[tuple[_Devices, ...], Field(min_length=1)]
    interconnect: _Channel | None = None
    all_reduces: tuple[_AllReduce, ...] = ()
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$")] | None = None


class _ClusterFile(BaseModel):
    model_config = STRICT
    name: str = "cluster"
    reserve: str = DEFAULT_RESERVE
    driver_memory: Bytes | None = None
    network: _Channel
    nodes: Annotated[tuple[_Node, ...], Field(min_length=1)]
    links: tuple[_NodeLink, ...] = ()


_ADAPTER = TypeAdapter(_ClusterFile)


def read_cluster(path: Path) -> Cluster:
    """Read the cluster that a cluster.toml describes.

    Raises: InputError naming file, key, value and remedy.
    """
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
    return Node(node.name, devices, interconnect, node.host, sums)
