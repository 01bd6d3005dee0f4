"""Memory of all devices of a plan at once is that of each device."""

import random
from itertools import pairwise

import pytest

from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import memory_on, plan_memories, plan_memory
from partition.estimates.timed_pipeline import TimedStage, TimingCache
from partition.plan import Pipeline, Plan
from random_plans import random_case, random_plan, random_shared_plan, tight_case
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


def lowered_for_gradients(seed: int) -> int:
    """Check that what pipelines have in flight fits; return how often gradients that wait leave less."""
    problem = tight_case(seed, num_plans=1)[0]
    costs, lowered = PipelineCosts(problem), 0
    timings, devices = TimingCache(costs), problem.cluster.devices[: problem.profile.num_layers]
    size, rng = problem.microbatch_sizes[0], random.Random(seed)
    edges = sorted(rng.sample(range(1, problem.profile.num_layers), len(devices) - 1))
    spans = pairwise((0, *edges, problem.profile.num_layers))
    stages = [TimedStage(device, *span, True) for device, span in zip(devices, spans, strict=True)]
    timing = timings.pipeline(stages, size).timing
    batch = timing.room(8 * size)
    for flights in timing.flights(-(-batch // size)) if batch else ():
        placed = zip(stages, flights, strict=True)
        pipeline = Pipeline(size, batch, tuple(it.leanest(costs, size, flight) for it, flight in placed))
        plan = Plan("manual", problem.profile.model, batch, (pipeline,))
        for device in devices:
            need = memory_on(plan, problem.profile, device).total_bytes
            assert need <= device.usable_bytes * (1 + 1e-9), (seed, device.name, flights)
        for at in range(timing.first_backward + 1, len(stages)):
            it, flight = stages[at], flights[at]
            held = costs.stage_bytes(it.device, it.start, it.stop, size, recompute=True)
            waiting = held.waiting(it.device.usable_bytes, flight)
            lowered += flights[at - 1] == flight + waiting < min(timing.caps[:at])
    return lowered


def test_what_is_in_flight_leaves_room_for_gradients_that_wait() -> None:
    assert sum(map(lowered_for_gradients, range(40))) > 10
