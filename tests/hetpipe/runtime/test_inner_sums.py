"""Sums that begin inside the last backward: where, in which order, and the gradients that come of it."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import runtime_mains
from cost_model.errors import InputError
from hetpipe.runtime.inner_sums import _Inner, _Watch
from hetpipe.runtime.pace import EmulatedPace, Pace
from hetpipe.runtime.processes import RankGroup, run_ranks
from partition.plan import Pipeline
from runtime_mains import case_of, stages
from stress_ranks import staging_of


def starts(*pipelines: Pipeline, copied: bool = False) -> list[dict[str, Any]]:
    """What the ranks saw of sums of single layers. copied: by ranks that copy them to the host first."""
    case = replace(case_of("pairs", *pipelines, most_bytes=1.0), name="by hand" if copied else "no copies")
    assert any(staging_of(case).on_gpu) == copied
    names = case.program.device_names
    events: list[dict[str, Any]] = []
    run_ranks(runtime_mains.inner_starts, (case,), RankGroup(names, (1,) * len(names)), events.append)
    for event in events:
        mine = [index for index, bucket in enumerate(case.program.buckets) if event["rank"] in bucket.ranks]
        assert [bucket for bucket, _ in event["starts"]] == 2 * mine  # two steps, each bucket once, in order
        assert event["worst"] < 1e-12
    return sorted(events, key=lambda event: event["rank"])


def whole(device: int, **recompute: Any) -> Pipeline:
    return Pipeline(1, 2, stages((device, 0, 6, 2), **recompute))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute", [{}, {"recompute": True}, {"recompute": True, "segment_layers": 1}], ids=str
)
def test_all_sums_but_the_last_begin_inside_the_last_backward(recompute):
    for event in starts(whole(0, **recompute), whole(1, **recompute)):
        route = "1:" if event["rank"] else ""
        inside = [where == f"{route}0B1" for _, where in event["starts"]]
        assert all(where in ("", f"{route}0B1") for _, where in event["starts"])
        assert len(inside) >= 8 and sum(inside) >= len(inside) - 2 * 2  # layer 0 and tied weights come last


@pytest.mark.slow
def test_sums_of_stages_that_send_begin_behind_the_send():
    first, second = Pipeline(1, 2, stages((0, 0, 3, 2), (1, 3, 6, 1))), whole(2)
    found = starts(first, second)
    assert {where for _, where in found[1]["starts"]} == {""}
    assert {where for _, where in found[2]["starts"]} == {"", "1:0B1"}


@pytest.mark.slow
def test_sums_that_are_copied_to_the_host_begin_behind_the_backward():
    copying, other = starts(whole(0), whole(1), copied=True)
    assert {where for _, where in copying["starts"]} == {""}
    assert {where for _, where in other["starts"]} == {"", "1:0B1"}


def watch(pace: Pace, start_s: float, times: int, *weights: nn.Parameter) -> tuple[_Watch, list[int]]:
    """One bucket for each weight, whose sums begin in the list returned."""
    begun: list[int] = []
    inside = [_Inner(index, 0.05 * (1 + index), [(weight, times)]) for index, weight in enumerate(weights)]
    watching = _Watch(inside, start_s, pace, lambda bucket, ready_s: begun.append(bucket))
    for index, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(partial(watching.made, index))
    return watching, begun


def test_a_bucket_waits_for_the_one_before_it():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    _, begun = watch(Pace(), 0.0, 1, first, second)
    (second * 2).sum().backward()
    assert begun == []
    (first * 2).sum().backward()
    assert begun == [0, 1]


def test_a_gradient_that_comes_twice_is_refused():
    weight = nn.Parameter(torch.ones(2))
    watch(Pace(), 0.0, 1, weight)

    def part(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    x = torch.ones(2, requires_grad=True)
    once = checkpoint(part, x, use_reentrant=True)
    with pytest.raises(InputError, match="gets its gradient in more runs of autograd than its layers"):
        checkpoint(part, once, use_reentrant=True).sum().backward()


@pytest.mark.alone
def test_on_an_emulated_device_a_sum_begins_when_its_part_of_the_backward_is_over():
    pace = EmulatedPace()
    pace.start_step(0.0)
    start_s = pace.begin(0.0)
    weights = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    watching, begun = watch(pace, start_s, 1, *weights)
    (weights[0] * weights[1]).sum().backward()
    assert begun == []  # the gradients are there, on the device's clock they are not
    watching.begin_due(wait=True)
    assert begun == [0, 1]
    assert pace.begin(0.0) >= start_s and pace.end(start_s, 0.1) == pytest.approx(start_s + 0.1, abs=0.06)


@pytest.mark.alone
def test_the_part_of_a_slow_cpu_counts_its_own_seconds():
    pace = EmulatedPace(cpu_speed=0.5)
    pace.start_step(0.0)
    start_s = pace.begin(0.0)
    pace.leave_out(-0.25)  # as if the thread had computed for so long
    assert pace.part(start_s, 100.0) == pytest.approx(start_s + 0.5, abs=0.05)
    pace.leave_out(0.25)
    assert pace.part(start_s, 100.0) == pytest.approx(start_s, abs=0.05)
