"""Where the hosts of a run meet, and which nodes they are, as whoever started their processes says."""

import socket
import time
from collections.abc import Callable
from ipaddress import ip_address

from cost_model.cluster import Cluster, Node
from cost_model.errors import InputError
from hetpipe.hosts.environments import Placed, Starter
from hetpipe.hosts.rendezvous import numbers_of
from hetpipe.trust.channel import Address

AGAIN_S = 1.0


def node_of(cluster: Cluster, host: str) -> Node | None:
    """Return the node that a host is: the one called so, else the one that has its address; None for none."""
    known = {host, host.partition(".")[0]} if not _is_number(host) else {host}
    called = [node for node in cluster.nodes if known & {node.name, node.host}]
    if not called:
        numbers = set(numbers_of(host))
        called = [node for node in cluster.nodes if node.host and numbers & set(numbers_of(node.host))]
    return called[0] if len(called) == 1 else None


def check_hosts(placed: Placed, cluster: Cluster) -> None:
    """Check that the hosts of a start are the nodes of the cluster that have devices.

    Raises: InputError naming who is not.
    """
    nodes = [node.name for node in cluster.nodes if node.devices]
    named = {host: node_of(cluster, host) for host in placed.hosts}
    found = [node.name for node in named.values() if node is not None]
    unknown = [host for host, node in named.items() if node is None or node.name not in nodes]
    remedy = "start it on those alone, correct the cluster file, or --exclude nodes that take no part"
    if unknown:
        raise InputError(
            f"{placed.starter} started this on {', '.join(unknown)}, and the cluster file has "
            f"{', '.join(nodes)}; {remedy}"
        )
    if named and (missing := [name for name in nodes if name not in found]):
        raise InputError(
            f"{placed.starter} started this on {', '.join(placed.hosts)}, and not on {', '.join(missing)} of "
            f"the cluster file; {remedy}"
        )
    if placed.num_hosts not in (None, len(nodes)) or len(nodes) < 2:
        count = placed.num_hosts or "several"
        raise InputError(
            f"{placed.starter} started this on {count} hosts, and the cluster file has {len(nodes)} "
            f"({', '.join(nodes)}); {remedy}"
        )


def meeting_of(placed: Placed, cluster: Cluster, wait_s: float, tell: Callable[[str], None]) -> Address:
    """Return where the hosts of a start meet: the leader, as every host knows it, and a port.

    The leader is the first host of the start or, where its starter names none, the first node with devices.
    wait_s: so long may the name of a pod take to be known. tell: takes a sentence where it is waited for.

    Raises: InputError if it is not known by then.
    """
    if placed.leader is None:
        first = next(node for node in cluster.nodes if node.devices)
        return first.name if first.host else _known_name(first.name), placed.port
    leader = placed.leader
    if placed.index == 0 and _is_loopback(leader):
        leader = socket.gethostname()
    node = node_of(cluster, leader)
    if node is not None and node.host:
        return node.name, placed.port
    if placed.starter is Starter.KUBERNETES:
        _await_name(leader, wait_s, tell)
    return _known_name(leader), placed.port


def _known_name(host: str) -> str:
    """Return the name of a host.

    Raises: InputError if it stands for no address here.
    """
    if not numbers_of(host):
        raise InputError(
            f"{host}, which leads, is a name that this host does not know; give its node a `host` in the "
            "cluster file, by which others reach it"
        )
    return host


def _await_name(host: str, wait_s: float, tell: Callable[[str], None]) -> None:
    """Wait until a host's name is known: that of a pod is not before it has an address."""
    end_s, told = time.monotonic() + wait_s, False
    while not numbers_of(host) and time.monotonic() < end_s:
        if not told:
            tell(f"waiting for {host}, which leads, to have an address")
            told = True
        time.sleep(AGAIN_S)


def _is_loopback(host: str) -> bool:
    """Return whether a name, not a number, is this host's for itself alone."""
    numbers = numbers_of(host)
    return not _is_number(host) and all(ip_address(each.partition("%")[0]).is_loopback for each in numbers)


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
