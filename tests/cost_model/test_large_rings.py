"""Rings of many members: equal to their messages one by one, whether these share network cards or not."""

import random
from dataclasses import replace
from itertools import permutations

import pytest

from cost_model.cluster import Cluster, Device, Link, Node, NodeLink
from cost_model.collective_choice import cheaper_collective, ring_order
from cost_model.collectives import Collective, ring_all_reduce
from cost_model.large_rings import MOST_ROUNDS, ring_ends_s
from cost_model.measured_links import MeasuredAllReduce
from cost_model.network import NORM_BYTES, Network, idle, reserve
from cost_model.ring_estimates import all_reduce_estimate_s, sum_estimate_s
from cost_model.sum_times import LARGE_RING, all_reduce_due, all_reduce_s, norm_due

FAST = Link(1e-5, 1e10)


def cluster(num_nodes: int, most_devices: int, rng: random.Random) -> Cluster:
    """Nodes with and without an interconnect on one network; some pairs have a link of their own."""
    latencies, bandwidths = [5e-6, 5e-5, 2e-4, 1e-3], [1.25e8, 3e8, 1.25e9, 3e9]
    counts = [rng.randint(1, most_devices) for _ in range(num_nodes)]
    nodes = tuple(
        Node(
            f"n{index}",
            tuple(Device(f"n{index}/{place}", f"n{index}", "one", 1.0) for place in range(count)),
            FAST if rng.random() < 0.7 else None,
        )
        for index, count in enumerate(counts)
    )
    links = tuple(
        NodeLink((f"n{one}", f"n{other}"), Link(rng.choice(latencies), rng.choice(bandwidths)))
        for one in range(num_nodes)
        for other in range(one)
        if rng.random() < 0.2
    )
    return Cluster("random", Link(rng.choice(latencies), rng.choice(bandwidths)), nodes, links)


def ordered(names: list[str], order: str, rng: random.Random) -> list[str]:
    """Return the members by node, in any order, or one of each node after the other."""
    if order == "shuffled":
        return rng.sample(names, len(names))
    return sorted(names, key=lambda name: name.split("/")[1]) if order == "by index" else names


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["by node", "shuffled", "by index"])
@pytest.mark.parametrize("num_bytes", [1e4, 1e9])
def test_a_large_ring_is_its_messages_one_by_one(seed: int, order: str, num_bytes: float):
    rng = random.Random(seed)
    network = Network(made := cluster(24, 8, rng))
    names = ordered([device.name for device in made.devices], order, rng)
    assert LARGE_RING < len(names) < MOST_ROUNDS / 2
    free_at, expected = idle(), idle()
    for resource in network.route(names[0], names[1]).resources:
        free_at[resource] = expected[resource] = 3.5
    ready_s = dict.fromkeys(names, 3.0)
    due = dict(ready_s)
    for messages in ring_all_reduce(num_bytes, names):
        arrived = [
            (destination, reserve(expected, network.route(source, destination), due[source], size))
            for source, destination, size in messages
        ]
        due |= {name: max(due[name], arrival) for name, arrival in arrived}
    assert all_reduce_due(free_at, network, num_bytes, ready_s) == pytest.approx(due, rel=1e-8)
    for one, other in zip(names, [*names[1:], names[0]], strict=True):
        for resource in network.route(one, other).resources:
            assert free_at[resource] == pytest.approx(expected[resource], rel=1e-8)


def test_equal_messages_of_a_card_take_their_turns_for_ever():
    # 100 nodes of 3 devices, those of a node 100 places apart: 3 messages a round through each card
    nodes = tuple(
        Node(f"n{i}", tuple(Device(f"n{i}/{k}", f"n{i}", "one", 1.0) for k in range(3))) for i in range(100)
    )
    network = Network(Cluster("laps", Link(0.0, 1.0), nodes))
    names = [f"n{i}/{k}" for k in range(3) for i in range(100)]
    assert all_reduce_s(network, 300.0, names) == pytest.approx(3 * 2 * 299)


