"""All clocks against each other on random plans: whoever implements a rule of docs/clock.md finds one time.

Of each comparison it is counted how often it was made, so that none is made of nothing.
"""

import re
from collections import Counter
from dataclasses import replace

import pytest

from clock_cases import LISTED, Case, cases, compare_fast, compare_lists, enough
from cost_model.collectives import Collective
from hetpipe.program import bucket_sizes
from hetpipe.program.gradient_buckets import gradient_buckets, summed_by
from hetpipe.program.instructions import Broadcast, Step
from hetpipe.simulation.fast_simulator import StepTimes, has_clock, step_times
from hetpipe.simulation.simulator import simulate
from partition.bounds.best_bound import fractional_bound_s
from partition.bounds.sharded_bound import sharded_bound
from partition.estimates.closed_forms import makespan_bound_s
from partition.estimates.pipeline_clock import one_f_one_b_s
from partition.problem import problem_of_plan
from places import ROOT

FEW, MANY = range(150), range(1000, 1400)
SLACK = 1 + 1e-9  # rounding


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_the_fast_simulator_finds_the_times_of_the_simulator_to_the_last_bit(seeds: range):
    counted: Counter[str] = Counter()
    for case in cases(seeds):
        if has_clock(case.plan):
            compare_fast(case)
            counted.update(case.features)
    enough(counted, 12, "smaller last microbatch", "no latency", "tied weights", "measured links")
    enough(counted, 6, "measured all-reduces", "pipelines on one card", "no backward below")
    enough(counted, 6, "rounded gradients")
    enough(counted, 2, "sums inside nodes first", "sums inside a backward")


def test_sums_cut_into_single_layers_are_alike_to_both_simulators(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket_sizes, "BUCKET_BYTES", 1e-9)
    monkeypatch.setattr(bucket_sizes, "LEAST_GAIN", -1e9)  # whether it gains or not
    cut = 0
    for case in cases(FEW):
        if has_clock(case.plan) and "sums inside a backward" in case.features:
            compare_fast(case)
            cut += len(case.program.buckets) > len(gradient_buckets(case.plan, case.problem.profile))
    assert cut >= 5


