import random
from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InputError
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Instruction, Program, Schedule
from hetpipe.program.lowering import lower_as
from hetpipe.program.program_text import parse_instruction, parse_program
from hetpipe.program.verification import verify
from hetpipe.reporting.critical_path import critical_path
from hetpipe.reporting.idle_time import device_times
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage
from random_cases import random_case


def two_layers() -> tuple[ModelProfile, Cluster]:
    """Two layers of 40 bytes, F 1 s and B 2 s; two nodes of one device, 40 bytes a second between."""
    times = LayerTimes((1.0,), (2.0,))
    layers = tuple(LayerProfile(f"layer{index}", 40.0, 1.0, 1.0) for index in range(2))
    profile = ModelProfile("two", 1, "float32", layers, {"one": KindProfile("measured", (1,), (times,) * 2)})
    nodes = tuple(Node(name, (Device(f"{name}/0", name, "one", 1e4),)) for name in "ab")
    return profile, Cluster("two", Link(0.0, 40.0), nodes)


def replicas(zero: int) -> Plan:
    """One sample on a/0, which owns the first layer, two on b/0, which owns the second."""
    pipelines = tuple(
        Pipeline(1, count, (Stage((name,), (0, 2), 1),)) for name, count in (("a/0", 1), ("b/0", 2))
    )
    return Plan("manual", "two", 3, pipelines, zero=zero, state_owners=("a/0", "b/0"))


def words(program: Program, rank: int) -> str:
    return " ".join(map(str, program.ranks[rank]))


def test_gradients_are_summed_in_each_microbatch_also_by_who_has_none():
    program = lower(replicas(2), *two_layers())
    assert words(program, 0) == (
        "0F0@0 0F0@1 0B0@1 REDUCE0.0 0B0@0 REDUCE1.0 REDUCE0.1 REDUCE1.1 NORM STEP BCAST0 BCAST1"
    )
    assert words(program, 1) == (
        "1:0F0@0 1:0F0@1 1:0B0@1 REDUCE0.0 1:0B0@0 REDUCE1.0 "
        "1:0F1@0 1:0F1@1 1:0B1@1 REDUCE0.1 1:0B1@0 REDUCE1.1 NORM STEP BCAST0 BCAST1"
    )
    assert parse_program(program.text, program.plan) == program


def test_weights_are_fetched_one_layer_ahead_and_not_twice_in_a_row():
    program = lower(replicas(3), *two_layers())
    # bucket 0 is the second layer; 0B0@1 follows 0F0@1, and F1@0 follows B0@0: nothing to fetch there
    assert words(program, 0) == (
        "GATHER1.0 GATHER0.0 0F0@0 0F0@1 GATHER1.1 0B0@1 REDUCE0.0 0B0@0 REDUCE1.0 "
        "GATHER0.1 GATHER1.2 REDUCE0.1 REDUCE1.1 NORM STEP"
    )
    assert words(program, 1) == (
        "GATHER1.0 GATHER0.0 1:0F0@0 1:0F0@1 GATHER1.1 1:0B0@1 REDUCE0.0 1:0B0@0 REDUCE1.0 "
        "GATHER0.1 1:0F1@0 1:0F1@1 GATHER1.2 1:0B1@1 REDUCE0.1 1:0B1@0 REDUCE1.1 NORM STEP"
    )
    assert parse_program(program.text, program.plan) == program


def together(zero: int) -> Plan:
    """As `replicas`, with both samples of b/0 in flight."""
    alone, both = replicas(zero).pipelines
    stages = (replace(both.stages[0], in_flight=2),)
    return replace(replicas(zero), pipelines=(alone, replace(both, stages=stages)))


def test_what_is_in_flight_passes_each_layer_in_one_round_of_it():
    profile, cluster = two_layers()
    program = lower(together(3), profile, cluster)
    verify(program, profile, cluster)
    assert words(program, 0) == (
        "GATHER1.0 GATHER0.0 0F0@0 0F0@1 GATHER1.1 0B0@1 REDUCE0.0 0B0@0 REDUCE1.0 NORM STEP"
    )
    assert words(program, 1) == (
        "GATHER1.0 GATHER0.0 1:0F0@0 1:0F1@0 1:0F0@1 1:0F1@1 "
        "GATHER1.1 1:0B0@1 1:0B1@1 REDUCE0.0 1:0B0@0 1:0B1@0 REDUCE1.0 NORM STEP"
    )
    assert parse_program(program.text, program.plan) == program
    gradients = lower(together(2), profile, cluster)
    assert words(gradients, 1) == (
        "1:0F0@0 1:0F1@0 1:0F0@1 1:0F1@1 1:0B0@1 1:0B1@1 REDUCE0.0 1:0B0@0 1:0B1@0 REDUCE1.0 "
        "NORM STEP BCAST0 BCAST1"
    )


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.LIST])
def test_all_schedules_of_replicas_go_through_the_layers_once_for_all_in_flight(schedule):
    profile, cluster = two_layers()
    plan = replicas(3) if schedule is Schedule.GPIPE else together(3)
    expected = lower(together(3), profile, cluster)
    assert lower_as(plan, profile, cluster, schedule).ranks == expected.ranks


def test_fewer_rounds_take_less_time_on_a_slow_link():
    profile, cluster = two_layers()
    slow = replace(cluster, network=Link(0.0, 4.0))
    one, both = (
        simulate(ProgramCosts(lower(plan, profile, slow), profile, slow))
        for plan in (replicas(3), together(3))
    )
    # the second sample's GATHERs and REDUCEs, of 10 s each, of which two cross those in the other direction
    assert (one.makespan_s, both.makespan_s) == (72, 52)


