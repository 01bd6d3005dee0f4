"""What is forced is respected, or proven impossible."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from cost_model.errors import InfeasibleError, InputError
from forced_brute_force import least_step_s
from hetpipe.simulation.prediction import evaluator
from partition.auto import auto
from partition.constraints.wishes import check_forced, describe, forced_of, parse_pin, pin_text
from partition.estimates.plan_memory import plan_memory
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Forced, Pin, Problem, problem_of
from random_problems import random_problem
from small_case import equal_stages, small_cluster, small_profile


def small_problem(*pins: Pin, **forced: int) -> Problem:
    return replace(problem_of(small_profile(), small_cluster(), 4), forced=Forced(pins, **forced))


def plan_of(problem: Problem) -> Plan:
    return auto(problem, evaluator(problem.profile, problem.cluster))


def random_forced(seed: int) -> Problem | None:
    """A random problem of at most three devices with random pins; None where they contradict themselves."""
    problem, rng = random_problem(seed), random.Random(seed)
    devices, layers = problem.cluster.devices, problem.profile.num_layers
    if len(devices) > 3 or layers > 5:
        return None
    pins = []
    for device in rng.sample(devices, rng.randint(0, 2)):
        start = rng.randint(0, layers - 1)
        pins.append(Pin(device.name, start, rng.randint(start + 1, layers)))
    forced = forced_of(
        problem.profile, problem.cluster, pins, rng.choice([None, None, 1, 2]), rng.choice([None, None, 2])
    )
    return replace(problem, forced=forced)


def pipelines_of(problem: Problem, names: tuple[str, ...], num_samples: int) -> Iterator[Pipeline]:
    """Every cut of an order, with the smallest microbatches and one in flight."""
    layers, size = problem.profile.num_layers, min(problem.microbatch_sizes)
    for cuts in combinations(range(1, layers), len(names) - 1):
        ranges = zip((0, *cuts), (*cuts, layers), strict=True)
        stages = tuple(Stage((name,), entry, 1) for name, entry in zip(names, ranges, strict=True))
        yield Pipeline(min(size, num_samples), num_samples, stages)


def unshared_plans(problem: Problem) -> Iterator[Plan]:
    """Every plan of one or two pipelines in which a device serves one stage, samples halved."""
    names = [device.name for device in problem.cluster.devices]
    batch, model = problem.global_batch_size, problem.profile.model
    for count in range(1, len(names) + 1):
        for order in permutations(names, count):
            for one in pipelines_of(problem, order, batch):
                yield Plan("any", model, batch, (one,))
            for cut in range(1, count):
                for one in pipelines_of(problem, order[:cut], batch // 2):
                    for other in pipelines_of(problem, order[cut:], batch - batch // 2):
                        yield Plan("any", model, batch, (one, other))


def fits(plan: Plan, problem: Problem) -> bool:
    return all(
        plan_memory(plan, problem.profile, name).total_bytes <= problem.cluster.device(name).usable_bytes
        for name in plan.device_names
    )


def test_pins_are_written_with_both_layers_in_them():
    assert parse_pin("big/0=0-11") == Pin("big/0", 0, 12)
    assert parse_pin("big/0=3") == Pin("big/0", 3, 4)
    assert [pin_text(parse_pin(text)) for text in ("a/0=0-11", "a/0=3-3")] == ["a/0=0-11", "a/0=3"]
    assert describe(Forced((Pin("a/0", 0, 2),), 2, 3)) == "the pin a/0=0-1, pipelines = 2, max_devices = 3"


@pytest.mark.parametrize(
    ("text", "message"),
    [("a/0", "write for example"), ("a/0=x", "write for example"), ("a/0=5-2", "write a/0=2-5")],
)
def test_a_pin_that_is_none_is_refused(text: str, message: str):
    with pytest.raises(InputError, match=message):
        parse_pin(text)


@pytest.mark.parametrize(
    ("pins", "numbers", "message"),
    [
        (["c/0=0"], (None, None), "unknown device 'c/0'"),
        (["a/0=2-4"], (None, None), "has layers 0 to 3"),
        (["a/0=0-1", "a/0=2-3"], (None, None), "name 'a/0' twice"),
        ([], (0, None), "pipelines = 0"),
        ([], (None, 0), "max_devices = 0"),
    ],
)
def test_what_the_model_or_the_cluster_has_not_is_refused(
    pins: list[str], numbers: tuple[int | None, int | None], message: str
):
    with pytest.raises(InputError, match=message):
        forced_of(small_profile(), small_cluster(), list(map(parse_pin, pins)), *numbers)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (small_problem(num_pipelines=3), "3 pipelines need 3 devices, more than the 2 devices"),
        (
            small_problem(num_pipelines=2, max_devices=1),
            "2 pipelines need 2 devices, more than max_devices = 1",
        ),
        (small_problem(Pin("a/0", 0, 2), Pin("b/0", 2, 4), max_devices=1), "2 devices are pinned, more than"),
        (replace(small_problem(num_pipelines=2), global_batch_size=1), "need a sample each"),
        (small_problem(Pin("a/0", 0, 4), Pin("b/0", 0, 4), num_pipelines=1), "layer 0 is pinned 2 times"),
        (small_problem(Pin("a/0", 1, 2)), "layers 0 and 2-3 to 1 free device, of the 2 devices"),
        (small_problem(Pin("a/0", 0, 2), Pin("b/0", 3, 4)), "layers 2 to no free devices"),
        (small_problem(Pin("a/0", 0, 4), Pin("b/0", 1, 4)), "layers 0 of 1 pipeline"),
    ],
)
def test_contradictions_are_named(problem: Problem, message: str):
    with pytest.raises(InputError, match=message):
        check_forced(problem)
    with pytest.raises(InputError, match=message):
        plan_of(problem)


def test_a_pinned_device_serves_its_layers():
    plan = plan_of(small_problem(Pin("b/0", 0, 1)))
    assert [(stage.device, stage.layers) for stage in plan.pipelines[0].stages] == [
        ("b/0", (0, 1)),
        ("a/0", (1, 4)),
    ]


def test_two_pipelines_are_two_and_one_device_is_one():
    assert len(plan_of(small_problem(num_pipelines=2)).pipelines) == 2
    assert plan_of(small_problem(max_devices=1)).device_names == ("a/0",)


def test_the_same_layers_pinned_twice_make_two_pipelines():
    plan = plan_of(small_problem(Pin("a/0", 0, 4), Pin("b/0", 0, 4)))
    assert set(plan.device_names) == {"a/0", "b/0"}
    # the fast device needs half the time of the slow one: it gets more samples
    shares = {entry.stages[0].device: entry.num_samples for entry in plan.pipelines}
    assert shares["a/0"] > shares["b/0"]


def test_a_forced_pipeline_of_a_slow_device_gets_a_sample():
    problem = small_problem(Pin("a/0", 0, 4), Pin("b/0", 0, 4))
    slow = [replace(device, speed=1e-3) for device in problem.cluster.nodes[1].devices]
    nodes = (problem.cluster.nodes[0], replace(problem.cluster.nodes[1], devices=tuple(slow)))
    problem = replace(problem, cluster=replace(problem.cluster, nodes=nodes))
    # left to itself it would get none: the fast device does all four before the slow one has done one
    shares = {entry.stages[0].device: entry.num_samples for entry in plan_of(problem).pipelines}
    assert shares == {"a/0": 3, "b/0": 1}


def test_what_does_not_fit_is_infeasible_with_the_missing_bytes():
    problem = small_problem(Pin("b/0", 0, 3))
    problem = replace(problem, cluster=small_cluster(slow_bytes=1000.0))
    with pytest.raises(
        InfeasibleError, match=r"the pin b/0=0-2: even in the best of all .* on 'b/0'"
    ) as caught:
        plan_of(problem)
    assert caught.value.device == "b/0" and caught.value.missing_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(30, 80))]
)
def test_infeasible_means_that_no_plan_of_unshared_devices_fits(seed: int):
    problem = random_forced(seed)
    if problem is None:
        return
    allowed = [plan for plan in unshared_plans(problem) if problem.forced.allows(plan)]
    some = [plan for plan in allowed if fits(plan, problem)]
    try:
        plan = plan_of(problem)
    except InfeasibleError:
        assert not some
        return
    except InputError:
        assert not allowed
        return
    assert problem.forced.allows(plan) and fits(plan, problem)
    best = min(problem_seconds(plan, problem) for plan in some) if some else float("inf")
    assert problem_seconds(plan, problem) <= 1.1 * best


def problem_seconds(plan: Plan, problem: Problem) -> float:
    return evaluator(problem.profile, problem.cluster)(plan).step_s


@pytest.mark.slow
def test_large_clusters_are_planned_too():
    profile, cluster = equal_stages(30)
    devices = tuple(replace(device, speed=1 + index % 7) for index, device in enumerate(cluster.devices[:24]))
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], devices=devices),))
    forced = forced_of(profile, cluster, [parse_pin("n/3=4-7"), parse_pin("n/4=8-9")], 3, 12)
    problem = Problem(profile, cluster, 48, (1,), forced)
    plan = plan_of(problem)
    assert forced.allows(plan)


def check_against_brute_force(seed: int) -> float:
    """Return by how much the plan takes longer than the best of all; nan where nothing is allowed."""
    problem = random_forced(seed)
    if problem is None or problem.profile.num_layers > 4:
        return math.nan
    problem = replace(problem, global_batch_size=min(problem.global_batch_size, 5))
    least_s = least_step_s(problem)
    try:
        plan = plan_of(problem)
    except (InfeasibleError, InputError):
        assert math.isinf(least_s)
        return math.nan
    assert problem.forced.allows(plan) and fits(plan, problem)
    return problem_seconds(plan, problem) / least_s - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "least"), [(range(40), 3), pytest.param(range(40, 150), 9, marks=pytest.mark.exhaustive)]
)
def test_forced_plans_are_as_good_as_the_best_of_all_plans(seeds: range, least: int) -> None:
    gaps = [gap for gap in map(check_against_brute_force, seeds) if not math.isnan(gap)]
    assert len(gaps) >= least
    assert max(gaps) <= 0.01
    assert sum(gap <= 1e-9 for gap in gaps) >= 0.9 * len(gaps)
