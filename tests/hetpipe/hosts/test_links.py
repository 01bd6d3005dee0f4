"""Which pairs of hosts are measured when, what is kept of it, and what is said."""

import os
import time
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from cost_model.cluster import EMULATED, Cluster, Device, Link, Node
from cost_model.measured_links import MeasuredLink
from hetpipe.hosts.links import (
    KEPT_S,
    HostLink,
    Pair,
    devices_of_json,
    devices_to_json,
    measure_pairs,
    rounds_of,
)
from hetpipe.runs.cache import links_folder
from shell import Shell

FAST, SLOW = (MeasuredLink(0.001, bandwidth, (8, 16), (1.0, 2.0)) for bandwidth in (1.25e8, 1.25e7))


def cluster(*names: str) -> Cluster:
    nodes = tuple(Node(name, (Device(f"{name}/0", name, EMULATED, 1.0),)) for name in names)
    return Cluster("made-up", Link(0.0, 1.0), nodes)


@pytest.mark.parametrize("count", range(1, 8))
def test_every_pair_meets_once_and_no_host_twice_in_a_round(count: int):
    names = [f"n{index}" for index in range(count)]
    rounds = rounds_of(names)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(names, 2))
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))


def test_a_link_is_measured_once_a_day_by_hosts_and_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[Pair] = []

    def ask(pairs: list[Pair], devices: list[tuple[Device, Device]]) -> list[dict[str, Any]]:
        assert [tuple(device.node for device in pair) for pair in devices] == pairs
        asked.extend(pairs)
        return [{"there": asdict(FAST), "back": asdict(SLOW)} for _ in pairs]

    hosts = {name: f"host {name}" for name in "abc"}
    made = cluster("a", "b", "c")
    first = measure_pairs(made, hosts, "eth0", ask)
    assert [link.nodes for link in first] == sorted(asked) == [("a", "b"), ("a", "c"), ("b", "c")]
    asked.clear()
    assert not any(link.was_kept for link in first)
    again = measure_pairs(made, hosts, "eth0", ask)
    assert again == first and all(link.was_kept for link in again)
    assert not asked
    assert not any(link.was_kept for link in measure_pairs(made, hosts, "eth0", ask, anew=True))
    assert len(asked) == 3
    asked.clear()
    measure_pairs(made, hosts, "eth1", ask)
    assert len(asked) == 3
    asked.clear()
    measure_pairs(made, {**hosts, "c": "another host"}, "eth0", ask)
    assert sorted(asked) == [("a", "c"), ("b", "c")]
    asked.clear()
    for file in (links_folder()).iterdir():
        if file.name.startswith("a-b"):
            os.utime(file, (time.time() - KEPT_S - 60,) * 2)
        elif file.name.startswith("a-c"):
            file.write_text('{"format": "hetpipe.host_link/1", "there": {"latency_s": "x"}}')
    assert measure_pairs(made, hosts, "eth0", ask) == first
    assert sorted(asked) == [("a", "b"), ("a", "c")]
    asked.clear()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where no folder can be
    told: list[str] = []
    assert measure_pairs(made, hosts, "eth0", ask, tell=told.append) == first and len(asked) == 3
    assert len(told) == 1 and "links cannot be written (Not a directory), so that" in told[0]


def test_a_plan_takes_the_slower_direction_and_both_are_told():
    unlike = HostLink(("a", "b"), FAST, SLOW)
    assert unlike.slower == Link(0.001, 1.25e7)
    assert str(unlike) == ("a to b: 1 Gbit/s, back 100 Mbit/s (a plan takes the slower), latency 1 ms")
    assert "back" not in str(HostLink(("a", "b"), FAST, FAST))


def test_devices_arrive_as_they_were_sent():
    one, other = cluster("a", "b").devices
    assert devices_of_json(devices_to_json([(one, other)])) == [(one, other)]


def test_what_is_kept_is_counted_and_cleared(hetpipe: Shell):
    def ask(pairs: list[Pair], _: list[tuple[Device, Device]]) -> list[dict[str, Any]]:
        return [{"there": asdict(FAST), "back": asdict(SLOW)} for _ in pairs]

    measure_pairs(cluster("a", "b"), {"a": "one", "b": "other"}, "eth0", ask)
    assert "kept: 1 measurement of links between hosts in" in hetpipe("cache").out
    (named,) = hetpipe("cache --json").json["links"]
    assert Path(named).parent == links_folder()
    assert "removed: 1 measurement of links between hosts in" in hetpipe("cache --clear").out
    assert not list(links_folder().iterdir())
