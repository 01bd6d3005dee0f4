"""Stages that share devices: the order in which a device takes them, and what the step then lasts."""

from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Link
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Compute, Pass, Program, Sync, Transfer
from hetpipe.program.program_text import parse_program
from hetpipe.program.verification import (
    observed_in_flight,
    verify_computations,
    verify_messages,
    verify_order,
)
from hetpipe.reporting.critical_path import critical_path
from hetpipe.simulation.prediction import simulate_plan
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage
from shared_plans import layers_of, pipeline, plan_of
from small_case import equal_plan, equal_stages, small_cluster, small_profile


def check(program: Program) -> None:
    verify_messages(program)
    verify_computations(program)
    verify_order(program)
    for (index, stage), most in observed_in_flight(program).items():
        assert most <= program.plan.pipelines[index].in_flight(stage)


def words(plan: Plan, profile: ModelProfile, cluster: Cluster, rank: int) -> str:
    program = lower(plan, profile, cluster)
    check(program)
    return " ".join(map(str, program.ranks[rank]))


def test_two_pipelines_take_turns_on_their_first_device():
    # n/0 1 s and n/1, n/2 2 s a microbatch. After the first two forwards the second pipeline has done less:
    # the first is at 1F0 on n/1 already.
    profile, cluster = layers_of(1, 2)
    plan = plan_of(pipeline(2, (0, 0, 1, 2), (1, 1, 2, 1)), pipeline(2, (0, 0, 1, 2), (2, 1, 2, 1)))
    assert words(plan, profile, cluster, 0) == (
        "0F0 0SEND_F0 1:0F0 1:0SEND_F0 1:0F1 1:0SEND_F1 0F1 0SEND_F1 0RECV_B0 0B0 1:0RECV_B0 1:0B0 "
        "0RECV_B1 0B1 1:0RECV_B1 1:0B1 NORM STEP"
    )
    # a device that serves one stage keeps its 1F1B
    alone = lower(equal_plan((2, 1), 2), *equal_stages(2)).ranks[1]
    assert words(plan, profile, cluster, 1) == " ".join(map(str, alone)).replace("NORM", "SYNC0 NORM")


def test_sharing_the_first_device_halves_the_step_where_each_device_holds_one_layer():
    # Layers of 1 and 2 s. One pipeline over two devices: the first forward, 64 * 2 s, the last backward:
    # 1/3 + 128 + 2/3 = 129. With layer 1 on two devices, n/0 computes 64 * 1 s and waits for 1 2/3 s.
    profile, cluster = layers_of(1, 2)
    disjoint = plan_of(pipeline(64, (0, 0, 1, 2), (1, 1, 2, 1)))
    assert simulate_plan(disjoint, profile, cluster).makespan_s == pytest.approx(129)
    shared = plan_of(pipeline(32, (0, 0, 1, 2), (1, 1, 2, 1)), pipeline(32, (0, 0, 1, 2), (2, 1, 2, 1)))
    assert simulate_plan(shared, profile, cluster).makespan_s == pytest.approx(65 + 2 / 3)


def test_two_cuts_over_the_same_devices_balance_what_one_cut_cannot():
    # Three layers of 1 s on two devices: one cut leaves 2 s on one of them, 1|2 and 2|1 in turn 1.5 s on
    # each.
    profile, cluster = layers_of(1, 1, 1)

    def both(count: int) -> Plan:
        return plan_of(
            pipeline(count, (0, 0, 1, 2), (1, 1, 3, 1)), pipeline(count, (0, 0, 2, 2), (1, 2, 3, 1))
        )

    def one(count: int) -> Plan:
        return plan_of(pipeline(count, (0, 0, 1, 2), (1, 1, 3, 1)))

    def period(more: Plan, fewer: Plan) -> float:
        grown_s = (
            simulate_plan(more, profile, cluster).makespan_s
            - simulate_plan(fewer, profile, cluster).makespan_s
        )
        return grown_s / (more.global_batch_size - fewer.global_batch_size)

    assert period(one(64), one(32)) == pytest.approx(2)
    assert period(both(32), both(16)) == pytest.approx(1.5)
    assert both(2).layers_of("n/0") == (0, 1) and both(2).layers_of("n/1") == (1, 2)


def test_neighbouring_stages_on_one_device_send_nothing():
    profile, cluster = layers_of(1, 1, 1)
    plan = plan_of(pipeline(1, (0, 0, 1, 1), (0, 1, 2, 1), (1, 2, 3, 1)))
    assert words(plan, profile, cluster, 0) == "0F0 1F0 1SEND_F0 1RECV_B0 1B0 0B0 NORM STEP"


def test_one_device_runs_two_stages_of_a_pipeline():
    profile, cluster = layers_of(1, 1, 1, 1)
    plan = plan_of(pipeline(2, (0, 0, 1, 2), (1, 1, 2, 2), (0, 2, 3, 2), (1, 3, 4, 1)))
    computes = [str(e) for e in lower(plan, profile, cluster).ranks[0] if isinstance(e, Compute)]
    assert computes == ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"]


