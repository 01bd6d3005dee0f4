"""Which plan is taken where messages share the network, of all that a search has looked at."""

from dataclasses import replace

import pytest

from cost_model.errors import InfeasibleError
from hetpipe.simulation.prediction import evaluator, predict
from hetpipe.simulation.shared_choice import TIES, Look, least_shared
from hetpipe.simulation.shared_network import shared_step_s, work_of
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Forced, Problem, problem_of
from partition.solver import compare, solve
from random_plans import random_case
from small_case import (
    meeting_chains,
    small_cluster,
    small_plan,
    small_profile,
    whole_model_on_two_nodes_of_two,
)

pytestmark = pytest.mark.whole_search

SEEDS = (1, 2, 3, 4, 5, 8, 12, 18)
EACH = Look(alike=0.001)
"""Whatever is shorter counts."""


def longer_s(plan: Plan, problem: Problem) -> float:
    """Return the longer of both steps."""
    prediction = predict(plan, problem.profile, problem.cluster)
    shared_s = shared_step_s(prediction.costs)
    assert shared_s is not None
    return max(prediction.step_s, shared_s)


def test_the_plan_that_is_taken_is_no_worse_and_one_that_was_looked_at():
    other = 0
    for seed in SEEDS:
        problem = random_case(seed)
        seen: dict[Plan, float] = {}
        choose = least_shared(problem.profile, problem.cluster, [EACH])

        def noted(plan: Plan, candidates, seen=seen, choose=choose) -> Plan:
            seen.update(candidates)
            return choose(plan, candidates)

        evaluate = evaluator(problem.profile, problem.cluster)
        plan = solve(problem, evaluate, proof_s=0)
        taken = solve(problem, evaluate, proof_s=0, choose=noted)
        if plan.sharding.by_layer:
            continue
        assert longer_s(taken, problem) <= longer_s(plan, problem)
        assert taken.predicted is not None
        assert taken.predicted.bound_s is not None
        assert taken.predicted.step_s >= taken.predicted.bound_s * (1 - 1e-9)
        if taken.pipelines != plan.pipelines:
            assert taken.pipelines in [each.pipelines for each in seen]
            other += 1
    assert other >= 4


def test_what_is_forced_is_kept():
    other = 0
    for seed in SEEDS:
        problem = replace(random_case(seed), forced=Forced(num_pipelines=1))
        evaluate = evaluator(problem.profile, problem.cluster)
        choose = least_shared(problem.profile, problem.cluster, [EACH])
        try:
            plan = solve(problem, evaluate, proof_s=0)
        except InfeasibleError:
            continue
        outcomes = compare(problem, evaluate, ("ddp", "gpipe-even", "auto"), proof_s=0, choose=choose)
        taken = outcomes[-1].plan
        assert taken is not None and taken.strategy == "auto"
        assert len(taken.pipelines) == 1
        other += taken.pipelines != plan.pipelines
    assert other >= 4


def chains(*nodes: str) -> Plan:
    """A pipeline through the nodes of each word, of `meeting_chains`."""
    plan, _, _ = meeting_chains(len(nodes))
    pipelines = tuple(
        Pipeline(1, 1, (Stage((f"{first}/{index}",), (0, 1), 1), Stage((f"{last}/{index}",), (1, 2), 1)))
        for index, (first, last) in enumerate(nodes)
    )
    return replace(plan, pipelines=pipelines)


def test_of_plans_that_are_as_good_by_turns_the_one_is_taken_whose_messages_meet_less():
    own, profile, cluster = meeting_chains(3)
    other = chains("ab", "ab", "ba")
    step_s = predict(own, profile, cluster).step_s
    for longer, of_ties in ((1.0009, other), (1.0011, own)):
        seen = {own: step_s, other: longer * step_s}
        assert least_shared(profile, cluster, [TIES])(own, seen) == of_ties
        assert least_shared(profile, cluster)(own, seen) == other
    work = work_of(own)
    for look, taken in (
        (replace(TIES, meeting=1.0), own),
        (replace(TIES, work=3 * work), other),
        (replace(TIES, work=3 * work - 1), own),
    ):
        assert least_shared(profile, cluster, [look])(own, {own: step_s, other: step_s}) == taken


def test_of_plans_that_are_as_good_where_messages_meet_the_shortest_by_turns_is_taken():
    own, profile, cluster = meeting_chains(3)
    problem = problem_of(profile, cluster, 3)
    least, short, long = chains("ba", "ab", "ab"), chains("ab", "ab", "ba"), chains("ba", "ba", "ba")
    assert longer_s(least, problem) < longer_s(short, problem) < 1.01 * longer_s(least, problem)
    seen = {own: 14.0, least: 12.4, short: 12.0, long: 11.0}
    assert least_shared(profile, cluster)(own, seen) == short


def test_plans_that_do_not_fit_or_are_longer_by_turns_are_not_taken():
    own, better, profile = small_plan(4, (1, 1)), small_plan(4, (2, 1)), small_profile()
    own_s = predict(own, profile, small_cluster()).step_s
    for cluster, step_s, taken in (
        (small_cluster(), 0.9 * own_s, better),
        (small_cluster(), 1.1 * own_s, own),
        (small_cluster(fast_bytes=needed(own)), 0.9 * own_s, own),
    ):
        assert least_shared(profile, cluster)(own, {own: own_s, better: step_s}) == taken


def needed(plan: Plan) -> float:
    return predict(plan, small_profile(), small_cluster()).devices["a/0"].memory_bytes


def test_plans_that_go_layer_by_layer_are_left_as_they_are():
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    sharded = replace(plan, zero=2)
    assert least_shared(profile, cluster)(sharded, {plan: 1.0, sharded: 1.0}) == sharded