def test_sums_inside_nodes_first_are_alike_to_both_simulators_where_they_are_not_cheaper_too():
    counted: Counter[str] = Counter()
    for case in cases(FEW):
        if not has_clock(case.plan) or case.plan.zero:
            continue
        network = case.costs.network
        forced = tuple(
            summed_by(bucket, Collective.HIERARCHICAL, case.plan, network) for bucket in case.program.buckets
        )
        costs = case.costs_of(replace(case.program, buckets=forced))
        trace = simulate(costs)
        busy_s = tuple(map(trace.busy_s, range(len(case.plan.device_names))))
        assert step_times(costs) == StepTimes(trace.makespan_s, busy_s), case.seed
        if any(1 < len(bucket.nodes) < len(bucket.ranks) for bucket in forced):
            counted.update(["on several nodes, one of them with several", *case.features])
        elif forced:
            counted["on one node, or one on each"] += 1
    enough(counted, 6, "on several nodes, one of them with several", "on one node, or one on each")


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_an_order_made_by_the_list_scheduler_lasts_as_long_as_it_says(seeds: range):
    counted: Counter[str] = Counter()
    for number, case in enumerate(cases(seeds)):
        case = replace(case, schedule=LISTED[number // 3 % 3])
        counted[case.schedule] += compare_lists(case) > 0
        counted.update(case.features)
    enough(counted, 40, *LISTED, "smaller last microbatch", "no latency")
    enough(
        counted,
        20,
        "shared devices",
        "sharded states",
        "tied weights",
        "measured links",
        "pipelines on one card",
    )
    enough(counted, 5, "no backward below")


def compare_pipeline(case: Case, index: int) -> tuple[float, float]:
    """Seconds of one pipeline by the planner's clock, and in the simulated step."""
    pipeline = case.plan.pipelines[index]
    count = pipeline.num_microbatches
    rest = pipeline.microbatch_samples(count - 1)
    planned_s = one_f_one_b_s(
        case.seconds(pipeline, pipeline.microbatch_size),
        [case.program.plan.pipelines[index].in_flight(stage) for stage in range(len(pipeline.stages))],
        count,
        None if rest == pipeline.microbatch_size else case.seconds(pipeline, rest),
    )
    return planned_s, max(end for compute, end in case.ends_s.items() if compute.pipeline == index)


@pytest.mark.parametrize("seeds", [range(300), pytest.param(MANY, marks=pytest.mark.slow)])
def test_the_planners_clock_is_the_simulator_for_a_pipeline_alone_and_never_above_it(seeds: range):
    counted: Counter[str] = Counter()
    for case in cases(seeds):
        if "shared devices" in case.features:
            continue
        used = Counter(
            resource
            for pipeline in case.plan.pipelines
            for route in case.routes(pipeline)
            for resource in route
        )
        for index, pipeline in enumerate(case.plan.pipelines):
            planned_s, simulated_s = compare_pipeline(case, index)
            assert planned_s <= simulated_s * SLACK, case.seed
            if all(used[resource] == 1 for route in case.routes(pipeline) for resource in route):
                assert planned_s == pytest.approx(simulated_s, rel=1e-12), case.seed
                counted[f"{min(3, len(pipeline.stages))} stages alone"] += 1
                counted.update(case.features)
            elif planned_s < simulated_s / SLACK:
                counted["delayed by others"] += 1
            if pipeline.num_samples % pipeline.microbatch_size == 0:
                full = case.seconds(pipeline, pipeline.microbatch_size)
                least_s = makespan_bound_s(full.busy_s, full.round_trips_s, pipeline.num_microbatches)
                assert least_s <= planned_s * SLACK, case.seed
                counted["above its closed form"] += 1
    enough(counted, 20, "1 stages alone", "2 stages alone", "smaller last microbatch", "no latency")
    enough(counted, 5, "no backward below")
    enough(counted, 10, "3 stages alone", "measured links", "delayed by others", "above its closed form")


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_step_is_below_its_bounds(seeds: range):
    counted: Counter[str] = Counter()
    for case in cases(seeds):
        trace, problem = case.trace, problem_of_plan(case.plan, case.problem.profile, case.problem.cluster)
        least_s = sharded_bound(problem).fractional_s if case.plan.zero else fractional_bound_s(problem)
        step_s = trace.makespan_s * SLACK
        assert step_s >= least_s > 0, case.seed
        assert step_s >= max(map(trace.busy_s, range(len(trace.device_names)))), case.seed
        assert step_s >= max(case.ends_s.values()), case.seed  # sums delay, they never hurry
        assert 0 <= trace.bubble < 1 and min(event.start_s for event in trace.events) == 0
        ends = [event.end_s for event in trace.events if isinstance(event.instruction, Step | Broadcast)]
        assert trace.makespan_s == max(ends)
        counted.update(case.features)
    enough(counted, 20, "shared devices", "sharded states", "tied weights", "measured links", "no latency")
    enough(counted, 10, "no backward below")


def test_the_code_cites_rules_that_are_on_the_page():
    page = (ROOT / "docs/clock.md").read_text(encoding="utf-8")
    rules = set(re.findall(r"^\*\*(R\d+)\.", page, re.MULTILINE))
    assert rules == {f"R{number}" for number in range(1, 15)}
    implementers = re.findall(r"^\| code \| `(.+)` \|$", page, re.MULTILINE)[0].split("` | `")
    assert len(implementers) == 5
    cited = {
        name: set(re.findall(r"\bR\d+\b", (ROOT / name).read_text(encoding="utf-8")))
        for name in [*implementers[:4], "cost_model/network.py", "hetpipe/simulation/fast_kernel.py"]
    }
    assert min(map(len, cited.values())) >= 3 and set.union(*cited.values()) == rules
    assert cited["hetpipe/simulation/simulator.py"] == {
        f"R{number}" for number in (*range(1, 12), 14) if number != 6
    }
