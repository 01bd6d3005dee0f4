"""Sums by nodes where the whole step is shorter so: never worse than with none of them."""

import random
from dataclasses import replace

from cost_model.network import Network
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import gradient_buckets, not_by_nodes, with_collectives
from hetpipe.program.instructions import Program
from hetpipe.simulation.collective_selection import sums_over_s
from hetpipe.simulation.fast_simulator import has_clock, step_times
from hetpipe.simulation.prediction import evaluator, predict
from partition.plan import Plan
from partition.problem import Problem
from random_plans import random_plan, sync_case
from small_case import whole_model_on_two_nodes_of_two

MET = (110, 358, 622, 713)
"""Problems of which a plan's sums are cheapest by nodes, each alone, but get into each other's way."""


def both(problem: Problem, plan: Plan) -> tuple[ProgramCosts, ProgramCosts]:
    """Return the costs with each sum as it is cheapest alone, and with none by nodes."""
    profile, cluster = problem.profile, problem.cluster
    network = Network(cluster, profile.links, profile.all_reduces)
    alone = with_collectives(plan, gradient_buckets(plan, profile), profile, network)
    costs = ProgramCosts(
        Program(plan, alone, (), first_trained=profile.first_trained), profile, cluster, network
    )
    plain = not_by_nodes(plan, alone, costs.sync_bytes, network)
    return costs, costs.of(replace(costs.program, buckets=plain))


def test_the_step_is_the_shorter_one_to_the_planner_and_as_lowered() -> None:
    by_nodes = none = 0
    for seed in (*range(40), *MET):
        rng, problem = random.Random(seed), sync_case(seed)
        evaluate = evaluator(problem.profile, problem.cluster)
        for plan in (plan for plan in (random_plan(rng, problem) for _ in range(8)) if has_clock(plan)):
            alone_s, plain_s = (step_times(costs).step_s for costs in both(problem, plan))
            predicted = predict(plan, problem.profile, problem.cluster)
            assert evaluate(plan).step_s == predicted.step_s == min(alone_s, plain_s), seed
            by_nodes += alone_s < plain_s
            none += plain_s < alone_s
            if plain_s < alone_s:
                buckets = predicted.program.buckets
                assert all(bucket.ranks == tuple(sorted(bucket.ranks)) for bucket in buckets)
                assert not any(bucket.nodes for bucket in buckets)
    assert by_nodes >= 20 and none >= len(MET)


def test_no_step_is_over_before_its_rings_are() -> None:
    for seed in (*range(40), *MET):
        rng, problem = random.Random(seed), sync_case(seed)
        for plan in (plan for plan in (random_plan(rng, problem) for _ in range(4)) if has_clock(plan)):
            for costs in both(problem, plan):
                times = step_times(costs)
                assert sums_over_s(costs, times.sums_begin_s) <= times.step_s * (1 + 1e-9), seed


def test_rings_over_slow_cards_are_over_too_late_to_be_simulated() -> None:
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    pipelines = tuple(plan.pipelines[at] for at in (0, 2, 1, 3))  # node by node, else a tree is cheaper
    slow = replace(cluster, network=replace(cluster.network, bandwidth_bytes_per_s=10.0))
    problem = Problem(profile, slow, plan.global_batch_size, (1,))
    alone, plain = both(problem, replace(plan, pipelines=pipelines))
    times = step_times(alone)
    over_s = sums_over_s(plain, times.sums_begin_s)
    assert times.step_s < over_s <= step_times(plain).step_s
