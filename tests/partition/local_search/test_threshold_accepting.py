"""Climbs with the simulator: what they find is no worse than what they begin with."""

import math
from collections.abc import Sequence

import pytest

from hetpipe.simulation.prediction import evaluator
from partition.estimates.timed_pipeline import TimedPipeline
from partition.local_search.pipeline_search import PipelineSearch
from partition.local_search.threshold_accepting import settled, walked
from partition.plan import Plan
from partition.problem import Problem
from random_problems import random_problem
from searches import clock_s, worst_starts


def simulated_s(search: PipelineSearch, problem: Problem, timed: Sequence[TimedPipeline]) -> float:
    plan = search.plan("test", timed)
    return evaluator(problem.profile, problem.cluster)(plan).step_s if plan is not None else math.inf


def test_a_climb_is_no_worse_than_its_starts_and_says_what_the_simulator_says() -> None:
    better = 0
    for seed in range(12):
        problem = random_problem(seed)
        search = PipelineSearch(problem)
        found = search.search(lambda _, seconds: seconds)
        if not found:
            continue

        def judge(
            timed: Sequence[TimedPipeline],
            _: float,
            search: PipelineSearch = search,
            problem: Problem = problem,
        ) -> float:
            return simulated_s(search, problem, timed)

        climbs = settled(search.cut_optimizer, found, judge, always=True)
        starts_s = min(judge(entry.timed, 0.0) for entry in found[:3])
        assert climbs[0].step_s <= starts_s
        assert [entry.step_s for entry in climbs] == sorted(entry.step_s for entry in climbs)
        assert climbs[0].step_s == judge(climbs[0].timed, 0.0)
        better += climbs[0].step_s < starts_s * (1 - 1e-3)
    assert better


def test_a_walk_finds_better_and_better_sets_and_ends_when_told() -> None:
    better = 0
    for search, worst in worst_starts(40):
        walk = walked(search.cut_optimizer, worst, lambda _, seconds: seconds, 100, sweeps=3)
        steps = [worst.step_s, *(entry.step_s for entry in walk)]
        assert steps == sorted(steps, reverse=True) and len(set(steps)) == len(steps)
        for entry in walk:
            assert clock_s(search, entry) == pytest.approx(entry.step_s, rel=3e-4)
        better += bool(walk)
        assert walked(search.cut_optimizer, worst, lambda _, seconds: seconds, 100, lambda: False) == []
    assert better > 5


def test_where_only_the_judge_finds_sets_too_slow_a_walk_gives_up() -> None:
    problem = random_problem(0)
    search = PipelineSearch(problem)
    best = search.search(lambda _, seconds: seconds)[0]
    asked: list[float] = []

    def judge(timed: Sequence[TimedPipeline], seconds: float) -> float:
        asked.append(seconds)
        return 2 * best.step_s

    assert walked(search.cut_optimizer, best, judge, 1000, sweeps=5, in_vain=7) == []
    assert 0 < len(asked) <= 7


def test_where_the_estimates_hold_there_is_no_climb() -> None:
    problem = random_problem(0)
    search = PipelineSearch(problem)
    found = search.search(lambda _, seconds: seconds)
    assert settled(search.cut_optimizer, found, lambda timed, _: found[0].step_s) == []


def test_a_few_devices_are_always_settled() -> None:
    problem = random_problem(0)
    search = PipelineSearch(problem)
    found = search.search(lambda _, seconds: seconds)
    asked: list[Plan] = []

    def simulate(plan: Plan) -> float:
        asked.append(plan)
        return found[0].step_s

    assert search.settled(found, simulate) and asked
