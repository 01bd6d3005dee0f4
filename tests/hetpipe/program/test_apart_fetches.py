"""Weights that each device of pipelines with stages fetches for itself: lists, seconds, refusals."""

from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, HostMemory, Link, Node
from cost_model.errors import InputError
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Program
from hetpipe.program.program_text import parse_instruction, parse_program
from hetpipe.program.verification import verify
from hetpipe.reporting.critical_path import critical_path
from hetpipe.reporting.idle_time import Cause, cause_text, device_times
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage


def two_layers() -> tuple[ModelProfile, Cluster]:
    """Two layers of 40 bytes, F 1 s and B 2 s; three nodes of one device, 40 bytes a second between.

    The devices are GPUs, from which and to which hosts copy at once.
    """
    times = LayerTimes((1.0,), (2.0,))
    layers = tuple(LayerProfile(f"layer{index}", 40.0, 1.0, 1.0) for index in range(2))
    profile = ModelProfile("two", 1, "float32", layers, {"one": KindProfile("measured", (1,), (times,) * 2)})
    at_hand = HostMemory(1e9, Link(0.0, 1e30))
    nodes = tuple(Node(name, (Device(f"{name}/0", name, "one", 1e4),), host_memory=at_hand) for name in "abc")
    return profile, Cluster("two", Link(0.0, 40.0), nodes)


def plan_of(layer_zero: tuple[int, ...] | None = None) -> Plan:
    """A sample through a/0 and b/0, which own a layer each; two on c/0, which owns nothing."""
    cut = Pipeline(1, 1, (Stage(("a/0",), (0, 1), 1), Stage(("b/0",), (1, 2), 1)))
    whole = Pipeline(1, 2, (Stage(("c/0",), (0, 2), 1),))
    return Plan("manual", "two", 3, (cut, whole), 3, ("a/0", "b/0"), layer_zero=layer_zero)


def words(program: Program, rank: int) -> str:
    return " ".join(map(str, program.ranks[rank]))


def test_each_device_fetches_what_it_does_not_own_as_often_as_it_needs_it() -> None:
    profile, cluster = two_layers()
    program = lower(plan_of(), profile, cluster)
    # bucket 0 is the second layer. No rank has a GATHER for what another one computes.
    assert words(program, 0) == "0F0@0 0SEND_F0 0RECV_B0 0B0@0 REDUCE1.0 REDUCE1.1 NORM STEP"
    assert words(program, 1) == "1RECV_F0 1F0@1 1B0@1 1SEND_B0 REDUCE0.0 REDUCE0.1 NORM STEP"
    assert words(program, 2) == (
        "GATHER1.0 GATHER0.0 1:0F0@0 1:0F0@1 GATHER1.1 1:0B0@1 REDUCE0.0 1:0B0@0 REDUCE1.0 "
        "GATHER0.1 1:0F1@0 1:0F1@1 GATHER1.2 1:0B1@1 REDUCE0.1 1:0B1@0 REDUCE1.1 NORM STEP"
    )
    verify(program, profile, cluster)
    assert parse_program(program.text, program.plan) == program


def test_layers_of_a_lower_stage_are_summed_once_and_broadcast() -> None:
    profile, cluster = two_layers()
    program = lower(plan_of((3, 1)), profile, cluster)
    assert words(program, 1) == "1RECV_F0 1F0@1 1B0@1 1SEND_B0 REDUCE0.0 NORM STEP BCAST0"
    assert words(program, 2) == (
        "GATHER1.0 1:0F0@0 1:0F0@1 GATHER1.1 1:0B0@1 1:0B0@0 REDUCE1.0 "
        "1:0F1@0 1:0F1@1 GATHER1.2 1:0B1@1 1:0B1@0 REDUCE1.1 REDUCE0.0 NORM STEP BCAST0"
    )
    verify(program, profile, cluster)


def test_an_owner_serves_while_it_computes_and_after_it_has_computed_all() -> None:
    # a/0: F from 0 to 1. b/0: F@1 from 1.025 to 2.025, B@1 until 4.025. c/0 has the first layer at 1, while
    # a/0 computes; the second one, behind it on its card, at 2. F@0 1 to 2, F@1 2 to 3; GATHER1.1 3 to 4,
    # B@1 3 to 5; REDUCE0.0 5 to 6; B@0 5 to 7; REDUCE1.0 7 to 8. GATHER0.1 7 to 8, F@0 7 to 8, F@1 8 to 9;
    # GATHER1.2 9 to 10, from a/0, which has been idle since 6.05; B@1 9 to 11, B@0 11 to 13, REDUCE1.1 13 to
    # 14.
    profile, cluster = two_layers()
    costs = ProgramCosts(lower(plan_of(), profile, cluster), profile, cluster)
    trace = simulate(costs)
    ends = {(event.rank, str(event.instruction)): event.end_s for event in trace.events}
    assert (ends[2, "GATHER1.0"], ends[2, "GATHER0.0"], ends[2, "1:0F0@1"]) == (1, 2, 3)
    assert (ends[2, "GATHER1.1"], ends[2, "1:0B0@0"], ends[0, "REDUCE1.0"]) == (4, 7, 8)
    assert (ends[2, "GATHER1.2"], ends[2, "1:0B1@0"], ends[0, "REDUCE1.1"]) == (10, 13, 14)
    assert (ends[1, "1B0@1"], ends[0, "0B0@0"]) == pytest.approx((4.025, 6.05))
    assert sum(part.duration_s for part in critical_path(trace, costs)) == pytest.approx(trace.makespan_s)
    third = device_times(trace, costs)[2]
    assert third.waiting_for[cause_text(Cause.GATHER, "")] == pytest.approx(1.0)  # for its first layer


def changed(program: Program, rank: int, old: str, new: str) -> Program:
    text = words(program, rank)
    assert old in text
    instructions = tuple(map(parse_instruction, text.replace(old, new, 1).split()))
    return replace(
        program, ranks=tuple(instructions if r == rank else row for r, row in enumerate(program.ranks))
    )


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "0F0@0", "GATHER1.0 0F0@0", r"GATHER on ranks \[0, 2\] under zero 3"),
        (2, "GATHER0.1 ", "", "has 1:0F1@1 before the GATHER of bucket 0"),
        (2, "GATHER1.2", "GATHER1.3", "in order"),
        (2, "REDUCE1.1 ", "", "each rank must have the same, in order"),
    ],
)
def test_wrong_fetches_are_refused(rank: int, old: str, new: str, message: str) -> None:
    profile, cluster = two_layers()
    program = lower(plan_of(), profile, cluster)
    with pytest.raises(InputError, match=message):
        verify(changed(program, rank, old, new), profile, cluster)