def test_receives_on_an_edge_follow_its_sends():
    # n/0 sends to n/1 for both pipelines; n/1 needs them in another order where its own cut lasts longer.
    profile, cluster = layers_of(1, 1, 4, link=Link(0.2, 1e30))
    plan = plan_of(pipeline(5, (0, 0, 2, 3), (1, 2, 3, 1)), pipeline(5, (0, 0, 1, 3), (1, 1, 3, 2)))
    program = lower(plan, profile, cluster)
    check(program)
    sent = [e.message for e in program.ranks[0] if isinstance(e, Transfer) and e.direction == "SEND"]
    received = [e.message for e in program.ranks[1] if isinstance(e, Transfer) and e.direction == "RECV"]
    assert sent == received
    assert parse_program(program.text, plan) == program


def test_a_sync_starts_while_other_stages_still_compute():
    # a/0 holds all layers for one microbatch, and the first two for another pipeline's eight.
    a, b = "a/0", "b/0"
    plan = Plan(
        "manual",
        "made-up",
        9,
        (
            Pipeline(1, 1, (Stage((b,), (0, 2), 1), Stage((a,), (2, 4), 1))),
            Pipeline(1, 8, (Stage((a,), (0, 2), 2), Stage((b,), (2, 4), 2))),
        ),
    )
    profile, cluster = small_profile(), small_cluster()
    program = lower(plan, profile, cluster)
    check(program)
    for rank, instructions in enumerate(program.ranks):
        syncs = [entry for entry in instructions if isinstance(entry, Sync)]
        assert syncs == [Sync(index) for index, entry in enumerate(program.buckets) if rank in entry.ranks]
    costs = ProgramCosts(program, profile, cluster)
    trace = simulate(costs)
    path = critical_path(trace, costs)
    assert sum(segment.duration_s for segment in path) == pytest.approx(trace.makespan_s)


def test_a_bucket_is_summed_before_the_backwards_that_do_not_touch_it():
    # Layer 2 of n/0 and n/1 is done when the short pipeline is; n/0 goes on with layer 0 of the long one.
    profile, cluster = layers_of(1, 1, 1)
    plan = plan_of(
        pipeline(1, (1, 0, 2, 1), (0, 2, 3, 1)),
        pipeline(1, (2, 0, 2, 1), (1, 2, 3, 1)),
        pipeline(6, (0, 0, 1, 2), (3, 1, 3, 1)),
    )
    program = lower(plan, profile, cluster)
    check(program)
    instructions = list(program.ranks[program.device_names.index("n/0")])
    first = next(index for index, entry in enumerate(instructions) if isinstance(entry, Sync))
    later = [entry for entry in instructions[first:] if isinstance(entry, Compute)]
    assert later and {entry.pipeline for entry in later} == {2}
    bad = [entry for entry in instructions if entry != instructions[first]]
    bad.insert(0, instructions[first])
    lists = [bad if entry == tuple(instructions) else entry for entry in program.ranks]
    with pytest.raises(InputError, match=r"before .*B0, which it needs"):
        verify_order(replace(program, ranks=tuple(map(tuple, lists))))


def test_a_message_between_stages_of_one_rank_is_refused():
    profile, cluster = layers_of(1, 1)
    program = lower(plan_of(pipeline(1, (0, 0, 1, 1), (0, 1, 2, 1))), profile, cluster)
    parts = program.text.replace("0F0 1F0", "0F0 0SEND_F0 1F0")
    with pytest.raises(InputError, match="0SEND_F0, whose tensors stay on this rank"):
        verify_messages(parse_program(parts, program.plan))
    swapped = program.text.replace("0F0 1F0", "1F0 0F0")
    with pytest.raises(InputError, match="deadlocks: rank 0 at 1F0"):
        verify_order(parse_program(swapped, program.plan))


def test_shared_devices_need_the_seconds_of_a_cluster():
    profile, _ = layers_of(1, 1)
    with pytest.raises(InputError, match=r"device 'n/0' serves 2 stages.*give the cluster"):
        lower(plan_of(pipeline(1, (0, 0, 1, 1), (0, 1, 2, 1))), profile)


def test_limits_that_cross_are_named():
    profile, cluster = layers_of(1, 1, 1)
    plan = plan_of(pipeline(3, (0, 0, 1, 2), (1, 1, 2, 2), (0, 2, 3, 1)))
    object.__setattr__(plan.pipelines[0].stages[0], "in_flight", 1)  # past the check that refuses it
    with pytest.raises(InputError, match="stage 0 of pipeline 0 with 1 in flight"):
        lower(plan, profile, cluster)


def test_a_backward_goes_before_a_forward_that_is_ready_too():
    profile, cluster = layers_of(3, 3)
    plan = plan_of(pipeline(4, (0, 0, 1, 2), (0, 1, 2, 2)))
    computes = [e for e in lower(plan, profile, cluster).ranks[0] if isinstance(e, Compute)]
    assert [str(e) for e in computes[:4]] == ["0F0", "1F0", "1B0", "0B0"]
    assert sum(entry.op is Pass.BACKWARD for entry in computes) == 8
