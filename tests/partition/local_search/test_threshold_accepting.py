"""Climbs with the simulator: what they find is no worse than what they begin with."""

import math
from collections.abc import Sequence

import pytest

from hetpipe.simulation.prediction import evaluator
from partition.estimates.effort import SimulatorEffort, Sweeps, effort_for
from partition.estimates.timed_pipeline import TimedPipeline
from partition.local_search.pipeline_search import PipelineSearch
from partition.local_search.threshold_accepting import improve_with_simulator, threshold_accepting
from partition.plan import Plan
from partition.problem import Problem
from random_problems import random_problem
from searches import clock_s, worst_starts


def simulated_s(search: PipelineSearch, problem: Problem, timed: Sequence[TimedPipeline]) -> float:
    plan = search.plan("test", timed)
    return evaluator(problem.profile, problem.cluster)(plan).step_s if plan is not None else math.inf


def simulator_effort(num_devices: int) -> SimulatorEffort:
    effort = effort_for(num_devices).simulator
    assert effort is not None
    return effort


@pytest.mark.slow
def test_a_climb_is_no_worse_than_its_starts_and_says_what_the_simulator_says() -> None:
    better = 0
    for seed in range(12):
        problem = random_problem(seed)
        search = PipelineSearch(problem)
        found = search.search(lambda _, seconds: seconds)
        if not found:
            continue

        def simulate(
            timed: Sequence[TimedPipeline],
            _: float,
            search: PipelineSearch = search,
            problem: Problem = problem,
        ) -> float:
            return simulated_s(search, problem, timed)

        climbs = improve_with_simulator(search.cut_optimizer, found, simulate, simulator_effort(1))
        starts_s = min(simulate(entry.timed, 0.0) for entry in found[:3])
        assert climbs[0].step_s <= starts_s
        assert [entry.step_s for entry in climbs] == sorted(entry.step_s for entry in climbs)
        assert climbs[0].step_s == simulate(climbs[0].timed, 0.0)
        better += climbs[0].step_s < starts_s * (1 - 1e-3)
    assert better


@pytest.mark.slow
def test_a_walk_finds_better_and_better_sets_and_ends_when_told() -> None:
    better = 0
    for search, worst in worst_starts(40):
        effort = Sweeps(tries=100, sweeps=3)
        walk = threshold_accepting(search.cut_optimizer, worst, lambda _, seconds: seconds, effort)
        steps = [worst.step_s, *(entry.step_s for entry in walk)]
        assert steps == sorted(steps, reverse=True) and len(set(steps)) == len(steps)
        for entry in walk:
            assert clock_s(search, entry) == pytest.approx(entry.step_s, rel=3e-4)
        better += bool(walk)
        assert (
            threshold_accepting(
                search.cut_optimizer, worst, lambda _, seconds: seconds, Sweeps(tries=100), lambda: False
            )
            == []
        )
    assert better > 5


def test_where_only_the_evaluation_finds_sets_too_slow_a_walk_gives_up() -> None:
    problem = random_problem(0)
    search = PipelineSearch(problem)
    best = search.search(lambda _, seconds: seconds)[0]
    asked: list[float] = []

    def evaluate(timed: Sequence[TimedPipeline], seconds: float) -> float:
        asked.append(seconds)
        return 2 * best.step_s

    effort = Sweeps(tries=1000, sweeps=5, most_late=7)
    assert threshold_accepting(search.cut_optimizer, best, evaluate, effort) == []
    assert 0 < len(asked) <= 7


def test_where_the_estimates_hold_there_is_no_climb() -> None:
    problem = random_problem(0)
    search = PipelineSearch(problem)
    found = search.search(lambda _, seconds: seconds)
    as_estimated = simulator_effort(16)
    assert improve_with_simulator(search.cut_optimizer, found, lambda *_: found[0].step_s, as_estimated) == []


def test_sets_of_few_devices_are_always_improved_with_the_simulator() -> None:
    problem = random_problem(0)
    search = PipelineSearch(problem)
    found = search.search(lambda _, seconds: seconds)
    asked: list[Plan] = []

    def simulate(plan: Plan) -> float:
        asked.append(plan)
        return found[0].step_s

    assert search.improve_with_simulator(found, simulate) and asked
