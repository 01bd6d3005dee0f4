"""Messages and all-reduces measured by size: interpolation, routes, what all_reduce_due charges, the file."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.cluster import CPU, EMULATED, Cluster, Device, Link, Node, NodeAllReduce
from cost_model.collective_choice import cheaper_collective
from cost_model.collectives import Collective
from cost_model.errors import InputError
from cost_model.measured_links import MeasuredAllReduce, MeasuredLink, slower
from cost_model.network import Network, Route, idle, reserve
from cost_model.profile import ModelProfile, profile_from_data, profile_text, read_profile
from cost_model.ring_estimates import all_reduce_estimate_s, sum_estimate_s
from cost_model.sum_resources import all_reduce_resources
from cost_model.sum_times import (
    all_reduce_due,
    all_reduce_s,
    broadcast_due,
    measured_all_reduce_s,
    reduce_due,
)
from hetpipe.commands.profile import link_sentences
from hetpipe.profiling.merging import merge
from hetpipe.profiling.profile_cache import cache_key
from hetpipe.runs.settings import TaskSettings
from small_case import check_golden, small_profile

# 8 bytes take 2 s, 16 take 6 s, what is beyond goes at 4 B/s; 1 s of latency
LINK = MeasuredLink(1.0, 4.0, message_bytes=(8, 16), occupied_s=(2.0, 6.0), standard_error=0.01)
FAST = Link(latency_s=0.0, bandwidth_bytes_per_s=1e12)
TWO = MeasuredAllReduce((CPU, CPU), (8, 16), (2.0, 3.0))
FOUR = MeasuredAllReduce((CPU,) * 4, (8,), (5.0,))


def devices(kinds: Sequence[str], network: Link = FAST) -> Cluster:
    """Devices of these kinds on one node."""
    entries = tuple(Device(f"n/{index}", "n", kind, 1.0) for index, kind in enumerate(kinds))
    return Cluster("made-up", network, (Node("n", entries),))


def names(count: int) -> list[str]:
    return [f"n/{index}" for index in range(count)]


def measured_profile() -> ModelProfile:
    """Return the small profile, whose links and all-reduces were measured by size."""
    links = {"fast>slow": LINK, "slow>fast": Link(0.25, 40.0)}
    pair = MeasuredAllReduce(("fast", "slow"), (8, 16), (2.0, 3.0))
    return replace(small_profile(), links=links, all_reduces=(pair,))


# ---- links


def test_occupancy_by_hand():
    # through the origin below 8 bytes, 0.5 s a byte between 8 and 16, 0.25 s a byte beyond
    assert [LINK.occupancy_s(size) for size in (0, 4, 8, 10, 16, 24)] == [0.0, 1.0, 2.0, 3.0, 6.0, 8.0]
    assert LINK.transfer_s(16) == 7.0
    assert MeasuredLink(1.0, 4.0).occupancy_s(8) == Link(1.0, 4.0).occupancy_s(8) == 2.0


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), min_size=1, unique_by=lambda pair: pair[0]),
    st.floats(0, 2000),
    st.floats(0, 2000),
)
def test_occupancy_is_near_the_measured_and_rises_with_it(
    pairs: list[tuple[int, float]], one: float, two: float
):
    sizes, seconds = tuple(sorted(size for size, _ in pairs)), tuple(sorted(value for _, value in pairs))
    link, pair = MeasuredLink(0.0, 10.0, sizes, seconds), MeasuredAllReduce((CPU, CPU), sizes, seconds)
    low, high = sorted((one, two))
    for size, value in zip(sizes, seconds, strict=True):
        assert link.occupancy_s(size) == pytest.approx(value)
        assert pair.sum_s(size) == pytest.approx(value)
    assert link.occupancy_s(low) <= link.occupancy_s(high) + 1e-9
    assert pair.sum_s(low) <= pair.sum_s(high) + 1e-9


def test_a_message_occupies_its_link_for_as_long_as_its_size_was_measured():
    free_at = [3.0]
    route = Route(LINK, (0,))
    assert reserve(free_at, route, ready_s=1.0, num_bytes=10) == 3.0 + 3.0 + 1.0
    assert reserve(free_at, route, ready_s=1.0, num_bytes=16) == 6.0 + 6.0 + 1.0
    assert free_at == [12.0]


def test_at_each_size_the_slower_of_file_and_measurement_counts():
    # in the file 2.5 s for 8 bytes, 5 s for 16, and 2 s of latency
    found = slower(Link(latency_s=2.0, bandwidth_bytes_per_s=3.2), LINK)
    assert found == MeasuredLink(2.0, 3.2, (8, 16), (2.5, 6.0))
    found = slower(Link(latency_s=0.5, bandwidth_bytes_per_s=1e12), LINK)
    assert found == replace(LINK, standard_error=None)
    slow = Link(latency_s=9.0, bandwidth_bytes_per_s=0.1)
    assert slower(slow, LINK) == slow and type(slower(slow, LINK)) is Link
    assert slower(slow, None) == slow


def test_routes_between_real_devices_depend_on_size_and_those_of_emulated_ones_do_not():
    measured = {f"{one}>{other}": LINK for one in (CPU, EMULATED) for other in (CPU, EMULATED)}
    network = Network(devices([CPU, CPU, EMULATED]), measured)
    assert network.route("n/0", "n/1").link.transfer_s(12) == 5.0
    assert network.route("n/0", "n/2").link == network.route("n/2", "n/1").link == FAST


# ---- all-reduces


def test_a_measured_all_reduce_by_hand():
    # ready at 0 and 2, a link that is busy until 4: both have the sum of 12 bytes 2.5 s later
    network = Network(devices([CPU, CPU]), all_reduces=[TWO])
    free_at = [0.0] * len(network.resources)
    back = network.route("n/1", "n/0").resources[0]
    free_at[back] = 4.0
    assert all_reduce_due(free_at, network, 12.0, {"n/0": 0.0, "n/1": 2.0}) == {"n/0": 6.5, "n/1": 6.5}
    assert free_at[back] == free_at[network.route("n/0", "n/1").resources[0]] == 6.5
    assert all_reduce_due(free_at, network, 12.0, {"n/0": 1.0}) == {"n/0": 1.0}


def test_the_sum_of_few_bytes_takes_what_the_smallest_measured_one_takes():
    assert [TWO.sum_s(size) for size in (0, 1, 8, 16, 32)] == [2.0, 2.0, 2.0, 3.0, 5.0]
    assert FOUR.sum_s(16) == 10.0  # one size: proportional beyond it


def test_the_measured_group_is_the_same_or_the_next_larger_of_the_same_kinds():
    mixed = MeasuredAllReduce((CPU, CPU, "gpu"), (8,), (7.0,))
    network = Network(devices([*[CPU] * 5, "gpu"]), all_reduces=[FOUR, mixed, TWO])
    found = [measured_all_reduce_s(network, 8.0, names(count)) for count in (2, 3, 4, 5)]
    assert found == [2.0, 5.0, 5.0, None]
    assert measured_all_reduce_s(network, 8.0, ["n/0", "n/5"]) == 7.0
    assert measured_all_reduce_s(network, 8.0, names(6)) is None


def test_a_measured_all_reduce_is_never_faster_than_the_ring_over_the_files_links():
    # two rounds of 4 bytes at 1 B/s and 0.5 s of latency: 9 s
    network = Network(devices([CPU, CPU], Link(0.5, 1.0)), all_reduces=[TWO])
    assert all_reduce_s(network, 8.0, names(2)) == 9.0


@pytest.mark.parametrize("num_bytes", [1.0, 8.0, 100.0])
def test_emulated_devices_keep_the_ring(num_bytes: float):
    groups = [TWO, MeasuredAllReduce((CPU, EMULATED), (8,), (9.0,)), replace(TWO, kinds=(EMULATED,) * 2)]
    cluster = devices([CPU, EMULATED, EMULATED], Link(0.5, 4.0))
    plain, measured = Network(cluster), Network(cluster, all_reduces=groups)
    for group in (["n/0", "n/1"], ["n/1", "n/2"], ["n/0", "n/1", "n/2"]):
        assert all_reduce_s(measured, num_bytes, group) == all_reduce_s(plain, num_bytes, group)


# ---- all-reduces that a node says


INSIDE = (NodeAllReduce(2, Link(1.0, 8.0)), NodeAllReduce(4, Link(2.0, 4.0)))
"""8 bytes take 2 s between two devices of a node, and 4 s between three or four."""


def two_nodes(kind: str = EMULATED, count: int = 5) -> Cluster:
    """Return nodes m and n: inside 1 B/s, between them 0.5 B/s, no latency; m says how long it sums."""
    nodes = [
        Node(name, tuple(Device(f"{name}/{i}", name, kind, 1.0) for i in range(count)), Link(0.0, 1.0))
        for name in "mn"
    ]
    return Cluster("two", Link(0.0, 0.5), (replace(nodes[0], all_reduces=INSIDE), nodes[1]))


def of_node(name: str, count: int) -> list[str]:
    return [f"{name}/{index}" for index in range(count)]


def test_a_sum_inside_a_node_takes_what_the_node_says_for_as_many_or_the_next_larger_number():
    network = Network(two_nodes())
    assert [all_reduce_s(network, 8.0, of_node("m", count)) for count in (2, 3, 4)] == [2.0, 4.0, 4.0]
    # five, of which it says nothing, and the other node: 2 (n - 1) rounds of 8 / n s
    assert all_reduce_s(network, 8.0, of_node("m", 5)) == pytest.approx(12.8)
    assert all_reduce_s(network, 8.0, of_node("n", 2)) == 8.0
    assert all_reduce_estimate_s(network, 8.0, of_node("m", 3)) == 4.0
    # nobody measured the tree
    assert cheaper_collective(network, 1e-6, of_node("m", 4)) is Collective.RING


def test_a_sum_over_nodes_counts_what_a_node_says_inside_of_it():
    # reduced in m in 2 s as it says, in n in 8 s; 2 rounds of 4 bytes at 0.5 B/s between them; and back
    network, names = Network(two_nodes()), [*of_node("m", 2), *of_node("n", 2)]
    free_at = idle()
    due = all_reduce_due(free_at, network, 8.0, dict.fromkeys(names, 0.0), Collective.HIERARCHICAL)
    assert due == {"m/0": 26.0, "m/1": 26.0, "n/0": 24.0, "n/1": 32.0}
    used = {index for index, free_s in free_at.items() if free_s}
    assert used == all_reduce_resources(network, names, Collective.HIERARCHICAL)
    # a tree sends all 8 bytes between the nodes, 16 s each way
    assert all_reduce_s(network, 8.0, names, Collective.TREE) == 8 + 16 + 16 + 8
    ready_s = dict.fromkeys(names, 0.0)
    assert reduce_due(idle(), network, 8.0, ready_s, "m/1")["m/1"] == 8 + 16
    # m/1 sends to n/0 from 0 on; what follows inside its node is not held up by that
    told = broadcast_due(idle(), network, 8.0, ready_s, "m/1")
    assert told == {"m/1": 2.0, "m/0": 2.0, "n/0": 16.0, "n/1": 24.0}
    # both say it, of four devices: 4 + 16 + 4 s, where a ring of eight takes 14 rounds of 2 s
    made = two_nodes()
    both = Network(replace(made, nodes=tuple(replace(node, all_reduces=INSIDE) for node in made.nodes)))
    eight = [*of_node("m", 4), *of_node("n", 4)]
    assert sum_estimate_s(both, 8.0, eight) == (24.0, ["m/0", "n/0"])
    assert all_reduce_s(both, 8.0, eight, Collective.HIERARCHICAL) == 24.0
    assert cheaper_collective(both, 8.0, eight) is Collective.HIERARCHICAL


def test_between_real_devices_the_slower_of_node_and_profile_counts():
    quick = MeasuredAllReduce((CPU, CPU), (8,), (1.0,))
    slow = MeasuredAllReduce((CPU, CPU), (8,), (3.0,))
    for entry, expected_s in ((quick, 2.0), (slow, 3.0)):
        network = Network(two_nodes(CPU), all_reduces=[entry])
        assert all_reduce_s(network, 8.0, of_node("m", 2)) == expected_s
        assert all_reduce_estimate_s(network, 8.0, of_node("m", 2)) == expected_s


# ---- the file


def data() -> dict[str, Any]:
    return copy.deepcopy(json.loads(profile_text(measured_profile())))


def test_measured_links_survive_the_file(tmp_path: Path):
    path = tmp_path / "profile.json"
    path.write_text(profile_text(measured_profile()))
    assert read_profile(path) == measured_profile()
    assert type(read_profile(path).links["slow>fast"]) is Link
    assert profile_text(read_profile(path)) == path.read_text()
    check_golden("profile-links.json", json.dumps(measured_keys(path), indent=1) + "\n")


def measured_keys(path: Path) -> dict[str, Any]:
    """Return the keys of the file that measured links are in."""
    return {key: value for key, value in json.loads(path.read_text()).items() if key in PLACES}


PLACES = ("links", "all_reduces")


def test_files_from_before_links_were_measured_by_size_are_read():
    old = json.loads(profile_text(small_profile()))
    assert "all_reduces" not in old
    assert old["links"] == {"fast>slow": {"latency_s": 0.25, "bandwidth_bytes_per_s": 40.0}}
    assert profile_from_data(old, "p") == small_profile()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("links", "fast>slow", "latency_s"), -1.0, "p: links.fast>slow: latency of -1.0 s is negative"),
        (("links", "fast>slow", "latency_s"), float("nan"), "links.fast>slow.latency_s: input should be a"),
        (("links", "fast>slow", "latency_s"), None, "links.fast>slow.latency_s: input should be a valid"),
        (("links", "fast>slow", "latecy_s"), 1.0, 'unknown key "links.fast>slow.latecy_s"; did you mean "la'),
        (("links", "slow>fast", "occupied"), [], 'unknown key "links.slow>fast.occupied"; did you mean "oc'),
        (("links", "slow>fast", "occupied_s"), [1.0], "links.slow>fast: occupied_s has 1 entries for 0"),
        (("links", "fast>slow", "message_bytes"), [8, 8], "message_bytes [8, 8] must rise, from 1 up"),
        (("links", "fast>slow", "message_bytes"), [0, 8], "message_bytes [0, 8] must rise, from 1 up"),
        (("links", "fast>slow", "message_bytes"), [8], "links.fast>slow: occupied_s has 2 entries for 1"),
        (("links", "fast>slow", "message_bytes"), [8, 9.5], "links.fast>slow.message_bytes[1]: input should"),
        (("links", "fast>slow", "occupied_s"), [1.0, -1.0], "occupied_s holds -1.0; give zero or more"),
        (("links", "fast>slow", "occupied_s"), [1.0, float("nan")], "links.fast>slow.occupied_s[1]: input"),
        (("links", "fast>slow", "standard_error"), -0.1, "standard_error is -0.1; give zero or more"),
        (("all_reduces", 0, "kinds"), ["fast"], "all_reduces[0]: kinds ['fast'] must name at least two"),
        (("all_reduces", 0, "message_bytes"), [16, 8], "all_reduces[0]: message_bytes [16, 8] must rise"),
        (("all_reduces", 0, "message_bytes"), [], "message_bytes [] must hold at least one size"),
        (("all_reduces", 0, "duration_s"), [1.0], "all_reduces[0]: duration_s has 1 entries for 2 message_b"),
        (("all_reduces", 0, "duration_s"), [-1.0, 1.0], "all_reduces[0]: duration_s holds -1.0"),
        (("all_reduces", 0, "duration"), [1.0], 'unknown key "all_reduces[0].duration"; did you mean "dura'),
        (("all_reduces",), [{}], 'key "all_reduces[0].kinds" is missing'),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_and_named(path: tuple[Any, ...], value: object, message: str):
    changed = data()
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError) as caught:
        profile_from_data(changed, "p")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_group_appears_once():
    changed = data()
    again = {**changed["all_reduces"][0], "kinds": ["slow", "fast"]}
    changed["all_reduces"].append(again)
    with pytest.raises(InputError, match=r"all_reduces\[1\]: the group of kinds .* appears twice"):
        profile_from_data(changed, "p")


def test_links_and_all_reduces_of_several_files_are_joined():
    whole = measured_profile()
    other = replace(
        whole, links={"slow>slow": LINK}, all_reduces=(MeasuredAllReduce(("slow",) * 2, (8,), (1.0,)),)
    )
    joined = merge([whole, other, whole])
    assert joined.links == {**whole.links, **other.links}
    assert joined.all_reduces == (*whole.all_reduces, *other.all_reduces)


def test_other_devices_to_measure_between_have_another_key():
    settings = TaskSettings("bert-tiny", 1)
    groups: list[list[list[str]]] = [[], [["gpu"]], [["gpu", "gpu"]], [["gpu"], ["gpu"]], [["gpu"]]]
    keys = {cache_key(settings, {"gpu": 1}, (1,), "", real_kinds=kinds) for kinds in groups}
    assert len(keys) == 4


def test_links_are_told_in_a_sentence_each():
    # 8 bytes in 3 s, 16 in 7 s, latency included
    assert link_sentences(measured_profile()) == [
        "link fast>slow: latency 1 s (standard error 1.0 %); with it 8 B 21.3 bit/s, 16 B 18.3 bit/s",
        "link slow>fast: latency 250 ms, 320 bit/s",
        "all-reduce of 1 fast and 1 slow: 8 B 2 s, 16 B 3 s",
    ]