def test_rounds_beyond_the_last_computed_go_on_at_its_pace():
    # one slow message in 200; two share a resource, which a latency as long as 20 messages hides
    users = [(index,) for index in range(200)]
    users[100] = (99,)
    arguments = (users, [1.0] * 200, [20.0 + index % 7 for index in range(200)], [0.0] * 200, 398)
    exact = max(ring_ends_s(*arguments, most_rounds=398))
    assert max(ring_ends_s(*arguments, most_rounds=100)) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("seed", range(40))
def test_the_estimate_of_a_ring_is_near(seed: int):
    rng = random.Random(seed)
    network = Network(made := cluster(rng.randint(2, 12), 8, rng))
    names = [device.name for device in made.devices]
    num_bytes = rng.choice([32.0, 1e4, 1e6, 1e9])
    for order in ("by node", "shuffled", "by index"):
        members = ordered(names, order, rng)
        exact = all_reduce_s(network, num_bytes, members)
        assert all_reduce_estimate_s(network, num_bytes, members) == pytest.approx(exact, rel=0.2)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheaper_collective_is_that_of_both_gone_through(seed: int):
    rng = random.Random(seed)
    network = Network(made := cluster(rng.randint(1, 12), 8, rng))
    for order in ("by node", "shuffled", "by index"):
        members = ordered([device.name for device in made.devices], order, rng)
        for num_bytes in (32.0, 1e4, 1e6, 1e9):
            expected, least_s = Collective.RING, all_reduce_s(network, num_bytes, members)
            for entry in (Collective.TREE, Collective.HIERARCHICAL):
                seconds = all_reduce_s(network, num_bytes, members, entry)
                if seconds < least_s * (1 - 1e-9):
                    expected, least_s = entry, seconds
            assert cheaper_collective(network, num_bytes, members) is expected


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_a_ring_is_that_of_both_gone_through(seed: int):
    rng = random.Random(seed)
    network = Network(made := cluster(rng.randint(1, 12), 8, rng))
    for order in ("by node", "shuffled", "by index"):
        members = ordered([device.name for device in made.devices], order, rng)
        by_node = [name for group in network.by_node(members) for name in group]
        for num_bytes in (32.0, 1e4, 1e6, 1e9):
            found = ring_order(network, num_bytes, members)
            assert found in (members, by_node)
            sooner_s = min(all_reduce_s(network, num_bytes, order) for order in (members, by_node))
            assert all_reduce_s(network, num_bytes, found) == pytest.approx(sooner_s, rel=2e-9)
            if found != members:
                assert sooner_s < all_reduce_s(network, num_bytes, members)


@pytest.mark.parametrize("seed", range(40))
def test_the_estimate_of_a_sum_is_near_where_it_goes_inside_nodes_first(seed: int):
    rng = random.Random(seed)
    network = Network(made := cluster(rng.randint(2, 12), 8, rng))
    names = [device.name for device in made.devices]
    for num_bytes in (1e6, 1e8):
        members = ordered(names, "shuffled", rng)
        estimate_s, ring = sum_estimate_s(network, num_bytes, members)
        assert estimate_s <= all_reduce_estimate_s(network, num_bytes, members)
        best_ring = ring_order(network, num_bytes, members)
        if cheaper_collective(network, num_bytes, best_ring) is Collective.HIERARCHICAL:
            exact_s = all_reduce_s(network, num_bytes, members, Collective.HIERARCHICAL)
            assert 0.8 * exact_s <= estimate_s <= 1.8 * exact_s
            assert list(ring) in ([group[0] for group in network.by_node(members)], best_ring)


