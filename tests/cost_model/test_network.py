from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.cluster import EMULATED, Cluster, Device, Link, Node, NodeLink
from cost_model.collective_choice import cheaper_collective, ring_order
from cost_model.collectives import Collective, ring_all_reduce, tree_all_reduce
from cost_model.measured_links import MeasuredAllReduce
from cost_model.network import NORM_BYTES, Network, Route, idle, reserve
from cost_model.sum_resources import all_reduce_resources, ring_holds_s
from cost_model.sum_times import all_reduce_due, all_reduce_s, messages_due, norm_due
from small_case import INSTANT, small_cluster

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


@pytest.mark.parametrize("late_s", [0.0, 1.0], ids=["all at once", "a card is busy"])
def test_a_ring_over_equal_links_is_that_of_its_messages_to_the_bit(late_s: float):
    devices = [Device(f"{name}/0", name, "gpu", 1.0) for name in "abcdefg"]
    nodes = tuple(Node(device.node, (device,)) for device in devices)
    network, names = Network(Cluster("seven", Link(0.1, 3.0), nodes)), [device.name for device in devices]
    ready_s, ours, theirs = {name: 0.3 * at for at, name in enumerate(names)}, idle(), idle()
    for free_at in (ours, theirs):
        reserve(free_at, network.route("a/0", "c/0"), 0.0, 3 * late_s * max(ready_s.values()))
    due_s = all_reduce_due(ours, network, 1.7, ready_s)
    begin_s = dict.fromkeys(names, max(ready_s.values()))
    assert due_s == messages_due(theirs, network, ring_all_reduce(1.7, names), begin_s)
    assert ours == theirs


def test_a_ring_holds_each_card_for_all_of_its_messages():
    # 8 bytes of four devices: 6 messages of 2 bytes from each. Node by node one device sends on each card,
    # one inside its node; where nodes take turns both send on their card
    network = four_devices(inside=Link(0.0, 8.0))
    node_by_node = ring_holds_s(network, 8.0, sorted(NAMES))
    assert node_by_node.keys() == all_reduce_resources(network, sorted(NAMES), Collective.RING)
    assert sorted(set(node_by_node.values())) == [1.5, 12.0]
    assert set(ring_holds_s(network, 8.0, NAMES).values()) == {24.0}
    for names in (NAMES, sorted(NAMES)):
        free_at = idle()
        all_reduce_due(free_at, network, 8.0, dict.fromkeys(names, 1.0))
        assert all(free_at[each] >= 1 + s for each, s in ring_holds_s(network, 8.0, names).items())
    assert ring_holds_s(network, 8.0, ["a/0"]) == {}


def test_all_reduce_of_one_rank_is_free():
    network = Network(small_cluster())
    assert all_reduce_due([0.0] * len(network.resources), network, 80.0, {"a/0": 3.0}) == {"a/0": 3.0}


@pytest.mark.parametrize("factor", [1, 2, 5])
def test_all_reduce_grows_with_bytes(factor: int):
    network = Network(replace(small_cluster(), network=Link(0.0, 40.0)))
    assert all_reduce_s(network, 80.0 * factor, ["a/0", "b/0"]) == pytest.approx(2.0 * factor)


def four_devices(inside: Link = INSTANT) -> Network:
    """Two nodes of two devices; inside a node messages take no time, between them 1 s and 1 s per byte."""
    nodes = tuple(
        Node(name, tuple(Device(f"{name}/{index}", name, "gpu", 1.0) for index in range(2)), inside)
        for name in "ab"
    )
    return Network(Cluster("four", Link(1.0, 1.0), nodes))


NAMES = ["a/0", "b/0", "a/1", "b/1"]


