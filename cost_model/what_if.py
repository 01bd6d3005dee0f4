"""What if: changes of a cluster, written as people say them ("add 2 RTX-4090 to desk")."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from cost_model.catalogue import ACCELERATORS, accelerator
from cost_model.cluster import FASTEST, SLOWEST, Cluster, Device, Link, Node, NodeLink, is_emulated
from cost_model.errors import InputError
from cost_model.measured_links import MeasuredLink
from cost_model.other_clusters import without
from cost_model.profile import ModelProfile
from cost_model.strict_files import did_you_mean
from cost_model.units import parse_bandwidth, parse_bytes, parse_seconds
from cost_model.vendors import driver_bytes

MOST_ADDED = 10_000

_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_QUANTITY = re.compile(r"\s*([-+.\d]\S*(?:\s+[^\s\d]\S*)?)")


@dataclass(frozen=True, slots=True)
class _Context:
    """A cluster to change, and the kinds that a profile knows beyond those of the cluster."""

    cluster: Cluster
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to write a change: what follows the verb, an example, and the change itself."""

    pattern: str
    example: str
    change: Callable[[_Context, re.Match[str]], Cluster]


def changed(cluster: Cluster, text: str, kinds: Iterable[str] = ()) -> Cluster:
    """Return a cluster after a change, or after several separated by commas.

    kinds: names of further kinds, as a profile spells them; the names of a catalogue are matched to them.

    >>> from cost_model.cluster_file import cluster_from_data
    >>> lab = cluster_from_data({
    ...     "network": {"bandwidth": "1 Gbit/s", "latency": "50 us"},
    ...     "nodes": [{"name": "desk", "devices": [{"kind": "T4", "memory": "16 GiB"}]}],
    ... }, "lab")
    >>> [device.name for device in changed(lab, "add 2 T4 to desk, network 10 Gbit/s").devices]
    ['desk/0', 'desk/1', 'desk/2']

    Raises: InputError for what is no change, or names what the cluster has not.
    """
    further = tuple(kinds)
    try:
        for part in text.split(","):
            cluster = _changed_once(_Context(cluster, further), " ".join(part.split()))
    except InputError as error:
        raise InputError(f'what if "{text}": {error}') from None
    return cluster


def _changed_once(context: _Context, text: str) -> Cluster:
    verb, _, rest = text.partition(" ")
    if verb not in _FORMS:
        raise InputError(f"unknown change {verb!r}; {did_you_mean(verb, _FORMS)}")
    for form in _FORMS[verb]:
        if match := re.fullmatch(form.pattern, rest):
            return form.change(context, match)
    examples = " or ".join(f'"{form.example}"' for form in _FORMS[verb])
    raise InputError(f"{text!r} is incomplete; write for example {examples}")


def check_measured_links(before: Cluster, after: Cluster, profile: ModelProfile) -> None:
    """Refuse better links than before where the profile's measurements count instead of them.

    Raises: InputError if a change of links would not show in the predictions.
    """
    for old, new, kinds in _changed_links(before, after):
        better = new.latency_s < old.latency_s or new.bandwidth_bytes_per_s > old.bandwidth_bytes_per_s
        for one, other in product(*kinds):
            if is_emulated(one) or is_emulated(other):
                continue
            for pair in (f"{one}>{other}", f"{other}>{one}"):
                measured = profile.links.get(pair)
                calibrated = isinstance(measured, MeasuredLink) and measured.calibrated
                if measured is not None and (better or calibrated):
                    raise InputError(
                        f"the profile holds a measured link {pair}, which counts instead of the changed one; "
                        "take it out of the profile's `links` to see what the change would do"
                    )
            for entry in profile.all_reduces:
                if better and {one, other} <= set(entry.kinds):
                    kinds_text = " and ".join(sorted(set(entry.kinds)))
                    raise InputError(
                        f"the profile holds measured all-reduces of {kinds_text}, which count "
                        "instead of the changed link; take them out of the profile's "
                        "`all_reduces` to see what the change would do"
                    )


