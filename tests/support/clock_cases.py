"""Random plans, and what the simulator makes of them: for tests that hold clocks against each other."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from cost_model.dtypes import GRADIENT_BF16
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Broadcast, Compute, Program, Schedule, Sync
from hetpipe.program.list_scheduling import list_schedule
from hetpipe.program.sync_starts import inner_syncs
from hetpipe.program.trace import Trace
from hetpipe.program.verification import (
    observed_in_flight,
    verify_computations,
    verify_messages,
    verify_order,
)
from hetpipe.simulation.fast_simulator import StepTimes, step_times
from hetpipe.simulation.prediction import evaluator
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.estimates.pipeline_clock import Seconds
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimingCache, timed_stages
from partition.plan import Pipeline, Plan
from partition.problem import Problem
from random_plans import crowded_case, random_case, random_plan, random_shared_plan, with_measured_links
from random_problems import frozen_below

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
        if any(inner_syncs(self.program, rank) for rank in range(len(self.program.ranks))):
            yield "sums inside a backward"
        if plan.zero:
            yield "sharded states"
        if self.program.buckets and plan.gradient_dtype == GRADIENT_BF16:
            yield "rounded gradients"
        if any(entry.first_backward(profile.first_trained) for entry in plan.pipelines):
            yield "no backward below"
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
        stages = timed_stages(self.problem.cluster, pipeline)
        return TimingCache(PipelineCosts(self.problem)).pipeline(stages, samples).timing.full

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
    if seed % 5 in (1, 3) and not any(layer.tied_to for layer in problem.profile.layers):
        first_trained = random.Random(-seed).randrange(problem.profile.num_layers)
        problem = replace(problem, profile=frozen_below(problem.profile, first_trained))
    if seed % 4 == 1:
        problem, plan = (replace(each, gradient_dtype=GRADIENT_BF16) for each in (problem, plan))
    return Case(seed, problem, plan)


def cases(seeds: Iterable[int]) -> list[Case]:
    return [case(seed) for seed in seeds]


def enough(counted: Counter[str], least: int, *names: str) -> None:
    """Check that each was compared often enough to mean something."""
    assert min(counted[name] for name in names) >= least, counted


def compare_fast(case: Case) -> None:
    """Not nearly: the same additions in the same order."""
    plan, trace = case.program.plan, case.trace
    expected = StepTimes(trace.makespan_s, tuple(map(trace.busy_s, range(len(plan.device_names)))))
    assert step_times(case.costs) == expected, case.seed
    assert step_times(case.costs, many=0) == expected, case.seed
    figures = evaluator(case.problem.profile, case.problem.cluster)(plan)
    assert (figures.step_s, figures.bubble) == (trace.makespan_s, trace.bubble), case.seed


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
