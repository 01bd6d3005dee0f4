"""Optimizer steps on the CPU of hosts: bytes and seconds by hand, plans that gain, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.cluster import Cluster, HostMemory, Link, Node
from cost_model.cluster_file import cluster_from_data
from cost_model.errors import InputError
from cost_model.host_memory import lent_by, step_on_host_s
from cost_model.profile import ModelProfile, profile_from_data, profile_text
from hetpipe.program.costs import ProgramCosts, check_memory
from hetpipe.reporting.host_sentences import rate_sentences
from hetpipe.reporting.tables import plan_sentences
from hetpipe.runs.settings import Settings
from hetpipe.simulation.prediction import evaluator, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from partition.bounds.best_bound import offloaded_bound
from partition.estimates.offloading import offloaded_plans
from partition.estimates.plan_memory import host_bytes, plan_memory
from partition.plan import OPTIMIZER_STATES, OPTIMIZER_STEP, Plan
from partition.plan_file import plan_from_data
from partition.problem import Problem, check_plan
from partition.solver import solve
from runs import CPU_CLUSTER, chain_plan, made_up_profile, run
from small_case import small_cluster, small_plan, small_profile

BOTH = (OPTIMIZER_STATES, OPTIMIZER_STEP)


def lent(cluster: Cluster, bandwidth: float, rate: float | None) -> Cluster:
    host = HostMemory(1e9, Link(0.0, bandwidth), rate)
    return replace(cluster, nodes=tuple(replace(node, host_memory=host) for node in cluster.nodes))


def on_host(plan: Plan, *words: str) -> Plan:
    """The plan whose first stage keeps something on its host."""
    first = plan.pipelines[0]
    stages = (replace(first.stages[0], offload=words or BOTH), *first.stages[1:])
    return replace(plan, pipelines=(replace(first, stages=stages), *plan.pipelines[1:]))


def test_moves_of_the_first_and_the_last_part_are_seen():
    link = Link(0.0, 1.0)
    assert step_on_host_s(0.0, 32.0, 32.0, 16.0, link, num_sharing=1) == 1 + 32 + 1
    # a CPU that is faster than the link: 16 moves down, then the last part's step and its move up
    assert step_on_host_s(0.0, 8.0, 32.0, 16.0, link, num_sharing=1) == 16 + 0.5 + 1
    # two devices share link and CPU
    assert step_on_host_s(0.0, 32.0, 32.0, 16.0, link, num_sharing=2) == 2 + 64 + 2
    assert step_on_host_s(100.0, 32.0, 32.0, 16.0, link, num_sharing=1) == 100.0


def test_a_device_has_nothing_of_the_states_and_the_host_the_weights_too():
    plan, profile, cluster = small_plan(), small_profile(), lent(small_cluster(), 100.0, 10.0)
    name = plan.pipelines[0].stages[0].device
    before, after = (plan_memory(each, profile, name) for each in (plan, on_host(plan)))
    assert after.optimizer_bytes == 0.0
    assert replace(after, optimizer_bytes=0) == replace(before, optimizer_bytes=0)
    ratio = profile.optimizer_bytes_per_parameter_byte
    parameters = before.optimizer_bytes / ratio
    kept = before.optimizer_bytes + parameters * (1 + 3 / 16)
    assert host_bytes(on_host(plan), profile, cluster) == {cluster.device(name).node: pytest.approx(kept)}


def test_the_step_is_that_of_the_host():
    plan, profile, cluster = small_plan(), small_profile(), lent(small_cluster(), 100.0, 10.0)
    costs = ProgramCosts(lower(on_host(plan), profile, cluster), profile, cluster)
    states = plan_memory(plan, profile, plan.pipelines[0].stages[0].device).optimizer_bytes
    parameters = states / profile.optimizer_bytes_per_parameter_byte
    expected = step_on_host_s(0.0, parameters / 10.0, states, parameters, Link(0.0, 100.0), num_sharing=1)
    assert costs.step_s(0) == pytest.approx(expected)


def test_the_planner_lets_the_host_step_where_that_is_faster_and_nowhere_else():
    profile = small_profile()
    tight = replace(
        small_cluster(),
        nodes=tuple(
            replace(node, devices=tuple(replace(device, memory_bytes=1600.0) for device in node.devices))
            for node in small_cluster().nodes
        ),
    )
    for rate, steps in ((1e9, True), (1e-3, False)):
        cluster = lent(tight, 10.0, rate)
        problem = Problem(profile, cluster, 4, (1, 2))
        plan = solve(problem, evaluator(profile, cluster))
        words = {word for pipeline in plan.pipelines for stage in pipeline.stages for word in stage.offload}
        assert (OPTIMIZER_STEP in words) is steps
        check_memory(plan, profile, cluster)
        assert plan.predicted is not None
        assert offloaded_bound(problem, sharded=plan.zero > 0).fractional_s <= plan.predicted.step_s


def test_a_host_steps_also_beside_one_that_does_not():
    plan, profile, cluster = small_plan(), small_profile(), lent(small_cluster(), 100.0, 10.0)
    first, *others = cluster.nodes
    assert first.host_memory is not None and others
    still = replace(first, host_memory=replace(first.host_memory, step_bytes_per_s=None))

    def tight(node: Node) -> Node:
        """The node with room for all but the states of its devices, and a part of these."""
        needs = [(device, plan_memory(plan, profile, device.name)) for device in node.devices]
        devices = (
            replace(device, memory_bytes=need.total_bytes - 0.5 * need.optimizer_bytes)
            for device, need in needs
        )
        return replace(node, devices=tuple(devices))

    mixed = replace(cluster, nodes=tuple(map(tight, (still, *others))))
    words = [
        {stage.device: stage.offload for pipeline in each.pipelines for stage in pipeline.stages}
        for each in offloaded_plans(Problem(profile, mixed, 4, (1, 2)), lambda _: [plan])
    ]
    names = {device.name for device in still.devices}
    assert {name: (OPTIMIZER_STATES,) if name in names else BOTH for name in plan.device_names} in words
    nobody = lent(mixed, 100.0, None)
    found = list(offloaded_plans(Problem(profile, nobody, 4, (1, 2)), lambda _: [plan]))
    assert found and len(found) == len({each.pipelines for each in found})


def test_plans_and_clusters_are_written_and_read():
    plan = on_host(small_plan())
    data = json.loads(json.dumps(plan.to_json()))
    assert plan_from_data(data, "plan.json").pipelines == plan.pipelines
    link = {"bandwidth": "12 GB/s", "latency": "10 us"}
    node = {"name": "a", "devices": [{"kind": "fast", "memory": "10 kB"}], "host_optimizer": "2 GB/s"}
    whole = {**node, "host_memory": "64 GB", "host_link": link}
    cluster = cluster_from_data({"driver_memory": "0 B", "network": link, "nodes": [whole]}, "c.toml")
    assert cluster.nodes[0].host_memory == HostMemory(64e9, Link(1e-5, 12e9), 2e9)
    assert cluster.to_json()["nodes"][0]["host_memory"]["step_bytes_per_s"] == 2e9
    with pytest.raises(InputError, match="has host_optimizer and no host_memory"):
        cluster_from_data({"driver_memory": "0 B", "network": link, "nodes": [node]}, "c.toml")


def test_what_cannot_be_is_refused():
    plan, profile, cluster = small_plan(), small_profile(), lent(small_cluster(), 100.0, 10.0)
    check_plan(on_host(plan), profile, cluster)
    with pytest.raises(InputError, match='names one of "optimizer states" and'):
        check_plan(on_host(plan, OPTIMIZER_STEP), profile, cluster)
    with pytest.raises(InputError, match="has no host_optimizer"):
        simulate_plan(on_host(plan), profile, lent(small_cluster(), 100.0, None))


def with_rates(profile: ModelProfile, **rates: float | None) -> ModelProfile:
    """The profile of kinds on whose hosts so many bytes of parameters a second were stepped."""
    kinds = {
        kind: replace(times, host_step_bytes_per_s=rates.get(kind)) for kind, times in profile.kinds.items()
    }
    return replace(profile, kinds=kinds)


def test_a_rate_that_the_file_does_not_state_is_the_least_that_was_measured():
    node = lent(small_cluster(), 100.0, None).nodes[0]
    both = replace(node, devices=(*node.devices, replace(node.devices[0], name="a/1", kind="slow")))
    profile = with_rates(small_profile(), fast=10.0, slow=7.0)
    for each, rate in ((node, 10.0), (both, 7.0)):
        host = lent_by(each, profile)
        assert host is not None and host == replace(node.host_memory, step_bytes_per_s=rate)
    stated = lent(small_cluster(), 100.0, 3.0).nodes[0]
    assert lent_by(stated, profile) == stated.host_memory
    assert lent_by(node, small_profile()) == node.host_memory
    assert lent_by(replace(node, host_memory=None), profile) is None


def test_a_measured_rate_is_planned_priced_and_bounded_with_as_a_stated_one():
    stated, silent = (lent(small_cluster(), 100.0, rate) for rate in (10.0, None))
    profile = with_rates(small_profile(), fast=10.0, slow=10.0)
    expected = simulate_plan(on_host(small_plan()), small_profile(), stated).makespan_s
    assert simulate_plan(on_host(small_plan()), profile, silent).makespan_s == expected
    assert simulate_plan(on_host(small_plan()), with_rates(profile, fast=5.0), silent).makespan_s > expected
    tight = [
        replace(
            cluster,
            nodes=tuple(
                replace(node, devices=tuple(replace(device, memory_bytes=1600.0) for device in node.devices))
                for node in cluster.nodes
            ),
        )
        for cluster in (lent(small_cluster(), 10.0, 1e9), lent(small_cluster(), 10.0, None))
    ]
    fast_host = with_rates(profile, fast=1e9, slow=1e9)
    problems = (Problem(small_profile(), tight[0], 4, (1, 2)), Problem(fast_host, tight[1], 4, (1, 2)))
    first, second = (solve(each, evaluator(each.profile, each.cluster)) for each in problems)
    assert first.pipelines == second.pipelines
    assert any(OPTIMIZER_STEP in stage.offload for each in second.pipelines for stage in each.stages)
    bounds = [offloaded_bound(each, sharded=False).fractional_s for each in problems]
    assert bounds[0] == bounds[1]


def test_the_plan_says_whether_a_rate_was_stated_or_measured():
    plan = on_host(small_plan())
    stated, silent = (lent(small_cluster(), 100.0, rate) for rate in (2e9, None))
    measured = with_rates(small_profile(), fast=3e9)
    told = "the CPU of a steps {} GB of parameters a second for its devices, {}"
    assert told.format("2", "as the cluster file states") in plan_sentences(plan, small_profile(), stated)
    assert told.format("2", "as the cluster file states") in plan_sentences(plan, measured, stated)
    assert told.format("3", "measured with the profile") in plan_sentences(plan, measured, silent)
    assert not any("the CPU of" in line for line in plan_sentences(small_plan(), measured, stated))
    assert rate_sentences(measured) == ["the CPU of the host of fast steps 3 GB of parameters a second"]


def test_a_rate_is_written_with_the_kind_and_read():
    profile = with_rates(small_profile(), fast=3e9)
    data = json.loads(profile_text(profile))
    assert data["kinds"]["fast"]["host_step_bytes_per_s"] == 3e9
    assert "host_step_bytes_per_s" not in data["kinds"]["slow"]
    assert profile_from_data(data, "profile.json") == profile
    data["kinds"]["fast"]["host_step_bytes_per_s"] = 0.0
    with pytest.raises(InputError, match=r"host_step_bytes_per_s is 0\.0; give more than zero"):
        profile_from_data(data, "profile.json")


@pytest.mark.slow
def test_a_run_whose_host_steps_has_the_same_bits(tmp_path: Path) -> None:
    toml = CPU_CLUSTER.replace('kind = "cpu", count = 4', 'kind = "emulated", count = 2, speed = 0.3')
    toml += 'host_memory = "1 GiB"\nhost_link = { bandwidth = "1 GB/s", latency = "10 us" }\n'
    toml += 'host_optimizer = "1 GB/s"\n'
    profile = made_up_profile("bert-tiny", kind="emulated", layer_s=1e-4)
    settings = Settings("bert-tiny", 3, learning_rate=1e-3, save=True)
    plan = chain_plan("bert-tiny", [0, 3, 8], 4)
    before, expected = run(tmp_path / "plain", plan, settings, profile, toml)
    report, losses = run(tmp_path / "host", on_host(plan), settings, profile, toml)
    assert losses == expected
    device, other = report.devices["here/0"], before.devices["here/0"]
    assert device.peak_bytes and other.peak_bytes
    saved = other.peak_bytes - device.peak_bytes
    assert saved == pytest.approx(other.predicted_bytes - device.predicted_bytes, rel=0.02)
