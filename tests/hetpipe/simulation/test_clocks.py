"""All clocks against each other on random plans: whoever implements a rule of docs/clock.md finds one time.

Of each comparison it is counted how often it was made, so that none is made of nothing.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.collectives import Collective
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import summed_by
from hetpipe.program.instructions import Broadcast, Compute, Pass, Program, Schedule, Step, Sync
from hetpipe.program.list_scheduling import list_schedule
from hetpipe.program.trace import Trace
from hetpipe.program.verification import (
    observed_in_flight,
    verify_computations,
    verify_messages,
    verify_order,
)
from hetpipe.simulation.fast_simulator import StepTimes, has_clock, step_times
from hetpipe.simulation.prediction import evaluator
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.bounds.best_bound import fractional_bound_s, sharded_bound
from partition.estimates.closed_forms import makespan_bound_s
from partition.estimates.pipeline_clock import Seconds, one_f_one_b_s
from partition.estimates.pipeline_costs import PipelineCosts
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem, problem_of_plan
from places import ROOT
from random_plans import crowded_case, random_case, random_plan, random_shared_plan, with_measured_links
from shared_plans import layers_of, plan_of
from shared_plans import pipeline as pipeline_of

FEW, MANY = range(150), range(1000, 1400)
SLACK = 1 + 1e-9  # rounding
LISTED = (Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.LIST)


@dataclass(frozen=True)
class Case:
    """A plan for a problem under one schedule, and what the simulator makes of it."""

    seed: int
    problem: Problem
    plan: Plan
    schedule: Schedule = Schedule.ONE_F_ONE_B

    @property
    def features(self) -> Iterator[str]:
        """The names of what makes the plan hard for a clock."""
        plan, profile, cluster = self.plan, self.problem.profile, self.problem.cluster
        if not all(len(places) == 1 for places in plan.places.values()):
            yield "shared devices"
        if any(entry.num_samples % entry.microbatch_size for entry in plan.pipelines):
            yield "smaller last microbatch"
        if cluster.network.latency_s == 0:
            yield "no latency"
        if any(bucket.nodes for bucket in self.program.buckets):
            yield "sums inside nodes first"
        if plan.zero:
            yield "sharded states"
        if any(layer.tied_to for layer in profile.layers):
            yield "tied weights"
        if cluster.network.bandwidth_bytes_per_s == 1 and not profile.links:
            yield "whole seconds"
        if profile.links:
            yield "measured links"
        if profile.all_reduces:
            yield "measured all-reduces"
        on_card = Counter(
            node
            for entry in plan.pipelines
            for node in {cluster.device(stage.device).node for stage in entry.stages}
        )
        if len(cluster.nodes) > 1 and max(on_card.values()) > 1:
            yield "pipelines on one card"

    @cached_property
    def program(self) -> Program:
        return lower(self.plan, self.problem.profile, self.problem.cluster, self.schedule)

    @cached_property
    def costs(self) -> ProgramCosts:
        return self.costs_of(self.program)

    @cached_property
    def trace(self) -> Trace:
        return simulate(self.costs)

    @cached_property
    def ends_s(self) -> dict[Compute, float]:
        """When each computation ends where no gradients are summed."""
        ranks = tuple(
            tuple(entry for entry in instructions if not isinstance(entry, Sync | Broadcast))
            for instructions in self.program.ranks
        )
        trace = simulate(self.costs_of(replace(self.program, buckets=(), ranks=ranks)))
        return {
            event.instruction: event.end_s for event in trace.events if isinstance(event.instruction, Compute)
        }

    def costs_of(self, program: Program) -> ProgramCosts:
        return ProgramCosts(program, self.problem.profile, self.problem.cluster)

    def seconds(self, pipeline: Pipeline, samples: int) -> Seconds:
        """What a microbatch of these samples takes at each stage and on each link."""
        costs = PipelineCosts(self.problem)
        named = [(self.problem.cluster.device(stage.device), stage) for stage in pipeline.stages]
        price = costs.prices
        return Seconds(
            tuple(price.forward_s(device, *stage.layers, samples) for device, stage in named),
            tuple(
                price.backward_s(device, *stage.layers, samples, recompute=stage.recompute)
                for device, stage in named
            ),
            tuple(
                costs.message_s(device, other, after.start, samples)
                for (device, _), (other, after) in pairwise(named)
            ),
        )

    def routes(self, pipeline: Pipeline) -> list[tuple[int, ...]]:
        """The resources of the messages over each link of a pipeline, each direction apart."""
        return [
            self.costs.network.route(*pair).resources
            for one, other in pairwise([stage.device for stage in pipeline.stages])
            for pair in ((one, other), (other, one))
        ]


def case(seed: int) -> Case:
    """A random problem, crowded or not, and a plan for it, every third with shared devices."""
    rng, crowded = random.Random(seed), seed % 2 == 0
    problem = crowded_case(seed) if crowded else random_case(seed)
    if rng.random() < 0.3:
        problem = replace(problem, profile=with_measured_links(rng, problem.profile))
    if seed % 3 == 0:
        plan = random_shared_plan(rng, problem)
    else:
        plan = random_plan(rng, problem, most=2 if crowded else 5)
    if rng.random() < 0.2:
        plan = replace(plan, zero=1)
    return Case(seed, problem, plan)


def cases(seeds: Iterable[int]) -> list[Case]:
    return [case(seed) for seed in seeds]


def enough(counted: Counter[str], least: int, *names: str) -> None:
    """Check that each was compared often enough to mean something."""
    assert min(counted[name] for name in names) >= least, counted


def compare_fast(case: Case) -> None:
    """Not nearly: the same additions in the same order."""
    plan, trace = case.plan, case.trace
    expected = StepTimes(trace.makespan_s, tuple(map(trace.busy_s, range(len(plan.device_names)))))
    assert step_times(case.costs) == expected, case.seed
    assert step_times(case.costs, many=0) == expected, case.seed
    figures = evaluator(case.problem.profile, case.problem.cluster)(plan)
    assert (figures.step_s, figures.bubble) == (trace.makespan_s, trace.bubble), case.seed


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_the_fast_simulator_finds_the_times_of_the_simulator_to_the_last_bit(seeds: range):
    counted: Counter[str] = Counter()
    for case in cases(seeds):
        if has_clock(case.plan):
            compare_fast(case)
            counted.update(case.features)
    enough(counted, 12, "smaller last microbatch", "no latency", "tied weights", "measured links")
    enough(counted, 6, "measured all-reduces", "pipelines on one card")
    enough(counted, 2, "sums inside nodes first")


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


def compare_lists(case: Case) -> int:
    """The number of computations whose times the list scheduler and the simulator find alike."""
    program = case.program
    verify_messages(program)
    verify_computations(program)
    verify_order(program)
    for (index, stage), most in observed_in_flight(program).items():
        assert most <= program.plan.pipelines[index].in_flight(stage), case.seed
    found = {compute: end for rank in list_schedule(case.costs, case.schedule) for compute, end in rank}
    assert found == case.ends_s, case.seed
    return len(found)


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


def compare_pipeline(case: Case, index: int) -> tuple[float, float]:
    """Seconds of one pipeline by the planner's clock, and in the simulated step."""
    pipeline = case.plan.pipelines[index]
    count = pipeline.num_microbatches
    rest = pipeline.microbatch_samples(count - 1)
    planned_s = one_f_one_b_s(
        case.seconds(pipeline, pipeline.microbatch_size),
        [pipeline.in_flight(stage) for stage in range(len(pipeline.stages))],
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
                busy_s = list(map(sum, zip(full.forward_s, full.backward_s, strict=True)))
                hops_s = list(map(sum, full.link_s))
                least_s = makespan_bound_s(busy_s, hops_s, pipeline.num_microbatches)
                assert least_s <= planned_s * SLACK, case.seed
                counted["above its closed form"] += 1
    enough(counted, 20, "1 stages alone", "2 stages alone", "smaller last microbatch", "no latency")
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


def test_two_stages_of_one_device_beside_a_pipeline_on_another_last_as_long_as_the_scheduler_says():
    """A case that a search once found."""
    plan = plan_of(
        pipeline_of(1, (1, 0, 1, 1), (0, 1, 2, 1), (1, 2, 3, 1), (0, 3, 5, 1)), pipeline_of(3, (0, 0, 5, 1))
    )
    profile, cluster = layers_of(1.0, 0.25, 1.0, 1.0, 0.5)
    network = replace(cluster.network, latency_s=0.3)
    problem = problem_of_plan(plan, profile, replace(cluster, network=network))
    for schedule in LISTED:
        assert compare_lists(Case(0, problem, plan, schedule)) == 14


def one_microbatch(*pipelines: dict[str, tuple[int, int]]) -> Plan:
    """Pipelines of one sample, each the layers [start, stop) of its devices."""
    entries = [
        Pipeline(1, 1, tuple(Stage((name,), layers, 1) for name, layers in stages.items()))
        for stages in pipelines
    ]
    return Plan("manual", "made-up", len(entries), tuple(entries))


def by_hand(parameter_bytes: tuple[float, ...], speed: float, *pipelines: dict[str, tuple[int, int]]) -> Case:
    """Layers of F 1 s, B 2 s on a/0, a/1, b/0 and b/1 (of this speed); messages of a byte, a second each."""
    profile, _ = layers_of(*[3.0] * len(parameter_bytes))
    layers = tuple(
        replace(layer, output_bytes_per_sample=1.0, parameter_bytes=num_bytes)
        for layer, num_bytes in zip(profile.layers, parameter_bytes, strict=True)
    )
    speeds = {"a": (1.0, 1.0), "b": (1.0, speed)}
    nodes = [
        Node(
            name, tuple(Device(f"{name}/{i}", name, "one", 1e6, speed=each) for i, each in enumerate(entries))
        )
        for name, entries in speeds.items()
    ]
    cluster = Cluster("two", Link(0.0, 1.0), tuple(nodes))
    plan = one_microbatch(*pipelines)
    return Case(0, problem_of_plan(plan, replace(profile, layers=layers), cluster), plan)


def test_a_gradient_waits_for_the_sum_that_took_its_card_before_it():
    # a/0 does all layers until 9; the others begin at 0, 2 and 4, and b/1 is done at 7. The sum of layer 2,
    # 4 bytes over a/0 and b/1, holds both cards from 9 to 13. b/0 is done at 10: its gradient leaves at 13,
    # a/1 goes on from 14 to 16. The norm: 6 rounds of 8 bytes.
    case = by_hand((0.0, 0.0, 4.0), 1.0, {"a/0": (0, 3)}, {"a/1": (0, 1), "b/0": (1, 2), "b/1": (2, 3)})
    assert case.trace.makespan_s == 16 + 6 * 8
    compare_fast(case)


def test_of_two_messages_that_are_ready_at_once_the_lower_rank_has_the_card_first():
    # Forwards leave node a from 1 and from 2 s on. b/0 computes from 2 to 5 s, b/1 in 2 s from 3 to 5 s: the
    # gradient of b/0 arrives at 6, that of b/1 at 7. In each round of the norm two messages of 8 bytes leave
    # each node.
    case = by_hand((0.0, 0.0), 1.5, {"a/0": (0, 1), "b/0": (1, 2)}, {"a/1": (0, 1), "b/1": (1, 2)})
    assert [case.ends_s[Compute(Pass.BACKWARD, index, 0, 0)] for index in range(2)] == [8, 9]
    assert case.trace.makespan_s == 9 + 6 * 2 * 8
    compare_fast(case)
    assert compare_lists(case) == 8


def test_the_code_cites_rules_that_are_on_the_page():
    page = (ROOT / "docs/clock.md").read_text(encoding="utf-8")
    rules = set(re.findall(r"^\*\*(R\d+)\.", page, re.MULTILINE))
    assert rules == {f"R{number}" for number in range(1, 14)}
    implementers = re.findall(r"^\| code \| `(.+)` \|$", page, re.MULTILINE)[0].split("` | `")
    assert len(implementers) == 5
    cited = {
        name: set(re.findall(r"\bR\d+\b", (ROOT / name).read_text(encoding="utf-8")))
        for name in [*implementers[:4], "cost_model/network.py", "hetpipe/simulation/fast_kernel.py"]
    }
    assert min(map(len, cited.values())) >= 3 and set.union(*cited.values()) == rules
    assert cited["hetpipe/simulation/simulator.py"] == {
        f"R{number}" for number in range(1, 12) if number != 6
    }