def test_a_tree_sums_in_each_node_first():
    assert tree_all_reduce(8.0, [["a/0", "a/1"], ["b/0", "b/1"]]) == [
        [("a/1", "a/0", 8.0), ("b/1", "b/0", 8.0)],
        [("b/0", "a/0", 8.0)],
        [("a/0", "b/0", 8.0)],
        [("a/0", "a/1", 8.0), ("b/0", "b/1", 8.0)],
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_tree_gives_all_to_the_first_and_back(sizes: list[int]):
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    groups = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    rounds = tree_all_reduce(1.0, groups)
    half = len(rounds) // 2
    has = {rank: {rank} for group in groups for rank in group}
    for messages in rounds[:half]:
        for source, destination, _ in messages:
            assert not has[source] & has[destination]  # nothing is summed twice
            has[destination] |= has[source]
    assert has[0] == has.keys()
    told = {0}
    for messages in rounds[half:]:
        assert {source for source, _, _ in messages} <= told
        told |= {destination for _, destination, _ in messages}
    assert told == has.keys()


def test_a_tree_by_hand():
    # between the nodes one message each way, 2 s each; the ring has 6 rounds, all of them between nodes
    network = four_devices()
    due = all_reduce_due(idle(), network, 1.0, {**dict.fromkeys(NAMES, 0.0), "b/1": 3.0}, Collective.TREE)
    assert due == {"a/0": 5.0, "a/1": 5.0, "b/0": 7.0, "b/1": 7.0}
    assert all_reduce_s(network, 1.0, NAMES, Collective.TREE) == 4.0
    assert all_reduce_s(network, 1.0, NAMES) > 6.0


@pytest.mark.parametrize("names", [NAMES, sorted(NAMES)], ids=["taking turns", "node by node"])
def test_a_sum_inside_nodes_first_by_hand(names: list[str]):
    # 8 bytes. Inside a node 8 B/s: 1 s to a/0 and to b/0, the last from 3 s on, as b/1 is late. Between these
    # 2 rounds of 4 bytes at 1 B/s and 1 s of latency: from 4 to 14 s. Back inside: 1 s.
    network = four_devices(inside=Link(0.0, 8.0))
    ready_s = {**dict.fromkeys(names, 0.0), "b/1": 3.0}
    due = all_reduce_due(idle(), network, 8.0, ready_s, Collective.HIERARCHICAL)
    assert due == {"a/0": 14.0, "a/1": 15.0, "b/0": 14.0, "b/1": 15.0}
    # nobody late: 1 + 10 + 1 s; the ring: 6 rounds of 2 s on each card and a latency; the tree: 20 s
    assert all_reduce_s(network, 8.0, names, Collective.HIERARCHICAL) == 12.0
    assert all_reduce_s(network, 8.0, names) >= 13.0
    assert all_reduce_s(network, 8.0, names, Collective.TREE) == 20.0
    assert cheaper_collective(network, 8.0, names) is Collective.HIERARCHICAL


def test_the_cards_are_held_by_the_sum_between_the_nodes_alone():
    network = four_devices(inside=Link(0.0, 8.0))
    free_at = idle()
    all_reduce_due(free_at, network, 8.0, dict.fromkeys(NAMES, 0.0), Collective.HIERARCHICAL)
    names = list(network.resources)
    # between the nodes two messages of 4 s each, 1 s apart, from 1 s on; inside the first and the last second
    assert {names[index]: free_s for index, free_s in free_at.items() if free_s} == {
        **dict.fromkeys(["card a out", "card a in", "card b out", "card b in"], 10.0),
        **dict.fromkeys(["link a>b", "link b>a"], 10.0),
        **dict.fromkeys(["link a/1>a/0", "link b/1>b/0"], 1.0),
        **dict.fromkeys(["link a/0>a/1", "link b/0>b/1"], 12.0),
    }
    used = all_reduce_resources(network, NAMES, Collective.HIERARCHICAL)
    assert used == {index for index, free_s in free_at.items() if free_s}


def test_the_cheaper_collective_depends_on_bytes_and_latency():
    nodes = tuple(Node(name, (Device(f"{name}/0", name, "gpu", 1.0),)) for name in "abcd")
    apart = Network(Cluster("four", Link(1.0, 1.0), nodes))
    names = [f"{name}/0" for name in "abcd"]
    # the ring takes 6 latencies and 6/4 of the bytes, the tree 4 latencies and four times the bytes
    assert cheaper_collective(apart, 0.1, names) is Collective.TREE
    assert cheaper_collective(apart, 100.0, names) is Collective.RING
    # inside nodes first, with 1 B/s there too: 2 latencies and 3 times the bytes
    network = four_devices(inside=Link(0.0, 1.0))
    assert cheaper_collective(network, 0.1, sorted(NAMES)) is Collective.HIERARCHICAL
    assert cheaper_collective(network, 100.0, sorted(NAMES)) is Collective.RING
    assert cheaper_collective(network, 1.0, NAMES[:2]) is Collective.RING


def test_a_ring_goes_node_by_node_where_that_is_sooner():
    # 8 bytes in messages of 2; between nodes 1 B/s and 1 s: each card carries two messages a round, or one
    network = four_devices()
    assert all_reduce_s(network, 8.0, sorted(NAMES)) == pytest.approx(13.0)
    assert all_reduce_s(network, 8.0, NAMES) > 24.0
    assert ring_order(network, 8.0, NAMES) == sorted(NAMES)
    assert ring_order(network, 8.0, ["b/1", "a/1", "b/0", "a/0"]) == ["b/1", "b/0", "a/1", "a/0"]
    # node by node already, or one device of each: they stay
    for names in (["b/0", "b/1", "a/0"], ["b/1", "a/0"], ["a/1", "a/0"]):
        assert ring_order(network, 8.0, names) == names
    # inside a node 2 s a byte: a ring that is never inside is sooner
    assert ring_order(four_devices(inside=Link(0.0, 0.25)), 8.0, NAMES) == NAMES


def test_a_measured_all_reduce_stays():
    devices = [replace(device, kind="gpu") for device in small_cluster().devices]
    nodes = tuple(Node(device.node, (device,)) for device in devices)
    third = Node("c", (Device("c/0", "c", "gpu", 1.0),))
    made = Cluster("three", Link(1.0, 1e9), (*nodes, third))
    names = [device.name for device in made.devices]
    measured = MeasuredAllReduce(("gpu",) * 3, (8,), (100.0,))
    assert cheaper_collective(Network(made), 8.0, names) is Collective.TREE
    assert cheaper_collective(Network(made, all_reduces=[measured]), 8.0, names) is Collective.RING


@pytest.mark.parametrize("names", [NAMES, sorted(NAMES), [*NAMES[::-1]]], ids=str)
def test_a_ring_that_shares_cards_is_what_its_messages_take_one_by_one(names: list[str]):
    network = four_devices(inside=Link(0.1, 8.0))
    busy = {resource: 2.0 + 0.7 * resource for resource in range(0, len(network.resources), 2)}
    free_at, each_free_at = idle(), idle()
    free_at.update(busy)
    each_free_at.update(busy)
    due = dict.fromkeys(names, 1.5)
    for messages in ring_all_reduce(9.0, names):
        arrived = [
            (taker, reserve(each_free_at, network.route(giver, taker), due[giver], size))
            for giver, taker, size in messages
        ]
        due |= {taker: max(due[taker], arrival) for taker, arrival in arrived}
    assert all_reduce_due(free_at, network, 9.0, {**dict.fromkeys(names, 0.0), names[1]: 1.5}) == due
    assert {key: free_at[key] for key in each_free_at} == each_free_at


def test_norms_of_rings_that_are_alike_but_for_names_are_worked_out_once():
    nodes = tuple(
        Node(name, tuple(Device(f"{name}/{index}", name, "gpu", 1.0) for index in range(3)), Link(0.0, 8.0))
        for name in "abcdefgh"
    )
    network = Network(Cluster("eight", Link(1.0, 1.0), nodes))
    names = [device.name for node in nodes for device in node.devices]
    first, second = names[:18], names[6:]
    assert len(set(first) - set(second)) == 6
    free_at, other_free_at = idle(), idle()
    due = norm_due(free_at, network, dict.fromkeys(first, 0.0))
    other = norm_due(other_free_at, network, dict.fromkeys(second, 0.0))
    assert len(network.norms) == 1 and list(due.values()) == list(other.values())
    for found, ring, free in ((due, first, free_at), (other, second, other_free_at)):
        alone = idle()
        assert found == all_reduce_due(alone, network, NORM_BYTES, dict.fromkeys(ring, 0.0))
        assert {key: free[key] for key in alone} == alone
    # of another shape: worked out for itself
    norm_due(idle(), network, dict.fromkeys(names, 0.0))
    assert len(network.norms) == 2
