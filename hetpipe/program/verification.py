"""Proves before launch that a program can run: messages have both ends, nothing deadlocks or leaks."""

from collections import defaultdict
from dataclasses import replace

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.program.compute_orders import most_in_flight, with_in_flight
from hetpipe.program.costs import check_memory
from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Direction,
    Norm,
    Pass,
    Program,
    Step,
    Sync,
    Transfer,
    incoming,
    outgoing,
)
from hetpipe.program.lowering import parameter_broadcasts, sync_points
from partition.plan import check_plan


def verify(program: Program, profile: ModelProfile, cluster: Cluster) -> None:
    """Check the program against its plan, the model and the devices.

    Raises: InputError naming the instruction that is wrong; InfeasibleError if a device lacks memory.
    """
    check_plan(program.plan, profile, cluster)
    verify_messages(program)
    verify_computations(program)
    verify_order(program)
    check_memory(with_in_flight(program.plan, observed_in_flight(program)), profile, cluster)


def verify_messages(program: Program) -> None:
    """Every send has its receive, on the right rank, and both ends of each directed edge have one order.

    Nothing is sent between stages of one rank.
    """
    edges: dict[tuple[Direction, int, int], list[object]] = defaultdict(list)
    for rank, instructions in enumerate(program.ranks):
        for entry in instructions:
            if isinstance(entry, Transfer):
                if program.rank_of(entry.pipeline, entry.stage) != rank:
                    raise InputError(f"rank {rank} has {entry}, which belongs to another rank")
                peer = program.rank_of(entry.pipeline, entry.peer_stage)
                if peer == rank:
                    raise InputError(f"rank {rank} has {entry}, whose tensors stay on this rank")
                edge = (rank, peer) if entry.direction is Direction.SEND else (peer, rank)
                edges[entry.direction, *edge].append(entry.message)
    for source, destination in sorted({(source, destination) for _, source, destination in edges}):
        sent, received = (edges.get((way, source, destination), []) for way in Direction)
        if sent != received:
            pairs = zip([*sent, None], [*received, None], strict=False)
            wrong = next((a, b) for a, b in pairs if a != b)
            raise InputError(
                f"rank {source} sends {wrong[0]} to rank {destination}, which receives {wrong[1]} then"
            )


def verify_computations(program: Program) -> None:
    """Each stage runs the forward and then the backward of each microbatch once, on its rank."""
    done: set[Compute] = set()
    for rank, instructions in enumerate(program.ranks):
        for entry in instructions:
            if not isinstance(entry, Compute):
                continue
            forward = replace(entry, op=Pass.FORWARD)
            if entry in done or program.rank_of(entry.pipeline, entry.stage) != rank:
                raise InputError(f"rank {rank} has {entry}, which runs elsewhere or before already")
            if entry.op is Pass.BACKWARD and forward not in done:
                raise InputError(f"rank {rank} has {entry} before {forward}")
            done.add(entry)
    expected = sum(2 * p.num_microbatches * len(p.stages) for p in program.plan.pipelines)
    if len(done) != expected:
        raise InputError(f"the program has {len(done)} computations, the plan needs {expected}")


def verify_order(program: Program) -> None:
    """No deadlock: run all lists, a computation only after its message was sent; then SYNC, NORM, STEP."""
    for rank, instructions in enumerate(program.ranks):
        syncs = [index for index, bucket in enumerate(program.buckets) if rank in bucket.ranks]
        tail = [entry for entry in instructions if isinstance(entry, Sync | Norm | Step | Broadcast)]
        broadcasts = parameter_broadcasts(program, rank)
        if tail != [*map(Sync, syncs), Norm(), Step(), *broadcasts]:
            raise InputError(
                f"rank {rank} ends in {' '.join(map(str, tail))}; SYNCs in order, NORM, STEP, and broadcasts "
                "in order of what is sharded belong there"
            )
        if not isinstance(instructions[-2 - len(broadcasts)], Norm):
            raise InputError(f"rank {rank} goes on after its NORM")
    _verify_syncs(program)
    sent: set[object] = set()
    received: set[object] = set()
    position = [0] * len(program.ranks)
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(program.ranks):
            while position[rank] < len(instructions):
                entry = instructions[position[rank]]
                if isinstance(entry, Compute):
                    num_stages = len(program.pipeline(entry).stages)
                    message = incoming(entry, num_stages)
                    if message is not None and (message not in sent or (rank, message) not in received):
                        break
                    made = outgoing(entry, num_stages)
                    if made is not None and made[1:3] in program.local_boundaries:
                        sent.add(made)
                        received.add((rank, made))
                elif isinstance(entry, Transfer):
                    if entry.direction is Direction.SEND:
                        sent.add(entry.message)
                    else:
                        received.add((rank, entry.message))
                position[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {instructions[position[rank]]}"
        for rank, instructions in enumerate(program.ranks)
        if position[rank] < len(instructions)
    ]
    if stuck:
        raise InputError(f"the program deadlocks: {'; '.join(stuck)}")


def _verify_syncs(program: Program) -> None:
    """A SYNC comes after the last backward that adds to its gradients."""
    for rank, (instructions, points) in enumerate(
        zip(program.ranks, sync_points(program, program.ranks), strict=True)
    ):
        done: set[Sync] = set()
        for entry in instructions:
            if isinstance(entry, Sync):
                done.add(entry)
            elif isinstance(entry, Compute) and (early := done.intersection(points.get(entry, ()))):
                raise InputError(f"rank {rank} has {min(map(str, early))} before {entry}, which it needs")


def observed_in_flight(program: Program) -> dict[tuple[int, int], int]:
    """The most microbatches that a stage (pipeline, stage) holds between forward and backward."""
    return most_in_flight(program.ranks)
