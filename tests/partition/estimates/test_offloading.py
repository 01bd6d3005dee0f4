"""Optimizer states in the memory of hosts: bytes, seconds, plans that nothing else lets fit, real runs."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cost_model.cluster import Cluster, Device, HostMemory, Link, Node
from cost_model.errors import InfeasibleError, InputError
from cost_model.host_memory import offloaded_step_s
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program.costs import ProgramCosts, check_memory
from hetpipe.program.instructions import Compute, Pass
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.simulation.prediction import evaluator, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training import checkpoint
from partition.bounds.best_bound import offloaded_bound
from partition.estimates.offloading import with_offload
from partition.estimates.plan_memory import host_bytes, plan_memory
from partition.plan import FROZEN_WEIGHTS, OPTIMIZER_STATES, Pipeline, Plan, Stage
from partition.plan_file import plan_from_data
from partition.problem import Problem, check_plan
from partition.solver import solve
from runs import CPU_CLUSTER, chain_plan, made_up_profile, run
from small_case import small_cluster, small_profile
from small_case import small_plan as plan_of_two


def lent(cluster: Cluster, num_bytes: float, bandwidth: float = 100.0) -> Cluster:
    """The same cluster, each of whose hosts lends memory."""
    host = HostMemory(num_bytes, Link(0.0, bandwidth))
    return replace(cluster, nodes=tuple(replace(node, host_memory=host) for node in cluster.nodes))


def with_memory(cluster: Cluster, num_bytes: float) -> Cluster:
    nodes = tuple(
        replace(node, devices=tuple(replace(device, memory_bytes=num_bytes) for device in node.devices))
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def offloaded(plan: Plan, *stages: int) -> Plan:
    """The plan with the states of some stages of its first pipeline on their hosts."""
    first = plan.pipelines[0]
    changed = tuple(
        replace(stage, offload=(OPTIMIZER_STATES,)) if index in stages else stage
        for index, stage in enumerate(first.stages)
    )
    return replace(plan, pipelines=(replace(first, stages=changed), *plan.pipelines[1:]))


def small_plan() -> tuple[Plan, ModelProfile, Cluster]:
    profile, cluster = small_profile(), lent(small_cluster(), 1e9)
    return plan_of_two(), profile, cluster


def test_a_device_keeps_three_sixteenths_of_what_is_on_its_host():
    plan, profile, cluster = small_plan()
    name = plan.pipelines[0].stages[0].device
    before, after = (plan_memory(each, profile, name) for each in (plan, offloaded(plan, 0)))
    assert after.optimizer_bytes == pytest.approx(before.optimizer_bytes * 3 / 16)
    assert replace(after, optimizer_bytes=0) == replace(before, optimizer_bytes=0)
    node = cluster.device(name).node
    assert host_bytes(offloaded(plan, 0), profile, cluster) == {node: before.optimizer_bytes}
    assert host_bytes(plan, profile, cluster) == {}


def test_the_step_takes_the_moves_too():
    plan, profile, cluster = small_plan()
    costs = ProgramCosts(lower(offloaded(plan, 0), profile, cluster), profile, cluster)
    alone = ProgramCosts(lower(plan, profile, cluster), profile, cluster)
    states = plan_memory(plan, profile, plan.pipelines[0].stages[0].device).optimizer_bytes
    expected = offloaded_step_s(0.0, alone.step_s(0), states, Link(0.0, 100.0), 1)
    assert costs.step_s(0) == pytest.approx(expected)
    assert costs.step_s(1) == alone.step_s(1)


def test_a_host_that_lends_nothing_or_too_little_is_refused():
    plan, profile, cluster = small_plan()
    nobody = replace(cluster, nodes=tuple(replace(node, host_memory=None) for node in cluster.nodes))
    with pytest.raises(InputError, match="has no host_memory"):
        simulate_plan(offloaded(plan, 0), profile, nobody)
    with pytest.raises(InfeasibleError, match="whose host_memory is 10"):
        check_memory(offloaded(plan, 0), profile, lent(cluster, 10.0))


def test_plans_with_offload_are_written_and_read():
    plan, _, _ = small_plan()
    data = json.loads(json.dumps(offloaded(plan, 1).to_json()))
    stages = data["pipelines"][0]["stages"]
    assert [stage.get("offload") for stage in stages] == [None, ["optimizer states"]]
    assert plan_from_data(data, "plan.json").pipelines == offloaded(plan, 1).pipelines
    with pytest.raises(InputError, match="offload names 'weights'; known: optimizer states, frozen weights"):
        Stage(("a/0",), (0, 1), 1, offload=("weights",))


def test_the_planner_offloads_where_nothing_else_fits_and_nowhere_else():
    profile = small_profile()
    ample = lent(small_cluster(), 1e9)
    problem = Problem(profile, ample, 4, (1, 2))
    assert not solve(problem, evaluator(profile, ample)).offloads

    # the first two layers, the smaller half, need 2,365 bytes with their states
    tight = with_memory(ample, 1600.0)
    plan = solve(replace(problem, cluster=tight), evaluator(profile, tight))
    assert plan.offloads
    check_memory(plan, profile, tight)
    assert plan.predicted is not None
    bound = offloaded_bound(replace(problem, cluster=tight), sharded=plan.zero > 0)
    assert plan.predicted.bound_s == pytest.approx(bound.fractional_s)
    assert plan.predicted.step_s >= bound.fractional_s

    nobody = with_memory(small_cluster(), 1600.0)
    with pytest.raises(InfeasibleError):
        solve(replace(problem, cluster=nobody), evaluator(profile, nobody))


def test_states_of_an_optimizer_that_has_them_on_the_device_alone_are_not_planned_for_hosts():
    profile, tight = small_profile(), lent(with_memory(small_cluster(), 1600.0), 1e9)
    resident = replace(profile, resident_states=True)
    with pytest.raises(InfeasibleError, match="add a device or memory"):
        solve(Problem(resident, tight, 4, (1, 2)), evaluator(resident, tight))
    plan = offloaded(plan_of_two(), 0)
    check_plan(plan, profile, tight)
    with pytest.raises(InputError, match="take hetpipe's own AdamW, or take it out of the plan"):
        check_plan(plan, resident, tight)


def frozen_profile(num_layers: int = 12) -> ModelProfile:
    """Layers of 1,000 bytes, 960 of them frozen, and F 1 s, B 2 s a microbatch of 1; twice that of 2."""
    layers = tuple(
        LayerProfile(f"layer {index}", 1000.0, 1.0, 4.0, unreached_bytes=960.0) for index in range(num_layers)
    )
    times = (LayerTimes((1.0, 2.0), (2.0, 4.0)),) * num_layers
    kinds = {"slow": KindProfile("measured", (1, 2), times)}
    return ModelProfile("frozen", 8, "float32", layers, kinds)


def one_device(memory_bytes: float, bandwidth: float, count: int = 1) -> Cluster:
    devices = tuple(Device(f"a/{index}", "a", "slow", memory_bytes) for index in range(count))
    host = HostMemory(1e9, Link(0.0, bandwidth))
    return Cluster("lab", Link(0.0, 1e3), (Node("a", devices, host_memory=host),))


def frozen_plan(cuts: list[int], **stage: object) -> Plan:
    stages = tuple(
        Stage((f"a/{index}",), cut, 1, offload=(FROZEN_WEIGHTS,), **stage)
        for index, cut in enumerate(pairwise(cuts))
    )
    return Plan("manual", "frozen", 2, (Pipeline(1, 2, stages),))


def test_two_layers_of_frozen_weights_are_on_the_device_at_once():
    profile, cluster = frozen_profile(), one_device(1e6, 960.0)
    plan = frozen_plan([0, 12])
    bare = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(Stage(("a/0",), (0, 12), 1),)),))
    before, after = (plan_memory(each, profile, "a/0") for each in (bare, plan))
    # the first and the last layer keep theirs; of ten layers two are there
    assert before.parameter_bytes - after.parameter_bytes == 8 * 960
    assert replace(after, parameter_bytes=0) == replace(before, parameter_bytes=0)
    assert host_bytes(plan, profile, cluster) == {"a": 9600.0}


@pytest.mark.parametrize(
    ("bandwidth", "forward_s", "backward_s"),
    [
        # moves of 1 s: that of layer 1 beside layer 0, and so on: nothing waits
        (960.0, 12.0, 24.0),
        # moves of 2 s: layer 1 waits a second, each after it too; a backward of 2 s hides them
        (480.0, 22.0, 24.0),
    ],
)
def test_weights_come_while_the_layer_before_computes(bandwidth, forward_s, backward_s):
    profile, cluster = frozen_profile(), one_device(1e6, bandwidth)
    costs = ProgramCosts(lower(frozen_plan([0, 12]), profile, cluster), profile, cluster)
    assert costs.compute_s(0, Compute(Pass.FORWARD, 0, 0, 0)) == pytest.approx(forward_s)
    back = Compute(Pass.BACKWARD, 0, 0, 0)
    assert costs.compute_s(0, back) == pytest.approx(backward_s)
    assert costs.after_layer_s(0, back, 12) == pytest.approx(backward_s)
    assert costs.after_layer_s(0, back, 0) == 0.0
    assert costs.after_layer_s(0, back, 3) == pytest.approx(6.0)


def test_devices_of_a_node_share_the_link_for_weights():
    profile, cluster = frozen_profile(), one_device(1e6, 960.0, count=2)
    costs = ProgramCosts(lower(frozen_plan([0, 6, 12]), profile, cluster), profile, cluster)
    # moves of 2 s: layer 0, then five that wait a second each; layer 6 has nothing to hide behind
    assert costs.compute_s(0, Compute(Pass.FORWARD, 0, 0, 0)) == pytest.approx(1 + 5 * 2)
    assert costs.compute_s(1, Compute(Pass.FORWARD, 0, 1, 0)) == pytest.approx(2 + 5 * 2)


def test_a_recomputed_layer_comes_once_for_forward_and_backward_of_its_segment():
    profile, cluster = frozen_profile(), one_device(1e6, 96.0)  # moves of 10 s
    plan = frozen_plan([0, 12], recompute=True, segment_layers=1)
    costs = ProgramCosts(lower(plan, profile, cluster), profile, cluster)
    # F of layer 11, then of ten layers a move of 10 s and F, beside whose B the next comes; B of 1, layer 0
    assert costs.compute_s(0, Compute(Pass.BACKWARD, 0, 0, 0)) == pytest.approx(1 + 10 * 11 + 2 + 3)


def test_a_stage_whose_layers_another_one_keeps_on_the_host_waits_for_them_too():
    profile, cluster = frozen_profile(), one_device(1e6, 480.0)
    (kept,) = frozen_plan([0, 12]).pipelines
    bare = replace(kept, stages=(replace(kept.stages[0], offload=()),))
    plan = Plan("manual", "frozen", 4, (kept, bare))
    costs = ProgramCosts(lower(plan, profile, cluster), profile, cluster)
    for op, seconds in ((Pass.FORWARD, 22.0), (Pass.BACKWARD, 24.0)):
        assert [costs.compute_s(0, Compute(op, pipeline, 0, 0)) for pipeline in (0, 1)] == [seconds] * 2


def test_the_planner_keeps_frozen_weights_on_the_host_where_nothing_else_fits():
    profile = replace(frozen_profile(), resident_states=True)  # weights move whatever the optimizer is
    ample, tight = one_device(1e6, 960.0), one_device(6500.0, 960.0)
    problem = Problem(profile, ample, 4, (1, 2))
    assert not solve(problem, evaluator(profile, ample)).offloads
    plan = solve(replace(problem, cluster=tight), evaluator(profile, tight))
    assert {stage.offload for stage in plan.pipelines[0].stages} == {(FROZEN_WEIGHTS,)}
    check_memory(plan, profile, tight)
    assert plan.predicted is not None and plan.predicted.bound_s is not None
    assert plan.predicted.bound_s <= plan.predicted.step_s
    nobody = replace(tight, nodes=tuple(replace(node, host_memory=None) for node in tight.nodes))
    with pytest.raises(InfeasibleError):
        solve(replace(problem, cluster=nobody), evaluator(profile, nobody))
    with pytest.raises(InputError, match="keeps frozen weights of 'a/0'"):
        simulate_plan(plan, profile, nobody)


def test_weights_of_what_is_trained_are_refused_to_move():
    profile = frozen_profile(4)
    trained = replace(profile, layers=tuple(replace(layer, unreached_bytes=0.0) for layer in profile.layers))
    cluster = one_device(1e9, 100.0)
    check_plan(frozen_plan([0, 4]), profile, cluster)
    with pytest.raises(InputError, match="no block of those stages has any that can move"):
        check_plan(frozen_plan([0, 4]), trained, cluster)


def test_states_are_on_hosts_or_sharded_by_layer_not_both():
    plan, _, _ = small_plan()
    with pytest.raises(InputError, match="zero is 2, and a stage has offload"):
        replace(offloaded(plan, 0), zero=2)
    assert replace(offloaded(plan, 0), zero=1).offloads


def test_devices_with_room_keep_their_states():
    plan, profile, cluster = small_plan()
    assert with_offload(plan, profile, cluster) is plan


@pytest.mark.slow
def test_a_run_with_states_on_the_host_has_the_same_bits(tmp_path: Path) -> None:
    toml = CPU_CLUSTER.replace('kind = "cpu", count = 4', 'kind = "emulated", count = 2, speed = 0.3')
    toml += 'host_memory = "1 GiB"\nhost_link = { bandwidth = "1 GB/s", latency = "10 us" }\n'
    profile = made_up_profile("bert-tiny", kind="emulated", layer_s=1e-4)
    settings = Settings("bert-tiny", 4, learning_rate=1e-3, save=True)
    plan = chain_plan("bert-tiny", [0, 3, 8], 4)
    before, expected = run(tmp_path / "plain", plan, settings, profile, toml)
    report, losses = run(tmp_path / "host", offloaded(plan, 0, 1), settings, profile, toml)
    assert losses == expected
    for name, device in report.devices.items():
        other = before.devices[name]
        assert device.peak_bytes and other.peak_bytes
        saved = other.peak_bytes - device.peak_bytes
        assert saved == pytest.approx(other.predicted_bytes - device.predicted_bytes, rel=0.02)
    one, other = (
        checkpoint.latest(RunFolder(tmp_path / each / "run").checkpoints) for each in ("plain", "host")
    )
    assert one is not None and other is not None
    files = [
        {layer: checkpoint.read_layer(found, checkpoint.read_manifest(found), layer) for layer in range(8)}
        for found in (one, other)
    ]
    for layer, tensors in files[0].items():
        assert tensors.keys() == files[1][layer].keys()
        assert all(tensor.equal(files[1][layer][name]) for name, tensor in tensors.items())
