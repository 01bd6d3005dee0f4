"""Seconds that no simulated step undercuts: plans above them are not simulated."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cost_model.cluster import Link
from hetpipe.simulation.prediction import evaluator
from node_problems import problem_of_nodes
from partition.estimates.effort import effort_for
from partition.estimates.optimizer_sharding import with_state_owners
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.ranking import Contest, Ranking
from partition.estimates.step_estimate import StepEstimate, busy_s, shares_devices
from partition.plan import Figures, Pipeline, Plan, Stage
from partition.problem import Problem
from random_plans import crowded_case, random_case, random_plan, random_shared_plan, with_measured_links
from random_problems import in_two_precisions

ROUNDING = 1e-9


def drawn(seed: int) -> tuple[Problem, Plan]:
    """Return a random problem and a plan of it, whether memory takes it or not."""
    rng = random.Random(seed)
    problem = crowded_case(seed) if seed % 3 == 0 else random_case(seed)
    problem = in_two_precisions(problem) if seed % 5 == 1 else problem
    if rng.random() < 0.3:
        problem = replace(problem, profile=with_measured_links(rng, problem.profile))
    plan = rng.choice([random_plan, random_shared_plan])(rng, problem)
    if rng.random() < 0.4:
        plan = with_state_owners(plan, problem.profile, problem.cluster)
    return problem, plan


def test_no_simulated_step_is_below_the_least_of_its_plan() -> None:
    seen = Counter[str]()
    for seed in range(300):
        problem, plan = drawn(seed)
        estimate = StepEstimate(PipelineCosts(problem))
        least_s = estimate.least_s(plan)
        step_s = evaluator(problem.profile, problem.cluster)(plan).step_s
        assert least_s <= step_s * (1 + ROUNDING), seed
        seen["above the busiest device"] += least_s > max(busy_s(estimate.timed(plan)).values())
        seen["sharded"] += plan.state_owners is not None
        seen["shared devices"] += shares_devices(plan)
        seen["smaller last microbatch"] += any(
            one.num_samples % one.microbatch_size for one in plan.pipelines
        )
    assert len(seen) == 4 and min(seen.values()) > 20, seen


def test_a_plan_that_is_sure_to_be_longer_is_not_simulated() -> None:
    # Two stages of four equal layers pass their microbatches one after the other where one is in flight.
    problem = problem_of_nodes(
        {"fast": 1.0}, [("fast", 2)], network=Link(0.0, 1e12), batch=4, num_layers=8, sizes=(1,)
    )
    first, second = (device.name for device in problem.cluster.devices)

    def plan(in_flight: int) -> Plan:
        stages = Stage((first,), (0, 4), in_flight), Stage((second,), (4, 8), 1)
        return problem.plan("by hand", (Pipeline(1, 4, stages),))

    def simulated(plans: Sequence[Plan]) -> list[Plan]:
        """Return those that are simulated of plans that are entered one after the other."""
        asked: list[Plan] = []
        figures = evaluator(problem.profile, problem.cluster)

        def evaluate(plan: Plan) -> Figures:
            asked.append(plan)
            return figures(plan)

        contest = Contest(Ranking(problem, evaluate), PipelineCosts(problem), effort_for(2).choice)
        for each in plans:
            contest.enter([each])
        assert contest.best == plan(2)
        return asked

    assert simulated([plan(2), plan(1)]) == [plan(2)]
    assert simulated([plan(1), plan(2)]) == [plan(1), plan(2)]
