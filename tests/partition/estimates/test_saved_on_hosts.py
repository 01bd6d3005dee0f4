"""Saved activations on hosts: bytes and seconds by hand, plans that need them, what is refused."""

import json
from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, HostMemory, Link, Node
from cost_model.errors import InfeasibleError, InputError
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program.costs import ProgramCosts, check_memory
from hetpipe.program.instructions import Compute, Pass
from hetpipe.reporting.explanation import explanation_sentences
from hetpipe.simulation.prediction import evaluator, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from partition.estimates.offloading import offloaded_plans
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import host_bytes, plan_memory
from partition.estimates.step_estimate import StepEstimate
from partition.explanation.explain import explain
from partition.plan import FROZEN_WEIGHTS, OPTIMIZER_STATES, SAVED_ACTIVATIONS, Pipeline, Plan, Stage
from partition.plan_file import plan_from_data
from partition.problem import Problem, check_plan
from partition.solver import solve

NUM_LAYERS = 8


def profile_of(num_layers: int = NUM_LAYERS) -> ModelProfile:
    """Layers of 10 trained bytes that save 1,000 a sample, 100 of them their input; F 1 s, B 2 s a sample."""
    layers = tuple(LayerProfile(f"layer {index}", 10.0, 100.0, 1000.0) for index in range(num_layers))
    times = (LayerTimes((1.0, 2.0), (2.0, 4.0)),) * num_layers
    return ModelProfile("saving", 8, "float32", layers, {"slow": KindProfile("measured", (1, 2), times)})


def cluster_of(memory_bytes: float, bandwidth: float, count: int = 1) -> Cluster:
    devices = tuple(Device(f"a/{index}", "a", "slow", memory_bytes) for index in range(count))
    return Cluster(
        "lab", Link(0.0, 1e9), (Node("a", devices, host_memory=HostMemory(1e9, Link(0.0, bandwidth))),)
    )


def plan_of(*cuts: tuple[int, int, int], samples: int = 4, offload: bool = True) -> Plan:
    """One pipeline, microbatches of one sample; stages as (first layer, layer after the last, in_flight)."""
    words = (SAVED_ACTIVATIONS,) if offload else ()
    stages = tuple(
        Stage((f"a/{index}",), (start, stop), flight, offload=words)
        for index, (start, stop, flight) in enumerate(cuts)
    )
    return Plan("manual", "saving", samples, (Pipeline(1, samples, stages),))


def test_a_device_has_the_saved_bytes_of_two_blocks():
    profile, plan = profile_of(), plan_of((0, 8, 3))
    before, after = (plan_memory(each, profile, "a/0") for each in (plan_of((0, 8, 3), offload=False), plan))
    assert before.saved_bytes == 3 * 8000
    # first and last layer keep theirs: 2,000 of each microbatch, of the one at work with two blocks of 1,000;
    # when the last layer works, with one block: 2,000 + 1,000
    assert after.saved_bytes == 2 * 2000 + 3000
    assert replace(after, saved_bytes=0.0) == replace(before, saved_bytes=0.0)
    assert host_bytes(plan, profile, cluster_of(1e9, 1.0)) == {"a": 3 * 6000.0}


def test_what_enters_a_stage_stays():
    profile = profile_of()
    plan = plan_of((0, 4, 2), (4, 8, 1))
    # layers 4 to 6 go, but for the 100 bytes of the input; layer 7 stays
    assert plan_memory(plan, profile, "a/1").saved_bytes == 100 + 2 * 1000
    assert host_bytes(plan, profile, cluster_of(1e9, 1.0, 2)) == {"a": 2 * 3000.0 + 2900.0}


@pytest.mark.parametrize(
    ("bandwidth", "forward_s", "backward_s"),
    [
        # moves of 1 s hide but for the last: layer 6 goes beside layer 7
        (1000.0, 8.0, 16.0),
        # moves of 2 s: from 2 s on, one after the other. Back, 6 comes beside 7, and so on
        (500.0, 14.0, 16.0),
        # moves of 3 s: forward as before; back they come one after the other, then 1 and 0 compute
        (1000 / 3, 20.0, 22.0),
    ],
)
def test_moves_hide_behind_other_layers(bandwidth, forward_s, backward_s):
    profile, cluster = profile_of(), cluster_of(1e6, bandwidth)
    costs = ProgramCosts(lower(plan_of((0, 8, 1)), profile, cluster), profile, cluster)
    assert costs.compute_s(0, Compute(Pass.FORWARD, 0, 0, 0)) == pytest.approx(forward_s)
    assert costs.compute_s(0, Compute(Pass.BACKWARD, 0, 0, 0)) == pytest.approx(backward_s)


