import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cost_model.cluster import Cluster, Link
from cost_model.profile import ModelProfile, profile_text
from hetpipe import cli
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.trace import Trace
from hetpipe.reporting.critical_path import PathSegment, Share, critical_path, shares
from hetpipe.reporting.idle_time import Cause, DeviceTime, device_times, waits_by_cause
from hetpipe.reporting.tables import as_text, path_sentence, waiting_table
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage
from partition.plan_file import plan_text
from random_problems import random_cluster, random_profile
from small_case import CLUSTER_TOML as CLUSTER
from small_case import equal_plan, equal_stages, small_cluster, small_plan, small_profile


def simulated(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Trace, ProgramCosts]:
    costs = ProgramCosts(lower(plan, profile), profile, cluster)
    return simulate(costs), costs


def told(path: tuple[PathSegment, ...]) -> list[tuple[str, float, float]]:
    return [(str(entry), entry.start_s, entry.end_s) for entry in path]


def slow_link() -> tuple[Trace, ProgramCosts]:
    """Two equal stages, F 1 s and B 2 s; a message occupies the link for 8 s and takes 0.5 s more.

    a: F0 0-1, F1 1-2; messages 1-9 and, queued, 9-17. b: F0 9.5-10.5, F1 17.5-18.5, B0 to 20.5, B1 to 22.5;
    gradients 20.5-28.5 and, queued, 28.5-36.5. a: B0 29-31, B1 37-39. NORM: 2 rounds of 16.5 s, to 72.
    """
    profile, cluster = equal_stages(2, link=Link(latency_s=0.5, bandwidth_bytes_per_s=1.0))
    layers = tuple(replace(layer, output_bytes_per_sample=8.0) for layer in profile.layers)
    return simulated(equal_plan((2, 2), 2), replace(profile, layers=layers), cluster)


def test_each_part_of_a_step_by_hand():
    # the times of tests/hetpipe/simulation/test_simulator.py, test_messages_sync_norm_and_step_by_hand
    path = critical_path(*simulated(small_plan(num_samples=1), small_profile(), small_cluster()))
    assert [what for what, _, _ in told(path)] == [
        "compute on a/0",
        "link a>b",
        "compute on b/0",
        "compute on b/0",
        "link b>a",
        "compute on a/0",
        "sync 0",
        "norm",
        "optimizer on a/0",
    ]
    ends = [end for _, _, end in told(path)]
    assert ends == pytest.approx([5, 5.5, 7.5, 11.5, 12, 21, 27.75, 29.05, 29.81])


def test_the_path_goes_through_the_message_that_was_queued_behind():
    assert told(critical_path(*slow_link())) == [
        ("compute on n/0", 0, 1),
        ("queue for link n/0>n/1", 1, 9),
        ("link n/0>n/1", 9, 17.5),
        ("compute on n/1", 17.5, 18.5),
        ("compute on n/1", 18.5, 20.5),
        ("queue for link n/1>n/0", 20.5, 28.5),
        ("link n/1>n/0", 28.5, 37),
        ("compute on n/0", 37, 39),
        ("norm", 39, 72),
    ]


def test_shares_add_up_the_longest_first():
    found = shares(critical_path(*slow_link()))
    assert found[0] == Share(Cause.NORM, "", 33.0, 33 / 72)
    assert Share(Cause.COMPUTE, "n/1", 3.0, 3 / 72) in found
    assert path_sentence(found).startswith("critical path: 46% norm, 12% link ")


def test_waiting_of_each_device_by_hand():
    # b waits 1 s for a's first forward, 8.5 s for its message, 7 s for the next, from 22.5 to 72 for NORM
    assert device_times(*slow_link()) == (
        DeviceTime(6, 66, {"compute on n/1": 18.5, "link n/1>n/0": 8.5 + 6, "norm": 33}),
        DeviceTime(6, 66, {"compute on n/0": 1, "link n/0>n/1": 8.5 + 7, "norm": 49.5}),
    )


def test_the_last_of_a_sync_holds_up_the_others():
    stage = (0, 4)
    ours = Pipeline(1, 2, (Stage(("a/0",), stage, 1),))
    others = Pipeline(1, 2, (Stage(("b/0",), stage, 1),))  # twice as slow
    path = critical_path(
        *simulated(Plan("manual", "made-up", 4, (ours, others)), small_profile(), small_cluster())
    )
    causes = [str(entry) for entry in path]
    assert causes[:4] == ["compute on b/0"] * 4
    assert causes[4].startswith("sync") and causes[-1] == "optimizer on b/0"


