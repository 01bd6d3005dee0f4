"""What if: each change does what editing the cluster file would do, and slips of the pen are named."""

from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, Link
from cost_model.cluster_file import cluster_from_data
from cost_model.errors import InputError
from cost_model.measured_links import MeasuredAllReduce, MeasuredLink
from cost_model.other_clusters import with_room, without
from cost_model.vendors import NVIDIA
from cost_model.what_if import changed, check_measured_links
from small_case import small_cluster, small_profile

GIB = 2.0**30


DATA = {
    "name": "lab",
    "driver_memory": "0 B",
    "network": {"bandwidth": "8 Gbit/s", "latency": "50 us"},
    "nodes": [
        {
            "name": "big",
            "devices": [{"kind": "V100", "memory": "16 GiB", "count": 2, "price_per_hour": 3}],
            "interconnect": {"bandwidth": "10 GB/s", "latency": "5 us"},
        },
        {"name": "desk", "devices": [{"kind": "T4", "memory": "20 GiB", "speed": 0.5, "watts": 70}]},
        {"name": "old", "devices": [{"kind": "K80", "memory": "12 GiB"}]},
    ],
    "links": [{"nodes": ["big", "old"], "bandwidth": "1 GB/s", "latency": "1 ms"}],
}


def lab() -> Cluster:
    """Two V100 on one node, a slowed T4, a K80 on a third; 10 % in reserve, nothing for drivers."""
    return cluster_from_data(DATA, "lab")


def test_an_added_device_has_a_driver_where_the_others_have():
    two = cluster_from_data({**DATA, "driver_memory": None}, "lab")
    over_nvlink, over_pcie = (NVIDIA.in_communicator_bytes(link) for link in ("NVLink 2", "PCIe 4"))
    assert two.device("big/0").driver_bytes == NVIDIA.context_bytes + 5 * over_nvlink
    added = changed(two, "add 1 RTX-4090 to desk").device("desk/1")
    assert added.driver_bytes == NVIDIA.context_bytes + 5 * over_pcie


def names(cluster: Cluster) -> list[str]:
    return [device.name for device in cluster.devices]


def test_devices_and_nodes_are_left_out():
    cluster = small_cluster()
    assert [device.name for device in without(cluster, ["a/0"]).devices] == ["b/0"]
    assert [device.name for device in without(cluster, ["b"]).devices] == ["a/0"]
    assert without(cluster, []) == cluster
    with pytest.raises(InputError, match='did you mean "a/0"'):
        without(cluster, ["a/00"])
    with pytest.raises(InputError, match="leaves none of the 2 devices"):
        without(cluster, ["a", "b/0"])


def test_added_devices_are_like_those_of_their_kind():
    cluster = changed(lab(), "add 2 T4 to desk")
    assert names(cluster) == ["big/0", "big/1", "desk/0", "desk/1", "desk/2", "old/0"]
    assert cluster.device("desk/2") == replace(lab().device("desk/0"), name="desk/2")
    other = changed(lab(), "add T4 to big")
    assert other.device("big/2") == replace(lab().device("desk/0"), name="big/2", node="big")
    assert changed(lab(), "add 1 Tesla V100-SXM2-16GB to big").device("big/2").kind == "V100"


def test_an_added_device_of_the_catalogue_has_its_memory_watts_and_the_reserve_of_its_neighbours():
    device = changed(lab(), "add 1 NVIDIA GeForce RTX 4090 to desk").device("desk/1")
    assert device == Device("desk/1", "desk", "RTX-4090", 24 * GIB, device.reserve_bytes, watts=450.0)
    assert device.reserve_bytes == pytest.approx(2.4 * GIB)
    assert changed(lab(), "add 1 L4 to desk").device("desk/1").price_per_hour == 0.805
    spelt = changed(lab(), "add 1 RTX-4090 to desk", kinds=["A100", "NVIDIA GeForce RTX 4090"])
    assert spelt.device("desk/1").kind == "NVIDIA GeForce RTX 4090"


def test_an_added_node_is_like_another_one():
    cluster = changed(lab(), "add node big2 like big")
    assert names(cluster)[-2:] == ["big2/0", "big2/1"]
    assert cluster.link("big2/0", "big2/1") == lab().link("big/0", "big/1")
    assert cluster.link("big2/0", "old/0") == lab().link("big/0", "old/0")
    assert cluster.link("big2/0", "big/0") == lab().network


def test_a_node_may_be_added_under_the_name_of_one_that_was_removed():
    cluster = changed(lab(), "remove old, add node old like big")
    assert names(cluster) == ["big/0", "big/1", "desk/0", "old/0", "old/1"]
    assert cluster.device("old/1").kind == "V100"
    assert cluster.links == ()  # that between big and old was of the other one


def test_new_names_do_not_take_those_of_removed_devices():
    cluster = changed(lab(), "remove big/0, add V100 to big")
    assert names(cluster)[:2] == ["big/1", "big/2"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("remove big/0", ["big/1", "desk/0", "old/0"]),
        ("remove big", ["desk/0", "old/0"]),
        ("remove V100 from big", ["big/0", "desk/0", "old/0"]),
        ("remove 2 V100 from big", ["desk/0", "old/0"]),
        ("remove all V100 from big", ["desk/0", "old/0"]),
        ("remove big/0,  remove  old", ["big/1", "desk/0"]),
    ],
)
def test_devices_are_removed(text: str, left: list[str]):
    assert names(changed(lab(), text)) == left