def _changed_links(before: Cluster, after: Cluster) -> Iterator[tuple[Link, Link, tuple[set[str], set[str]]]]:
    """Yield links that are others than before: (old, new, kinds of device at both ends)."""
    nodes = {node.name: {device.kind for device in node.devices} for node in after.nodes}
    everywhere = set().union(*nodes.values())
    if before.network != after.network:
        yield before.network, after.network, (everywhere, everywhere)
    inside = {node.name: node.interconnect or before.network for node in before.nodes}
    for node in after.nodes:
        new = node.interconnect or after.network
        if node.interconnect and inside.get(node.name, new) != new:
            yield inside[node.name], new, (nodes[node.name], nodes[node.name])
    between = {frozenset(entry.nodes): entry.link for entry in before.links}
    for entry in after.links:
        old = between.get(frozenset(entry.nodes), before.network)
        if set(entry.nodes) <= inside.keys() and old != entry.link:
            yield old, entry.link, (nodes[entry.nodes[0]], nodes[entry.nodes[1]])


def _add_devices(context: _Context, words: re.Match[str]) -> Cluster:
    """Add devices like those of their kind that the node or the cluster has, else as in the catalogue."""
    node = _node(context.cluster, words["node"])
    like = _like(context, node, words["kind"])
    first = 1 + max((int(device.name.rpartition("/")[2]) for device in node.devices), default=-1)
    added = (
        replace(like, name=f"{node.name}/{index}", node=node.name)
        for index in range(first, first + _count(words["count"]))
    )
    return _with_node(context.cluster, replace(node, devices=(*node.devices, *added)))


def _count(text: str | None) -> int:
    if text is not None and len(text) > len(str(MOST_ADDED)):
        raise InputError(f"{text[:40]} devices are too many; give at most {MOST_ADDED:,}")
    count = int(text or 1)
    if count < 1:
        raise InputError(f"{count} devices are none; give at least 1")
    if count > MOST_ADDED:
        raise InputError(f"{count:,} devices are too many; give at most {MOST_ADDED:,}")
    return count


def _like(context: _Context, node: Node, kind: str) -> Device:
    """Return a device of a kind: one of the node, else of the cluster, else of the catalogue.

    One of the catalogue keeps as large a share of its memory in reserve as the first device of the node.

    Raises: InputError for an unknown kind.
    """
    for device in (*node.devices, *context.cluster.devices):
        if _same_kind(device.kind, kind):
            return device
    try:
        found = accelerator(kind)
    except InputError:
        near = did_you_mean(kind, [*_kinds(context.cluster.devices), *(each.name for each in ACCELERATORS)])
        raise InputError(f"neither the cluster nor the catalogue has a kind {kind!r}; {near}") from None
    neighbour = next(iter((*node.devices, *context.cluster.devices)))
    return Device(
        name="",
        node=node.name,
        kind=next((known for known in context.kinds if _same_kind(known, kind)), found.name),
        memory_bytes=found.memory_bytes,
        reserve_bytes=found.memory_bytes * (neighbour.reserve_bytes / neighbour.memory_bytes),
        price_per_hour=found.price_per_hour,
        watts=found.watts,
        driver_bytes=_driver_bytes(found.name, neighbour, context.cluster),
    )


def _driver_bytes(kind: str, neighbour: Device, cluster: Cluster) -> float:
    """Return what the driver takes on another device; nothing where the file leaves it out of the others."""
    if neighbour.is_gpu and not neighbour.driver_bytes:
        return 0.0
    counts = Counter(device.kind for device in cluster.devices)
    counts[kind] += 1
    return driver_bytes(kind, counts)


def _same_kind(known: str, asked: str) -> bool:
    if known == asked:
        return True
    try:
        return accelerator(known) == accelerator(asked)
    except InputError:
        return False


def _kinds(devices: Iterable[Device]) -> list[str]:
    return list(dict.fromkeys(device.kind for device in devices))


