"""Bounds of a forced number of pipelines: more of them than a node has devices sum all between nodes."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.simulation.prediction import evaluator
from parallel import on_all_cores
from partition.bounds.best_bound import fractional_bound_s, pipeline_bound_s, sync_bound_s
from partition.bounds.card_bound import lone_layer_bound_s, summed_layers_bound_s
from partition.estimates.device_classes import equal_devices
from partition.estimates.stage_tables import ProblemTables
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Forced, Problem
from partition.solver import compare, solve
from random_plans import random_plan, sync_case

SLACK = 1 + 1e-9


def nodes_of_one(num_nodes: int, megabytes: float, num_layers: int = 3) -> Problem:
    """Return a model of F 1 s and B 1 s a sample on nodes of a device each, 1 MB/s between; batch 6."""
    layers = tuple(
        LayerProfile(f"layer {at}", megabytes * 1e6 / num_layers, 1.0, 1.0) for at in range(num_layers)
    )
    times = LayerTimes((1 / num_layers,), (1 / num_layers,))
    kinds = {"kind": KindProfile("measured", (1,), (times,) * num_layers)}
    profile = ModelProfile("equal layers", 8, "float32", layers, kinds)
    nodes = tuple(Node(name, (Device(f"{name}/0", name, "kind", 1e9),)) for name in "abcd"[:num_nodes])
    return Problem(profile, Cluster("lone devices", Link(0.0, 1e6), nodes), 6, (1,))


def forced_to(problem: Problem, num_pipelines: int) -> Problem:
    return replace(problem, forced=Forced(num_pipelines=num_pipelines))


def bound_s(problem: Problem, step_s: float) -> float:
    """Return the bound with sums, for a plan known of that step; nothing is searched."""
    search = PipelineSearch(problem)
    search.best = step_s
    most = problem.forced.num_pipelines
    low_s, _ = pipeline_bound_s(search, fractional_bound_s(problem), 2.0, most_pipelines=most)
    return sync_bound_s(search, low_s, step_s, 4.0)


def check_forced(seed: int) -> tuple[int, int]:
    """Hold bounds of numbers of pipelines against random plans; return (plans, bounds lifted)."""
    rng, problem = random.Random(seed), sync_case(seed)
    evaluate, steps = evaluator(problem.profile, problem.cluster), defaultdict(list)
    for _ in range(30):
        plan = random_plan(rng, problem)
        steps[len(plan.pipelines)].append(evaluate(plan).step_s)
    lifted = 0
    for count, of_count in sorted(steps.items())[1:4]:  # one pipeline sums nothing
        step_s = min(of_count)
        forced_s = bound_s(forced_to(problem, count), step_s)
        assert forced_s <= step_s * SLACK, (seed, count)
        lifted += forced_s > 1.01 * bound_s(problem, step_s)
    return sum(map(len, steps.values())), lifted


def test_no_plan_of_as_many_pipelines_beats_their_bound() -> None:
    checked = [check_forced(seed) for seed in range(6)]
    assert sum(lifted for _, lifted in checked) >= 3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_plan_of_as_many_pipelines_beats_their_bound_in_hundreds_of_problems() -> None:
    assert sum(plans for plans, _ in on_all_cores(check_forced, range(5000, 5150))) == 150 * 30


def test_no_node_has_a_layer_for_itself_where_it_has_fewer_devices_than_there_are_pipelines() -> None:
    problem = nodes_of_one(2, 4.0)
    for count, possible in ((1, True), (2, False)):
        forced = forced_to(problem, count)
        lone_s = lone_layer_bound_s(ProblemTables(forced, equal_devices(forced.cluster)))
        assert (lone_s < float("inf")) is possible


def test_nodes_hold_all_layers_twice_together() -> None:
    # three nodes, two pipelines: each layer is on two nodes, so that 2 * 30 MB pass three cards of 1 MB/s;
    # that each node passes all samples through a third of the model, summed once, would take 14 s
    problem = forced_to(nodes_of_one(3, 30.0), 2)
    tables = ProblemTables(problem, equal_devices(problem.cluster))
    assert summed_layers_bound_s(tables, 1.0, 40.0) < 15.0
    whole = tuple(Pipeline(1, 3, (Stage((f"{name}/0",), (0, 3), 1),)) for name in "ab")
    step_s = evaluator(problem.profile, problem.cluster)(Plan("manual", "equal layers", 6, whole)).step_s
    assert 19.9 < bound_s(problem, step_s) <= step_s


def test_a_faster_plan_of_another_number_of_pipelines_does_not_limit_their_bound() -> None:
    problem = forced_to(nodes_of_one(2, 30.0), 2)
    evaluate = evaluator(problem.profile, problem.cluster)
    outcomes = {outcome.strategy: outcome.plan for outcome in compare(problem, evaluate)}
    auto, single = outcomes["auto"], outcomes["single"]
    assert single.predicted.step_s < 20 < auto.predicted.step_s  # which sums 30 MB
    assert auto.predicted.bound_s == pytest.approx(solve(problem, evaluate).predicted.bound_s, rel=0.01)
    assert 25 < auto.predicted.bound_s <= auto.predicted.step_s * SLACK
    assert auto.predicted.bound_space.startswith("2 pipelines that share no device")
    assert single.predicted.bound_s < single.predicted.step_s
