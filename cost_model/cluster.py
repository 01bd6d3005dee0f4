"""The hardware: devices on nodes, and the links between them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from cost_model.errors import InputError
from cost_model.strict_files import canonical_sha256, did_you_mean

EMULATED = "emulated"
CPU = "cpu"


def is_emulated(kind: str) -> bool:
    """Return whether devices of a kind are emulated: "emulated", or "emulated-" and a name of its own.

    >>> is_emulated("emulated"), is_emulated("emulated-V100"), is_emulated("V100")
    (True, True, False)
    """
    return kind.partition("-")[0] == EMULATED


SLOWEST, FASTEST = 1e-9, 1e9
"""Speeds that a device may have."""
LEAST_BANDWIDTH = 1e-9


@dataclass(frozen=True, slots=True)
class Link:
    """A directed channel: latency plus bytes over bandwidth (alpha-beta model, Hockney, 1994)."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0:
            raise InputError(f"latency of {self.latency_s} s is negative; give zero or more")
        if not self.bandwidth_bytes_per_s > 0:
            raise InputError(f"bandwidth of {self.bandwidth_bytes_per_s} B/s must be above zero")
        if self.bandwidth_bytes_per_s < LEAST_BANDWIDTH:
            raise InputError(
                f"bandwidth of {self.bandwidth_bytes_per_s} B/s: a byte would take 30 years; give more"
            )

    def transfer_s(self, num_bytes: float) -> float:
        """Return seconds for one message on the idle link.

        >>> Link(latency_s=1.0, bandwidth_bytes_per_s=4.0).transfer_s(8)
        3.0
        """
        return self.latency_s + self.occupancy_s(num_bytes)

    def occupancy_s(self, num_bytes: float) -> float:
        """Return seconds for which one message occupies the link, latency left out."""
        return num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the cluster; speed scales the times measured for its kind (1 is as measured).

    gpu: its number among the GPUs of its node; None: its number there, as where all are GPUs.
    driver_bytes: what contexts and communicators take, which no allocator sees; see `vendors.driver_bytes`.
    """

    name: str
    node: str
    kind: str
    memory_bytes: float
    reserve_bytes: float = 0.0
    speed: float = 1.0
    price_per_hour: float | None = None
    watts: float | None = None
    gpu: int | None = None
    driver_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.memory_bytes > 0:
            raise InputError(f"device {self.name!r}: memory of {self.memory_bytes} bytes must be above zero")
        if not self.speed > 0:
            raise InputError(f"device {self.name!r}: speed {self.speed} must be above zero")
        if not 0 <= self.reserve_bytes < self.memory_bytes:
            raise InputError(
                f"device {self.name!r}: a reserve of {self.reserve_bytes:,.0f} bytes leaves nothing of its "
                f"{self.memory_bytes:,.0f}; lower `reserve`"
            )
        if not 0 <= self.driver_bytes < self.memory_bytes - self.reserve_bytes:
            raise InputError(
                f"device {self.name!r}: {self.driver_bytes:,.0f} bytes for the driver and a reserve of "
                f"{self.reserve_bytes:,.0f} leave nothing of its {self.memory_bytes:,.0f}; give it its "
                "`driver_memory`, or lower `reserve`"
            )

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU: neither a CPU nor emulated."""
        return self.kind != CPU and not is_emulated(self.kind)

    @property
    def usable_bytes(self) -> float:
        """The bytes that a plan may fill: memory less reserve, and less what the driver takes."""
        return self.memory_bytes - self.reserve_bytes - self.driver_bytes

    @property
    def usable_words(self) -> str:
        """Say how much that is, and what the driver takes besides."""
        beside = f" beside {math.ceil(self.driver_bytes):,} for its driver" if self.driver_bytes else ""
        return f"{math.floor(self.usable_bytes):,} usable{beside}"

    @property
    def device_class(self) -> tuple[str, float, float, str]:
        """A key: devices with the same one may be exchanged in a plan without changing its cost."""
        return (self.kind, self.speed, self.usable_bytes, self.node)