def _add_node(context: _Context, words: re.Match[str]) -> Cluster:
    """Add a node with the devices, the interconnect and the links of another."""
    cluster, name = context.cluster, words["new"]
    like = _node(cluster, words["node"])
    if any(node.name == name and not node.devices for node in cluster.nodes):  # it was removed
        nodes = tuple(node for node in cluster.nodes if node.name != name)
        links = tuple(entry for entry in cluster.links if name not in entry.nodes)
        cluster = replace(cluster, nodes=nodes, links=links)
    if not _NODE_NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name of a node; use letters, digits, '_', '.' and '-'")
    devices = tuple(
        replace(device, name=f"{name}/{device.name.rpartition('/')[2]}", node=name) for device in like.devices
    )
    further = (
        NodeLink((name, next(end for end in entry.nodes if end != like.name)), entry.link)
        for entry in cluster.links
        if like.name in entry.nodes
    )
    nodes = (*cluster.nodes, replace(like, name=name, devices=devices))
    return replace(cluster, nodes=nodes, links=(*cluster.links, *further))


def _remove(context: _Context, words: re.Match[str]) -> Cluster:
    return without(context.cluster, [words["name"]])


def _remove_kind(context: _Context, words: re.Match[str]) -> Cluster:
    """Remove the last devices of a kind from a node."""
    node = _node(context.cluster, words["node"])
    names = [device.name for device in node.devices if _same_kind(device.kind, words["kind"])]
    if not names:
        near = did_you_mean(words["kind"], _kinds(node.devices))
        raise InputError(f"node {node.name!r} has no {words['kind']!r}; {near}")
    count = len(names) if words["count"] == "all" else _count(words["count"])
    if count > len(names):
        raise InputError(f"node {node.name!r} has {len(names)} {words['kind']}, not {count}; remove fewer")
    return without(context.cluster, names[-count:])


def _set_network(context: _Context, words: re.Match[str]) -> Cluster:
    return replace(context.cluster, network=_channel(context.cluster.network, words["channel"]))


def _set_link(context: _Context, words: re.Match[str]) -> Cluster:
    cluster = context.cluster
    pair = (_node(cluster, words["one"]).name, _node(cluster, words["other"]).name)
    if pair[0] == pair[1]:
        raise InputError(f'a link joins two nodes; write "interconnect {pair[0]} ..." for inside of one')
    others = tuple(entry for entry in cluster.links if set(entry.nodes) != set(pair))
    old = next((entry.link for entry in cluster.links if set(entry.nodes) == set(pair)), cluster.network)
    return replace(cluster, links=(*others, NodeLink(pair, _channel(old, words["channel"]))))


def _set_interconnect(context: _Context, words: re.Match[str]) -> Cluster:
    node = _node(context.cluster, words["node"])
    if node.all_reduces:
        raise InputError(f"node {node.name!r} has `all_reduces`, which count instead; take them out first")
    link = _channel(node.interconnect or context.cluster.network, words["channel"])
    return _with_node(context.cluster, replace(node, interconnect=link))


def _channel(link: Link, text: str) -> Link:
    """Return a link with the bandwidth or the latency, or both, that a text gives."""
    parts = [found.strip() for found in _QUANTITY.findall(text)]
    rates = [part for part in parts if part.endswith("/s")]
    latencies = [part for part in parts if not part.endswith("/s")]
    if "".join(parts).replace(" ", "") != text.replace(" ", "") or max(len(rates), len(latencies)) != 1:
        raise InputError(
            f"{text!r} is no bandwidth or latency; write for example 10 Gbit/s, or 10 Gbit/s 5 us"
        )
    return Link(
        latency_s=parse_seconds(latencies[0]) if latencies else link.latency_s,
        bandwidth_bytes_per_s=parse_bandwidth(rates[0]) if rates else link.bandwidth_bytes_per_s,
    )


