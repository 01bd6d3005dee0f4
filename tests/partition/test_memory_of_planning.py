"""What planning has made goes with it: nothing waits for the collector, which is paused meanwhile."""

import gc
from contextlib import suppress

import pytest

from cost_model.errors import InfeasibleError
from hetpipe.simulation.prediction import evaluator
from partition.estimates.timed_pipeline import PipelineTiming
from partition.solver import solve
from random_problems import random_problem


@pytest.mark.parametrize("seed", [1, 4, 6])
def test_no_timing_is_left_in_a_cycle_of_references(seed: int) -> None:
    """Rules of published systems that find nothing had kept all that their frames knew, 300 MB a plan."""
    problem = random_problem(seed)
    gc.collect()
    gc.disable()
    try:
        with suppress(InfeasibleError):
            solve(problem, evaluator(problem.profile, problem.cluster), proof_s=0)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [found for found in gc.garbage if isinstance(found, PipelineTiming)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
