"""The dynamic programme against brute force: all orders, cuts and in_flight of small problems."""

import math
import random
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.memory import StageShape, device_memory
from parallel import on_all_cores
from partition.estimates.closed_forms import cap_in_flight, in_flight_windows, makespan_bound_s
from partition.estimates.device_classes import DeviceClasses
from partition.estimates.pipeline_costs import Layout, PipelineCosts
from partition.estimates.plan_memory import plan_memory
from partition.estimates.step_estimate import StepEstimate
from partition.estimates.timed_pipeline import TimedStage
from partition.exact.chain_dp import FOREVER_S, ChainProgramme, StageBytes
from partition.exact.chain_search import class_orders, search_chains
from partition.problem import Problem
from random_problems import in_two_precisions, random_problem, random_profile, with_ample_memory


def layouts(problem: Problem) -> list[Layout]:
    """Every ordered subset of the devices with every cut."""
    num_layers, devices = problem.profile.num_layers, problem.cluster.devices
    return [
        tuple(zip(order, *zip(*pairwise((0, *cuts, num_layers)), strict=True), strict=True))
        for count in range(1, min(len(devices), num_layers) + 1)
        for order in permutations(devices, count)
        for cuts in combinations(range(1, num_layers), count - 1)
    ]


def brute_force(costs: PipelineCosts, samples: int, period: float) -> float:
    """Least objective over all layouts that a period and memory allow; inf where there is none."""
    best, estimate = math.inf, StepEstimate(costs)
    num_microbatches = costs.num_microbatches(samples)
    for layout in layouts(costs.problem):
        timed = estimate.pipeline([TimedStage(*stage) for stage in layout], samples)
        if timed.timing.period_s > period:
            continue
        flights = [min(flight, num_microbatches) for flight in timed.timing.windows(period)]
        fits = all(
            device_memory(
                costs.problem.profile.on(device.kind), [StageShape(start, stop, flight, samples)]
            ).total_bytes
            <= device.usable_bytes
            for (device, start, stop), flight in zip(layout, flights, strict=True)
        )
        if fits:
            best = min(best, estimate.alone_s(timed, [num_microbatches] * len(layout)))
    return best


def compare_with_brute_force(seed: int) -> int:
    """Return the number of infeasible cases met."""
    problem = random_problem(seed)
    if seed % 3 == 0:
        problem = in_two_precisions(problem)
    costs, infeasible = PipelineCosts(problem), 0
    classes = DeviceClasses.of(problem.cluster.devices)
    orders = class_orders(classes, costs)
    for samples in problem.microbatch_sizes:
        programme = ChainProgramme(costs, classes, samples)
        fastest = min(float(table[-1, 0]) for table in programme.busy_s)
        periods = [0.3 * fastest, 0.7 * fastest, 2 * fastest, FOREVER_S]
        roots = list(programme.roots(orders, periods, None))
        for index, period in enumerate(periods):
            mine = min((root.objective_s for root in roots if root.period == index), default=math.inf)
            expected = brute_force(costs, samples, period)
            assert mine == pytest.approx(expected, rel=1e-9), (seed, samples, index)
            infeasible += math.isinf(expected)
    return infeasible


def test_programme_equals_brute_force() -> None:
    assert sum(compare_with_brute_force(seed) for seed in range(25)) > 5


@pytest.mark.slow
@pytest.mark.exhaustive
def test_programme_equals_brute_force_on_hundreds_of_problems() -> None:
    assert sum(on_all_cores(compare_with_brute_force, range(1000, 1400))) > 50


def test_windows_by_hand() -> None:
    # four equal stages, f = 1, b = 2, links of 0.1 each way: W = 3, 9, 15, 21 (notes, section 1)
    assert in_flight_windows([3.0] * 4, [0.2] * 3, 3.0) == (7, 5, 3, 1)
    assert in_flight_windows([3.0] * 4, [0.0] * 3, 3.0) == (4, 3, 2, 1)
    assert in_flight_windows([3.0], [], 3.0) == (1,)
    # a period as long as the round trip: one at a time
    assert in_flight_windows([3.0] * 4, [0.2] * 3, 12.6) == (1, 1, 1, 1)


