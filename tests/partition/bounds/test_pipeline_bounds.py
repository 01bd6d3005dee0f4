"""No plan of disjoint pipelines is faster than its bounds, where memory was made for such plans too."""

import dataclasses
import math
import random
from itertools import combinations, product

import numpy as np
import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.memory import StageShape, device_memory, leanest_segments, segment_choices
from cost_model.profile import KindProfile, ModelProfile
from parallel import on_all_cores
from partition.bounds.amount_intervals import Interval
from partition.bounds.best_bound import fractional_bound_s
from partition.bounds.card_columns_bound import device_columns_bound_s
from partition.bounds.column_bound import ColumnBound
from partition.bounds.pricing_bound import PriceBounds
from partition.estimates.amounts import Amount
from partition.estimates.device_classes import equal_devices
from partition.estimates.stage_tables import ProblemTables, leanest_table
from partition.exact.cluster_split import ClusterSplit
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem
from random_plans import fits, random_plan, tight_case, without_sync_s

FAR = (1.0, 1.3, 4.0)  # ceilings in times of the best plan: from as near as it gets to far above
SLACK = 1 + 1e-9


def bounds_s(problem: Problem, ceiling_s: float) -> tuple[float, float]:
    """(integer bound, column bound) with nothing known from below."""
    classes = equal_devices(problem.cluster)
    tables, low_s = ProblemTables(problem, classes), 1e-3 * ceiling_s
    exact_s = ClusterSplit(tables, ceiling_s).bound_s(low_s)
    return exact_s, ColumnBound(tables, seconds=3.0).bound_s(low_s, ceiling_s)


def devices_bound_s(problem: Problem, ceiling_s: float) -> float:
    """The bound of devices as columns, with nothing known from below."""
    tables = ProblemTables(problem, equal_devices(problem.cluster))
    return device_columns_bound_s(tables, 1e-3 * ceiling_s, ceiling_s, math.inf)


def check(problem: Problem, best_s: float, factor: float) -> None:
    exact_s, column_s = bounds_s(problem, factor * best_s)
    assert devices_bound_s(problem, factor * best_s) <= best_s * SLACK
    assert fractional_bound_s(problem) <= best_s * SLACK
    assert exact_s <= best_s * SLACK
    assert column_s <= best_s * SLACK


def check_tight_case(seed: int) -> None:
    problem, plans = tight_case(seed)
    assert plans, seed
    best_s = min(without_sync_s(plan, problem) for plan in plans)
    if best_s > 0:
        check(problem, best_s, FAR[seed % len(FAR)])


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(4, 28, 4)),
        *(
            pytest.param(first, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for first in range(28, 60, 4)
        ),
    ],
)
def test_no_plan_beats_the_bounds(first: int) -> None:
    for seed in range(first, first + 4):
        check_tight_case(seed)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_plan_beats_the_bounds_in_hundreds_of_problems() -> None:
    on_all_cores(check_tight_case, range(10_000, 10_250))
    on_all_cores(check_pipelines_stand_in_the_way, range(10_000, 10_400))


def lone_device(memory_bytes: float, *, sizes: tuple[int, ...] = (2,), batch: int = 2) -> Problem:
    """One layer, F 1 s and B 2 s a sample, 1 byte of parameters, 1 byte saved a sample, on one device."""
    times = LayerTimes((1.0, 2.0), (2.0, 4.0))
    profile = ModelProfile(
        model="one layer",
        sequence_length=8,
        dtype="float32",
        layers=(LayerProfile("only", 1.0, 0.0, 1.0),),
        kinds={"kind": KindProfile("measured", (1, 2), (times,))},
    )
    node = Node("a", (Device("a/0", "a", "kind", memory_bytes),))
    return Problem(profile, Cluster("lone", Link(0.0, 1.0), (node,)), batch, sizes)


def lone_plan(problem: Problem, size: int) -> Plan:
    stage = Stage(("a/0",), (0, 1), 1)
    batch = problem.global_batch_size
    return Plan("manual", problem.profile.model, batch, (Pipeline(size, batch, (stage,)),))


def test_a_single_microbatch_whose_gradients_come_after_its_activations_counts() -> None:
    # parameters 1 + states 2 + the larger of gradients 1 and saved 2: 5, not 6
    problem = lone_device(5.0)
    assert fits(lone_plan(problem, 2), problem)
    assert devices_bound_s(problem, 24.0) == pytest.approx(6.0, rel=1e-1)
    for bound_s in bounds_s(problem, 24.0):
        assert bound_s == pytest.approx(6.0, rel=5e-3)


def test_a_single_smaller_microbatch_takes_less_memory() -> None:
    # sizes of 4 need 1 + 2 + 4 = 7 bytes, 3 samples in one microbatch 6; two of them only 5, the plan says 6
    problem = lone_device(6.0, sizes=(4,), batch=3)
    assert fits(lone_plan(problem, 3), problem)
    for bound_s in bounds_s(problem, 36.0):
        assert bound_s == pytest.approx(9.0, rel=5e-3)


