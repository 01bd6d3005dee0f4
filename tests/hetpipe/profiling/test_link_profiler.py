"""Which links and all-reduces are measured, what the seconds become, and the real thing on CPUs."""

from dataclasses import replace

import pytest

from cost_model.cluster import CPU, EMULATED, Cluster, Device, Link, Node
from cost_model.cluster_file import read_cluster
from cost_model.known_clusters import FOLDER as CLUSTERS
from cost_model.measured_links import MeasuredLink
from cost_model.network import NORM_BYTES
from cost_model.profile import profile_from_data
from hetpipe.profiling.link_profiler import (
    ALL_REDUCE_BYTES,
    LATENCY_BYTES,
    MESSAGE_BYTES,
    WARMUP,
    groups_of_devices,
    link_of,
    measure_all_reduces,
    measure_links,
    mixed,
    pairs_of_devices,
)
from hetpipe.program.costs import ProgramCosts
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from runs import cluster_file
from small_case import plan_of, small_profile


def cluster(*nodes: str) -> Cluster:
    """Nodes by the kinds of their devices, one letter each."""
    kinds = {"c": CPU, "e": EMULATED}
    return Cluster(
        "made-up",
        Link(0.0, 1.0),
        tuple(
            Node(
                f"n{node}",
                tuple(
                    Device(f"n{node}/{i}", f"n{node}", kinds.get(letter, letter), 1.0)
                    for i, letter in enumerate(letters)
                ),
            )
            for node, letters in enumerate(nodes)
        ),
    )


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        (["c"], []),
        (["ee"], []),
        (["c", "ec"], [("n0/0", "n1/1")]),
        (["AAB"], [("n0/0", "n0/1"), ("n0/0", "n0/2")]),
        (["A", "A"], []),  # GPUs of different nodes are not on one host
        (["A", "BB"], [("n1/0", "n1/1")]),
        (["Ac"], [("n0/0", "n0/1")]),
    ],
)
def test_each_two_kinds_of_a_host_have_a_pair(nodes: list[str], pairs: list[tuple[str, str]]):
    found = pairs_of_devices(cluster(*nodes))
    assert [(one.name, other.name) for one, other in found] == pairs


@pytest.mark.parametrize(
    ("nodes", "groups"),
    [
        (["c"], []),
        (["eee"], []),
        (["cc"], [("cpu cpu", (2,))]),
        (["ccc", "ccc"], [("cpu cpu cpu cpu cpu cpu", (2, 4, 6))]),
        (["A" * 12], [(" ".join("A" * 12), (2, 4, 8, 12))]),
        (["AAB"], [("A A", (2,)), ("A A B", (3,))]),
    ],
)
def test_groups_grow_by_powers_of_two_to_all(nodes: list[str], groups: list[tuple[str, tuple[int, ...]]]):
    found = groups_of_devices(cluster(*nodes))
    assert [(" ".join(device.kind for device in devices), sizes) for devices, sizes in found] == groups


def test_emulated_links_are_not_measured():
    assert pairs_of_devices(read_cluster(CLUSTERS / "four-unequal.toml")) == []


def test_sizes_are_mixed_and_small_ones_come_more_often():
    order = mixed((LATENCY_BYTES, *MESSAGE_BYTES))
    assert order == mixed((LATENCY_BYTES, *MESSAGE_BYTES))  # the same on all ranks
    counts = [order[WARMUP * (1 + len(MESSAGE_BYTES)) :].count(size) for size in MESSAGE_BYTES]
    assert counts == [100, 100, 100, 100, 100, 64, 16, 9]


def test_what_a_message_takes_longer_than_the_smallest_it_occupies_the_link():
    # medians 2, 1.5, 4 and 8 s, of which 2 s are latency: never less than nothing; the last 4 s for 8 bytes
    seconds = {4: [1.0, 2.0, 9.0], 8: [1.5], 16: [4.0, 4.0], 24: [8.0]}
    link = link_of(seconds)
    assert replace(link, standard_error=None) == MeasuredLink(2.0, 2.0, (8, 16, 24), (0.0, 2.0, 6.0))
    assert link.standard_error is not None and link.standard_error > 0
    flat = link_of({4: [2.0, 2.0], 8: [3.0], 16: [2.5]})  # a larger message that was faster
    assert (flat.occupied_s, flat.bandwidth_bytes_per_s) == ((1.0, 1.0), 16.0)


@pytest.mark.slow
def test_links_and_all_reduces_of_real_devices_are_measured_and_used(tmp_path):
    devices = read_cluster(cluster_file(tmp_path))
    links, all_reduces = measure_links(devices), measure_all_reduces(devices)
    assert links.keys() == {"cpu>cpu"}
    link = links["cpu>cpu"]
    assert isinstance(link, MeasuredLink)
    assert 0 < link.latency_s < 1
    assert link.message_bytes == MESSAGE_BYTES and link.occupied_s == tuple(sorted(link.occupied_s))
    assert link.standard_error is not None
    assert link.transfer_s(2**24) < 2**24 / 1e6
    assert [entry.kinds for entry in all_reduces] == [(CPU,) * 2, (CPU,) * 4]
    for entry in all_reduces:
        assert entry.message_bytes == ALL_REDUCE_BYTES
        assert all(0 < value < 10 for value in entry.duration_s)

    kinds = {CPU: small_profile().kinds["fast"]}
    profile = replace(small_profile(), kinds=kinds, links=links, all_reduces=all_reduces)
    assert profile_from_data(profile.to_json(), "measured") == profile
    plan = plan_of([("n/0", 0, 2, 1), ("n/1", 2, 4, 1)], num_samples=1)
    costs = ProgramCosts(lower(plan, profile), profile, two_cpus())
    # forward 3 + 3 s, backward 6 + 5 s, 10 bytes each way, the sums of 250 tied bytes and NORM
    hop_s = link.transfer_s(10.0)
    sums_s = all_reduces[0].sum_s(250.0) + all_reduces[0].sum_s(NORM_BYTES)
    expected_s = 17.0 + 2 * hop_s + sums_s + max(costs.step_s(rank) for rank in (0, 1))
    assert simulate(costs).makespan_s == pytest.approx(expected_s)


def two_cpus() -> Cluster:
    """Two CPUs on a node whose links are instant."""
    return Cluster(
        "made-up", Link(0.0, 1e30), (Node("n", tuple(Device(f"n/{i}", "n", CPU, 1e9) for i in (0, 1))),)
    )
