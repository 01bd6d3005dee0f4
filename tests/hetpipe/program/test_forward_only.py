"""The forwards of a program alone: all of them, and no rank waits for ever."""

from hypothesis import given

from hetpipe.program.forward_only import finished_sends, forward_only
from hetpipe.program.instructions import Compute, Direction, Program, Transfer
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Plan
from shared_plans import layers_of, pipeline, plan_of, shared_plans


def program_of(plan: Plan) -> Program:
    return lower(plan, *layers_of(*[3.0] * plan.num_layers), None)


@given(shared_plans())
def test_every_rank_ends_where_a_send_waits_for_its_receiver(plan):
    """A send is over once its receive is posted, as gloo has it; a rank waits for what the list says."""
    program = program_of(plan)
    lists = [forward_only(program, rank) for rank in range(len(program.ranks))]
    over = [finished_sends(program, rank) for rank in range(len(lists))]
    at, posted, sent, done = [0] * len(lists), set(), set(), set()

    def can_go(rank: int) -> bool:
        instruction = lists[rank][at[rank]]
        if any(send.message not in posted for send in over[rank].get(at[rank], ())):
            return False
        if not isinstance(instruction, Compute) or not instruction.stage:
            return True
        place = instruction.pipeline, instruction.stage
        before = (*place[:1], place[1] - 1, instruction.microbatch)
        if place in program.local_boundaries:
            return before in done
        message = (instruction.op, *place, instruction.microbatch)
        return message in sent and message in posted

    while moving := [rank for rank in range(len(lists)) if at[rank] < len(lists[rank]) and can_go(rank)]:
        instruction = lists[moving[0]][at[moving[0]]]
        if isinstance(instruction, Compute):
            done.add((instruction.pipeline, instruction.stage, instruction.microbatch))
        elif isinstance(instruction, Transfer):
            (sent if instruction.direction is Direction.SEND else posted).add(instruction.message)
        at[moving[0]] += 1
    assert at == list(map(len, lists))
    expected = sum(len(entry.stages) * entry.num_microbatches for entry in plan.pipelines)
    assert len(done) == expected and sent == posted


@given(shared_plans())
def test_messages_of_an_edge_are_sent_and_received_in_one_order_and_are_those_of_training(plan):
    program = program_of(plan)
    ends: dict[Direction, dict[tuple[int, int], list[object]]] = {way: {} for way in Direction}
    for rank in range(len(program.ranks)):
        for instruction in forward_only(program, rank):
            if isinstance(instruction, Transfer):
                peer = program.rank_of(instruction.pipeline, instruction.peer_stage)
                edge = (rank, peer) if instruction.direction is Direction.SEND else (peer, rank)
                ends[instruction.direction].setdefault(edge, []).append(instruction.message)
                assert instruction in program.ranks[rank]
    assert ends[Direction.SEND] == ends[Direction.RECV]


def test_few_sends_are_under_way():
    plan = plan_of(pipeline(6, (0, 0, 2, 3), (1, 2, 4, 1)))
    found = finished_sends(program_of(plan), 0)
    assert [len(sends) for sends in found.values()] == [1, 1, 1, 1]