def test_a_smaller_last_microbatch_may_take_less_for_a_sample() -> None:
    # of size 2: F 8 and B 8, of size 1: 1 and 1; three samples take 18, not 1.5 * 16 = 24
    problem = lone_device(100.0, batch=3)
    kind = dataclasses.replace(problem.profile.kinds["kind"], layers=(LayerTimes((1.0, 8.0), (1.0, 8.0)),))
    problem = dataclasses.replace(problem, profile=dataclasses.replace(problem.profile, kinds={"kind": kind}))
    assert without_sync_s(lone_plan(problem, 2), problem) == 18.0
    for bound_s in bounds_s(problem, 72.0):
        assert bound_s == pytest.approx(18.0, rel=5e-3)


def test_a_smaller_last_microbatch_counts_in_a_range_of_them() -> None:
    # microbatches of 4 and a last of 2: 18 s on each device; at 12 s, for 4 samples each, 8 of 12 are done
    problem = lone_device(100.0, sizes=(4,), batch=12)
    node = problem.cluster.nodes[0]
    devices = (*node.devices, dataclasses.replace(node.devices[0], name="a/1"))
    cluster = dataclasses.replace(problem.cluster, nodes=(dataclasses.replace(node, devices=devices),))
    for bound_s in bounds_s(dataclasses.replace(problem, cluster=cluster), 72.0):
        assert bound_s == pytest.approx(18.0, rel=2e-2)


def two_layers(
    times: LayerTimes, memory_bytes: float, num_devices: int, *, output_bytes: float, batch: int, size: int
) -> Problem:
    """Two equal layers of 4 bytes of states, measured at 1 and 2 or 1 and 4, on equal devices of one node."""
    layers = tuple(LayerProfile(name, 1.0, output_bytes, 0.1) for name in ("first", "last"))
    kinds = {"kind": KindProfile("measured", (1, size), (times,) * 2)}
    profile = ModelProfile("two layers", 8, "float32", layers, kinds)
    devices = tuple(Device(f"a/{index}", "a", "kind", memory_bytes) for index in range(num_devices))
    cluster = Cluster("lab", Link(0.0, 1e9), (Node("a", devices),))
    return Problem(profile, cluster, batch, (size,))


def test_only_full_microbatches_take_a_full_round_trip() -> None:
    # F 4 and B 4 at size 2, 0.5 and 0.5 at size 1; 8.2 bytes are one layer with one of size 2 in flight.
    # two pipelines of 3 samples: round trips of 16 and of 2 one after the other, not 1.5 * 16 = 24
    times = LayerTimes((0.5, 4.0), (0.5, 4.0))
    problem = two_layers(times, 8.3, 4, output_bytes=1.0, batch=6, size=2)
    pipelines = tuple(
        Pipeline(2, 3, (Stage((f"a/{first}",), (0, 1), 1), Stage((f"a/{first + 1}",), (1, 2), 1)))
        for first in (0, 2)
    )
    plan = Plan("manual", problem.profile.model, 6, pipelines)
    assert fits(plan, problem) and without_sync_s(plan, problem) == pytest.approx(18.0, rel=1e-6)
    for bound_s in (*bounds_s(problem, 72.0), devices_bound_s(problem, 72.0)):
        assert bound_s <= 18.0 * SLACK


def test_a_larger_microbatch_may_take_less_time() -> None:
    # F 8 and B 8 at size 1, 2 and 2 at size 4, so 4 and 4 at 3; 10.3 bytes are one layer of 3 samples
    times = LayerTimes((8.0, 2.0), (8.0, 2.0))
    problem = two_layers(times, 10.4, 2, output_bytes=1.0, batch=3, size=4)
    stages = (Stage(("a/0",), (0, 1), 1), Stage(("a/1",), (1, 2), 1))
    plan = Plan("manual", problem.profile.model, 3, (Pipeline(3, 3, stages),))
    assert fits(plan, problem) and without_sync_s(plan, problem) == pytest.approx(16.0, rel=1e-6)
    for bound_s in (*bounds_s(problem, 64.0), devices_bound_s(problem, 64.0)):
        assert bound_s <= 16.0 * SLACK


def test_a_smaller_last_microbatch_goes_back_behind_a_full_one() -> None:
    # a layer a device, F 1 and B 2 a sample, 5 samples in 2, 2, 1. The last stage: 2 in front, 15, and 2 back
    # for the small one. The full ones: 2 + 12 + 4, and then the small one's backward at the first stage, 2
    problem = two_layers(LayerTimes((1.0, 2.0), (2.0, 4.0)), 6.0, 2, output_bytes=0.0, batch=5, size=2)
    stages = (Stage(("a/0",), (0, 1), 2), Stage(("a/1",), (1, 2), 1))
    plan = Plan("manual", problem.profile.model, 5, (Pipeline(2, 5, stages),))
    assert fits(plan, problem) and without_sync_s(plan, problem) == pytest.approx(20.0, rel=1e-6)
    assert bounds_s(problem, 60.0)[0] == pytest.approx(20.0, rel=1e-3)


