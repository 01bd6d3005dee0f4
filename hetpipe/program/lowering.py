"""The lowering of a plan to the instruction lists that run."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import add

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.network import Network
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding
from hetpipe.program.compute_orders import Order, compute_orders
from hetpipe.program.gradient_buckets import gradient_buckets, in_order_of_backwards, with_collectives
from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Direction,
    Instruction,
    Message,
    Norm,
    Pass,
    Program,
    Schedule,
    Step,
    Sync,
    Transfer,
    incoming,
    outgoing,
)
from hetpipe.program.layer_rounds import with_rounds
from partition.estimates.optimizer_sharding import with_state_owners
from partition.plan import Plan

RECEIVE_AHEAD = 1
"""A receive is posted this many computations before the one that waits for it, or earlier: an edge between
two ranks carries its messages in the order in which they are sent. Not between GPUs: see `on_gpus`."""


def lower_as(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster | None,
    schedule: Schedule,
    *,
    most_bytes: float | None = None,
) -> Program:
    """Lower a plan under one schedule that is named, never `auto`; see `schedule_selection.lower`.

    most_bytes: see `cut_buckets`; without a cluster no bucket is cut.
    """
    if plan.zero and plan.state_owners is None:
        if cluster is None:
            raise InputError("the plan leaves open who has the optimizer states; give the cluster")
        plan = with_state_owners(plan, profile, cluster)
    buckets = gradient_buckets(plan, profile)
    if cluster is not None:
        network = Network(cluster, profile.links, profile.all_reduces)
        buckets = with_collectives(plan, buckets, profile, network, most_bytes)
    ordered = compute_orders(plan, profile, cluster, schedule)
    if ordered.last_backward_s:
        buckets = in_order_of_backwards(plan, buckets, ordered.last_backward_s)
    program = Program(ordered.plan, buckets, (), schedule, profile.first_trained)
    lists = list(_with_messages(program, ordered.ranks, on_gpus(program, cluster)))
    broadcasts = [parameter_broadcasts(program, rank) for rank in range(len(ordered.ranks))]
    if plan.sharding.by_layer:
        ends = [(Norm(), Step(), *spread) for spread in broadcasts]
        return replace(program, ranks=tuple(map(add, with_rounds(program, lists), ends)))
    syncs = sync_points(program, ordered.ranks)
    return replace(program, ranks=tuple(map(_with_syncs, lists, syncs, broadcasts)))


def on_gpus(program: Program, cluster: Cluster | None) -> tuple[bool, ...]:
    """Return, by rank, whether its device is a GPU; without a cluster none is.

    A receive between two of them runs on the GPU until its message comes. Whatever waits for the whole GPU
    meanwhile, such as loading a kernel or giving memory back, waits for the message too, for ever where that
    depends on what this rank has not yet handed in. So it is posted where it is needed: the host has handed
    in all before by then, and goes ahead of the GPU, which loses no time (`SideStream`).
    """
    if cluster is None:
        return (False,) * len(program.device_names)
    return tuple(cluster.device(name).is_gpu for name in program.device_names)


def _with_messages(
    program: Program, orders: Sequence[Order], gpus: Sequence[bool]
) -> Iterator[list[Instruction]]:
    """Yield each rank's computations with the receives that they need and the sends of their results."""
    sends: list[list[Transfer | None]] = [[_send(program, compute) for compute in order] for order in orders]
    edges: dict[tuple[int, int], list[Transfer]] = {}
    for rank, row in enumerate(sends):
        for send in row:
            if send is not None:
                peer = program.rank_of(send.pipeline, send.peer_stage)
                edges.setdefault((rank, peer), []).append(send)
    edge_of: dict[Message, Iterator[Transfer]] = {}
    for messages in edges.values():
        line = iter(messages)
        edge_of.update((send.message, line) for send in messages)
    at_need = {
        message
        for (rank, peer), messages in edges.items()
        if gpus[rank] and gpus[peer]
        for message in (send.message for send in messages)
    }
    for order, row in zip(orders, sends, strict=True):
        yield list(_merged(program, order, row, edge_of, at_need))