def _setter(
    parse: Callable[[str], float], change: Callable[[Device, float], Device]
) -> Callable[[_Context, re.Match[str]], Cluster]:
    """Return the change that gives a value to a device, or to all devices of a node."""

    def set_value(context: _Context, words: re.Match[str]) -> Cluster:
        cluster, name, value = context.cluster, words["name"], parse(words["value"])
        names = {device.name for device in cluster.devices if name in (device.name, device.node)}
        if not names:
            known = [*(device.name for device in cluster.devices), *(node.name for node in cluster.nodes)]
            raise InputError(f"the cluster has no device or node {name!r}; {did_you_mean(name, known)}")
        return cluster.with_devices(lambda one: change(one, value) if one.name in names else one)

    return set_value


def _number(text: str) -> float:
    """Return a number of zero or more.

    Raises: InputError if it is none.
    """
    if not re.fullmatch(r"\d+\.?\d*|\.\d+", text):
        raise InputError(f"{text!r} is no number of zero or more; write for example 0.5")
    return float(text)


def _speed(text: str) -> float:
    """Return a speed, as a cluster file may have it.

    Raises: InputError if it is none.
    """
    if not SLOWEST <= (speed := _number(text)) <= FASTEST:
        raise InputError(f"{text[:40]!r} is no speed from {SLOWEST:g} to {FASTEST:g}; write for example 0.5")
    return speed


def _with_memory(device: Device, memory_bytes: float) -> Device:
    """Return a device of other memory, with the same share of it in reserve."""
    reserve_bytes = memory_bytes * (device.reserve_bytes / device.memory_bytes)
    return replace(device, memory_bytes=memory_bytes, reserve_bytes=reserve_bytes)


def _with_speed(device: Device, speed: float) -> Device:
    return replace(device, speed=speed)


def _with_price(device: Device, price_per_hour: float) -> Device:
    return replace(device, price_per_hour=price_per_hour)


def _with_watts(device: Device, watts: float) -> Device:
    return replace(device, watts=watts)


def _node(cluster: Cluster, name: str) -> Node:
    for node in cluster.nodes:
        if node.name == name:
            return node
    raise InputError(f"unknown node {name!r}; {did_you_mean(name, [node.name for node in cluster.nodes])}")


def _with_node(cluster: Cluster, changed_node: Node) -> Cluster:
    nodes = (changed_node if node.name == changed_node.name else node for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


_VALUE = r"(?P<name>\S+) (?P<value>.+)"
_FORMS: Mapping[str, tuple[_Form, ...]] = {
    "add": (
        _Form(r"node (?P<new>\S+) like (?P<node>\S+)", "add node big2 like big", _add_node),
        _Form(r"(?:(?P<count>\d+) )?(?P<kind>.+) to (?P<node>\S+)", "add 2 RTX-4090 to desk", _add_devices),
    ),
    "remove": (
        _Form(
            r"(?:(?P<count>\d+|all) )?(?P<kind>.+) from (?P<node>\S+)", "remove 2 T4 from desk", _remove_kind
        ),
        _Form(r"(?P<name>\S+)", "remove desk/1", _remove),
    ),
    "network": (_Form(r"(?P<channel>.+)", "network 10 Gbit/s", _set_network),),
    "link": (
        _Form(r"(?P<one>\S+) (?P<other>\S+) (?P<channel>[-+.\d].*)", "link big desk 10 Gbit/s", _set_link),
    ),
    "interconnect": (_Form(r"(?P<node>\S+) (?P<channel>.+)", "interconnect big 24 GB/s", _set_interconnect),),
    "memory": (_Form(_VALUE, "memory big/0 24 GiB", _setter(parse_bytes, _with_memory)),),
    "speed": (_Form(_VALUE, "speed desk/1 0.5", _setter(_speed, _with_speed)),),
    "price": (_Form(_VALUE, "price desk 0.4", _setter(_number, _with_price)),),
    "watts": (_Form(_VALUE, "watts desk 250", _setter(_number, _with_watts)),),
}
