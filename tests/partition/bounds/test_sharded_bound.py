"""The bounds of plans that shard states, gradients or weights: below every random plan's simulated step."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from cost_model.memory import state_home_bytes
from cost_model.sharding import Sharding
from hetpipe.simulation.prediction import evaluator, simulate_plan
from partition.bounds.sharded_bound import sharded_bound, sharded_pipeline_bound
from partition.estimates.optimizer_sharding import with_state_owners
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import plan_memory
from partition.estimates.step_estimate import StepEstimate
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem, check_plan
from partition.solver import compare, solve
from random_plans import fits
from random_problems import frozen_below, in_two_precisions, random_problem

BY_LAYER = (Sharding.GRADIENTS, Sharding.WEIGHTS)
ALL = (Sharding.STATES, *BY_LAYER)


def problem_of(seed: int, sharding: Sharding) -> Problem:
    """A random problem; in some the first layers are frozen, or one kind of device computes in 16 bits."""
    problem, rng = random_problem(seed), random.Random(f"{seed} sharded")
    if rng.random() < 0.3:
        first = rng.randrange(1, problem.profile.num_layers - 1)
        problem = replace(problem, profile=frozen_below(problem.profile, first))
    elif rng.random() < 0.3 and sharding is Sharding.GRADIENTS:
        problem = in_two_precisions(problem)
    return problem


def random_plan(rng: random.Random, problem: Problem, sharding: Sharding) -> Plan:
    """Any plan in which each device serves one stage, and owners of a layer are any that hold it."""
    names = [device.name for device in problem.cluster.devices]
    rng.shuffle(names)
    batch, num_layers = problem.global_batch_size, problem.profile.num_layers
    used = names[: rng.randint(min(2, batch), min(len(names), batch))]
    whole = sharding is Sharding.WEIGHTS and rng.random() < 0.5
    count = len(used) if whole else rng.randint(1, len(used))
    ends = [0, *sorted(rng.sample(range(1, len(used)), count - 1)), len(used)]
    shares = [0, *sorted(rng.sample(range(1, batch), count - 1)), batch]
    pipelines = []
    for (start, stop), (first, last) in zip(pairwise(ends), pairwise(shares), strict=True):
        devices = used[start:stop][:num_layers]
        cuts = [0, *sorted(rng.sample(range(1, num_layers), len(devices) - 1)), num_layers]
        size = rng.randint(1, min(last - first, max(problem.microbatch_sizes)))
        flights = sorted((rng.randint(1, 3) for _ in devices), reverse=True)
        stages = []
        for name, layers, flight in zip(devices, pairwise(cuts), flights, strict=True):
            again = rng.random() < 0.3
            stages.append(Stage((name,), layers, flight, again, segment_layers=int(again)))
        pipelines.append(Pipeline(size, last - first, tuple(stages)))
    levels = None
    if rng.random() < 0.3 and sharding in BY_LAYER:
        levels = (int(sharding), *(rng.randint(1, sharding) for _ in range(num_layers - 1)))
    plan = Plan(
        "random", problem.profile.model, batch, tuple(pipelines), zero=int(sharding), layer_zero=levels
    )
    check_plan(plan, problem.profile, problem.cluster)
    if rng.random() < 0.5:
        return with_state_owners(plan, problem.profile, problem.cluster)
    holders = [
        [name for name in plan.device_names if layer in plan.layers_of(name)] for layer in range(num_layers)
    ]
    return replace(plan, state_owners=tuple(map(rng.choice, holders)))


def check_random_plans(seed: int, num_plans: int, sharding: Sharding) -> list[float]:
    """Simulate random plans; return their steps in units of the bound that speaks about them.

    Where states alone are sharded the bound counts weights and gradients in memory: of plans that fit. There
    pipelines that share no device have one of their own. Nor is any below what its closed forms say is least.
    """
    problem, rng = problem_of(seed, sharding), random.Random(seed)
    plans = [random_plan(rng, problem, sharding) for _ in range(num_plans)]
    if sharding is Sharding.STATES:
        plans = [plan for plan in plans if fits(plan, problem)]
    if not plans:
        return []
    evaluate, steps = evaluator(problem.profile, problem.cluster), list[float]()
    estimate = StepEstimate(PipelineCosts(problem))
    bound = sharded_bound(problem, sharding)
    if sharding is Sharding.STATES:
        best_s = min(evaluate(plan).step_s for plan in plans)
        bound = sharded_pipeline_bound(problem, 2 * best_s, proof_s=0.5)
        assert (bound.fractional_s, bound.fractional_space) == sharded_bound(problem).of(plans[0])
    for plan in plans:
        if sharding in BY_LAYER:
            check_states(plan, problem)
        step_s = evaluate(plan).step_s
        bound_s, space = bound.of(plan)
        assert bound_s <= step_s, (seed, plan)
        assert estimate.least_s(plan) <= step_s * (1 + 1e-9), (seed, plan)
        assert sharding is Sharding.STATES or space == bound.fractional_space
        steps.append(step_s / bound_s)
    return steps


def check_states(plan: Plan, problem: Problem) -> None:
    """Optimizer states are counted once over all devices, gradients of a layer at its owner at least."""
    profile, layers = problem.profile, range(plan.num_layers)
    needs = {name: plan_memory(plan, profile, name) for name in plan.device_names}
    ratio = profile.optimizer_bytes_per_parameter_byte
    assert plan.state_owners is not None
    for name, need in needs.items():
        shares = plan.owned_shares(name).items()
        owned = sum(share * state_home_bytes(profile, [layer]) for layer, share in shares)
        assert need.gradient_bytes >= owned - 1e-9
        assert need.parameter_bytes >= owned - 1e-9
        assert need.optimizer_bytes >= ratio * owned - 1e-9
    if not profile.tied_groups:  # tied weights that two stages of a pipeline hold are its devices' own
        total = sum(need.optimizer_bytes for need in needs.values())
        assert total == pytest.approx(ratio * state_home_bytes(profile, layers))


@pytest.mark.parametrize("sharding", ALL)
def test_no_random_plan_that_shards_beats_its_bound(sharding: Sharding) -> None:
    steps = [step for seed in range(40) for step in check_random_plans(seed, 5, sharding)]
    assert len(steps) > 20 and min(steps) < 1.6  # the plans come near: the bound says something


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("sharding", ALL)
def test_nor_do_two_thousand_of_each(sharding: Sharding) -> None:
    compared, seed = 0, 1000
    while compared < 2000:
        compared += len(check_random_plans(seed, 10, sharding))
        seed += 1


def test_pipelines_that_shard_states_are_bounded_as_pipelines() -> None:
    # shares of layers know neither whole layers nor filling and draining; pipelines do
    problem = random_problem(3)
    simulated = evaluator(problem.profile, problem.cluster)
    plan = compare(problem, simulated, ["poplar-1", "auto"])[0].plan
    assert (
        plan is not None
        and plan.zero == 1
        and plan.predicted is not None
        and plan.predicted.bound_s is not None
    )
    least_s = sharded_bound(problem).fractional_s
    assert least_s < plan.predicted.bound_s <= simulated(plan).step_s
    assert "optimizer states anywhere" in str(plan.predicted.bound_space)
    for proof_s in (0, None):  # nothing has searched, so that there is no proof to go on from
        alone = solve(problem, simulated, "poplar-1", proof_s=proof_s)
        assert alone.predicted is not None and alone.predicted.bound_s == least_s


@pytest.mark.parametrize("strategy", ["poplar-2", "poplar-3"])
def test_a_plan_in_rounds_says_the_bound_of_what_it_shards(strategy: str) -> None:
    problem = random_problem(3)
    plan = solve(problem, evaluator(problem.profile, problem.cluster), strategy)
    assert plan.predicted is not None and plan.predicted.bound_s is not None
    assert plan.predicted.bound_s == sharded_bound(problem, plan.sharding).fractional_s
    assert plan.predicted.bound_s <= simulate_plan(plan, problem.profile, problem.cluster).makespan_s
    assert "memory not counted" in str(plan.predicted.bound_space)