def test_nothing_to_wait_for_on_one_device():
    profile, cluster = equal_stages(1)
    trace, costs = simulated(equal_plan((1,), 2), profile, cluster)
    assert shares(critical_path(trace, costs)) == (Share(Cause.COMPUTE, "n/0", 6.0, 1.0),)
    assert device_times(trace, costs) == (DeviceTime(6.0, 0.0, {}),)


def test_a_step_without_time_has_no_path():
    profile, cluster = equal_stages(1, forward_s=0.0, backward_s=0.0)
    trace, costs = simulated(equal_plan((1,), 2), profile, cluster)
    assert shares(critical_path(trace, costs)) == ()


def random_case(seed: int) -> tuple[Trace, ProgramCosts]:
    """One to nine devices in several pipelines of any cuts, over links that they share."""
    rng = random.Random(seed)
    num_layers, num_devices = rng.randint(3, 7), rng.randint(2, 9)
    profile = random_profile(rng, num_layers, tied=rng.random() < 0.5)
    cluster = random_cluster(rng, num_devices, 100.0)
    names = rng.sample([device.name for device in cluster.devices], rng.randint(1, num_devices))
    pipelines = []
    while names:
        count = rng.randint(1, min(len(names), num_layers))
        cuts = [0, *sorted(rng.sample(range(1, num_layers), count - 1)), num_layers]
        flights = sorted((rng.randint(1, 6) for _ in range(count)), reverse=True)
        stages = tuple(
            Stage((names[index],), (cuts[index], cuts[index + 1]), flights[index]) for index in range(count)
        )
        pipelines.append(Pipeline(rng.randint(1, 3), rng.randint(1, 20), stages))
        names = names[count:]
    samples = sum(pipeline.num_samples for pipeline in pipelines)
    return simulated(Plan("manual", "random", samples, tuple(pipelines)), profile, cluster)


@pytest.mark.parametrize("seed", range(60))
def test_the_whole_step_is_explained(seed: int):
    trace, costs = random_case(seed)
    path = critical_path(trace, costs)
    assert path[0].start_s == 0 and path[-1].end_s == trace.makespan_s
    assert all(before.end_s == after.start_s for before, after in pairwise(path))
    assert sum(share.fraction for share in shares(path)) == pytest.approx(1)
    assert sum(entry.duration_s for entry in path if entry.cause is Cause.OTHER) == pytest.approx(0, abs=1e-9)
    for rank, entry in enumerate(device_times(trace, costs)):
        assert entry.busy_s == trace.busy_s(rank)
        assert entry.busy_s + entry.waiting_s == pytest.approx(trace.makespan_s)
        assert sum(entry.waiting_for.values()) == pytest.approx(entry.waiting_s, abs=1e-6)
        assert sum(waits_by_cause(trace, costs)[rank].values()) == pytest.approx(entry.waiting_s, abs=1e-6)


def test_the_table_names_the_longest_waits_first():
    trace, costs = slow_link()
    text = as_text(waiting_table(dict(zip(trace.device_names, device_times(trace, costs), strict=True))))
    assert "norm 33 s, compute on n/1 18.5 s, link n/1>n/0 14.5 s" in text


def test_simulate_tells_what_a_step_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "profile.json").write_text(profile_text(small_profile()))
    (tmp_path / "plan.json").write_text(plan_text(small_plan(num_samples=1)))
    files = [f"--{name.partition('.')[0]}={tmp_path / name}" for name in ("profile.json", "cluster.toml")]
    assert cli.main(["simulate", str(tmp_path / "plan.json"), *files]) == 0
    printed = capsys.readouterr().out
    assert "critical path: 47% compute on a/0" in printed  # 14 s of 29.81
    assert "of the speed of all devices " in printed
    assert cli.main(["simulate", str(tmp_path / "plan.json"), *files, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["critical_path"][0] == {
        "cause": "compute",
        "where": "a/0",
        "duration_s": 14.0,
        "fraction": pytest.approx(14 / 29.81),
    }
    slow = data["devices"]["b/0"]
    assert slow["busy_s"] + slow["waiting_s"] == pytest.approx(data["step_s"])
    assert sum(slow["waiting_for"].values()) == pytest.approx(slow["waiting_s"])
    assert {"memory_bytes", "busy"} <= slow.keys()
    assert sum(data["speed"].values()) == pytest.approx(1)
