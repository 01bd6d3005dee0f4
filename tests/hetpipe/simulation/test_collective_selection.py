"""Sums by nodes where the whole step is shorter so: never worse than with none of them."""

import random
from dataclasses import replace

from cost_model.network import Network
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import gradient_buckets, not_by_nodes, with_collectives
from hetpipe.program.instructions import Program
from hetpipe.simulation.fast_simulator import has_clock, step_times
from hetpipe.simulation.prediction import evaluator, predict
from partition.plan import Plan
from partition.problem import Problem
from random_plans import random_plan, sync_case

MET = (110, 358, 622, 713)
"""Problems of which a plan's sums are cheapest by nodes, each alone, but get into each other's way."""


def steps_s(problem: Problem, plan: Plan) -> tuple[float, float]:
    """Return the steps with each sum as it is cheapest alone, and with none by nodes."""
    profile, cluster = problem.profile, problem.cluster
    network = Network(cluster, profile.links, profile.all_reduces)
    alone = with_collectives(plan, gradient_buckets(plan, profile), profile, network)
    costs = ProgramCosts(
        Program(plan, alone, (), first_trained=profile.first_trained), profile, cluster, network
    )
    plain = not_by_nodes(plan, alone, costs.sync_bytes, network)
    other = costs.of(replace(costs.program, buckets=plain))
    return step_times(costs).step_s, step_times(other).step_s


def test_the_step_is_the_shorter_one_to_the_planner_and_as_lowered() -> None:
    by_nodes = none = 0
    for seed in (*range(40), *MET):
        rng, problem = random.Random(seed), sync_case(seed)
        evaluate = evaluator(problem.profile, problem.cluster)
        for plan in (plan for plan in (random_plan(rng, problem) for _ in range(8)) if has_clock(plan)):
            alone_s, plain_s = steps_s(problem, plan)
            predicted = predict(plan, problem.profile, problem.cluster)
            assert evaluate(plan).step_s == predicted.step_s == min(alone_s, plain_s), seed
            by_nodes += alone_s < plain_s
            none += plain_s < alone_s
            if plain_s < alone_s:
                buckets = predicted.program.buckets
                assert all(bucket.ranks == tuple(sorted(bucket.ranks)) for bucket in buckets)
                assert not any(bucket.nodes for bucket in buckets)
    assert by_nodes >= 20 and none >= len(MET)