@dataclass(frozen=True, slots=True)
class NodeAllReduce:
    """How long so many devices of a node sum: latency plus the bytes that each gives over bandwidth."""

    num_devices: int
    link: Link

    def __post_init__(self) -> None:
        if self.num_devices < 2:
            raise InputError(f"an all-reduce of {self.num_devices} devices sums nothing; give 2 or more")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a node that plans may fill beside its devices', and the link to it that these share.

    The link is full duplex: so many bytes per second go each way at once. step_bytes_per_s: bytes of
    parameters for which its CPU makes an AdamW step in a second; None: it makes none.
    """

    memory_bytes: float
    link: Link
    step_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not self.memory_bytes > 0:
            raise InputError(f"host_memory of {self.memory_bytes} bytes must be above zero; or leave it out")
        if self.step_bytes_per_s is not None and not self.step_bytes_per_s > 0:
            raise InputError("host_optimizer of 0 bytes a second makes no step; give more, or leave it out")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: its devices, and the interconnect between them where it has one.

    all_reduces: measured ones, by rising numbers of devices; other sums go over the interconnect.
    host_memory: what plans may keep there; None: nothing.
    """

    name: str
    devices: tuple[Device, ...]
    interconnect: Link | None = None
    host: str | None = None
    all_reduces: tuple[NodeAllReduce, ...] = ()
    host_memory: HostMemory | None = None

    def __post_init__(self) -> None:
        sizes = [entry.num_devices for entry in self.all_reduces]
        if any(b <= a for a, b in pairwise(sizes)):
            raise InputError(
                f"node {self.name!r}: all_reduces are of {', '.join(map(str, sizes))} devices; give each "
                "number once, the numbers rising"
            )


@dataclass(frozen=True, slots=True)
class NodeLink:
    """The link between one pair of nodes, each way, in place of the cluster's network."""

    nodes: tuple[str, str]
    link: Link


@dataclass(frozen=True)  # no slots: devices are looked up by name, clusters have thousands
class Cluster:
    """The devices at hand, and their links. Devices are named node/index; names of nodes are unique."""

    name: str
    network: Link
    nodes: tuple[Node, ...]
    links: tuple[NodeLink, ...] = ()

    def __post_init__(self) -> None:
        names = Counter(node.name for node in self.nodes)
        for name, count in names.items():
            if count > 1:
                raise InputError(f"node {name!r} appears twice; names of nodes must differ")
        if not any(node.devices for node in self.nodes):
            raise InputError("the cluster has no device; give a node `devices`")
        pairs = Counter(frozenset(override.nodes) for override in self.links)
        for override in self.links:
            pair = frozenset(override.nodes)
            for name in override.nodes:
                if name not in names:
                    raise InputError(f"a link names the unknown node {name!r}; {did_you_mean(name, names)}")
            if len(pair) != 2:
                raise InputError(f"a link joins node {override.nodes[0]!r} with itself; use `interconnect`")
            if pairs[pair] > 1:
                raise InputError(f"the link between {' and '.join(sorted(pair))} is given twice")

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for node in self.nodes for device in node.devices)

    def device(self, name: str) -> Device:
        """Return the device of a name.

        Raises: InputError with the nearest name if there is none.
        """
        device = self._by_name.get(name)
        if device is None:
            raise InputError(f"unknown device {name!r}; {did_you_mean(name, list(self._by_name))}")
        return device

    def node_of(self, device: str) -> Node:
        """Return the node of a device.

        Raises: InputError with the nearest name if there is none.
        """
        return self._nodes_by_name[self.device(device).node]

    def with_devices(self, change: Callable[[Device], Device]) -> "Cluster":
        """Return the cluster with each device as a change makes it, names and nodes as they are."""
        nodes = (dataclasses.replace(node, devices=tuple(map(change, node.devices))) for node in self.nodes)
        return dataclasses.replace(self, nodes=tuple(nodes))

    @cached_property
    def _nodes_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    def link(self, source: str, destination: str) -> Link:
        """Return the channel from one device to another (names)."""
        first, second = self.device(source).node, self.device(destination).node
        if first == second:
            interconnect = next(node.interconnect for node in self.nodes if node.name == first)
            return interconnect or self.network
        override = next((link for link in self.links if set(link.nodes) == {first, second}), None)
        return override.link if override else self.network

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as plain data, keys as in the fields above; the text of the golden file."""
        data = {"format": "hetpipe.cluster/1", **dataclasses.asdict(self)}
        for node in data["nodes"]:
            if not node["all_reduces"]:
                del node["all_reduces"]
            if node["host_memory"] is None:
                del node["host_memory"]
            elif node["host_memory"]["step_bytes_per_s"] is None:
                del node["host_memory"]["step_bytes_per_s"]
            for device in node["devices"]:
                if device["gpu"] is None:
                    del device["gpu"]
                if not device["driver_bytes"]:
                    del device["driver_bytes"]
        return data

    @property
    def sha256(self) -> str:
        return canonical_sha256(self.to_json())
