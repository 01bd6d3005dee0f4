"""program.txt and its words, read back."""

import re
from dataclasses import replace

from cost_model.collectives import Collective
from cost_model.errors import InputError
from hetpipe.program.instructions import (
    FORMAT,
    Broadcast,
    Bucket,
    Compute,
    Direction,
    Gather,
    Instruction,
    Norm,
    Pass,
    Program,
    Reduce,
    Schedule,
    Step,
    Sync,
    Transfer,
    program_head,
)
from partition.plan import Plan

_WORD = re.compile(r"(?:(\d+):)?(\d+)(?:(SEND|RECV)_)?([FB])(\d+)(?:@(\d+))?")
_ROUND = re.compile(r"(REDUCE|GATHER)(\d+)\.(\d+)")
_NODES = r" nodes=\d+(?:,\d+)*(?:/\d+(?:,\d+)*)*"
_PART = r" part=([\d.e-]+):([\d.e-]+)"
_BUCKET = re.compile(
    rf"bucket \d+: ranks=([\d,]+) layers=([\d,]+)( tied)?( tree|{_NODES})?(?: owner=(\d+)(?:{_PART})?)?"
)


def parse_instruction(word: str) -> Instruction:
    """Return the instruction that its text form stands for.

    >>> parse_instruction("1:0SEND_F3")
    Transfer(direction=<Direction.SEND: 'SEND'>, op=<Pass.FORWARD: 'F'>, pipeline=1, stage=0, microbatch=3)

    Raises: InputError if it stands for none.
    """
    if word == "NORM":
        return Norm()
    if word == "STEP":
        return Step()
    if word.startswith("SYNC") and word[4:].isdigit():
        return Sync(int(word[4:]))
    if word.startswith("BCAST") and word[5:].isdigit():
        return Broadcast(int(word[5:]))
    if (found := _ROUND.fullmatch(word)) is not None:
        return (Reduce if found[1] == "REDUCE" else Gather)(int(found[2]), int(found[3]))
    match = _WORD.fullmatch(word)
    if match is None or (match[3] and match[6]):
        raise InputError(f"{word!r} is no instruction; they look like 0F3, 1SEND_B2, SYNC0, NORM, STEP")
    route, stage, direction, op, microbatch, layer = match.groups()
    where = (int(route or 0), int(stage), int(microbatch))
    if direction is None:
        return Compute(Pass(op), *where, None if layer is None else int(layer))
    return Transfer(Direction(direction), Pass(op), *where)


def parse_program(text: str, plan: Plan) -> Program:
    """Return the program of program.txt for its plan.

    Raises: InputError if the text is malformed or belongs to another plan.
    """
    lines = text.splitlines()
    found = lines[0] if lines else ""
    head, _, first_trained = found.partition(" first_trained=")
    schedule = next((candidate for candidate in Schedule if head == program_head(plan, candidate)), None)
    if schedule is None or not (first_trained or "0").isdigit():
        raise InputError(f"program.txt begins with {found!r}, which is not format {FORMAT!r} of this plan")
    buckets = [_parse_bucket(line) for line in lines[1:] if line.startswith("bucket ")]
    ranks: list[tuple[Instruction, ...]] = []
    for name, line in zip(plan.device_names, lines[1 + len(buckets) :], strict=False):
        head, _, words = line.partition(": ")
        if head != f"rank {len(ranks)} {name}":
            raise InputError(f"program.txt has {head!r} where rank {len(ranks)} on {name!r} belongs")
        ranks.append(tuple(parse_instruction(word) for word in words.split()))
    if len(ranks) != len(plan.device_names) or len(lines) != 1 + len(buckets) + len(ranks):
        raise InputError(f"program.txt has {len(ranks)} ranks, the plan {len(plan.device_names)} devices")
    return Program(plan, tuple(buckets), tuple(ranks), schedule, int(first_trained or 0))


def _parse_bucket(line: str) -> Bucket:
    match = _BUCKET.fullmatch(line)
    if match is None:
        raise InputError(
            f"program.txt: {line!r} is no bucket; they look like 'bucket 0: ranks=0,3 layers=0,25'"
        )
    ranks, layers = (tuple(map(int, group.split(","))) for group in match.groups()[:2])
    way, owner = match[4], None if match[5] is None else int(match[5])
    bucket = Bucket(layers, ranks, tied=match[3] is not None, state_owner=owner)
    if match[6] is not None:
        bucket = replace(bucket, part=(float(match[6]), float(match[7])))
    if way is None:
        return bucket
    if way == " tree":
        return replace(bucket, collective=Collective.TREE)
    nodes = tuple(tuple(map(int, node.split(","))) for node in way.removeprefix(" nodes=").split("/"))
    return replace(bucket, collective=Collective.HIERARCHICAL, nodes=nodes)