def test_devices_of_a_node_share_the_link():
    profile = profile_of()
    one, two = cluster_of(1e6, 1000.0), cluster_of(1e6, 1000.0, count=2)
    alone = plan_of((0, 8, 1))
    other = Pipeline(1, 4, (Stage(("a/1",), (0, 8), 1, offload=(SAVED_ACTIVATIONS,)),))
    both = replace(alone, global_batch_size=8, pipelines=(*alone.pipelines, other))
    found = [
        ProgramCosts(lower(plan, profile, cluster), profile, cluster).compute_s(
            0, Compute(Pass.FORWARD, 0, 0, 0)
        )
        for plan, cluster in ((alone, one), (both, two))
    ]
    assert found == pytest.approx([8.0, 14.0])


def test_the_planner_keeps_activations_on_the_host_where_that_is_faster_than_recompute():
    profile = profile_of()
    ample, tight = cluster_of(1e6, 2000.0), cluster_of(4500.0, 2000.0)
    problem = Problem(profile, ample, 4, (1, 2))
    assert not solve(problem, evaluator(profile, ample)).offloads
    plan = solve(replace(problem, cluster=tight), evaluator(profile, tight))
    ((stage,),) = (pipeline.stages for pipeline in plan.pipelines)
    assert stage.offload == (SAVED_ACTIVATIONS,) and not stage.recompute
    check_memory(plan, profile, tight)
    assert plan.predicted is not None and plan.predicted.bound_s is not None
    assert plan.predicted.bound_s <= plan.predicted.step_s
    # 4 samples of 8 layers, F 1 s and B 2 s: no more than without, where recompute takes 128 s
    assert plan.predicted.step_s == pytest.approx(96.0, rel=0.02)
    nobody = replace(tight, nodes=tuple(replace(node, host_memory=None) for node in tight.nodes))
    again = solve(replace(problem, cluster=nobody), evaluator(profile, nobody))
    assert again.predicted is not None and again.predicted.step_s > 1.25 * plan.predicted.step_s


def test_plans_offload_nothing_of_a_stage_that_has_nothing_to_move():
    blocks = profile_of()
    profile = replace(
        blocks, layers=(*blocks.layers[:-1], replace(blocks.layers[-1], parameter_bytes=2000.0))
    )
    cluster = cluster_of(6000.0, 2000.0, 2)
    plan = plan_of((0, 7, 2), (7, 8, 1), offload=False)
    found = list(offloaded_plans(Problem(profile, cluster, 4, (1, 2)), lambda _: [plan]))
    for each in found:
        check_plan(each, profile, cluster)
    # states of the head alone are on the host where saved activations of the blocks are too
    offloads = [tuple(stage.offload for stage in each.pipelines[0].stages) for each in found]
    assert ((OPTIMIZER_STATES, SAVED_ACTIVATIONS), (OPTIMIZER_STATES,)) in offloads


def test_plans_of_compiled_blocks_have_states_alone_on_hosts():
    tight = cluster_of(4500.0, 2000.0)
    layers = tuple(replace(layer, unreached_bytes=4.0) for layer in profile_of().layers)
    whole = plan_of((0, 8, 1), offload=False)
    for profile in (profile_of(), replace(profile_of(), layers=layers)):
        compiled = replace(profile, compiled=True)
        plan = solve(Problem(compiled, tight, 4, (1, 2)), evaluator(compiled, tight))
        check_plan(plan, compiled, tight)
        # room for what is saved, weights and gradients, but not for all states
        small = cluster_of(plan_memory(whole, compiled, "a/0").total_bytes - 50.0, 2000.0)
        found = list(offloaded_plans(Problem(compiled, small, 4, (1,)), lambda _: [whole]))
        assert {stage.offload for each in found for stage in each.pipelines[0].stages} == {
            (OPTIMIZER_STATES,)
        }


