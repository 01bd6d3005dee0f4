"""Schedules of a whole plan: GPipe, interleaved 1F1B, the list scheduler, and `auto` that simulates them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.cluster import Cluster, Link
from cost_model.errors import InfeasibleError, InputError
from cost_model.profile import ModelProfile
from hetpipe.program.instructions import Compute, Program, Schedule
from hetpipe.program.program_text import parse_program
from hetpipe.program.verification import observed_in_flight, verify
from hetpipe.simulation import schedule_selection
from hetpipe.simulation.prediction import predict, simulate_plan
from hetpipe.simulation.schedule_selection import choose_schedule, default_schedule, lower
from partition.estimates.plan_memory import plan_memory
from partition.plan import Plan
from shared_plans import layers_of, pipeline, plan_of, shared_plans
from small_case import equal_plan, equal_stages, small_cluster, small_plan, small_profile

CONCRETE = [Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.LIST]


def rounds(num_devices: int, num_chunks: int, num_microbatches: int) -> Plan:
    """A layer a stage, in_flight by the distance from the end."""
    count = num_devices * num_chunks
    stages = [(index % num_devices, index, index + 1, count - index) for index in range(count)]
    return plan_of(pipeline(num_microbatches, *stages))


def equal_layers(count: int) -> tuple[ModelProfile, Cluster]:
    """Layers of F 1 s, B 2 s on at most eight devices."""
    return equal_stages(count)[0], equal_stages(8)[1]


def computes(program: Program) -> list[list[str]]:
    return [[str(entry) for entry in rank if isinstance(entry, Compute)] for rank in program.ranks]


def step_s(plan: Plan, case: tuple[ModelProfile, Cluster], schedule: Schedule) -> float:
    return simulate_plan(plan, *case, schedule).makespan_s


def test_two_chunks_halve_the_bubble():
    # 12 layers of 3 s on two devices: 18 s a microbatch each. One cut: (4 + 1) * 18 s; chunks of half the
    # length: (4 + 1/2) * 18 s.
    profile, cluster = equal_layers(12)
    plain = plan_of(pipeline(4, (0, 0, 6, 2), (1, 6, 12, 1)))
    chunks = plan_of(pipeline(4, (0, 0, 3, 4), (1, 3, 6, 3), (0, 6, 9, 2), (1, 9, 12, 1)))
    assert step_s(plain, (profile, cluster), Schedule.ONE_F_ONE_B) == 90
    assert step_s(chunks, (profile, cluster), Schedule.INTERLEAVED) == 81


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 40))
def test_interleaved_runs_for_any_number_of_devices_chunks_and_microbatches(
    num_devices: int, num_chunks: int, num_microbatches: int
):
    plan = rounds(num_devices, num_chunks, num_microbatches)
    profile, cluster = equal_layers(num_devices * num_chunks)
    program = lower(plan, profile, cluster, Schedule.INTERLEAVED)
    verify(program, profile, cluster)
    most = observed_in_flight(program)
    assert [stage.in_flight for stage in program.plan.pipelines[0].stages] == [
        most[key] for key in sorted(most)
    ]
    if num_microbatches % num_devices == 0:  # groups of num_devices: nothing waits but to fill and drain
        fill = (num_devices - 1) / num_chunks
        period = 3 * num_chunks
        assert simulate_plan(plan, profile, cluster, Schedule.INTERLEAVED).makespan_s == pytest.approx(
            (num_microbatches + fill) * period
        )


@pytest.mark.slow
@settings(deadline=None)
@given(shared_plans(), st.lists(st.floats(0.1, 3), min_size=5, max_size=5), st.sampled_from([0.0, 0.3]))
def test_every_schedule_that_applies_gives_a_program_that_runs(
    plan: Plan, seconds: list[float], latency_s: float
):
    profile, cluster = layers_of(*seconds, link=Link(latency_s, 1e30))
    choice = choose_schedule(plan, profile, cluster, Schedule.AUTO)
    for schedule in CONCRETE:
        if schedule is Schedule.INTERLEAVED and schedule in choice.refused:
            continue
        program = lower(plan, profile, cluster, schedule)
        verify(program, profile, cluster)
        assert parse_program(program.text, program.plan) == program
        for (index, stage), most in observed_in_flight(program).items():
            assert most <= program.plan.pipelines[index].in_flight(stage)
        assert step_s(plan, (profile, cluster), schedule) == choice.step_s[schedule]
    least_s = min(choice.step_s.values())
    assert simulate_plan(plan, profile, cluster, Schedule.AUTO).makespan_s == pytest.approx(least_s)


def test_gpipe_runs_all_forwards_first():
    profile, cluster = equal_layers(2)
    program = lower(equal_plan((2, 1), 3), profile, None, Schedule.GPIPE)
    assert computes(program) == [[f"{stage}{op}{m}" for op in "FB" for m in range(3)] for stage in range(2)]
    assert [stage.in_flight for stage in program.plan.pipelines[0].stages] == [3, 3]
    for rank in computes(lower(rounds(2, 2, 3), *equal_layers(4), Schedule.GPIPE)):
        assert [word[1] for word in rank] == ["F"] * 6 + ["B"] * 6
    assert predict(equal_plan((2, 1), 3), profile, cluster).step_s == 12


def test_gpipe_needs_the_memory_of_all_microbatches():
    # 3355 bytes suffice for 2 of 3 in flight on a/0, see test_memory; a third has 240 of saved bytes and
    # buffers more
    profile, cluster = small_profile(), small_cluster(fast_bytes=3355)
    plan = small_plan(num_samples=3)
    verify(lower(plan, profile, cluster), profile, cluster)
    program = lower(plan, profile, cluster, Schedule.GPIPE)
    need = plan_memory(program.plan, profile, "a/0").total_bytes
    with pytest.raises(InfeasibleError, match=f"'a/0'.*; {need - 3355:,.0f} bytes are missing"):
        verify(program, profile, cluster)
    choice = choose_schedule(plan, profile, cluster, Schedule.AUTO)
    assert choice.schedule is Schedule.ONE_F_ONE_B
    assert "bytes are missing" in choice.refused[Schedule.GPIPE] and Schedule.GPIPE not in choice.step_s


def test_where_no_schedule_fits_the_missing_bytes_of_1f1b_are_named():
    profile, cluster = small_profile(), small_cluster(fast_bytes=1000)
    choice = choose_schedule(small_plan(), profile, cluster, Schedule.AUTO)
    assert not choice.step_s and choice.schedule is Schedule.ONE_F_ONE_B
    with pytest.raises(InfeasibleError, match="bytes are missing"):
        verify(choice.program, profile, cluster)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (equal_plan((2, 1), 2), "here each device has one stage"),
        (
            plan_of(pipeline(2, (0, 0, 1, 2), (1, 1, 2, 2), (1, 2, 3, 2), (0, 3, 4, 1))),
            "visits n/0, n/1, n/1",
        ),
        (plan_of(pipeline(2, (0, 0, 1, 2), (1, 1, 2, 2), (0, 2, 3, 1))), "visits n/0, n/1, n/0: take"),
        (plan_of(pipeline(1, (0, 0, 2, 1)), pipeline(1, (0, 0, 2, 1))), "this plan has 2 pipelines"),
    ],
)
def test_interleaved_is_refused_where_there_are_no_rounds(plan: Plan, why: str):
    case = equal_layers(plan.num_layers)
    with pytest.raises(InputError, match=why):
        lower(plan, *case, Schedule.INTERLEAVED)
    assert why in choose_schedule(plan, *case, Schedule.AUTO).refused[Schedule.INTERLEAVED].replace("; ", " ")
    assert default_schedule(plan) is Schedule.ONE_F_ONE_B


def test_list_takes_a_backward_before_a_forward_where_1f1b_would_wait():
    # Three in flight on the first device: 1F1B forwards all three before its first backward, which is there
    # after 1 + 3 s; the list scheduler takes it as soon as it is free.
    profile, cluster = layers_of(6, 1)
    plan = plan_of(pipeline(4, (0, 0, 1, 3), (1, 1, 2, 1)))
    (first, _) = computes(lower(plan, profile, cluster))
    (listed, _) = computes(lower(plan, profile, cluster, Schedule.LIST))
    assert first[:4] == ["0F0", "0F1", "0F2", "0B0"]
    assert listed[:3] == ["0F0", "0F1", "0B0"]
    with pytest.raises(InputError, match=r"the schedule is list.*give the cluster"):
        lower(plan, profile, None, Schedule.LIST)
    with pytest.raises(InputError, match=r"auto depends on the seconds.*give the cluster"):
        lower(plan, profile, None, Schedule.AUTO)


def test_auto_takes_the_fastest_and_ties_go_to_1f1b():
    case = equal_layers(4)
    choice = choose_schedule(rounds(2, 2, 5), *case, Schedule.AUTO)
    assert choice.schedule is Schedule.INTERLEAVED
    assert choice.step_s[Schedule.INTERLEAVED] == min(choice.step_s.values())
    assert choice.step_s[Schedule.INTERLEAVED] < choice.step_s[Schedule.ONE_F_ONE_B]
    assert (
        str(choice) == "schedule auto takes interleaved; 1f1b 38 s, interleaved 33 s, list 38 s, gpipe 36 s"
    )
    tied = choose_schedule(rounds(2, 2, 2), *case, Schedule.AUTO)
    assert len(set(tied.step_s.values())) == 1 and tied.schedule is Schedule.ONE_F_ONE_B


def test_auto_leaves_huge_programs_as_they_are(monkeypatch: pytest.MonkeyPatch):
    plan, case = rounds(2, 2, 5), equal_layers(4)
    monkeypatch.setattr(schedule_selection, "MOST_INSTRUCTIONS", 50)
    choice = choose_schedule(plan, *case, Schedule.AUTO)
    assert choice.schedule is Schedule.ONE_F_ONE_B and not choice.step_s
    assert all("instructions, more than 50" in reason for reason in choice.refused.values())
    assert choice.program == lower(plan, *case, Schedule.ONE_F_ONE_B)


def test_rounds_get_auto_unless_told_otherwise():
    plan, case = rounds(2, 2, 5), equal_layers(4)
    assert default_schedule(plan) is Schedule.AUTO
    assert lower(plan, *case).schedule is Schedule.INTERLEAVED
    assert lower(plan, *case, Schedule.ONE_F_ONE_B).schedule is Schedule.ONE_F_ONE_B
    assert default_schedule(equal_plan((2, 1), 2)) is Schedule.ONE_F_ONE_B


def test_a_scheduled_plan_has_the_figures_of_its_schedule_and_keeps_its_bound():
    profile, cluster = small_profile(), small_cluster()
    plan = small_plan()
    plan = replace(
        plan, predicted=replace(predict(plan, profile, cluster).figures, bound_s=1.0, bound_space="all")
    )
    prediction = predict(plan, profile, cluster, Schedule.GPIPE)
    found = prediction.plan
    assert found.predicted is not None and plan.predicted is not None
    assert found.predicted is prediction.figures
    assert found.pipelines == prediction.program.plan.pipelines != plan.pipelines
    assert found.predicted.step_s == step_s(plan, (profile, cluster), Schedule.GPIPE)
    assert found.predicted.devices["a/0"].memory_bytes > plan.predicted.devices["a/0"].memory_bytes
    assert (found.predicted.bound_s, found.predicted.bound_space) == (1.0, "all")
    again = predict(plan, profile, cluster).plan
    assert again == replace(plan, predicted=again.predicted) and again.predicted == plan.predicted
