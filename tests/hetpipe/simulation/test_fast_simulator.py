"""The planner's clock against the simulator, whose rules it follows, interpreted and compiled."""

import random

import pytest

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.simulation.fast_simulator import has_clock, step_times
from hetpipe.simulation.prediction import evaluator, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Plan
from random_plans import random_case, random_plan


def check(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Not nearly: the same additions in the same order."""
    trace, predicted = simulate_plan(plan, profile, cluster), evaluator(profile, cluster)(plan)
    costs = ProgramCosts(lower(plan, profile, cluster), profile, cluster)
    assert step_times(costs, many=0) == step_times(costs)
    assert predicted.step_s == trace.makespan_s
    assert predicted.bubble == trace.bubble
    for rank, name in enumerate(plan.device_names):
        assert predicted.devices[name].busy * predicted.step_s == pytest.approx(trace.busy_s(rank))


@pytest.mark.parametrize("seed", range(40))
def test_the_step_is_that_of_the_simulator(seed: int):
    problem = random_case(seed)
    rng = random.Random(seed)
    for _ in range(5):
        plan = random_plan(rng, problem)
        assert has_clock(plan)
        check(plan, problem.profile, problem.cluster)