def test_a_slow_link_is_worse_than_recompute():
    profile, slow = profile_of(), cluster_of(4500.0, 100.0)
    plan = solve(Problem(profile, slow, 4, (1, 2)), evaluator(profile, slow))
    assert not plan.offloads


def test_candidates_are_ranked_by_their_moves_too():
    profile = profile_of()
    steps = [
        StepEstimate(PipelineCosts(Problem(profile, cluster_of(1e6, bandwidth), 4, (1, 2)))).estimate_s(
            plan_of((0, 8, 1))
        )
        for bandwidth in (1e9, 500.0)
    ]
    assert steps[1] - steps[0] == pytest.approx(4 * (14.0 - 8.0))


def test_an_explanation_says_what_hosts_keep_and_what_moves_cost():
    profile, plan = profile_of(), plan_of((0, 8, 1))
    said = []
    for bandwidth in (1000.0, 500.0):
        problem = Problem(profile, cluster_of(1e6, bandwidth), 4, (1,))
        found = explain(plan, problem, evaluator(profile, problem.cluster))
        said.append("\n".join(explanation_sentences(found, plan, problem)))
    for text in said:
        assert "the host of a keeps 5.86 KiB of saved activations; it lends" in text
    assert "what moves hides behind computation" in said[0]
    assert "for what moves, passes of a device are 24 s of a step longer" in said[1]


def test_plans_are_written_and_read():
    plan = plan_of((0, 8, 2))
    data = json.loads(json.dumps(plan.to_json()))
    assert data["pipelines"][0]["stages"][0]["offload"] == ["saved activations"]
    assert plan_from_data(data, "plan.json").pipelines == plan.pipelines


def test_what_cannot_be_is_refused():
    profile, cluster = profile_of(), cluster_of(1e6, 100.0)
    with pytest.raises(InputError, match="nothing is saved then"):
        Stage(("a/0",), (0, 8), 1, recompute=True, offload=(SAVED_ACTIVATIONS,))
    with pytest.raises(InputError, match="none of them is a"):
        check_plan(plan_of((0, 1, 1), (1, 8, 1)), profile, cluster_of(1e6, 100.0, 2))
    with pytest.raises(InputError, match="blocks are compiled"):
        check_plan(plan_of((0, 8, 1)), replace(profile, compiled=True), cluster)
    layers = tuple(replace(layer, unreached_bytes=4.0) for layer in profile.layers)
    frozen = Stage(("a/0",), (0, 8), 1, offload=(FROZEN_WEIGHTS,))
    with pytest.raises(InputError, match='"frozen weights", and blocks are compiled'):
        check_plan(
            Plan("manual", "saving", 4, (Pipeline(1, 4, (frozen,)),)),
            replace(profile, layers=layers, compiled=True),
            cluster,
        )
    nobody = replace(cluster, nodes=tuple(replace(node, host_memory=None) for node in cluster.nodes))
    with pytest.raises(InputError, match="keeps saved activations of 'a/0'"):
        simulate_plan(plan_of((0, 8, 1)), profile, nobody)
    little = replace(
        cluster,
        nodes=tuple(replace(node, host_memory=HostMemory(10.0, Link(0.0, 1.0))) for node in cluster.nodes),
    )
    with pytest.raises(InfeasibleError, match="whose host_memory is 10"):
        check_memory(plan_of((0, 8, 1)), profile, little)


def test_weights_that_all_have_room_never_move():
    layers = tuple(
        LayerProfile(f"layer {index}", 100.0, 1.0, 4.0, unreached_bytes=60.0) for index in range(4)
    )
    profile = replace(profile_of(4), layers=layers)
    stage = Stage(("a/0",), (0, 4), 1, offload=(FROZEN_WEIGHTS,))
    plan, cluster = Plan("manual", "saving", 1, (Pipeline(1, 1, (stage,)),)), cluster_of(1e6, 1.0)
    costs = ProgramCosts(lower(plan, profile, cluster), profile, cluster)
    assert costs.compute_s(0, Compute(Pass.FORWARD, 0, 0, 0)) == 4.0
