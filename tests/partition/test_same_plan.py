"""The same input gives the same plan, whatever the clocks say meanwhile."""

import gc
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import highspy
import pytest

from hetpipe.simulation.prediction import evaluator
from partition import solver
from partition.estimates.timed_pipeline import TimedStage
from partition.local_search.pipeline_search import PipelineSearch
from partition.problem import Problem
from partition.solver import solve
from random_problems import random_cluster, random_profile


def rounded_problem(seed: int) -> Problem:
    """Six to ten devices: the search rounds a linear programme to whole pipelines."""
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(3, 6))
    states = 4 * sum(layer.parameter_bytes for layer in profile.layers)
    cluster = random_cluster(rng, rng.randint(6, 10), rng.choice([0.6, 1.2, 3]) * states + 8)
    return Problem(profile, cluster, rng.randint(20, 60), (1, 2))


def searched(problem: Problem) -> list[tuple[float, list[tuple[TimedStage, ...]]]]:
    """Return (seconds, stages of each pipeline) of all sets that are found."""
    found = PipelineSearch(problem).search(lambda timed, seconds: seconds)
    return [(entry.step_s, [pipeline.stages for pipeline in entry.timed]) for entry in found]


@contextmanager
def late_clocks() -> Iterator[Counter[str]]:
    """Clocks that are an hour later at each look; gives how often integer programmes ran.

    HiGHS has a clock of its own: where it has a limit in seconds, time is up.
    """
    counted: Counter[str] = Counter()
    run = highspy.Highs.run

    def later() -> float:
        counted["looks"] += 1
        return 3600.0 * counted["looks"]

    def late_run(solver: highspy.Highs) -> highspy.HighsStatus:
        counted["integer programmes"] += bool(solver.getLp().integrality_)
        if solver.getOptionValue("time_limit")[1] < math.inf:
            solver.setOptionValue("time_limit", 0.0)
        return run(solver)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(highspy.Highs, "run", late_run))
        for name in ("time", "monotonic", "perf_counter", "process_time"):
            patches.enter_context(mock.patch.object(time, name, later))
        yield counted


@pytest.mark.parametrize("seed", [1, 8])
def test_a_search_finds_the_same_sets_when_all_clocks_are_late(seed: int):
    problem = rounded_problem(seed)
    found = searched(problem)
    with late_clocks() as counted:
        again = searched(problem)
    assert counted["integer programmes"] > 0
    assert again == found


@pytest.mark.slow
def test_late_clocks_end_the_proof_and_leave_the_plan():
    problem = rounded_problem(6)
    evaluate = evaluator(problem.profile, problem.cluster)
    plan = solve(problem, evaluate, proof_s=2.0)
    with late_clocks() as counted:
        late = solve(problem, evaluate, proof_s=2.0)
    assert counted["looks"] > 0
    assert late.pipelines == plan.pipelines
    assert plan.predicted is not None and late.predicted is not None
    assert late.predicted.step_s == plan.predicted.step_s
    assert late.predicted.bound_s < plan.predicted.bound_s


def test_what_a_search_keeps_is_not_searched_for_cycles_as_soon_as_it_is_over():
    with solver._collector_paused():
        kept = [[]]
    assert any(one is kept for one in gc.get_objects(generation=2))
    assert gc.isenabled()
