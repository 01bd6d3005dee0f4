"""From a plan to the instruction lists that run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cost_model.cluster import Cluster
from cost_model.collectives import Collective
from cost_model.errors import InputError
from cost_model.network import Network, cheaper_collective
from cost_model.profile import ModelProfile
from hetpipe.program.compute_orders import Order, compute_orders
from hetpipe.program.instructions import (
    Broadcast,
    Bucket,
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
from partition.estimates.optimizer_sharding import with_state_owners
from partition.plan import Plan

RECEIVE_AHEAD = 1
"""A receive is posted this many computations before the one that waits for it, or earlier: an edge between
two ranks carries its messages in the order in which they are sent."""


def lower_as(plan: Plan, profile: ModelProfile, cluster: Cluster | None, schedule: Schedule) -> Program:
    """Lower a plan under one schedule that is named, never `auto`; see `schedule_selection.lower`."""
    if plan.zero and plan.state_owners is None:
        if cluster is None:
            raise InputError("the plan leaves open who has the optimizer states; give the cluster")
        plan = with_state_owners(plan, profile, cluster)
    buckets = gradient_buckets(plan, profile)
    if cluster is not None:
        network = Network(cluster, profile.links, profile.all_reduces)
        buckets = with_collectives(plan, buckets, profile, network)
    ordered = compute_orders(plan, profile, cluster, schedule)
    if ordered.last_backward_s:
        buckets = _as_they_end(plan, buckets, ordered.last_backward_s)
    program = Program(ordered.plan, buckets, ())
    lists = _with_messages(program, ordered.ranks)
    syncs = sync_points(program, ordered.ranks)
    broadcasts = [parameter_broadcasts(program, rank) for rank in range(len(ordered.ranks))]
    return Program(ordered.plan, buckets, tuple(map(_with_syncs, lists, syncs, broadcasts)), schedule)


def _with_messages(program: Program, orders: Sequence[Order]) -> Iterator[list[Instruction]]:
    """Each rank's computations with the receives that they need and the sends of what they make."""
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
    for order, row in zip(orders, sends, strict=True):
        yield list(_merged(program, order, row, edge_of))


def _merged(
    program: Program,
    order: Order,
    sends: Sequence[Transfer | None],
    edge_of: dict[Message, Iterator[Transfer]],
) -> Iterator[Instruction]:
    posted: set[Message] = set()
    looked = 0
    for slot, compute in enumerate(order):
        for ahead in order[looked : slot + 1 + RECEIVE_AHEAD]:
            wanted = incoming(ahead, len(program.pipeline(ahead).stages))
            # the messages before it on the edge go first, whoever needs them later
            while wanted in edge_of and wanted not in posted:
                send = next(edge_of[wanted])
                posted.add(send.message)
                yield Transfer(Direction.RECV, send.op, send.pipeline, send.peer_stage, send.microbatch)
        looked = slot + 1 + RECEIVE_AHEAD
        yield compute
        if (send_now := sends[slot]) is not None:
            yield send_now


def _send(program: Program, compute: Compute) -> Transfer | None:
    """The send of what a computation makes; None at the ends, and where it stays on the rank."""
    message = outgoing(compute, len(program.pipeline(compute).stages))
    if message is None or message[1:3] in program.local_boundaries:
        return None
    return Transfer(Direction.SEND, compute.op, compute.pipeline, compute.stage, compute.microbatch)


def sync_points(program: Program, orders: Sequence[Iterable[Instruction]]) -> list[dict[Compute, list[Sync]]]:
    """For each rank, after which computation its SYNCs come: the last backward of any of its stages that hold
    layers of the bucket, and after the SYNCs before it."""
    points: list[dict[Compute, list[Sync]]] = []
    buckets_of: list[list[int]] = [[] for _ in orders]
    layers = [set(bucket.layers) for bucket in program.buckets]
    for index, bucket in enumerate(program.buckets):
        for rank in bucket.ranks:
            buckets_of[rank].append(index)
    for mine, order in zip(buckets_of, orders, strict=True):
        last: dict[tuple[int, int], tuple[int, Compute]] = {}
        for slot, entry in enumerate(order):
            if isinstance(entry, Compute) and entry.op is Pass.BACKWARD:
                last[entry.pipeline, entry.stage] = (slot, entry)
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
    """The broadcasts in which a rank takes part, in order of the buckets."""
    return tuple(
        Broadcast(index)
        for index, bucket in enumerate(program.buckets)
        if bucket.state_owner is not None and rank in bucket.ranks
    )


