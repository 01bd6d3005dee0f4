"""Which sum over hosts is measured, what is kept of it, and what is said."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cost_model.cluster import EMULATED, Cluster, Device, Link, Node, NodeLink
from cost_model.errors import InputError
from hetpipe.hosts.links import devices_to_json
from hetpipe.hosts.sums import SIZES, HostSum, devices_of_sum, measure_sum, seconds_of, sizes_for
from hetpipe.runs.cache import links_folder

MBIT_S = 1e6 / 8


def cluster(*names: str, mbit_s: float = 1000.0) -> Cluster:
    """Two devices in each node; the link of the last two is ten times slower than the others."""
    nodes = tuple(
        Node(name, tuple(Device(f"{name}/{index}", name, EMULATED, 1.0) for index in range(2)))
        for name in names
    )
    last = (NodeLink((names[-2], names[-1]), Link(0.0, mbit_s / 10 * MBIT_S)),)
    return Cluster("made-up", Link(0.0, mbit_s * MBIT_S), nodes, last)


def test_two_hosts_have_a_link_alone():
    assert measure_sum(cluster("a", "b"), {}, "eth0", lambda devices, sizes: [1.0]) is None


def test_sizes_are_those_whose_sum_is_over_soon_by_the_links():
    fast = sizes_for(cluster("a", "b", "c"), ["a/0", "b/0", "c/0"])
    assert tuple(fast) == SIZES[:5]
    # 2 * 2 rounds of a third of it, over 100 Mbit/s
    assert fast[SIZES[4]] == pytest.approx(4 / 3 * SIZES[4] / (100 * MBIT_S))
    assert tuple(sizes_for(cluster("a", "b", "c", mbit_s=0.01), ["a/0", "b/0", "c/0"])) == SIZES[:1]


def test_a_sum_is_measured_once_a_day_by_hosts_and_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[list[str]] = []

    def ask(devices: Sequence[Device], sizes: Sequence[int]) -> list[float]:
        asked.append([device.name for device in devices])
        return [0.001 * (index + 1) for index in range(len(sizes))]

    hosts = {name: f"host {name}" for name in "abc"}
    made = cluster("a", "b", "c")
    first = measure_sum(made, hosts, "eth0", ask)
    assert first is not None and first.measured_s == pytest.approx((0.001, 0.002, 0.003, 0.004, 0.005))
    assert asked == [["a/0", "b/0", "c/0"]]
    again = measure_sum(made, hosts, "eth0", ask)
    assert again == first and again.was_kept and not first.was_kept
    assert len(asked) == 1
    assert measure_sum(made, hosts, "eth0", ask, anew=True) == first
    assert len(asked) == 2
    measure_sum(made, hosts, "eth1", ask)
    measure_sum(made, {**hosts, "c": "another"}, "eth0", ask)
    assert len(asked) == 4
    for file in (links_folder()).iterdir():
        file.write_text('{"format": "hetpipe.host_sum/1", "seconds": ["x"]}')
    assert measure_sum(made, hosts, "eth0", ask) == first
    assert len(asked) == 5
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where no folder can be
    told: list[str] = []
    assert measure_sum(made, hosts, "eth0", ask, tell=told.append) == first
    assert len(told) == 1 and "links cannot be written (Not a directory), so that" in told[0]


def test_a_sum_that_is_far_from_what_the_links_say_is_told_so():
    near, far = (HostSum(("a", "b", "c"), (2**20,), (seconds,), (0.1,)) for seconds in (0.105, 0.15))
    assert not near.is_far
    assert str(near) == "a sum of 1.00 MiB over a, b, c: 105 ms, +5.0% of what the links say"
    assert far.is_far
    assert str(far).endswith(
        "+50.0% of what the links say; predicted sums between these hosts may be as far off"
    )


def test_what_hosts_send_is_checked():
    devices = [Device("a/0", "a", EMULATED, 1.0), Device("b/0", "b", EMULATED, 1.0)]
    assert devices_of_sum(devices_to_json([devices])[0]) == devices
    assert seconds_of([1.0, 2]) == [1.0, 2.0]
    with pytest.raises(InputError, match="the measured sum"):
        seconds_of(None)
    with pytest.raises(InputError, match="the question for a sum"):
        devices_of_sum([{"name": "a/0"}])
