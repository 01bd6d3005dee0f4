from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rank_mains
from cost_model.errors import InputError
from hetpipe.program.instructions import Compute, Direction, Pass, Program, Schedule, Transfer, incoming
from hetpipe.runtime.processes import RankGroup, WorkerLostError, run_ranks
from hetpipe.runtime.transport import MAX_TENSORS, DistributedTransport, release_points
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, made_up_profile
from shared_plans import layers_of, pipeline, plan_of, shared_plans

CPU = torch.device("cpu")
TWO_RANKS = RankGroup(("here/0", "here/1"), (1, 1))
PROFILE = made_up_profile("bert-tiny")  # 8 layers


def program_of(*cuts: int, batch: int = 4, in_flight: tuple[int, ...] | None = None) -> Program:
    plan = chain_plan("bert-tiny", list(cuts), 1, batch)
    if in_flight is not None:
        stages = tuple(
            Stage(stage.devices, stage.layers, count)
            for stage, count in zip(plan.pipelines[0].stages, in_flight, strict=True)
        )
        plan = Plan("manual", "bert-tiny", batch, (Pipeline(1, batch, stages),))
    return lower(plan, PROFILE)


def releases(program: Program, rank: int) -> dict[str, str]:
    """By computation: the sends that are over when its input has come."""
    return {
        str(program.ranks[rank][index]): " ".join(map(str, sends))
        for index, sends in release_points(program, rank).items()
    }


def test_two_stages_release_what_the_reply_proves():
    program = program_of(0, 4, 8)
    # rank 0: F0 F1 B0 F2 B1 F3 B2 B3;  rank 1: F0 B0 F1 B1 F2 B2 F3 B3
    # the gradient of k comes after the forward of k, and before that of k + 1
    assert releases(program, 0) == {
        "0B0": "0SEND_F0",
        "0B1": "0SEND_F1",
        "0B2": "0SEND_F2",
        "0B3": "0SEND_F3",
    }
    # rank 0 sends its F2 after its B0, F3 after B1; nothing comes after B2 and B3, so NORM proves those
    assert releases(program, 1) == {"1F2": "1SEND_B0", "1F3": "1SEND_B1"}


def test_three_stages_release_towards_both_sides():
    program = program_of(0, 3, 6, 8)
    # rank 0: F0 F1 F2 B0 F3 B1 B2 B3;  rank 1: F0 F1 B0 F2 B1 F3 B2 B3;  rank 2: F0 B0 F1 B1 F2 B2 F3 B3
    # rank 0's B0 comes when rank 1 has run F0 F1 B0: F0 and F1 were consumed by then
    assert releases(program, 0) == {
        "0B0": "0SEND_F0 0SEND_F1",
        "0B1": "0SEND_F2",
        "0B2": "0SEND_F3",
    }
    # rank 0's F3 was sent after its B0, no other forward after a backward; rank 2 as with two stages
    assert releases(program, 1) == {
        "1B0": "1SEND_F0",
        "1B1": "1SEND_F1",
        "1F3": "1SEND_B0",
        "1B2": "1SEND_F2",
        "1B3": "1SEND_F3",
    }
    assert releases(program, 2) == {"2F2": "2SEND_B0", "2F3": "2SEND_B1"}


def test_gpipe_releases_all_forwards_with_the_first_gradient():
    program = program_of(0, 4, 8, in_flight=(4, 4))
    assert releases(program, 0) == {"0B0": "0SEND_F0 0SEND_F1 0SEND_F2 0SEND_F3"}
    assert releases(program, 1) == {}


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """One or two pipelines of 1 to 4 stages with any in_flight that does not deadlock."""
    device = 0
    pipelines = []
    for _ in range(draw(st.integers(1, 2))):
        num_stages = draw(st.integers(1, 4))
        cuts = [
            0,
            *sorted(draw(st.sets(st.integers(1, 7), min_size=num_stages - 1, max_size=num_stages - 1))),
        ]
        flights = sorted(
            draw(st.lists(st.integers(1, 6), min_size=num_stages, max_size=num_stages)), reverse=True
        )
        stages = []
        for index, count in enumerate(flights):
            stop = [*cuts, 8][index + 1]
            stages.append(Stage((f"here/{device}",), (cuts[index], stop), count))
            device += 1
        num_samples = draw(st.integers(1, 12))
        pipelines.append(Pipeline(draw(st.integers(1, 3)), num_samples, tuple(stages)))
    total = sum(pipeline.num_samples for pipeline in pipelines)
    return lower(Plan("manual", "bert-tiny", total, tuple(pipelines)), PROFILE)


