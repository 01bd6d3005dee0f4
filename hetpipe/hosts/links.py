"""The links between the hosts of a run: measured pair by pair, kept for a day, and put into the cluster.

Pairs that share no host are measured at the same time, others after one another, so that none takes the
bandwidth of another.
"""

import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cost_model.cluster import Cluster, Device, Link
from cost_model.errors import InputError
from cost_model.measured_links import MeasuredLink
from cost_model.strict_files import canonical_sha256, check_format, read_json, validate, write_atomically
from cost_model.units import format_bandwidth, format_seconds
from hetpipe.hosts.leader_store import LeaderStore
from hetpipe.hosts.own_interface import interface_of
from hetpipe.runs.cache import links_folder
from hetpipe.runtime.processes import RankGroup, run_ranks

FORMAT = "hetpipe.host_link/1"
KEPT_S = 24 * 3600.0
"""A link that was measured longer ago is measured again: networks change."""
ALIKE = 1.1
"""Directions whose bandwidths are closer than this factor are told as one."""
TIMEOUT_S = 120.0

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class HostLink:
    """What messages between two nodes were measured to take, each direction apart.

    was_kept: whether it is from the cache.
    """

    nodes: Pair
    there: MeasuredLink
    back: MeasuredLink
    was_kept: bool = field(default=False, compare=False)

    @property
    def slower(self) -> Link:
        """The link as a plan takes it, which knows one for both directions: that of the slower one."""
        latency_s = max(self.there.latency_s, self.back.latency_s)
        bandwidth = min(self.there.bandwidth_bytes_per_s, self.back.bandwidth_bytes_per_s)
        return Link(latency_s, bandwidth)

    def __str__(self) -> str:
        slow, fast = sorted((self.there, self.back), key=lambda link: link.bandwidth_bytes_per_s)
        text = f"{self.nodes[0]} to {self.nodes[1]}: {format_bandwidth(self.there.bandwidth_bytes_per_s)}"
        if fast.bandwidth_bytes_per_s > ALIKE * slow.bandwidth_bytes_per_s:
            text += f", back {format_bandwidth(self.back.bandwidth_bytes_per_s)} (a plan takes the slower)"
        return f"{text}, latency {format_seconds(self.slower.latency_s)}"


_MEASURED = TypeAdapter(MeasuredLink)
_DEVICES = TypeAdapter(tuple[Device, Device])


def rounds_of(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return all pairs of nodes in rounds, in each of which a node is in one pair (the circle method).

    >>> rounds_of(["a", "b", "c"])
    [[('b', 'c')], [('a', 'c')], [('a', 'b')]]
    """
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairs = [
            (one, other) if nodes.index(one) < nodes.index(other) else (other, one)
            for one, other in met
            if one is not None and other is not None
        ]
        rounds.append(pairs)
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def measure_pairs(
    cluster: Cluster,
    hosts: dict[str, str],
    interface: str,
    ask: Callable[[list[Pair], list[tuple[Device, Device]]], list[dict[str, Any]]],
    *,
    anew: bool = False,
    tell: Callable[[str], None] = warnings.warn,
) -> list[HostLink]:
    """Return the links between all pairs of nodes that have devices, those that are known from the cache.

    hosts: what each host is called, with its address, by node. interface: of the leader, by which it is
    reached. ask: measures pairs that share no node, given the first device of both nodes of each. anew:
    whatever the cache holds. tell: takes a sentence where the cache cannot be written.
    """
    first = {node.name: node.devices[0] for node in cluster.nodes if node.devices}
    found: dict[Pair, HostLink] = {}
    keeps = True
    for pairs in rounds_of(list(first)):
        files = {pair: _file(first[pair[0]], first[pair[1]], hosts, interface) for pair in pairs}
        if not anew:
            found |= {pair: link for pair in pairs if (link := _kept(files[pair], pair)) is not None}
        left = [pair for pair in pairs if pair not in found]
        if not left:
            continue
        answers = ask(left, [(first[one], first[other]) for one, other in left])
        for pair, answer in zip(left, answers, strict=True):
            found[pair] = _host_link(pair, answer, "the measurement of links")
            if keeps:
                keeps = keep(files[pair], {"format": FORMAT, **answer}, tell)
    return [found[pair] for pair in sorted(found)]


def keep(file: Path, data: dict[str, Any], tell: Callable[[str], None]) -> bool:
    """Write what was measured into the cache; return whether that could be, and tell where it could not."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(data) + "\n")
    except OSError as error:
        reason = f"{file.parent} cannot be written ({error.strerror})"
        tell(f"{reason}, so that what was measured is not kept and the next call measures anew")
        return False
    return True


def rank_of_pair(
    node: str, devices: Sequence[tuple[Device, Device]], store: LeaderStore, number: str
) -> dict[str, Any] | None:
    """Take part in the measurement of the pair that a node is in; return what its first end has found.

    store: its prefix is of the round alone. number: the address by which this host is reached.
    """
    pair = next((pair for pair in devices if node in {device.node for device in pair}), None)
    if pair is None:
        return None
    from hetpipe.profiling.host_links import host_link_rank
    from hetpipe.runtime.host_staging import Staging

    names = [device.node for device in pair]
    group = RankGroup(
        tuple(device.name for device in pair), (1, 1),
        backend=Staging.of(pair).backend,
        timeout_s=TIMEOUT_S,
        local=(names.index(node),),
        interface=interface_of(number),
        store=dataclasses.replace(store, prefix=f"{store.prefix} {' '.join(names)}"),
    )  # fmt: skip
    found: list[dict[str, Any]] = []
    run_ranks(host_link_rank, (pair,), group, lambda event: found.append(event["found"]))
    return found[0] if found else None


def devices_to_json(devices: Sequence[Sequence[Device]]) -> list[list[dict[str, Any]]]:
    """Return groups of devices as a message has them."""
    return [[dataclasses.asdict(device) for device in pair] for pair in devices]


def devices_of_json(data: Sequence[Any]) -> list[tuple[Device, Device]]:
    """Return the pairs of devices of a message."""
    return [_DEVICES.validate_python(pair) for pair in data]


def _host_link(pair: Pair, data: dict[str, Any], source: str) -> HostLink:
    there, back = (
        validate(_MEASURED, json.loads(json.dumps(data.get(way))), source) for way in ("there", "back")
    )
    return HostLink(pair, there, back)


def _kept(path: Path, pair: Pair) -> HostLink | None:
    """Return the link that was measured before, if it was not long ago."""
    try:
        if time.time() - path.stat().st_mtime > KEPT_S:
            return None
        link = _host_link(pair, check_format(read_json(path), FORMAT, str(path)), str(path))
        return dataclasses.replace(link, was_kept=True)
    except (OSError, InputError):
        return None


def _file(one: Device, other: Device, hosts: dict[str, str], interface: str) -> Path:
    """Return where the link between two devices' hosts is kept, by all that its measurement depends on."""
    folder = Path(__file__).parents[1] / "profiling"
    code = b"".join((folder / name).read_bytes() for name in ("host_links.py", "link_profiler.py"))
    key = {
        "ends": [[device.node, hosts[device.node], device.kind] for device in (one, other)],
        "interface": interface,
        "torch": version("torch"),
        "code": hashlib.sha256(code).hexdigest(),
    }
    return links_folder() / f"{one.node}-{other.node}-{canonical_sha256(key)[:24]}.json"
