"""The instructions that compute a loss alone: every forward of a program, and what travels between them."""

from hetpipe.program.instructions import Compute, Direction, Instruction, Pass, Program, Transfer

_Place = tuple[int, int, int]
"""Pipeline, stage, microbatch."""


def forward_only(program: Program, rank: int) -> tuple[Instruction, ...]:
    """Return the list of one rank: its forwards, each with the ends of its messages around it.

    All ranks take forwards in one order, by microbatch + stage: each comes after what it needs, so that the
    first that is not done never waits, and those of one edge are sent and received in the same order. A
    receive is posted one computation ahead. Messages are those of the program's own forwards.
    """
    mine = [place for place in _in_order(program) if program.rank_of(*place[:2]) == rank]
    found: list[Instruction] = []
    for index, place in enumerate(mine):
        if index == 0:
            found += _receive(program, place)
        for following in mine[index + 1 : index + 2]:
            found += _receive(program, following)
        pipeline, stage, microbatch = place
        found.append(Compute(Pass.FORWARD, *place))
        stages = len(program.plan.pipelines[pipeline].stages)
        if stage + 1 < stages and (pipeline, stage + 1) not in program.local_boundaries:
            found.append(Transfer(Direction.SEND, Pass.FORWARD, pipeline, stage, microbatch))
    return tuple(found)


def finished_sends(program: Program, rank: int) -> dict[int, tuple[Transfer, ...]]:
    """Return which of the sends of a rank may be waited for before which instruction of its list, by index.

    A send may be waited for once its receiver's computation comes before the next one here in the order of
    all: nothing that is done before it waits for this rank then.
    """
    order = {place: index for index, place in enumerate(_in_order(program))}
    waiting: list[Transfer] = []
    found: dict[int, tuple[Transfer, ...]] = {}
    for index, instruction in enumerate(forward_only(program, rank)):
        if isinstance(instruction, Compute):
            here = order[instruction.pipeline, instruction.stage, instruction.microbatch]
            over = tuple(
                send for send in waiting if order[send.pipeline, send.stage + 1, send.microbatch] < here
            )
            if over:
                found[index] = over
                waiting = [send for send in waiting if send not in over]
        elif isinstance(instruction, Transfer) and instruction.direction is Direction.SEND:
            waiting.append(instruction)
    return found


def _in_order(program: Program) -> list[_Place]:
    places = [
        (pipeline, stage, microbatch)
        for pipeline, shape in enumerate(program.plan.pipelines)
        for stage in range(len(shape.stages))
        for microbatch in range(shape.num_microbatches)
    ]
    return sorted(places, key=lambda place: (place[1] + place[2], place))


def _receive(program: Program, place: _Place) -> list[Instruction]:
    pipeline, stage, microbatch = place
    if stage == 0 or (pipeline, stage) in program.local_boundaries:
        return []
    return [Transfer(Direction.RECV, Pass.FORWARD, pipeline, stage, microbatch)]