def position(program: Program, rank: int, wanted: object) -> int:
    return next(index for index, entry in enumerate(program.ranks[rank]) if entry == wanted)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_a_send_is_released_once_and_only_after_its_consumer_has_replied(program):
    check_releases(program)


@settings(max_examples=60, deadline=None)
@given(shared_plans(), st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.LIST, Schedule.AUTO]))
def test_sends_between_shared_devices_are_released_as_late(plan, schedule):
    check_releases(lower(plan, *layers_of(1, 2, 1, 3, 1), schedule))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 9))
def test_sends_of_an_interleaved_pipeline_are_released_as_late(num_devices, num_chunks, num_microbatches):
    count = num_devices * num_chunks
    stages = [(index % num_devices, index, index + 1, count - index) for index in range(count)]
    plan = plan_of(pipeline(num_microbatches, *stages))
    check_releases(lower(plan, *layers_of(*[1] * count), Schedule.INTERLEAVED))


def check_releases(program: Program) -> None:
    for rank in range(len(program.ranks)):
        points = release_points(program, rank)
        released = [send for sends in points.values() for send in sends]
        assert len(set(released)) == len(released)
        for index, sends in points.items():
            compute = program.ranks[rank][index]
            assert isinstance(compute, Compute)
            message = incoming(compute, program.pipeline(compute).stages)
            assert message is not None
            source = compute.stage + (-1 if compute.op is Pass.FORWARD else 1)
            reply = Transfer(Direction.SEND, compute.op, compute.pipeline, source, compute.microbatch)
            peer = program.rank_of(compute.pipeline, source)
            for send in sends:
                assert program.rank_of(send.pipeline, send.peer_stage) == peer
                assert position(program, rank, send) < index
                consumer = Compute(send.op, send.pipeline, send.peer_stage, send.microbatch)
                assert position(program, peer, consumer) < position(program, peer, reply)


@settings(max_examples=30, deadline=None)
@given(programs())
def test_every_message_has_a_range_of_tags_of_its_own(program):
    sends = {
        entry.message
        for instructions in program.ranks
        for entry in instructions
        if isinstance(entry, Transfer)
    }
    transports = [DistributedTransport(program, rank, CPU, 1.0) for rank in range(len(program.ranks))]
    tags = [transport._tags for transport in transports]
    assert all(entry == tags[0] for entry in tags)
    assert tags[0].keys() == sends
    values = sorted(tags[0].values())
    assert all(b - a >= MAX_TENSORS for a, b in pairwise(values))


def test_more_tensors_than_a_boundary_may_carry_are_refused():
    transport = DistributedTransport(program_of(0, 4, 8), 1, CPU, 1.0)
    receive = Transfer(Direction.RECV, Pass.FORWARD, 0, 1, 0)
    with pytest.raises(InputError, match="17 tensors cross at 1RECV_F0; 16 are the most"):
        transport.post_receive(receive, rank_mains.SHAPES[:1] * (MAX_TENSORS + 1))


# ---- real messages


@pytest.mark.slow
def test_a_boundary_of_several_tensors_arrives_whole():
    events: list[dict[str, Any]] = []
    run_ranks(rank_mains.exchange, (program_of(0, 4, 8),), TWO_RANKS, events.append)
    assert events == [{"event": "got", "values": [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]], "ids": [4, 5]}]


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["stays silent", "leaves"])
def test_a_receive_from_a_lost_peer_names_rank_instruction_and_peer(peer):
    expected = (
        r"rank 1 \(here/1\) failed: PeerError: "
        r"rank 1 \(here/1\) waited at 1RECV_F2 for rank 0 \(here/0\), begun \d+\.\d s ago: .+"
    )
    with pytest.raises(WorkerLostError, match=expected):
        run_ranks(rank_mains.lose_the_peer, (program_of(0, 4, 8), peer), TWO_RANKS)
