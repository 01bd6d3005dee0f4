from dataclasses import replace

import pytest

from cost_model.cluster import EMULATED, Cluster, Device, Link, Node, NodeLink
from cost_model.communication import (
    Network,
    Route,
    all_reduce_due,
    all_reduce_s,
    reserve,
    ring_all_reduce,
)
from small_case import small_cluster

SLOW = Link(latency_s=1.0, bandwidth_bytes_per_s=1.0)
FAST = Link(latency_s=0.0, bandwidth_bytes_per_s=10.0)


def cluster(kind: str = "gpu") -> Cluster:
    """Two devices with an interconnect on node a, one on b, one on c; a and c have a slow link."""
    devices = {name: Device(name, name[0], kind, 1.0) for name in ("a/0", "a/1", "b/0", "c/0")}
    return Cluster(
        name="three",
        network=Link(latency_s=0.5, bandwidth_bytes_per_s=2.0),
        nodes=(
            Node("a", (devices["a/0"], devices["a/1"]), interconnect=FAST),
            Node("b", (devices["b/0"],)),
            Node("c", (devices["c/0"],)),
        ),
        links=(NodeLink(("c", "a"), SLOW),),
    )


def test_each_pair_has_its_channel():
    network = Network(cluster())
    assert network.route("a/0", "a/1").link == FAST
    assert network.route("a/0", "b/0").link == cluster().network
    assert network.route("a/0", "c/0").link == network.route("c/0", "a/1").link == SLOW


def test_messages_between_nodes_share_cards_and_those_inside_do_not():
    network = Network(cluster())

    def resources(source: str, destination: str) -> set[str]:
        return {network.resources[index] for index in network.route(source, destination).resources}

    assert resources("a/0", "b/0") == {"card a out", "link a>b", "card b in"}
    assert resources("a/0", "a/1") == {"link a/0>a/1"}
    assert resources("a/0", "b/0") & resources("a/1", "c/0") == {"card a out"}
    assert not resources("a/0", "b/0") & resources("b/0", "a/0")  # full duplex


def test_a_message_waits_for_the_latest_of_its_resources():
    # free at 3 and 7, ready at 1: starts at 7, 8 bytes at 2 B/s end at 11, latency 1 on top
    free_at = [3.0, 7.0, 0.0]
    route = Route(Link(latency_s=1.0, bandwidth_bytes_per_s=2.0), (0, 1))
    assert reserve(free_at, route, ready_s=1.0, num_bytes=8) == 12.0
    assert free_at == [11.0, 11.0, 0.0]


def test_measured_links_count_where_they_are_slower_but_never_for_emulated_devices():
    measured = {"gpu>gpu": Link(latency_s=0.0, bandwidth_bytes_per_s=1.5), "emulated>emulated": SLOW}
    link = Network(cluster(), measured).route("a/0", "b/0").link
    assert link == Link(latency_s=0.5, bandwidth_bytes_per_s=1.5)
    assert Network(cluster(EMULATED), measured).route("a/0", "b/0").link == cluster().network


def test_ring_has_two_n_minus_one_rounds_of_an_nth_each():
    rounds = ring_all_reduce(12.0, ["x", "y", "z"])
    assert rounds == [[("x", "y", 4.0), ("y", "z", 4.0), ("z", "x", 4.0)]] * 4


def test_all_reduce_by_hand():
    # Ranks ready at 0 and 2, 80 bytes: from 2 on 2 rounds of 40 bytes at 40 B/s plus 0.25 s: 2 + 2 x 1.25.
    network = Network(small_cluster())
    free_at = [0.0] * len(network.resources)
    due = all_reduce_due(free_at, network, 80.0, {"a/0": 0.0, "b/0": 2.0})
    assert due == {"a/0": 4.5, "b/0": 4.5}
    assert all_reduce_s(network, 80.0, ["a/0", "b/0"]) == 2.5


def test_all_reduce_of_one_rank_is_free():
    network = Network(small_cluster())
    assert all_reduce_due([0.0] * len(network.resources), network, 80.0, {"a/0": 3.0}) == {"a/0": 3.0}


@pytest.mark.parametrize("factor", [1, 2, 5])
def test_all_reduce_grows_with_bytes(factor: int):
    network = Network(replace(small_cluster(), network=Link(0.0, 40.0)))
    assert all_reduce_s(network, 80.0 * factor, ["a/0", "b/0"]) == pytest.approx(2.0 * factor)
