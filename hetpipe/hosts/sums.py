"""A sum over all hosts, one device of each: what it was measured to take, beside what their links say."""

import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter

from cost_model.cluster import Cluster, Device
from cost_model.errors import InputError
from cost_model.network import Network
from cost_model.strict_files import canonical_sha256, check_format, read_json, validate
from cost_model.sum_times import all_reduce_s
from cost_model.units import format_bytes, format_seconds
from hetpipe.hosts.leader_store import LeaderStore
from hetpipe.hosts.links import KEPT_S, TIMEOUT_S, keep
from hetpipe.hosts.own_interface import interface_of
from hetpipe.runs.cache import links_folder
from hetpipe.runtime.processes import RankGroup, run_ranks

FORMAT = "hetpipe.host_sum/1"
SIZES = tuple(16 * 2**10 * 4**power for power in range(6))
"""Bytes that each device gives: 16 KiB to 16 MiB."""
LONGEST_S = 0.5
"""Sizes whose sums take longer by the links are left out, but for the smallest."""
FEWEST = 3
"""A sum over two hosts is two messages on their link."""
FAR = 1.2
"""A sum that takes so many times what the links say is warned of, and one that takes so many times less."""


@dataclass(frozen=True, slots=True)
class HostSum:
    """The seconds of sums over the first devices of some nodes: measured, and by the links between them.

    num_bytes: what each device gives, by size. was_kept: whether it is from the cache.
    """

    nodes: tuple[str, ...]
    num_bytes: tuple[int, ...]
    measured_s: tuple[float, ...]
    by_links_s: tuple[float, ...]
    was_kept: bool = field(default=False, compare=False)

    @property
    def ratio(self) -> float:
        """Of the largest size: measured over what the links say."""
        return self.measured_s[-1] / self.by_links_s[-1]

    @property
    def is_far(self) -> bool:
        """Whether sums between these hosts are not what their links say."""
        return not 1 / FAR <= self.ratio <= FAR

    def __str__(self) -> str:
        text = (
            f"a sum of {format_bytes(self.num_bytes[-1])} over {', '.join(self.nodes)}: "
            f"{format_seconds(self.measured_s[-1])}, {self.ratio - 1:+.1%} of what the links say"
        )
        if self.is_far:
            text += "; predicted sums between these hosts may be as far off"
        return text


_SECONDS = TypeAdapter(tuple[float, ...])
_DEVICE = TypeAdapter(Device)


def sizes_for(cluster: Cluster, names: Sequence[str]) -> dict[int, float]:
    """Return the sizes to measure, each with what a sum over devices (names) takes by the links, seconds."""
    network = Network(cluster)
    seconds = {size: all_reduce_s(network, size, names) for size in SIZES}
    return {size: took for size, took in seconds.items() if took <= LONGEST_S or size == SIZES[0]}


def measure_sum(
    cluster: Cluster,
    hosts: dict[str, str],
    interface: str,
    ask: Callable[[list[Device], list[int]], list[float]],
    *,
    anew: bool = False,
    tell: Callable[[str], None] = warnings.warn,
) -> HostSum | None:
    """Return a sum over all nodes that have devices, from the cache where it is known; None for two nodes.

    hosts, interface: as for `links.measure_pairs`, to which cluster owes its links. ask: measures, given the
    first device of each node and the sizes. anew: whatever the cache holds. tell: takes a sentence where
    the cache cannot be written.
    """
    devices = [node.devices[0] for node in cluster.nodes if node.devices]
    if len(devices) < FEWEST:
        return None
    by_links = sizes_for(cluster, [device.name for device in devices])
    sizes = list(by_links)
    file = _file(devices, hosts, interface, sizes)
    seconds = None if anew else _kept(file)
    was_kept = seconds is not None and len(seconds) == len(sizes)
    if seconds is None or not was_kept:
        seconds = tuple(ask(devices, sizes))
        keep(file, {"format": FORMAT, "seconds": seconds}, tell)
    nodes = tuple(device.node for device in devices)
    return HostSum(nodes, tuple(sizes), seconds, tuple(by_links.values()), was_kept)


def seconds_of(data: object) -> list[float]:
    """Return the seconds that a host has answered.

    Raises: InputError if they are none.
    """
    seconds: tuple[float, ...] = validate(_SECONDS, data, "the measured sum")
    return list(seconds)


def devices_of_sum(data: Sequence[object]) -> list[Device]:
    """Return the devices of a message.

    Raises: InputError if they are none.
    """
    return [validate(_DEVICE, device, "the question for a sum") for device in data]


def rank_of_sum(
    node: str, devices: Sequence[Device], sizes: Sequence[int], store: LeaderStore, number: str
) -> list[float] | None:
    """Take part in a sum over hosts; return what its first device has found, there alone.

    number: the address by which this host is reached.
    """
    from hetpipe.profiling.host_sums import host_sum_rank
    from hetpipe.runtime.host_staging import Staging

    group = RankGroup(
        tuple(device.name for device in devices), (1,) * len(devices),
        backend=Staging.of(devices).backend,
        timeout_s=TIMEOUT_S,
        local=([device.node for device in devices].index(node),),
        interface=interface_of(number),
        store=store,
    )  # fmt: skip
    found: list[list[float]] = []
    run_ranks(host_sum_rank, (devices, sizes), group, lambda event: found.append(event["found"]))
    return found[0] if found else None


def _kept(path: Path) -> tuple[float, ...] | None:
    """Return what was measured before, if it was not long ago."""
    try:
        if time.time() - path.stat().st_mtime > KEPT_S:
            return None
        data = check_format(read_json(path), FORMAT, str(path))
        return validate(_SECONDS, data.get("seconds"), str(path))
    except (OSError, InputError):
        return None


def _file(devices: Sequence[Device], hosts: dict[str, str], interface: str, sizes: Sequence[int]) -> Path:
    """Return where a sum is kept, by all that its measurement depends on."""
    code = (Path(__file__).parents[1] / "profiling" / "host_sums.py").read_bytes()
    key = {
        "members": [[device.node, hosts[device.node], device.kind] for device in devices],
        "interface": interface,
        "sizes": list(sizes),
        "torch": version("torch"),
        "code": hashlib.sha256(code).hexdigest(),
    }
    return links_folder() / f"sum-{canonical_sha256(key)[:24]}.json"
