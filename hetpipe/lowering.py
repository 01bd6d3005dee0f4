"""From a plan to the instruction lists that run."""

from collections import Counter
from collections.abc import Iterator

from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.instructions import (
    Bucket,
    Compute,
    Direction,
    Instruction,
    Norm,
    Pass,
    Program,
    Step,
    Sync,
    Transfer,
)
from hetpipe.schedules import one_f_one_b
from partition.plan import Plan

RECEIVE_AHEAD = 1
"""A receive is posted this many computations before the one that waits for it."""


def lower(plan: Plan, profile: ModelProfile) -> Program:
    """The program of a plan: 1F1B at every stage, receives posted ahead, SYNC as soon as possible.

    Raises: InputError if two stages share a device, which needs a schedule of its own, or states are sharded
        (both not yet).
    """
    if plan.zero:
        raise InputError(f"zero is {plan.zero}; sharded optimizer states are not supported yet, write 0")
    places = [
        (stage.device, pipeline, index)
        for pipeline, entry in enumerate(plan.pipelines)
        for index, stage in enumerate(entry.stages)
    ]
    for name, count in Counter(device for device, _, _ in places).items():
        if count > 1:
            raise InputError(f"device {name!r} serves {count} stages; shared devices are not supported yet")
    buckets = gradient_buckets(plan, profile)
    syncs: list[list[Sync]] = [[] for _ in places]
    for index, bucket in enumerate(buckets):
        for rank in bucket.ranks:
            syncs[rank].append(Sync(index))
    return Program(
        plan,
        buckets,
        tuple(
            (*_stage_instructions(plan, pipeline, index), *syncs[rank], Norm(), Step())
            for rank, (_, pipeline, index) in enumerate(places)
        ),
    )


def _stage_instructions(plan: Plan, pipeline: int, stage: int) -> Iterator[Instruction]:
    entry = plan.pipelines[pipeline]
    last = len(entry.stages) - 1
    order = list(one_f_one_b(range(entry.num_microbatches), entry.in_flight(stage)))
    received = 0
    for slot, (op, microbatch) in enumerate(order):
        for ahead_op, ahead in order[received : slot + 1 + RECEIVE_AHEAD]:
            if (ahead_op is Pass.FORWARD and stage > 0) or (ahead_op is Pass.BACKWARD and stage < last):
                yield Transfer(Direction.RECV, ahead_op, pipeline, stage, ahead)
        received = slot + 1 + RECEIVE_AHEAD
        yield Compute(op, pipeline, stage, microbatch)
        if (op is Pass.FORWARD and stage < last) or (op is Pass.BACKWARD and stage > 0):
            yield Transfer(Direction.SEND, op, pipeline, stage, microbatch)


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
