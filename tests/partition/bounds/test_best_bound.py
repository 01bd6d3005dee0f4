"""The fractional bound by hand, and below every random plan, shared and interleaved devices included."""

import dataclasses
import random
from itertools import pairwise

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError
from cost_model.layer_costs import Prices
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.bounds.best_bound import bound_space, fractional_bound_s
from partition.estimates.optimizer_sharding import fits
from partition.estimates.plan_memory import plan_memory
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem
from random_problems import in_two_precisions, random_problem


def two_devices(
    memory_bytes: float, *, optimizer_s_per_byte: float = 0.0, tied_bytes: float = 0.0
) -> Problem:
    """Return layers of 1 s and 2 s a sample on a device of speed 1, on devices of speed 1 and 2; batch 6.

    tied_bytes: of the 1 byte of parameters of the second layer, those that it shares with the first.
    """
    times = (LayerTimes((0.5,), (0.5,)), LayerTimes((1.0,), (1.0,)))
    profile = ModelProfile(
        model="two layers",
        sequence_length=8,
        dtype="float32",
        layers=(
            LayerProfile("first", 1.0, 0.0, 1.0),
            LayerProfile(
                "second", 1.0, 0.0, 1.0, tied_to="first" if tied_bytes else None, tied_bytes=tied_bytes
            ),
        ),
        kinds={"kind": KindProfile("measured", (1,), times, optimizer_s_per_byte=optimizer_s_per_byte)},
    )
    devices = tuple(Device(f"a/{index}", "a", "kind", memory_bytes, speed=index + 1.0) for index in range(2))
    return Problem(profile, Cluster("lab", Link(0.0, 1.0), (Node("a", devices),)), 6, (1,))


def test_bound_is_total_work_over_total_speed() -> None:
    assert fractional_bound_s(two_devices(100.0)) == pytest.approx(18 / 3, rel=1e-5)


def test_tight_memory_raises_the_bound() -> None:
    # 8 bytes of states on 4 + 4: each device holds half of them; best the second layer on the fast one
    assert fractional_bound_s(two_devices(4.0)) == pytest.approx(6.0, rel=1e-5)
    # speeds 1 and 2, equal memory for 3/4 of the states each: x on the slow one is free to be 1/3 of the work
    assert fractional_bound_s(two_devices(6.0)) == pytest.approx(6.0, rel=1e-5)


def test_optimizer_is_part_of_the_bound() -> None:
    # 2 bytes of parameters at 3 s each on speed 1: 6 s more of work
    problem = two_devices(100.0, optimizer_s_per_byte=3.0)
    assert fractional_bound_s(problem) == pytest.approx(24 / 3, rel=1e-5)


def test_tied_weights_take_one_optimizer_step() -> None:
    # 1 byte of the first layer and half a byte of the second at 3 s each: 4.5 s more of work
    problem = two_devices(100.0, optimizer_s_per_byte=3.0, tied_bytes=0.5)
    assert fractional_bound_s(problem) == pytest.approx(22.5 / 3, rel=1e-5)


def test_a_tied_model_that_just_fits_one_device_is_feasible() -> None:
    problem = two_devices(1.0, tied_bytes=1.0)
    plan = Plan("single", "two layers", 6, (Pipeline(1, 6, (Stage(("a/0",), (0, 2), 1),)),))
    need = plan_memory(plan, problem.profile, "a/0").total_bytes
    # states of the one byte of weights, a sample's activations, and a gradient until it is added to the other
    assert need == 4 + 2 + 1
    for memory_bytes in (need, 4.0):  # the bound counts states alone
        alone = two_devices(memory_bytes).cluster.devices[0]
        cluster = Cluster("lab", Link(0.0, 1.0), (Node("a", (alone,)),))
        found_s = fractional_bound_s(dataclasses.replace(problem, cluster=cluster))
        assert found_s == pytest.approx(18, rel=1e-5)


def test_states_that_do_not_fit_together_are_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="need 8 bytes, all devices together have 6 usable") as caught:
        fractional_bound_s(two_devices(3.0))
    assert caught.value.missing_bytes == 2.0


def random_plan(rng: random.Random, problem: Problem) -> Plan:
    """Draw any plan: several pipelines, microbatches up to the largest, devices shared and interleaved."""
    num_layers, batch = problem.profile.num_layers, problem.global_batch_size
    names = [device.name for device in problem.cluster.devices]
    shares = sorted(rng.sample(range(1, batch), min(rng.randrange(3), batch - 1)))
    pipelines = []
    for start, stop in zip([0, *shares], [*shares, batch], strict=True):
        cuts = [0, *sorted(rng.sample(range(1, num_layers), rng.randrange(min(4, num_layers)))), num_layers]
        stages = tuple(Stage((rng.choice(names),), layers, 1) for layers in pairwise(cuts))
        largest = min(stop - start, max(problem.microbatch_sizes))
        pipelines.append(Pipeline(rng.randint(1, largest), stop - start, stages))
    return Plan("random", problem.profile.model, batch, tuple(pipelines))


def busiest_s(plan: Plan, problem: Problem) -> float:
    """Return compute and optimizer seconds of the busiest device: no step is shorter."""
    prices, seconds = Prices(problem.profile), []
    for name in plan.device_names:
        device = problem.cluster.device(name)
        seconds.append(prices.optimizer_s(device, plan.layers_of(name)))
        for pipeline in plan.pipelines:
            for microbatch in range(pipeline.num_microbatches):
                samples = pipeline.microbatch_samples(microbatch)
                for stage in pipeline.stages:
                    if stage.device == name:
                        seconds[-1] += prices.forward_s(device, *stage.layers, samples)
                        seconds[-1] += prices.backward_s(device, *stage.layers, samples)
    return max(seconds)


def check_random_plans(seed: int, num_plans: int) -> int:
    """Return the number of plans that fit and so were compared with the bound."""
    problem, rng = random_problem(seed), random.Random(seed)
    if seed % 3 == 0:
        problem = in_two_precisions(problem)
    if seed % 2:  # every size up to the whole batch
        problem = dataclasses.replace(problem, microbatch_sizes=(problem.global_batch_size,))
    try:
        bound_s = fractional_bound_s(problem)
    except InfeasibleError:
        bound_s = float("inf")
    plans = [random_plan(rng, problem) for _ in range(num_plans)]
    fitting = [plan for plan in plans if fits(plan, problem.profile, problem.cluster)]
    assert all(bound_s <= busiest_s(plan, problem) for plan in fitting), seed
    return len(fitting)


def test_no_random_plan_beats_the_bound() -> None:
    assert sum(check_random_plans(seed, 30) for seed in range(12)) > 50


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_random_plan_beats_the_bound_in_hundreds_of_problems() -> None:
    assert sum(check_random_plans(seed, 40) for seed in range(2000, 2500)) > 2000


def test_fewer_microbatch_sizes_never_lower_the_bound() -> None:
    problem = two_devices(100.0)
    for sizes in ((1,), (2,), (1, 2)):
        allowed = dataclasses.replace(problem, microbatch_sizes=sizes)
        more = dataclasses.replace(problem, microbatch_sizes=(*sizes, 4))
        assert fractional_bound_s(allowed) >= fractional_bound_s(more) * (1 - 1e-9)
    assert bound_space(more).startswith("all plans with microbatches up to 4, ")
