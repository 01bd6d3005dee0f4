"""From a plan to the instruction lists that run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cost_model.cluster import Cluster
from cost_model.collectives import Collective
from cost_model.communication import Network, cheaper_collective
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.costs import ProgramCosts
from hetpipe.instructions import (
    Bucket,
    Compute,
    Direction,
    Instruction,
    Message,
    Norm,
    Pass,
    Program,
    Step,
    Sync,
    Transfer,
    incoming,
    outgoing,
)
from hetpipe.list_schedule import last_backward_s, list_schedule
from hetpipe.schedules import one_f_one_b
from partition.plan import Plan

RECEIVE_AHEAD = 1
"""A receive is posted this many computations before the one that waits for it, or earlier: an edge between
two ranks carries its messages in the order in which they are sent."""

Order = tuple[Compute, ...]


def lower(plan: Plan, profile: ModelProfile, cluster: Cluster | None = None) -> Program:
    """The program of a plan: 1F1B at every stage, receives posted ahead, SYNC as soon as possible.

    cluster: decides by which collective each bucket is summed, all by rings without it. Where a device serves
    several stages, its seconds decide their order (`list_schedule`).

    Raises: InputError if states are sharded (not yet), or a device is shared and no cluster is given.
    """
    if plan.zero:
        raise InputError(f"zero is {plan.zero}; sharded optimizer states are not supported yet, write 0")
    network = None if cluster is None else Network(cluster, profile.links, profile.all_reduces)
    buckets = gradient_buckets(plan, profile)
    if network is not None:
        buckets = with_collectives(plan, buckets, profile, network)
    shared = next((name for name, places in plan.places.items() if len(places) > 1), None)
    if shared is None:
        orders = [_one_f_one_b(plan, pipeline, stage) for ((pipeline, stage),) in plan.places.values()]
    elif cluster is None:
        count = len(plan.places[shared])
        raise InputError(
            f"device {shared!r} serves {count} stages, whose order depends on their seconds; give the cluster"
        )
    else:
        schedule = list_schedule(ProgramCosts(Program(plan, buckets, ()), profile, cluster, network))
        orders = [tuple(compute for compute, _ in scheduled) for scheduled in schedule]
        buckets = _as_they_end(plan, buckets, last_backward_s(schedule))
    program = Program(plan, buckets, ())
    lists = _with_messages(program, orders)
    syncs = sync_points(program, orders)
    return Program(plan, buckets, tuple(map(_with_syncs, lists, syncs)))


def _one_f_one_b(plan: Plan, pipeline: int, stage: int) -> Order:
    entry = plan.pipelines[pipeline]
    order = one_f_one_b(range(entry.num_microbatches), entry.in_flight(stage))
    return tuple(Compute(op, pipeline, stage, microbatch) for op, microbatch in order)


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


def _with_syncs(
    instructions: Iterable[Instruction], after: dict[Compute, list[Sync]]
) -> tuple[Instruction, ...]:
    """A rank's list with its SYNCs, each after the sends of its last backward, then NORM and STEP."""
    result: list[Instruction] = []
    due: list[Sync] = []
    for entry in instructions:
        if due and not (isinstance(entry, Transfer) and entry.direction is Direction.SEND):
            result += due
            due = []
        result.append(entry)
        if isinstance(entry, Compute) and entry in after:
            due = after[entry]
    return (*result, *due, Norm(), Step())


def _as_they_end(
    plan: Plan, buckets: Iterable[Bucket], ends_s: dict[tuple[int, int], float]
) -> tuple[Bucket, ...]:
    """The buckets in the order in which their last backward ends, so that no SYNC waits for a later one."""
    ready = [0.0] * plan.num_layers
    for (pipeline, stage), end in ends_s.items():
        for layer in range(*plan.pipelines[pipeline].stages[stage].layers):
            ready[layer] = max(ready[layer], end)
    return tuple(sorted(buckets, key=lambda bucket: max(ready[layer] for layer in bucket.layers)))


def gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    """Neighbouring layers with the same owners form a bucket; tied weights are one more each.

    In one global order, the layers whose backward ends first at the front; only buckets of several owners.
    """
    rank_of = {name: rank for rank, name in enumerate(plan.device_names)}
    holders: list[set[int]] = [set() for _ in range(profile.num_layers)]
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for layer in range(*stage.layers):
                holders[layer].add(rank_of[stage.device])

    def owners(*layers: int) -> tuple[int, ...]:
        return tuple(sorted(set().union(*(holders[layer] for layer in layers))))

    tied = [layer for layer in range(profile.num_layers) if profile.tied_home(layer) != layer]
    buckets = [
        Bucket((home, *(layer for layer in tied if profile.tied_home(layer) == home)), (), tied=True)
        for home in sorted({profile.tied_home(layer) for layer in tied})
    ]
    buckets = [Bucket(bucket.layers, owners(*bucket.layers), tied=True) for bucket in buckets]
    start = 0
    for stop in range(1, profile.num_layers + 1):
        if stop == profile.num_layers or holders[stop] != holders[start]:
            buckets.append(Bucket(tuple(range(start, stop)), owners(start)))
            start = stop
    several = [bucket for bucket in buckets if len(bucket.ranks) > 1]
    return tuple(sorted(several, key=lambda bucket: (-bucket.layers[0], bucket.tied)))


def with_collectives(
    plan: Plan, buckets: Iterable[Bucket], profile: ModelProfile, network: Network
) -> tuple[Bucket, ...]:
    """The buckets, each summed by the collective that is cheaper for its owners on the idle network."""
    names = plan.device_names

    def collective(bucket: Bucket) -> Collective:
        return cheaper_collective(network, bucket.num_bytes(profile), [names[rank] for rank in bucket.ranks])

    return tuple(replace(bucket, collective=collective(bucket)) for bucket in buckets)
