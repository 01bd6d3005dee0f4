"""Climbs with the simulator: what they find is no worse than what they begin with."""

import math
from collections.abc import Sequence

from hetpipe.planning import evaluator
from partition.climbs import settled
from partition.pipeline_search import PipelineSearch
from partition.plan import Plan
from partition.problem import Problem
from partition.worker import Worker
from random_problems import random_problem

TRIES = 40


def simulated_s(search: PipelineSearch, problem: Problem, workers: Sequence[Worker]) -> float:
    plan = search.plan("test", workers)
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
            workers: Sequence[Worker], _: float, search: PipelineSearch = search, problem: Problem = problem
        ) -> float:
            return simulated_s(search, problem, workers)

        climbs = settled(search.recutter, found, judge, TRIES, always=True)
        starts_s = min(judge(entry.workers, 0.0) for entry in found[:3])
        assert climbs[0].step_s <= starts_s
        assert [entry.step_s for entry in climbs] == sorted(entry.step_s for entry in climbs)
        assert climbs[0].step_s == judge(climbs[0].workers, 0.0)
        better += climbs[0].step_s < starts_s * (1 - 1e-3)
    assert better


def test_where_the_estimates_hold_there_is_no_climb() -> None:
    problem = random_problem(0)
    search = PipelineSearch(problem)
    found = search.search(lambda _, seconds: seconds)
    assert settled(search.recutter, found, lambda workers, _: found[0].step_s, TRIES) == []


def test_a_few_devices_are_always_settled() -> None:
    problem = random_problem(0)
    search = PipelineSearch(problem)
    found = search.search(lambda _, seconds: seconds)
    asked: list[Plan] = []

    def simulate(plan: Plan) -> float:
        asked.append(plan)
        return found[0].step_s

    assert search.settled(found, simulate) and asked
