"""Memory of all devices of a plan at once is that of each device."""

import random

import pytest

from partition.estimates.plan_memory import plan_memories, plan_memory
from random_plans import random_case, random_plan, random_shared_plan
from random_problems import in_two_precisions


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("make", [random_plan, random_shared_plan])
def test_memories_of_a_plan_are_those_of_its_devices(seed, make):
    problem = random_case(seed)
    if seed % 2:
        problem = in_two_precisions(problem)
    plan = make(random.Random(seed), problem)
    profile, cluster = problem.profile, problem.cluster
    each = {
        name: plan_memory(plan, profile.on(cluster.device(name).kind), name) for name in plan.device_names
    }
    assert plan_memories(plan, profile, cluster) == each
