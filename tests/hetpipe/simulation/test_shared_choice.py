"""Which plan is taken where messages share the network, of all that a search has looked at."""

from dataclasses import replace

from cost_model.errors import InfeasibleError
from hetpipe.simulation.prediction import evaluator, predict
from hetpipe.simulation.shared_choice import NEAR, least_shared
from hetpipe.simulation.shared_network import shared_step_s
from partition.plan import Plan
from partition.problem import Forced, Problem
from partition.solver import compare, solve
from random_plans import random_case
from small_case import small_cluster, small_plan, small_profile, whole_model_on_two_nodes_of_two

SEEDS = (1, 2, 3, 4, 5, 8, 12, 18)


def shared_s(plan: Plan, problem: Problem) -> float:
    step_s = shared_step_s(predict(plan, problem.profile, problem.cluster).costs)
    assert step_s is not None
    return step_s


def test_the_plan_that_is_taken_is_no_worse_and_one_that_was_looked_at():
    other = 0
    for seed in SEEDS:
        problem = random_case(seed)
        seen: dict[Plan, float] = {}
        choose = least_shared(problem.profile, problem.cluster)

        def noted(plan: Plan, candidates, seen=seen, choose=choose) -> Plan:
            seen.update(candidates)
            return choose(plan, candidates)

        evaluate = evaluator(problem.profile, problem.cluster)
        plan = solve(problem, evaluate, proof_s=0)
        taken = solve(problem, evaluate, proof_s=0, choose=noted)
        if plan.sharding.by_layer:
            continue
        assert shared_s(taken, problem) <= shared_s(plan, problem)
        assert taken.predicted is not None and plan.predicted is not None
        assert taken.predicted.step_s <= (1 + NEAR) * plan.predicted.step_s
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
        choose = least_shared(problem.profile, problem.cluster)
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


def test_plans_that_do_not_fit_or_are_far_off_are_not_taken():
    own, profile = small_plan(4, (1, 1)), small_profile()
    better = small_plan(4, (2, 1))
    for cluster, step_s, taken in (
        (small_cluster(), 1.0, better),
        (small_cluster(), 1.0 + NEAR + 0.01, own),
        (small_cluster(fast_bytes=needed(own)), 1.0, own),
    ):
        assert least_shared(profile, cluster)(own, {own: 1.0, better: step_s}) == taken


def needed(plan: Plan) -> float:
    return predict(plan, small_profile(), small_cluster()).devices["a/0"].memory_bytes


def test_plans_that_go_layer_by_layer_are_left_as_they_are():
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    sharded = replace(plan, zero=2)
    assert least_shared(profile, cluster)(sharded, {plan: 1.0, sharded: 1.0}) == sharded
