"""Slow links between hosts: named soon after they are, never for noise, nor for a late sender or receiver."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.units import format_seconds
from hetpipe.program.costs import ProgramCosts
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from hetpipe.training.slow_devices import WINDOW
from hetpipe.training.slow_links import LinkSpell, LinkWatch, SlowLinks, Taken, edges_between
from host_runs import LINE, hosts_with_folders
from runs import chain_plan, cluster_file, made_up_profile
from three_hosts import has_namespaces

PLANNED_S = 0.02
CLOCKS_OFF_S = 1e-4
LAYER_S = 2e-4


def spells(
    seconds: list[float], planned_s: float = PLANNED_S, error_s: float = CLOCKS_OFF_S
) -> list[LinkSpell]:
    watch = SlowLinks()
    found = [watch.see(0, Taken(step, each, planned_s), error_s) for step, each in enumerate(seconds, 1)]
    return [spell for spell in found if spell is not None]


def noisy(seed: int, count: int, level: float, tails: float = 0.2) -> list[float]:
    """Seconds with lognormal noise; every fifth message comes up to many times as late."""
    draw = random.Random(seed)
    return [
        PLANNED_S
        * level
        * math.exp(draw.gauss(0, 0.1))
        * (draw.paretovariate(1.0) if draw.random() < tails else 1.0)
        for _ in range(count)
    ]


@given(seed=st.integers(0, 10**6), level=st.floats(0.5, 1.0))
@settings(max_examples=60)
def test_noise_is_no_alarm(seed: int, level: float):
    assert spells(noisy(seed, 1000, level)) == []


@given(seed=st.integers(0, 10**6), since=st.integers(2, 300), times=st.floats(1.6, 20))
@settings(max_examples=60)
def test_a_slow_link_is_named_soon_and_so_is_its_end(seed: int, since: int, times: float):
    before, after = noisy(seed, since - 1, 1.0, 0.05), noisy(seed + 1, 60, times, 0.05)
    found = spells([*before, *after, *noisy(seed + 2, 60, 1.0, 0.05)])
    assert [spell.ended for spell in found] == [False, True]
    # never late; single late messages right before it are taken for its begin, up to 8 in 1,500 such links
    assert 0 <= since - found[0].since <= 12
    assert found[0].num_steps <= 25
    assert found[0].taken_s == pytest.approx(times * PLANNED_S, rel=0.25)
    assert found[1].since == found[0].since


def test_what_threads_or_clocks_may_err_by_is_no_alarm():
    assert spells([0.0025] * 100, planned_s=1e-4) == []
    assert spells([0.0045] * 100, planned_s=1e-4) != []
    assert spells([0.0045] * 100, planned_s=1e-4, error_s=0.002) == []


@pytest.fixture
def costs(tmp_path: Path) -> ProgramCosts:
    """Three stages, four microbatches; 16 KiB a sample."""
    cluster = read_cluster(cluster_file(tmp_path))
    return costs_on(cluster, "cpu")


def costs_on(cluster: Cluster, kind: str) -> ProgramCosts:
    profile = made_up_profile("bert-tiny", kind)
    plan = chain_plan("bert-tiny", [0, 3, 6, 8], 4, node=cluster.nodes[0].name)
    return ProgramCosts(lower(plan, profile, cluster), profile, cluster)


def test_messages_between_hosts_are_timed_and_no_others(costs: ProgramCosts, tmp_path: Path):
    found = edges_between(costs, (0, 0, 2))
    assert [(edge.source, edge.destination, len(edge.transfers)) for edge in found] == [(1, 2, 4), (2, 1, 4)]
    assert edges_between(costs, (0, 0, 0)) == ()
    text = (
        (tmp_path / "cluster.toml")
        .read_text()
        .replace('kind = "cpu"', 'kind = "H100", driver_memory = "0 B"')
    )
    (tmp_path / "cluster.toml").write_text(text)
    gpus = costs_on(read_cluster(tmp_path / "cluster.toml"), "H100")
    assert edges_between(gpus, (0, 1, 2)) == ()


def watch_of(costs: ProgramCosts) -> LinkWatch:
    return LinkWatch.of(costs, 0, (0, 1, 1), lambda: simulate(costs))


def rows(sent: list[Any], arrived: list[Any]) -> list[list[Any]]:
    """What the ranks say where the first sends to the second, and gets nothing back that was noted."""
    nothing = [None] * 4
    return [[sent, nothing], [arrived, nothing], []]


@pytest.mark.parametrize(
    ("sent", "arrived", "slow"),
    [
        # each takes 50 ms, whenever it was sent
        ([0.1 * each for each in range(4)], [(0.0, 0.1 * each + 0.05, True) for each in range(4)], 50),
        # they wait for one another: 50 ms each, not 50, 100, 150 and 200
        ([0.0] * 4, [(0.0, 0.05, True), (0.0, 0.1, True), (0.0, 0.15, True), (0.0, 0.2, True)], 50),
        # the sender is late, or the receiver, or nobody knows when they came
        ([1.0] * 4, [(0.0, 1.001, True)] * 4, None),
        ([0.0] * 4, [(0.1 * each, 0.1 * each + 0.001, True) for each in range(1, 5)], None),
        ([0.0] * 4, [(0.0, 0.1 * each, False) for each in range(1, 5)], None),
        ([None] * 4, [(0.0, 0.1 * each, True) for each in range(1, 5)], None),
        ([0.0] * 4, [None] * 4, None),
    ],
)  # fmt: skip
def test_neither_a_late_sender_nor_a_late_receiver_makes_a_link_slow(
    costs: ProgramCosts, sent, arrived, slow
):
    watch = watch_of(costs)
    told = [watch.events(step, rows(sent, arrived), CLOCKS_OFF_S) for step in range(1, 31)]
    if slow is None:
        assert not any(told)
        assert watch.now() == {}
        return
    (event,) = [event for events in told for event in events]
    assert watch.planned_s is not None
    planned_s = watch.planned_s[0][0]
    times = slow / 1e3 / planned_s
    assert event["text"] == watch.told[0]
    assert f"here/0 to here/1 takes {times:.2f} times its planned" in event["text"]
    assert "for a message of 64.00 KiB since step 1 (median of 20 steps)" in event["text"]
    assert watch.now() == {"slow_links": {"here/0 to here/1": pytest.approx(times)}}
    fast = rows([0.0] * 4, [(0.0, planned_s * each, True) for each in range(1, 5)])
    for step in range(31, 61):
        watch.events(step, fast, CLOCKS_OFF_S)
    assert "here/0 to here/1 is as fast as planned again: 1.00 times" in watch.told[1]
    assert watch.now() == {}


def test_a_link_that_is_nearly_as_late_as_is_looked_at_is_told_of_once():
    late = [PLANNED_S / 10 + 0.0035, PLANNED_S / 10 + 0.0025]
    found = spells([late[step // 25 % 2] for step in range(400)], PLANNED_S / 10)
    assert [spell.ended for spell in found] == [False]


def test_a_link_that_is_late_by_less_than_is_looked_at_is_not_called_as_fast_as_planned(costs: ProgramCosts):
    watch = watch_of(costs)
    assert watch.planned_s is not None
    planned_s = watch.planned_s[0][0]
    for late_s, first in ((0.1, 1), (0.001, 31)):
        late = rows([0.0] * 4, [(0.0, (planned_s + late_s) * each, True) for each in range(1, 5)])
        for step in range(first, first + 30):
            watch.events(step, late, CLOCKS_OFF_S)
    took, planned = format_seconds(planned_s + 0.001), format_seconds(planned_s)
    said = f"the link here/0 to here/1 is not slow any more: {took} a message, planned are {planned}"
    assert watch.told[1] == said
    assert watch.now() == {}


def test_only_the_rank_that_reports_judges(costs: ProgramCosts):
    watch = replace(watch_of(costs), planned_s=None)
    assert watch.events(1, [], 0.0) == []
    alone = LinkWatch.of(costs, 0, (0, 0, 0), lambda: simulate(costs))
    assert alone.mine(0.0) == []
    assert alone.events(1, [[], [], []], 0.0) == []


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="no network namespaces can be made here")
@pytest.mark.alone
def test_a_link_that_becomes_slow_is_named_and_so_is_its_end(tmp_path: Path):
    line = LINE.replace("sequence-length 16", "sequence-length 64")
    with hosts_with_folders(tmp_path) as runs:
        made_up = runs.give_profile(LAYER_S, sequence_length=64)
        for folder in runs.folders:  # 26 ms for a message: on a busy host none takes longer
            text = (folder / "cluster.toml").read_text()
            (folder / "cluster.toml").write_text(text.replace("100 Mbit/s", "20 Mbit/s"))
        runs.start(
            f"{line} {made_up} --rendezvous tcp://{runs.hosts[0].address}:29502 --steps 64 --no-save -q"
        )
        leader = RunFolder(runs.folders[0] / "runs" / "bert-tiny-001")
        runs.wait_for_step(leader, WINDOW + 1)
        runs.hosts[1].shape("5mbit", burst="16kb")
        runs.wait_until(lambda: bool(slow_steps(leader)))
        runs.hosts[1].shape("1gbit")
        ended, *_ = runs.ends(0, 0, 0)
    said = [text for text in read_report(leader.report).slow_devices if text.startswith("the link")]
    begun = [text for text in said if "mid/0" in text and " takes " in text]
    assert begun, said
    assert all(f"note: {text}\n" in ended.err for text in said)
    over = ("as fast as planned again", "is not slow any more")
    assert any(words in text for text in said for words in over)
    noted = slow_steps(leader)
    assert WINDOW + 1 < noted[0] < noted[-1]


def slow_steps(leader: RunFolder) -> list[int]:
    """Return the steps in which a link of the second host is named as slow."""
    return [
        entry["step"]
        for entry in leader.read_metrics()
        if any("mid/0" in name for name in entry.get("slow_links", ()))
    ]
