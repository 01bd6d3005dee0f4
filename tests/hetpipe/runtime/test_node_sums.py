"""Sums inside nodes first, on real ranks: the sum is right, and all owners have the same bytes."""

from typing import Any

import pytest

import runtime_mains
from cost_model.collectives import Collective
from hetpipe.runtime.processes import RankGroup, run_ranks
from partition.plan import Pipeline
from random_cases import Case
from runtime_mains import case_of, stages


def whole_model_on(*devices: int) -> Case:
    """A pipeline of one stage on each; even devices are on one node, odd ones on the other."""
    pipelines = [Pipeline(1, 2, stages((device, 0, 6, 1))) for device in devices]
    return case_of("pairs", *pipelines, collective=Collective.HIERARCHICAL)


def gradients(case: Case) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    names = case.program.device_names
    run_ranks(runtime_mains.summed_gradients, (case,), RankGroup(names, (1,) * len(names)), events.append)
    return sorted(events, key=lambda event: event["rank"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "nodes"),
    [
        ((0, 1, 2, 3), ((0, 2), (1, 3))),
        ((1, 0, 2), ((0,), (1, 2))),
        ((0, 2), ((0, 1),)),
    ],
    ids=["two of two", "one of one, one of two", "one node"],
)
def test_all_owners_end_with_the_bytes_of_one_sum(devices, nodes):
    case = whole_model_on(*devices)
    assert {bucket.nodes for bucket in case.program.buckets} == {nodes}
    events = gradients(case)
    assert len(events) == len(devices)
    assert len(events[0]["steps"]) == 2 and events[0]["steps"][0] != events[0]["steps"][1]
    for event in events:
        assert event["steps"] == events[0]["steps"]  # digests of the bytes
        assert event["worst"] < 1e-12