@pytest.mark.parametrize("seed", range(20))
def test_the_estimate_of_a_sum_in_parts_is_near_parts_that_follow_each_other(seed: int):
    rng = random.Random(seed)
    network = Network(made := cluster(rng.randint(2, 8), 8, rng))
    members = [device.name for device in made.devices]
    if not 1 < len(network.by_node(members)) < len(members):
        return
    whole_s, _ = sum_estimate_s(network, 1e9, members)
    for parts in (2, 4, 8):
        estimate_s, _ = sum_estimate_s(network, 1e9, members, parts)
        free_at, over_s = idle(), 0.0
        for _ in range(parts):
            ready_s = dict.fromkeys(members, 0.0)
            due_s = all_reduce_due(free_at, network, 1e9 / parts, ready_s, Collective.HIERARCHICAL)
            over_s = max(over_s, *due_s.values())
        ring_s = all_reduce_s(network, 1e9, ring_order(network, 1e9, members))
        assert estimate_s <= whole_s
        assert 0.7 * min(over_s, ring_s) <= estimate_s <= 1.5 * min(over_s, ring_s)


def test_an_estimate_counts_what_was_measured():
    devices = tuple(Device(f"n/{index}", "n", "one", 1.0) for index in range(3))
    made = Cluster("node", Link(0.5, 1.0), (Node("n", devices),))
    names = [device.name for device in devices]
    slow = Network(made, all_reduces=[MeasuredAllReduce(("one",) * 3, (8,), (100.0,))])
    quick = Network(made, all_reduces=[MeasuredAllReduce(("one",) * 3, (8,), (1.0,))])
    assert all_reduce_estimate_s(slow, 6.0, names) == 100.0
    # 4 rounds of 2 bytes at 1 B/s and 0.5 s: never below the cluster file
    assert all_reduce_estimate_s(quick, 6.0, names) == all_reduce_s(quick, 6.0, names) == 10.0
    assert all_reduce_estimate_s(quick, 6.0, names[:1]) == 0.0


def test_resources_are_numbered_cards_first_then_links():
    made = cluster(5, 4, random.Random(1))
    resources = Network(made).resources
    names = [f"card {node.name} {way}" for node in made.nodes for way in ("out", "in")]
    names += [f"link {one.name}>{other.name}" for one, other in permutations(made.nodes, 2)]
    for node in made.nodes:
        names += [f"link {one.name}>{other.name}" for one, other in permutations(node.devices, 2)]
    assert list(resources) == names
    assert len(resources) == len(names)
    with pytest.raises(IndexError, match="none has number"):
        resources[len(names)]
    one, other = made.nodes[3].devices[0].name, made.nodes[1].devices[0].name
    assert [names[index] for index in Network(made).route(one, other).resources] == [
        "card n3 out",
        "link n3>n1",
        "card n1 in",
    ]


def test_a_network_of_thousands_of_nodes_names_nothing_before_it_is_asked():
    nodes = tuple(Node(f"n{i}", (Device(f"n{i}/0", f"n{i}", "one", 1.0),)) for i in range(3000))
    network = Network(replace(cluster(1, 1, random.Random(0)), nodes=nodes, links=()))
    assert network.resources[network.route("n2999/0", "n17/0").resources[1]] == "link n2999>n17"


@pytest.mark.parametrize("seed", range(8))
def test_norms_are_worked_out_once_and_wait_for_what_is_busy(seed: int) -> None:
    rng = random.Random(seed)
    made = cluster(rng.randint(5, 7), 8, rng)
    network, names = Network(made), [device.name for device in made.devices]
    rng.shuffle(names)
    for late_s in (0.0, 0.5, 20.0):  # of some resource; the last device is ready within 10 s
        ready_s = {name: 10 * rng.random() for name in names}
        resource = rng.choice(network.route(names[0], names[1]).resources)
        free_s, plain_s = idle(), idle()
        free_s[resource] = plain_s[resource] = late_s
        kept = norm_due(free_s, network, ready_s)
        assert kept == pytest.approx(all_reduce_due(plain_s, network, NORM_BYTES, ready_s), rel=1e-9)
        assert dict(free_s) == pytest.approx({key: plain_s[key] for key in free_s}, rel=1e-9)