def _merged(
    program: Program,
    order: Order,
    sends: Sequence[Transfer | None],
    edge_of: dict[Message, Iterator[Transfer]],
    at_need: Container[Message],
) -> Iterator[Instruction]:
    posted: set[Message] = set()
    for slot, compute in enumerate(order):
        for distance, ahead in enumerate(order[slot : slot + 1 + RECEIVE_AHEAD]):
            wanted = incoming(ahead, program.pipeline(ahead).stages)
            if distance and wanted in at_need:
                continue
            # the messages before it on the edge go first, whoever needs them later
            while wanted in edge_of and wanted not in posted:
                send = next(edge_of[wanted])
                posted.add(send.message)
                yield Transfer(Direction.RECV, send.op, send.pipeline, send.peer_stage, send.microbatch)
        yield compute
        if (send_now := sends[slot]) is not None:
            yield send_now


def _send(program: Program, compute: Compute) -> Transfer | None:
    """Return the send of a computation's result; None at the ends, and where it stays on the rank."""
    stages = program.pipeline(compute).stages
    message = outgoing(compute, stages, program.first_backward[compute.pipeline])
    if message is None or message[1:3] in program.local_boundaries:
        return None
    return Transfer(Direction.SEND, compute.op, compute.pipeline, compute.stage, compute.microbatch)


def sync_points(program: Program, orders: Sequence[Iterable[Instruction]]) -> list[dict[Compute, list[Sync]]]:
    """Return, for each rank, the SYNCs that come after each of its computations.

    A SYNC comes after the last backward of any of the rank's stages that hold layers of the bucket, and after
    the SYNCs before it.
    """
    points: list[dict[Compute, list[Sync]]] = []
    buckets_of: list[list[int]] = [[] for _ in orders]
    layers = [set(bucket.layers) for bucket in program.buckets]
    for index, bucket in enumerate(program.buckets):
        for rank in bucket.ranks:
            buckets_of[rank].append(index)
    for mine, order in zip(buckets_of, orders, strict=True):
        last: dict[tuple[int, int], tuple[int, Compute]] = {}
        for slot, instruction in enumerate(order):
            if isinstance(instruction, Compute) and instruction.op is Pass.BACKWARD:
                last[instruction.pipeline, instruction.stage] = (slot, instruction)
        stages = [
            (layers_held, end)
            for (pipeline, stage), end in last.items()
            for layers_held in [range(*program.plan.pipelines[pipeline].stages[stage].layers)]
        ]
        after: dict[Compute, list[Sync]] = {}
        latest: tuple[int, Compute] | None = None
        for index in mine:
            touching = [end for held, end in stages if not layers[index].isdisjoint(held)]
            latest = max([*touching, *([latest] if latest else [])], key=lambda end: end[0])
            after.setdefault(latest[1], []).append(Sync(index))
        points.append(after)
    return points


def parameter_broadcasts(program: Program, rank: int) -> tuple[Broadcast, ...]:
    """Return the broadcasts in which a rank takes part, in order of the buckets.

    None of weights that are sharded: they are fetched when they are needed.
    """
    return tuple(
        Broadcast(index)
        for index, bucket in enumerate(program.buckets)
        if bucket.state_owner is not None
        and rank in bucket.ranks
        and program.sharding_of(index) is not Sharding.WEIGHTS
    )


def _with_syncs(
    instructions: Iterable[Instruction], after: dict[Compute, list[Sync]], broadcasts: Iterable[Broadcast]
) -> tuple[Instruction, ...]:
    """Return a rank's list with its SYNCs after the sends of their last backward; NORM, STEP, broadcasts."""
    result: list[Instruction] = []
    due: list[Sync] = []
    for instruction in instructions:
        if due and not (isinstance(instruction, Transfer) and instruction.direction is Direction.SEND):
            result += due
            due = []
        result.append(instruction)
        if isinstance(instruction, Compute) and instruction in after:
            due = after[instruction]
    return (*result, *due, Norm(), Step(), *broadcasts)
