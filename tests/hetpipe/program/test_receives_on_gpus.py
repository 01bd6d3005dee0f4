"""A receive between GPUs holds up what waits for the whole GPU: none may depend on work not handed in."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.cluster import CPU, Cluster
from cost_model.errors import InputError
from hetpipe.program.instructions import Compute, Direction, Message, Program, Schedule, Transfer, incoming
from hetpipe.program.verification import verify, verify_order
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Plan
from shared_plans import layers_of, pipeline, plan_of, shared_plans
from small_case import equal_stages

SCHEDULES = [Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.LIST]


def lowered(plan: Plan, *, gpus: bool, schedule: Schedule = Schedule.ONE_F_ONE_B) -> Program:
    profile, cluster = layers_of(*(1.0,) * plan.num_layers)
    profile = replace(profile, kinds={**profile.kinds, CPU: profile.kinds["one"]})
    return lower(plan, profile, cluster if gpus else on_cpus(cluster), schedule=schedule)


def on_cpus(cluster: Cluster) -> Cluster:
    nodes = tuple(
        replace(node, devices=tuple(replace(device, kind=CPU) for device in node.devices))
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


@settings(max_examples=200)
@given(shared_plans(), st.sampled_from(SCHEDULES))
def test_no_receive_waits_for_what_comes_after_it(plan: Plan, schedule: Schedule):
    """Even where everything on a GPU waits until the message of each receive before it is there."""
    program = lowered(plan, gpus=True, schedule=schedule)
    everywhere = (True,) * len(program.ranks)
    verify_order(program, everywhere)


@pytest.mark.parametrize(
    ("plan", "schedule"),
    [
        (plan_of(pipeline(1, (0, 0, 1, 1), (1, 1, 2, 1))), Schedule.ONE_F_ONE_B),  # one microbatch
        (plan_of(pipeline(4, (0, 0, 1, 1), (1, 1, 2, 1))), Schedule.ONE_F_ONE_B),  # in_flight (1, 1)
        (plan_of(pipeline(4, (0, 0, 1, 4), (1, 1, 2, 4))), Schedule.GPIPE),
        (plan_of(*(pipeline(2, (a, 0, 1, 2), (b, 1, 2, 1)) for a, b in ((0, 1), (1, 0)))), Schedule.LIST),
    ],
)
def test_receives_posted_ahead_could_wait_for_ever(plan: Plan, schedule: Schedule):
    program = lowered(plan, gpus=False, schedule=schedule)
    verify_order(program)
    with pytest.raises(InputError, match=r"the program deadlocks: rank \d at \d+RECV_"):
        verify_order(program, (True,) * len(program.ranks))
    verify_order(lowered(plan, gpus=True, schedule=schedule), (True,) * len(program.ranks))


def test_a_receive_is_posted_where_it_is_needed_between_gpus_alone():
    plan = plan_of(pipeline(3, (0, 0, 1, 2), (1, 1, 2, 1)))
    ahead, at_need = (lowered(plan, gpus=gpus) for gpus in (False, True))
    assert ahead.ranks != at_need.ranks
    for early, late in zip(ahead.ranks, at_need.ranks, strict=True):
        assert without_receives(early) == without_receives(late)
    for instructions in at_need.ranks:
        for entry, following in pairwise(instructions):
            if isinstance(entry, Transfer) and entry.direction is Direction.RECV:
                assert str(following).replace("RECV_", "") == str(entry).replace("RECV_", "")


def without_receives(instructions: tuple[object, ...]) -> list[object]:
    return [
        entry
        for entry in instructions
        if not (isinstance(entry, Transfer) and entry.direction is Direction.RECV)
    ]


Channel = Callable[[int, int], tuple[int, int]]
"""(sender, receiver) -> the communicator that they use."""


def arrives(program: Program, channel: Channel) -> bool:
    """Whether all messages arrive where each end of a communicator works off what is posted in its order.

    As NCCL does: an operation ends when both of its ends are at the head, be it a send or a receive. The host
    goes on after a send, and waits at a computation for what it needs.
    """
    queues: dict[tuple[int, tuple[int, int]], deque[tuple[Direction, Message]]] = defaultdict(deque)
    places, arrived = [0] * len(program.ranks), set[Message]()
    progress = True
    while progress:
        progress = False
        for rank, instructions in enumerate(program.ranks):
            while places[rank] < len(instructions):
                entry = instructions[places[rank]]
                if isinstance(entry, Transfer):
                    peer = program.rank_of(entry.pipeline, entry.peer_stage)
                    ends = (rank, peer) if entry.direction is Direction.SEND else (peer, rank)
                    queues[rank, channel(*ends)].append((entry.direction, entry.message))
                elif isinstance(entry, Compute):
                    message = incoming(entry, program.pipeline(entry).stages)
                    if message and message[1:3] not in program.local_boundaries and message not in arrived:
                        break
                places[rank] += 1
                progress = True
        for (rank, key), queue in queues.items():
            other = next((found for (end, k), found in queues.items() if k == key and end != rank), None)
            while queue and other and queue[0][1] == other[0][1] and queue[0][0] != other[0][0]:
                arrived.add(queue.popleft()[1])
                other.popleft()
                progress = True
    return all(place == len(entries) for place, entries in zip(places, program.ranks, strict=True))


def test_one_communicator_for_both_directions_would_hang_1f1b():
    """Rank 0 sends F1 before it asks for B0, rank 1 sends B0 before it asks for F1."""
    program = lowered(plan_of(pipeline(3, (0, 0, 1, 2), (1, 1, 2, 1))), gpus=True)
    assert not arrives(program, lambda sender, receiver: (min(sender, receiver), max(sender, receiver)))
    assert arrives(program, lambda sender, receiver: (sender, receiver))


@settings(max_examples=50)
@given(shared_plans(), st.sampled_from(SCHEDULES))
def test_one_communicator_for_each_direction_never_hangs(plan: Plan, schedule: Schedule):
    program = lowered(plan, gpus=True, schedule=schedule)
    assert arrives(program, lambda sender, receiver: (sender, receiver))


def test_more_ways_between_gpus_than_there_are_streams_are_refused():
    """Rank 0 sends to so many others, and receives from them; what shares a stream waits for each other."""
    profile, _ = layers_of(1.0, 1.0)
    cluster = equal_stages(18)[1]
    for peers, fits in ((15, True), (16, False)):
        plan = plan_of(*(pipeline(1, (0, 0, 1, 1), (peer, 1, 2, 1)) for peer in range(1, peers + 1)))
        program = lower(plan, profile, cluster)
        if fits:
            verify(program, profile, cluster)
        else:
            with pytest.raises(InputError, match=r"^'n/0' has 32 ways to and from other GPUs"):
                verify(program, profile, cluster)
