"""The measurement of links between hosts and of a sum over them, as the launcher that leads has it done."""

import secrets
from typing import TYPE_CHECKING, Any

from cost_model.cluster import Cluster, Device
from hetpipe.hosts.leader_store import LeaderStore
from hetpipe.hosts.links import TIMEOUT_S, HostLink, Pair, devices_to_json, measure_pairs, rank_of_pair
from hetpipe.hosts.own_interface import interface_of
from hetpipe.hosts.sums import HostSum, measure_sum, rank_of_sum, seconds_of

if TYPE_CHECKING:
    from hetpipe.hosts.leader import Leader


def measure_links(leader: "Leader", cluster: Cluster, *, anew: bool = False) -> list[HostLink]:
    """Return the links between all nodes of the cluster that have devices, each measured if unknown, or anew.

    Raises: what one of the hosts raises.
    """
    node, address = leader.facts.node, leader.address

    def ask(pairs: list[Pair], devices: list[tuple[Device, Device]]) -> list[dict[str, Any]]:
        leader.tell(f"measuring the link {', '.join(f'{one} to {other}' for one, other in pairs)}")
        mark = secrets.token_hex(8)
        store = LeaderStore(address, leader.token, TIMEOUT_S, mark)
        nodes = [name for pair in pairs for name in pair if name != node]
        own, answers = leader.ask(
            "link", nodes,
            lambda: rank_of_pair(node, devices, store, address[0]),
            devices=devices_to_json(devices), port=address[1], mark=mark,
        )  # fmt: skip
        found = {name: answer[0]["found"] for name, answer in answers.items()} | {node: own}
        return [found[first] for first, _ in pairs]

    with leader.store_served():
        interface = interface_of(address[0])
        return measure_pairs(cluster, leader.hosts, interface, ask, anew=anew, tell=leader.tell)


def measure_sums(leader: "Leader", cluster: Cluster, *, anew: bool = False) -> HostSum | None:
    """Return a sum over the first devices of all nodes of a cluster with measured links; None for two nodes.

    Raises: what one of the hosts raises.
    """
    node, address = leader.facts.node, leader.address

    def ask(devices: list[Device], sizes: list[int]) -> list[float]:
        nodes = [device.node for device in devices]
        leader.tell(f"measuring a sum over {', '.join(nodes)}")
        mark = secrets.token_hex(8)
        store = LeaderStore(address, leader.token, TIMEOUT_S, mark)
        own, answers = leader.ask(
            "sum", [name for name in nodes if name != node],
            lambda: rank_of_sum(node, devices, sizes, store, address[0]) if node in nodes else None,
            devices=devices_to_json([devices])[0], sizes=sizes, port=address[1], mark=mark,
        )  # fmt: skip
        found = {name: answer[0]["found"] for name, answer in answers.items()} | {node: own}
        return seconds_of(found[nodes[0]])

    with leader.store_served():
        interface = interface_of(address[0])
        return measure_sum(cluster, leader.hosts, interface, ask, anew=anew, tell=leader.tell)