@pytest.mark.parametrize(
    ("text", "pair", "link"),
    [
        ("network 1 Gbit/s", ("big/0", "desk/0"), Link(50e-6, 125e6)),
        ("network 16Gbit/s 10 us", ("big/0", "desk/0"), Link(10e-6, 2e9)),
        ("network 1 ms", ("big/0", "desk/0"), Link(1e-3, 1e9)),
        ("network 1 Gbit/s", ("big/0", "big/1"), Link(5e-6, 10e9)),  # it has an interconnect
        ("link big desk 80 Gbit/s", ("desk/0", "big/1"), Link(50e-6, 10e9)),
        ("link old big 2 GB/s", ("big/0", "old/0"), Link(1e-3, 2e9)),
        ("interconnect big 300 GB/s 1 us", ("big/0", "big/1"), Link(1e-6, 300e9)),
    ],
)
def test_links_change(text: str, pair: tuple[str, str], link: Link):
    assert changed(lab(), text).link(*pair) == link


def test_memory_keeps_its_share_of_reserve():
    cluster = changed(lab(), "memory big/0 40 GiB")
    assert cluster.device("big/0").usable_bytes == pytest.approx(36 * GIB)
    assert cluster.device("big/1") == lab().device("big/1")
    both = changed(lab(), "memory big 40 GiB")
    assert [device.memory_bytes for device in both.devices][:2] == [40 * GIB] * 2


def test_speed_price_and_watts_are_set():
    assert changed(lab(), "speed desk/0 1.5").device("desk/0").speed == 1.5
    cluster = changed(lab(), "price desk 0.4, watts big 250")
    assert cluster.device("desk/0").price_per_hour == 0.4
    assert [device.watts for device in cluster.devices] == [250.0, 250.0, 70.0, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ad 2 T4 to desk", """what if "ad 2 T4 to desk": unknown change 'ad'; did you mean "add"?"""),
        ("", "unknown change ''; known: add, remove, network, link"),
        ("add 2 T4 to desc", """unknown node 'desc'; did you mean "desk"?"""),
        ("add 2 T4", 'is incomplete; write for example "add node big2 like big" or "add 2 RTX-4090 to desk"'),
        ("add 0 T4 to desk", "0 devices are none; give at least 1"),
        ("add RTX-4091 to desk", """has a kind 'RTX-4091'; did you mean "RTX-4090"?"""),
        ("add node big like desk", "node 'big' appears twice"),
        ("add node b/1 like desk", "'b/1' is no name of a node"),
        ("remove bg", """no such device or node; did you mean "big"?"""),
        ("remove 3 V100 from big", "node 'big' has 2 V100, not 3; remove fewer"),
        ("remove V10 from big", """node 'big' has no 'V10'; did you mean "V100"?"""),
        ("remove big, remove desk, remove old", "leaves none of the 1 devices"),
        ("network fast", "'fast' is no bandwidth or latency; write for example"),
        ("network 1 Gbit/s 2 Gbit/s", "is no bandwidth or latency"),
        ("network 1 Gbyte/s", "unknown unit 'Gbyte/s'"),
        ("network 0 Gbit/s", "must be above zero"),
        ("network -1 Gbit/s", "is negative"),
        ("link big big 1 Gbit/s", 'write "interconnect big ..."'),
        ("link big 1 Gbit/s", "is incomplete; write for example"),
        ("memory big/0 24", "'24' has no unit"),
        ("memory dsk 24 GiB", """no device or node 'dsk'; did you mean "desk"?"""),
        ("speed desk -1", "'-1' is no number of zero or more"),
        ("speed desk 0", "'0' is no speed from 1e-09 to 1e+09"),
        ("speed desk 99999999999999", "is no speed from 1e-09 to 1e+09"),
        ("watts desk 70 W", "'70 W' is no number"),
    ],
)
def test_what_is_no_change_is_refused_in_one_line(text: str, message: str):
    with pytest.raises(InputError) as error:
        changed(lab(), text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_better_links_than_a_measured_one_that_counts_are_refused():
    profile, before = small_profile(), small_cluster()  # the profile has measured fast>slow
    with pytest.raises(InputError, match="holds a measured link fast>slow, which counts instead"):
        check_measured_links(before, changed(before, "network 1 Gbit/s"), profile)
    with pytest.raises(InputError, match="fast>slow"):
        check_measured_links(before, changed(before, "link a b 1 us"), profile)
    check_measured_links(before, changed(before, "network 1 B/s"), profile)  # slower ones count
    check_measured_links(before, changed(before, "speed a 2, add fast to a"), profile)
    check_measured_links(before, changed(before, "interconnect a 1 TB/s"), profile)  # fast>fast is unknown


def test_what_a_run_has_calibrated_counts_instead_of_slower_links_too():
    links = {"slow>fast": MeasuredLink(0.25, 40.0, calibrated=True)}
    profile, before = replace(small_profile(), links=links), small_cluster()
    with pytest.raises(InputError, match="slow>fast"):
        check_measured_links(before, changed(before, "network 1 B/s"), profile)


def test_better_links_than_a_measured_all_reduce_are_refused():
    sums = (MeasuredAllReduce(("fast", "slow"), (8,), (1.0,)),)
    profile, before = replace(small_profile(), links={}, all_reduces=sums), small_cluster()
    with pytest.raises(InputError, match="measured all-reduces of fast and slow"):
        check_measured_links(before, changed(before, "network 1 Gbit/s"), profile)


def test_a_device_with_less_room_keeps_its_reserve_and_its_driver():
    found = with_room(lab(), {"big/1": 3 * GIB})
    usable = [device.usable_bytes for device in found.devices[:2]]
    assert usable == pytest.approx([lab().devices[0].usable_bytes, 3 * GIB])
    assert found.devices[1].reserve_bytes == lab().devices[1].reserve_bytes
