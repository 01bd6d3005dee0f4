"""Gradients that travel in bfloat16: rounded in their memory, summed within a bound, alike at all owners."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import runtime_mains
from cost_model.collectives import Collective
from cost_model.dtypes import GRADIENT_BF16
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.runtime.rounded_buffers import front, round_in_place, widen_in_place
from partition.plan import Pipeline
from random_cases import MODULES, Case, random_case
from runtime_mains import case_of, stages

UNIT = 2.0**-8  # of bfloat16: a number is rounded by at most so much of itself


@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 4097, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_rounded_and_widened_where_they_are(count: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randn(count, dtype=dtype, generator=generator) * 1e3
    numbers[0] = torch.inf
    buffer, place = numbers.clone(), 0
    place = buffer.data_ptr()
    round_in_place(buffer, torch.bfloat16)
    rounded = front(buffer, torch.bfloat16)
    assert rounded.data_ptr() == place and rounded.shape == (count,)
    assert torch.equal(rounded, numbers.bfloat16())
    widen_in_place(buffer, torch.bfloat16)
    assert buffer.data_ptr() == place and torch.equal(buffer, numbers.bfloat16().to(dtype))


def rounded(case: Case) -> Case:
    plan = replace(case.program.plan, gradient_dtype=GRADIENT_BF16)
    return replace(case, program=replace(case.program, plan=plan))


def run(main: Any, case: Case, *arguments: Any) -> list[dict[str, Any]]:
    names = case.program.device_names
    events: list[dict[str, Any]] = []
    run_ranks(main, arguments, RankGroup(names, (1,) * len(names), preload=MODULES), events.append)
    return events


@pytest.mark.slow
def test_sums_are_within_their_bound_and_alike_at_all_owners():
    """By every collective, of two to four owners, some of which copy theirs to the host."""
    pipelines = [Pipeline(1, 2, stages((device, 0, 6, 1))) for device in range(4)]
    cases = [rounded(case_of("pairs", *pipelines, collective=way)) for way in Collective]
    sharded = replace(cases[0].program.plan, zero=1, state_owners=("n/0", "n/1", "n/2", "n/3", "n/0", "n/1"))
    cases.append(runtime_mains.lowered_again(cases[0], sharded))
    for case, event in zip(cases, run(runtime_mains.rounded_sums, cases[0], cases), strict=True):
        count = len(case.program.ranks)
        bound = count * UNIT / (1 - count * UNIT)
        assert len(event["worst"]) == len(case.program.buckets)
        assert all(UNIT / 8 < worst <= bound * (1 + 1e-6) for worst in event["worst"]), (event, bound)


@pytest.mark.slow
def test_random_plans_train_near_one_process_with_owners_alike():
    cases = [rounded(random_case(seed, 3, over_nodes=seed % 2 == 0)) for seed in range(12)]
    summing = [case for case in cases if case.program.buckets]
    assert len(summing) >= 8
    assert any(case.program.plan.zero for case in summing)
    for event in run(runtime_mains.train_rounded, summing[0], summing):
        assert 1e-5 < event["worst"] < 3 * UNIT, event  # infinite where owners disagree