def _with_syncs(
    instructions: Iterable[Instruction], after: dict[Compute, list[Sync]], broadcasts: Iterable[Broadcast]
) -> tuple[Instruction, ...]:
    """A rank's list with its SYNCs, each after the sends of its last backward; NORM, STEP, broadcasts."""
    result: list[Instruction] = []
    due: list[Sync] = []
    for entry in instructions:
        if due and not (isinstance(entry, Transfer) and entry.direction is Direction.SEND):
            result += due
            due = []
        result.append(entry)
        if isinstance(entry, Compute) and entry in after:
            due = after[entry]
    return (*result, *due, Norm(), Step(), *broadcasts)


def _as_they_end(
    plan: Plan, buckets: Iterable[Bucket], ends_s: Mapping[tuple[int, int], float]
) -> tuple[Bucket, ...]:
    """The buckets in the order in which their last backward ends, so that no SYNC waits for a later one."""
    ready = [0.0] * plan.num_layers
    for (pipeline, stage), end in ends_s.items():
        for layer in range(*plan.pipelines[pipeline].stages[stage].layers):
            ready[layer] = max(ready[layer], end)
    return tuple(sorted(buckets, key=lambda bucket: max(ready[layer] for layer in bucket.layers)))


def gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    """Neighbouring layers with the same owners form a bucket; tied weights are one more each.

    Where optimizer states are sharded, only layers whose states are on one device go together. In one global
    order, the layers whose backward ends first at the front; only buckets of several owners.
    """
    rank_of = {name: rank for rank, name in enumerate(plan.device_names)}
    holders: list[set[int]] = [set() for _ in range(profile.num_layers)]
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for layer in range(*stage.layers):
                holders[layer].add(rank_of[stage.device])

    def owners(*layers: int) -> tuple[int, ...]:
        return tuple(sorted(set().union(*(holders[layer] for layer in layers))))

    states = plan.state_owners

    def bucket_of(layers: tuple[int, ...], ranks: tuple[int, ...], *, tied: bool = False) -> Bucket:
        return Bucket(layers, ranks, tied, state_owner=None if states is None else rank_of[states[layers[0]]])

    tied = [layer for layer in range(profile.num_layers) if profile.tied_home(layer) != layer]
    groups = [
        (home, *(layer for layer in tied if profile.tied_home(layer) == home))
        for home in sorted({profile.tied_home(layer) for layer in tied})
    ]
    buckets = [bucket_of(layers, owners(*layers), tied=True) for layers in groups]
    start = 0
    for stop in range(1, profile.num_layers + 1):
        last = stop == profile.num_layers
        if last or holders[stop] != holders[start] or (states and states[stop] != states[start]):
            buckets.append(bucket_of(tuple(range(start, stop)), owners(start)))
            start = stop
    several = [bucket for bucket in buckets if len(bucket.ranks) > 1]
    return tuple(sorted(several, key=lambda bucket: (-bucket.layers[0], bucket.tied)))


def with_collectives(
    plan: Plan, buckets: Iterable[Bucket], profile: ModelProfile, network: Network
) -> tuple[Bucket, ...]:
    """The buckets, each summed by the collective that is cheaper for its owners on the idle network."""
    names = plan.device_names

    def collective(bucket: Bucket) -> Collective:
        if bucket.state_owner is not None:
            return bucket.collective  # reduced to the owner, whatever is cheaper
        return cheaper_collective(network, bucket.num_bytes(profile), [names[rank] for rank in bucket.ranks])

    return tuple(replace(bucket, collective=collective(bucket)) for bucket in buckets)
