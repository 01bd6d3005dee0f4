import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.cluster import Cluster, Device, Link, Node, NodeAllReduce, NodeLink
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from small_case import check_golden, small_cluster

GOOD = """
driver_memory = "0 B"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"

[[nodes]]
name = "big"
devices = [{ kind = "A100", count = 2, memory = "40 GiB", speed = 0.5 }, { kind = "T4", memory = "16 GiB" }]

[[nodes]]
name = "old"
devices = [{ kind = "P100", memory = "16 GB" }]
"""


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def test_units_become_bytes_and_seconds_and_devices_are_named_by_node(tmp_path: Path):
    cluster = read(tmp_path, GOOD)
    assert [device.name for device in cluster] == ["big/0", "big/1", "big/2", "old/0"]
    assert cluster.network == Link(latency_s=5e-5, bandwidth_bytes_per_s=1.25e9)
    big = cluster.device("big/1")
    assert (big.kind, big.speed, big.memory_bytes, big.usable_bytes) == ("A100", 0.5, 40 * 2**30, 36 * 2**30)
    assert cluster.device("old/0").memory_bytes == 16e9


def test_reserve_may_be_a_size_or_nothing(tmp_path: Path):
    assert read(tmp_path, 'reserve = "1 GiB"\n' + GOOD).device("big/0").usable_bytes == 39 * 2**30
    assert read(tmp_path, 'reserve = "0 B"\n' + GOOD).device("big/0").reserve_bytes == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("latency", "latencyy", 'unknown key "network.latencyy"; did you mean "latency"?'),
        ('latency = "50 us"', "", 'key "network.latency" is missing'),
        ('"10 Gbit/s"', '"10"', "network.bandwidth: '10' has no unit"),
        ('"10 Gbit/s"', '"10 Gbits"', "network.bandwidth: '10 Gbits' has unknown unit 'Gbits'"),
        ('"10 Gbit/s"', "10", "network.bandwidth: 10 has no unit; write it as text like '10 Gbit/s'"),
        ('"10 Gbit/s"', '"0 bit/s"', "bandwidth of 0.0 B/s must be above zero"),
        ('"50 us"', '"-1 us"', "network.latency: '-1 us' is negative; give zero or more"),
        (
            "speed = 0.5",
            "speed = 0",
            "nodes[0].devices[0].speed: input should be greater than or equal to 0.0",
        ),
        ("speed = 0.5", "sped = 0.5", 'unknown key "nodes[0].devices[0].sped"; did you mean "speed"?'),
        ("count = 2", "count = 0", "nodes[0].devices[0].count: input should be greater than or equal to 1"),
        ("count = 2", 'count = "2"', "nodes[0].devices[0].count: input should be a valid integer"),
        ('"40 GiB"', '"0 GiB"', "device 'big/0': memory of 0.0 bytes must be above zero"),
        ('name = "old"', 'name = "big"', "node 'big' appears twice; names of nodes must differ"),
        ('name = "old"', 'name = "o/d"', "nodes[1].name"),
        ('name = "old"', 'name = "old"\nhost = "-oProxyCommand=x"', "host"),
        ("[network]", 'reserve = "100 %"\n[network]', "leaves nothing of its"),
        ("[network]", "[network", "not TOML"),
    ],
)
def test_a_mistake_is_refused_with_file_key_and_remedy(tmp_path: Path, old: str, new: str, message: str):
    assert old in GOOD
    with pytest.raises(InputError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    text = str(caught.value)
    assert message in text
    assert str(tmp_path / "cluster.toml") in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ('["big", "odl"]', "a link names the unknown node 'odl'; did you mean \"old\"?"),
        ('["big", "big"]', "a link joins node 'big' with itself; use `interconnect`"),
        ('["big"]', "links[0].nodes[1]"),
    ],
)
def test_a_link_joins_two_known_nodes(tmp_path: Path, nodes: str, message: str):
    link = f'\n[[links]]\nnodes = {nodes}\nbandwidth = "1 Gbit/s"\nlatency = "1 ms"\n'
    with pytest.raises(InputError) as caught:
        read(tmp_path, GOOD + link)
    assert message in str(caught.value)


def test_the_same_link_twice_is_refused(tmp_path: Path):
    link = '\n[[links]]\nnodes = {}\nbandwidth = "1 Gbit/s"\nlatency = "1 ms"\n'
    with pytest.raises(InputError, match="the link between big and old is given twice"):
        read(tmp_path, GOOD + link.format('["big", "old"]') + link.format('["old", "big"]'))


SUMS = 'name = "big"\nall_reduces = [{ devices = 2, bandwidth = "4 GB/s", latency = "30 us" }, %s]'


def test_a_node_says_how_long_its_devices_sum(tmp_path: Path):
    three = '{ devices = 3, bandwidth = "2 GB/s", latency = "50 us" }'
    told = read(tmp_path, GOOD.replace('name = "big"', SUMS % three))
    expected = (NodeAllReduce(2, Link(3e-5, 4e9)), NodeAllReduce(3, Link(5e-5, 2e9)))
    assert [node.all_reduces for node in told.nodes] == [expected, ()]
    plain = read(tmp_path, GOOD)
    assert "all_reduces" not in plain.to_json()["nodes"][0]
    assert told.sha256 != plain.sha256


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("devices = 4", "node 'big': all_reduces has 4 devices, the node 3; take that entry out"),
        (
            "devices = 2",
            "node 'big': all_reduces are of 2, 2 devices; give each number once, the numbers rising",
        ),
        ("devices = 1", "nodes[0].all_reduces[1].devices: input should be greater than or equal to 2"),
        ("device = 3", 'unknown key "nodes[0].all_reduces[1].device"; did you mean "devices"?'),
    ],
)
def test_sums_of_a_node_that_it_cannot_have_are_refused(tmp_path: Path, entry: str, message: str):
    wrong = SUMS % f'{{ {entry}, bandwidth = "2 GB/s", latency = "50 us" }}'
    with pytest.raises(InputError) as caught:
        read(tmp_path, GOOD.replace('name = "big"', wrong))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_unknown_device_are_named(tmp_path: Path):
    with pytest.raises(InputError, match="no such file"):
        read_cluster(tmp_path / "nothing.toml")
    with pytest.raises(InputError, match="unknown device 'big/9'; did you mean"):
        read(tmp_path, GOOD).device("big/9")


def test_a_cluster_needs_a_device():
    with pytest.raises(InputError, match="the cluster has no device"):
        Cluster("empty", Link(0.0, 1.0), (Node("a", ()),))


def test_a_link_in_place_of_the_network_holds_both_ways():
    slow = Link(latency_s=1.0, bandwidth_bytes_per_s=1.0)
    plain = small_cluster()
    cluster = Cluster("two", plain.network, plain.nodes, (NodeLink(("b", "a"), slow),))
    assert cluster.link("a/0", "b/0") == cluster.link("b/0", "a/0") == slow


def test_equal_devices_have_equal_classes():
    one, two = (Device(f"a/{index}", "a", "gpu", 1.0) for index in range(2))
    assert one.device_class == two.device_class
    for other in (
        replace(one, node="b"),
        replace(one, kind="other"),
        replace(one, speed=0.5),
        replace(one, memory_bytes=2.0),
        replace(one, reserve_bytes=0.5),  # a plan may fill less of it
    ):
        assert other.device_class != one.device_class


def test_cluster_file_has_its_golden_json():
    cluster = read_cluster("four-unequal")
    check_golden("cluster.json", json.dumps(cluster.to_json(), indent=1) + "\n")
