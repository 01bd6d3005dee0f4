"""Plans in which pipelines share devices, as the planner finds them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.cluster import Link
from cost_model.errors import InfeasibleError
from hetpipe.program.verification import observed_in_flight, verify_messages, verify_order
from hetpipe.simulation.prediction import predict, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from partition.bounds.best_bound import fractional_bound_s
from partition.estimates.device_classes import equal_devices
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import plan_memory
from partition.estimates.shared_pipelines import SharedPipeline, SharedPipelineCosts
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimedStage
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Forced, Problem
from partition.shared_devices.shifted_cuts import memory_binds, shared_plans, sharing_may_win
from random_problems import random_problem, with_ample_memory
from shared_plans import layers_of


def holding(num_layers: int, num_devices: int, *seconds: float, batch: int = 64) -> Problem:
    """Layers of so many seconds on equal devices, each with memory for the states of num_layers layers."""
    profile, cluster = layers_of(*seconds, link=Link(0.0, 1e30))
    layers = tuple(replace(layer, parameter_bytes=1.0) for layer in profile.layers)
    states = num_layers * (2 + profile.optimizer_bytes_per_parameter_byte)
    (node,) = cluster.nodes
    devices = tuple(replace(device, memory_bytes=states) for device in node.devices[:num_devices])
    cluster = replace(cluster, nodes=(replace(node, devices=devices),))
    return Problem(replace(profile, layers=layers), cluster, batch, (1,))


def planned(problem: Problem, best: Plan | None = None, limit: int = 12) -> list[Plan]:
    tables = ProblemTables(problem, equal_devices(problem.cluster))
    return shared_plans(tables, PipelineCosts(problem), best, limit=limit)


def least_s(problem: Problem, plans: list[Plan]) -> float:
    return min(simulate_plan(plan, problem.profile, problem.cluster).makespan_s for plan in plans)


def one_pipeline(problem: Problem, *stages: tuple[int, int, int, int]) -> Plan:
    """All samples, in microbatches of 1, through stages (device, start, stop, in_flight)."""
    entries = tuple(Stage((f"n/{device}",), (start, stop), flight) for device, start, stop, flight in stages)
    batch = problem.global_batch_size
    return Plan("auto", problem.profile.model, batch, (Pipeline(1, batch, entries),))


def test_one_device_feeds_two_where_each_holds_one_layer():
    # Layers of 1 and 2 s. A device for each: 1/3 + 64 * 2 + 2/3 = 129 s. The second layer on two devices:
    # the first computes 64 * 1 s and waits 1 2/3 s for its first gradient.
    problem = holding(1, 3, 1, 2)
    unshared = one_pipeline(problem, (0, 0, 1, 2), (1, 1, 2, 1))
    assert least_s(problem, [unshared]) == pytest.approx(129)
    for best in (None, unshared):
        assert least_s(problem, planned(problem, best)) == pytest.approx(65 + 2 / 3)


def test_two_devices_feed_three():
    # Layers of 2 and 3 s, five devices that hold one each: 1 s a sample, but for fill and drain. Two
    # pipelines of their own take 1.5 s.
    problem = holding(1, 5, 2, 3, batch=48)
    (node,) = problem.cluster.nodes
    more = (*node.devices, replace(node.devices[0], name="n/4"))
    problem = replace(problem, cluster=replace(problem.cluster, nodes=(replace(node, devices=more),)))
    plans = planned(problem)
    assert 48 < least_s(problem, plans) < 54
    held = [sum(layer in plans[0].layers_of(name) for name in plans[0].device_names) for layer in (0, 1)]
    assert held == [2, 3] and len(plans[0].pipelines) == 4


def test_two_cuts_balance_what_one_cut_cannot():
    # Three layers of 1 s on two devices that hold two each. One cut leaves 2 s a sample on one of them, 1|2
    # and 2|1 in turn 1.5 s on each.
    def period(batch: int) -> float:
        problem = holding(2, 2, 1, 1, 1, batch=batch)
        unshared = one_pipeline(problem, (0, 0, 1, 2), (1, 1, 3, 1))
        return least_s(problem, planned(problem, unshared))

    assert (period(96) - period(64)) / 32 == pytest.approx(1.5)
    problem = holding(2, 2, 1, 1, 1)
    unshared = one_pipeline(problem, (0, 0, 1, 2), (1, 1, 3, 1))
    assert least_s(problem, [unshared]) > 128
    cuts = {pipeline.stages[0].stop for pipeline in planned(problem, unshared)[0].pipelines}
    assert cuts == {1, 2}


def test_no_second_cut_where_memory_holds_one_layer_more_on_neither():
    problem = holding(2, 2, 1, 1, 1)
    tight = replace(problem, cluster=holding(1, 2, 1, 1, 1).cluster)
    assert planned(problem) and planned(tight) == []


def test_samples_move_to_the_pipeline_that_got_faster():
    # Two pairs, three layers of 1 s on each; on the second pair memory takes one cut only.
    problem = holding(2, 4, 1, 1, 1, batch=60)
    pairs = [
        Pipeline(1, 30, (Stage((f"n/{first}",), (0, 1), 2), Stage((f"n/{first + 1}",), (1, 3), 1)))
        for first in (0, 2)
    ]
    (node,) = problem.cluster.nodes
    small = replace(node.devices[2], memory_bytes=node.devices[2].memory_bytes / 2)
    devices = (*node.devices[:2], small, node.devices[3])
    problem = replace(problem, cluster=replace(problem.cluster, nodes=(replace(node, devices=devices),)))
    best = Plan("auto", problem.profile.model, 60, tuple(pairs))
    shifted = [
        plan
        for plan in planned(problem, best)
        if [s.device for s in plan.pipelines[-1].stages] == ["n/2", "n/3"]
    ]
    # rates 1 / 1.5 and 1 / 2 a second: 34 and 26 samples
    assert [entry.num_samples for entry in shifted[0].pipelines] == [17, 17, 26]


def test_what_the_user_has_decided_stays():
    problem = holding(1, 3, 1, 2)
    assert planned(replace(problem, forced=Forced(num_pipelines=2)))
    assert planned(replace(problem, forced=Forced(max_devices=2))) == []


def test_in_flight_that_memory_does_not_take_is_not_planned():
    problem = holding(1, 3, 1, 2)
    big = replace(problem.profile.layers[0], saved_bytes_per_sample=1.0)
    layers = (big, *problem.profile.layers[1:])
    tight = replace(problem, profile=replace(problem.profile, layers=layers))
    (node,) = tight.cluster.nodes
    devices = tuple(replace(device, memory_bytes=device.memory_bytes + 3) for device in node.devices)
    tight = replace(tight, cluster=replace(tight.cluster, nodes=(replace(node, devices=devices),)))
    draft = tuple(
        SharedPipeline(
            (TimedStage(devices[0], 0, 1), TimedStage(devices[second], 1, 2)),
            microbatch_size=1,
            num_samples=32,
        )
        for second in (1, 2)
    )
    plans = SharedPipelineCosts(PipelineCosts(tight)).plans(draft)
    assert [[pipeline.in_flight(0) for pipeline in plan.pipelines] for _, plan in plans] == [[2, 1]]


def test_whether_memory_binds():
    problem = holding(1, 3, 1, 2)
    assert memory_binds(problem, PipelineCosts(problem))
    ample = with_ample_memory(problem)
    assert not memory_binds(ample, PipelineCosts(ample))


def test_on_many_devices_sharing_is_tried_where_layers_are_coarse():
    def tight(num_devices: int, num_layers: int) -> tuple[Problem, Plan]:
        problem = holding(1, num_devices, *([1.0] * num_layers))
        (node,) = problem.cluster.nodes
        each = node.devices[0].memory_bytes * -(-num_layers // 3)
        devices = tuple(
            replace(node.devices[0], name=f"{node.name}/{place}", memory_bytes=each)
            for place in range(num_devices)
        )
        cluster = replace(problem.cluster, nodes=(replace(node, devices=devices),))
        third = num_layers // 3
        stages = tuple(Stage((devices[k].name,), (third * k, third * (k + 1)), 1) for k in range(3))
        return replace(problem, cluster=cluster), problem.plan("three stages", (Pipeline(1, 64, stages),))

    for num_devices, num_layers, may in ((12, 12, True), (13, 12, False), (13, 3, True)):
        problem, plan = tight(num_devices, num_layers)
        costs = PipelineCosts(problem)
        assert sharing_may_win(problem, costs, plan) is may
        assert sharing_may_win(problem, costs, None)
        ample = with_ample_memory(problem)
        assert not sharing_may_win(ample, PipelineCosts(ample), plan)


def bound_s(problem: Problem) -> float:
    try:
        return fractional_bound_s(problem)
    except InfeasibleError:
        return float("inf")


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.booleans())
def test_plans_fit_and_run_and_are_not_below_the_bound(seed: int, ample: bool):
    problem = random_problem(seed)
    problem = with_ample_memory(problem) if ample else problem
    profile, cluster = problem.profile, problem.cluster
    plans = planned(problem)
    plans += (
        planned(problem, replace(plans[0], predicted=predict(plans[0], profile, cluster).figures))
        if plans
        else []
    )
    for plan in plans:
        assert any(len(places) > 1 for places in plan.places.values())
        for name in plan.device_names:
            assert plan_memory(plan, profile, name).total_bytes <= cluster.device(name).usable_bytes
        for pipeline in plan.pipelines:
            assert pipeline.microbatch_size <= max(problem.microbatch_sizes)
        assert sum(pipeline.num_samples for pipeline in plan.pipelines) == problem.global_batch_size
        program = lower(plan, profile, cluster)
        verify_messages(program)
        verify_order(program)
        for (index, stage), most in observed_in_flight(program).items():
            assert most <= plan.pipelines[index].in_flight(stage)
        assert simulate_plan(plan, profile, cluster).makespan_s >= bound_s(problem) * (1 - 1e-9)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6))
def test_plans_are_the_same_again_and_no_more_than_asked_for(seed: int):
    problem = random_problem(seed)
    plans = planned(problem)
    assert [plan.sha256 for plan in planned(problem, limit=3)] == [plan.sha256 for plan in plans[:3]]
    assert len({plan.sha256 for plan in plans}) == len(plans) <= 12