def test_makespan_bound_by_hand() -> None:
    # four stages, 16 microbatches: 3 to fill and drain, 16 of work
    assert makespan_bound_s([1.0] * 4, [0.0] * 3, 16) == 19.0
    assert makespan_bound_s([1.0, 0.5], [0.5], 4) == 4.0
    assert makespan_bound_s([1.0, 1.0], [0.5], 4, total_s=[3.5, 3.5]) == 5.0


def test_a_cap_holds_for_all_later_stages() -> None:
    assert cap_in_flight([7, 5, 3, 1], [4, 9, 9, 9]) == (4, 4, 3, 1)
    assert cap_in_flight([7, 5, 3, 1], [9, 2, 9, 9]) == (7, 2, 2, 1)


def test_stage_bytes_equal_device_memory() -> None:
    for seed, samples in product(range(6), (1, 2, 3, 8)):
        profile = random_problem(seed).profile
        table = StageBytes.of(profile, samples)
        for start, stop in combinations(range(profile.num_layers + 1), 2):
            memory = device_memory(profile, [StageShape(start, stop, 3, samples)])
            assert table.fixed[stop, start] + 3 * samples * table.per_sample[stop, start] == pytest.approx(
                memory.total_bytes, rel=1e-12
            )
            assert table.trained[stop, start] == pytest.approx(memory.gradient_bytes, rel=1e-12)


def test_search_finds_the_brute_force_optimum_where_memory_is_ample() -> None:
    for seed in range(200, 230):
        problem = with_ample_memory(random_problem(seed))
        if seed % 3 == 0:
            problem = in_two_precisions(problem)
        costs = PipelineCosts(problem)
        expected = min(brute_force(costs, samples, FOREVER_S) for samples in problem.microbatch_sizes)
        found = search_chains(problem)
        assert found.estimates_s[0] == pytest.approx(expected, rel=1e-9)
        assert list(found.estimates_s) == sorted(found.estimates_s)
        assert len({plan.sha256 for plan in found.plans}) == len(found.plans)


@pytest.mark.parametrize("precisions", [1, 2])
@pytest.mark.parametrize("seed", range(300, 340))
def test_search_fits_whenever_some_pipeline_does(seed: int, precisions: int) -> None:
    problem = random_problem(seed)
    if precisions == 2:
        problem = in_two_precisions(problem)
    costs = PipelineCosts(problem)
    expected = min(brute_force(costs, samples, FOREVER_S) for samples in problem.microbatch_sizes)
    plans = search_chains(problem).plans
    assert bool(plans) == math.isfinite(expected)
    for plan in plans:
        for name in plan.device_names:
            device = problem.cluster.device(name)
            need = plan_memory(plan, problem.profile.on(device.kind), name)
            assert need.total_bytes <= device.usable_bytes


def test_equal_devices_are_not_told_apart() -> None:
    devices = tuple(Device(f"a/{index}", "a", "kind 0", 100.0) for index in range(6))
    cluster = Cluster("equal", Link(0.0, 1.0), (Node("a", devices),))
    problem = replace(random_problem(0), cluster=cluster)
    orders = class_orders(DeviceClasses.of(devices), PipelineCosts(problem))
    num_stages = min(6, problem.profile.num_layers)
    assert orders == [(0,) * count for count in range(1, num_stages + 1)]


def test_unequal_devices_have_every_order() -> None:
    devices = tuple(Device(f"a/{index}", "a", "kind 0", 100.0 + index) for index in range(5))
    cluster = Cluster("unequal", Link(0.0, 1.0), (Node("a", devices),))
    problem = replace(random_problem(0), cluster=cluster, profile=random_profile(random.Random(0), 12))
    orders = class_orders(DeviceClasses.of(devices), PipelineCosts(problem))
    assert sorted(orders) == sorted(order for count in range(1, 6) for order in permutations(range(5), count))