def check_pipelines_stand_in_the_way(seed: int) -> None:
    """Of each pipeline of a plan: at prices that ask for just what it does it is not ruled out."""
    problem, plans = tight_case(seed, num_plans=10)
    classes = equal_devices(problem.cluster)
    entries = {device.name: entry for entry, group in enumerate(classes.members) for device in group}
    bound = ColumnBound(ProblemTables(problem, classes), seconds=60.0)
    rng = np.random.default_rng(seed)
    for plan in plans[:3]:
        step_s = without_sync_s(plan, problem)
        floors = PriceBounds(bound.tables, {}, step_s)
        for pipeline in plan.pipelines:
            used = [entries[stage.device] for stage in pipeline.stages]
            prices = np.full(len(classes.counts), 1e4)  # what it does not use is dear
            prices[used] = rng.integers(1, 50, len(used))
            price = float(prices[used].sum())
            ratio = pipeline.num_samples * (1 - 1e-7) / price
            assert step_s == 0 or bound.blocking(floors, prices, ratio) is not None, seed


@pytest.mark.slow
def test_pipelines_stand_in_the_way_of_a_proof() -> None:
    for seed in (*range(60), 20590):  # the last: 6 samples at once need less memory than 4
        check_pipelines_stand_in_the_way(seed)


def least_bytes(profile: ModelProfile, shape: StageShape) -> float:
    """Of all segments that a stage may be recomputed by."""
    choices = segment_choices(shape.stop - shape.start) if shape.recompute else (0,)
    shapes = [shape._replace(segment_layers=each) for each in choices]
    return min(device_memory(profile, [shape]).total_bytes for shape in shapes)


@pytest.mark.slow
def test_most_in_flight_is_what_memory_says() -> None:
    for seed in range(30):
        problem = tight_case(seed, num_plans=4)[0]
        tables = ProblemTables(problem, equal_devices(problem.cluster))
        for samples, count, again in product((1, 2), (1, 2, 3, 5), (False, True)):
            caps = tables.at(samples).most_in_flight(Amount.whole(count, samples), recompute=again)
            for (entry, group), start in product(enumerate(tables.classes.members), range(tables.num_layers)):
                for stop in range(start + 1, tables.num_layers + 1):
                    usable = group[0].usable_bytes * (1 + 1e-9)
                    shapes = [
                        StageShape(start, stop, flight, samples, again, count)
                        for flight in range(1, count + 1)
                    ]
                    held = problem.profile.on(group[0].kind)
                    fitting = [least_bytes(held, shape) <= usable for shape in shapes]
                    assert min(caps[entry, start, stop], count) == sum(fitting), (seed, count, start, stop)


def test_the_segments_of_a_table_are_the_leanest() -> None:
    for seed in range(20):
        profile = tight_case(seed, num_plans=1)[0].profile
        for samples in (1, 3):
            table = leanest_table(profile, samples)
            for start, stop in combinations(range(profile.num_layers + 1), 2):
                shape = StageShape(start, stop, 1, samples, recompute=True)
                each = leanest_segments(profile, shape, whole=False)
                found, least = (
                    device_memory(profile, [shape._replace(segment_layers=k)]).total_bytes
                    for k in (int(table[start, stop]), each)
                )
                assert found == pytest.approx(least, rel=1e-12), (seed, start, stop)


def test_memory_that_just_fits_is_not_lost_by_rounding() -> None:
    for seed in range(60):
        problem, plans = tight_case(seed, num_plans=6)
        tables = ProblemTables(problem, equal_devices(problem.cluster))
        for plan in plans:
            for pipeline in plan.pipelines:
                size = tables.at(pipeline.microbatch_size)
                amount = Amount.exact(pipeline.num_samples, pipeline.microbatch_size)
                for place, stage in enumerate(pipeline.stages):
                    entry = next(
                        index
                        for index, group in enumerate(tables.classes.members)
                        if stage.device in {device.name for device in group}
                    )
                    caps = size.most_in_flight(amount, recompute=stage.recompute)
                    assert caps[entry, stage.start, stage.stop] >= pipeline.in_flight(place), seed


def test_plans_that_are_drawn_cover_the_space() -> None:
    rng = random.Random(0)
    plans = [random_plan(rng, tight_case(seed, num_plans=1)[0]) for seed in range(200)]
    pipelines = [pipeline for plan in plans for pipeline in plan.pipelines]
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    assert sum(len(plan.pipelines) > 1 for plan in plans) > 20
    assert sum(pipeline.num_microbatches == 1 for pipeline in pipelines) > 20
    assert sum(pipeline.num_samples % pipeline.microbatch_size > 0 for pipeline in pipelines) > 20
    assert sum(stage.recompute for stage in stages) > 20
    assert sum(len(pipeline.stages) > 2 for pipeline in pipelines) > 20


def test_intervals_end_at_single_amounts() -> None:
    work, ends = [Interval(4, 1, 3, 1, 3)], []
    while work:
        interval = work.pop()
        if interval.exact:
            ends.append(interval.top)
            assert interval.fewest == interval.top
        else:
            work += interval.parts()
    assert sorted(ends) == [5, 6, 7, 9, 10, 11, 13, 14, 15]