def ends(zero: int) -> dict[tuple[int, str], float]:
    profile, cluster = two_layers()
    trace = simulate(ProgramCosts(lower(replicas(zero), profile, cluster), profile, cluster))
    return {(event.rank, str(event.instruction)): event.end_s for event in trace.events}


def test_seconds_of_a_step_with_sharded_gradients():
    # Both: F@0, F@1 until 2, B@1 until 4, B@0 until 6; REDUCE0.0 at b/0 from 4 to 5, REDUCE1.0 at a/0 from 6
    # to 7. b/0 again until 10 and 12; its last sums from 10 to 11 and 12 to 13. NORM: 2 rounds of 16 bytes,
    # 0.4 s each. The two broadcasts, of 1 s, go in opposite directions.
    found = ends(2)
    assert (found[1, "REDUCE0.0"], found[0, "REDUCE1.0"]) == (5, 7)
    assert (found[1, "REDUCE0.1"], found[0, "REDUCE1.1"]) == (11, 13)
    assert (found[0, "NORM"], found[0, "BCAST0"], found[1, "BCAST1"]) == pytest.approx((13.8, 14.8, 14.8))


def test_seconds_of_a_step_with_sharded_weights():
    # b/0 has the first layer at 1, so F0@0 ends at 2 there, F0@1 at 3; it comes to GATHER1.1 then, which
    # brings it back at 4, while B0@1 goes on until 5, and B0@0 until 7. REDUCE1.0 goes to a/0 from 7 to 8,
    # and GATHER0.1, which is ready at 7, behind it on the same link, until 9.
    found = ends(3)
    assert (found[1, "GATHER1.0"], found[1, "1:0F0@0"], found[1, "GATHER1.1"]) == (1, 2, 4)
    assert (found[1, "1:0B0@1"], found[1, "1:0B0@0"]) == (5, 7)
    assert (found[0, "REDUCE1.0"], found[0, "GATHER0.1"], found[0, "REDUCE1.1"]) == (8, 9, 14)
    assert found[0, "NORM"] == pytest.approx(14.8)


def changed(program: Program, rank: int, old: str, new: str) -> Program:
    text = words(program, rank)
    assert old in text
    instructions: tuple[Instruction, ...] = tuple(map(parse_instruction, text.replace(old, new, 1).split()))
    return replace(
        program, ranks=tuple(instructions if r == rank else row for r, row in enumerate(program.ranks))
    )


@pytest.mark.parametrize(
    ("zero", "rank", "old", "new", "message"),
    [
        (2, 0, "REDUCE1.1 ", "", "each rank must have the same, in order"),
        (2, 0, "REDUCE0.0 0B0@0 REDUCE1.0", "REDUCE0.1 0B0@0 REDUCE1.0", "each rank must have the same"),
        (2, 1, "1:0B1@1 REDUCE0.1", "REDUCE0.1 1:0B1@1", "no REDUCE of bucket 0 after 1:0B1@1"),
        (2, 1, "REDUCE0.0 1:0B0@0 REDUCE1.0", "REDUCE1.0 1:0B0@0 REDUCE0.0", "bucket|hands in"),
        (2, 0, "0F0@0 0F0@1", "0F0@1 0F0@0", "has 0F0@1 before 0F0@0"),
        (2, 0, "0F0@1", "0F0", "."),
        (3, 0, "0F0@1 GATHER1.1 0B0@1 REDUCE0.0 0B0@0", "0F0@1 0B0@1 REDUCE0.0 0B0@0 GATHER1.1",
         "before the GATHER of bucket 1"),
        (3, 0, "REDUCE1.0 GATHER0.1", "GATHER0.1 REDUCE1.0", "would mix up their messages"),
        (3, 0, "GATHER0.1 ", "", "each rank must have the same, in order"),
    ],
)  # fmt: skip
def test_wrong_rounds_are_refused(zero, rank, old, new, message):
    profile, cluster = two_layers()
    program = lower(replicas(zero), profile, cluster)
    verify(program, profile, cluster)
    with pytest.raises(InputError, match=message):
        verify(changed(program, rank, old, new), profile, cluster)


def test_rounds_without_a_plan_that_shards_are_refused():
    profile, cluster = two_layers()
    program = lower(replicas(1), profile, cluster)
    with pytest.raises(InputError, match="has a REDUCE on ranks"):
        verify(changed(program, 0, "NORM", "REDUCE0.0 NORM"), profile, cluster)


@pytest.mark.parametrize("zero", [2, 3])
def test_random_programs_run_on_the_clock_and_their_path_has_no_gap(zero):
    for seed in range(12):
        case = random_case(seed, random.Random(seed).randint(2, 4), zero=zero)
        costs = ProgramCosts(case.program, case.profile, case.cluster)
        trace = simulate(costs)
        path = critical_path(trace, costs)
        assert sum(part.duration_s for part in path) == pytest.approx(trace.makespan_s)
        for device in device_times(trace, costs):
            # waits of less than a nanosecond, as for a range of a few bytes, are none
            assert sum(device.waiting_for.values()) == pytest.approx(device.waiting_s, abs=1e-8)


def test_a_sum_between_microbatches_that_pass_a_layer_together_is_refused():
    profile, cluster = two_layers()
    program = lower(together(2), profile, cluster)
    early = changed(program, 1, "1:0B1@1 REDUCE0.0", "REDUCE0.0 1:0B1@1")
    with pytest.raises(InputError, match="no REDUCE of bucket 0 after 1:0B1@1"):
        verify(early, profile, cluster)
