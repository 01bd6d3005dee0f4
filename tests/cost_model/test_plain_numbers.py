"""Numbers that callers give: NumPy's are numbers, and what is none is told by its name."""

import json

import numpy as np
import pytest

from cost_model.errors import InputError
from cost_model.plain_numbers import whole_number
from hetpipe.runs.settings import checked_settings
from hetpipe.simulation.prediction import evaluator
from partition.plan_file import plan_text
from partition.problem import problem_of
from partition.solver import solve
from random_problems import random_problem


@pytest.mark.parametrize("value", [True, np.True_, 16.0, np.float32(16), float("nan"), "16", None, [16]])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(InputError, match=r"^steps is .*; give a whole number$"):
        whole_number("steps", value)


def test_a_problem_is_of_whole_numbers():
    case = random_problem(3)
    for batch in (16.0, "16", None, True, float("nan")):
        with pytest.raises(InputError, match=r"global_batch_size is .*; give a whole number"):
            problem_of(case.profile, case.cluster, batch)
        with pytest.raises(InputError, match=r"microbatch_size is .*; give a whole number"):
            problem_of(case.profile, case.cluster, 16, batch if batch is not None else [2])


def test_numbers_of_numpy_are_numbers():
    case = random_problem(3)
    given = problem_of(case.profile, case.cluster, np.int64(16), np.int32(2))
    plan = solve(given, evaluator(case.profile, case.cluster), proof_s=0)
    assert plan_text(plan) == plan_text(
        solve(problem_of(case.profile, case.cluster, 16, 2), evaluator(case.profile, case.cluster), proof_s=0)
    )
    assert type(json.loads(plan_text(plan))["global_batch_size"]) is int
    settings = checked_settings(steps=np.int64(3), learning_rate=np.float64(0.1), clip_norm=np.float32(0.5))
    assert (settings.steps, settings.learning_rate, settings.clip_norm) == (3, 0.1, 0.5)
    assert {type(settings.steps), type(settings.learning_rate)} == {int, float}
