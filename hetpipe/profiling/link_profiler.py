"""The measurement of messages and all-reduces between this host's devices, sent as the executor does."""

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from cost_model.cluster import CPU, Cluster, Device, Link
from cost_model.measured_links import MeasuredAllReduce, MeasuredLink
from cost_model.network import NORM_BYTES
from hetpipe.profiling.median_error import standard_error_of_median
from hetpipe.program.instructions import Direction, Pass, Program, Transfer
from hetpipe.runtime.accelerators import synchronize_stream
from hetpipe.runtime.host_staging import Staging, room_on_host
from hetpipe.runtime.processes import Emit, RankGroup, run_ranks
from hetpipe.runtime.rank_setup import torch_device
from hetpipe.runtime.transport import DistributedTransport, TensorShape
from partition.plan import Pipeline, Plan, Stage

LATENCY_BYTES = 4
MESSAGE_BYTES = tuple(1024 * 4**power for power in range(8))  # 1 KiB to 16 MiB
ALL_REDUCE_BYTES = (int(NORM_BYTES), 16 * 2**10, 2**20, 16 * 2**20)
MOST_ROUNDS, LEAST_ROUNDS = 100, 9
BYTES_PER_SIZE = 64 * 2**20
WARMUP = 2
LARGEST_PART = 8
"""Groups of two, four, ... devices of a kind are measured up to this one, and all of them together."""
TIMEOUT_S = 60.0


def pairs_of_devices(cluster: Cluster) -> list[tuple[Device, Device]]:
    """Return real devices to measure a link between, for each two kinds that this host has.

    Emulated links are as written in the file.
    """
    by_kind = _by_kind(cluster)
    kinds = sorted(by_kind)
    return [
        (by_kind[one][0], by_kind[other][1 if one == other else 0])
        for index, one in enumerate(kinds)
        for other in kinds[index:]
        if one != other or len(by_kind[one]) > 1
    ]


def groups_of_devices(cluster: Cluster) -> list[tuple[tuple[Device, ...], tuple[int, ...]]]:
    """Return real devices to measure all-reduces between, and the sizes of their groups.

    Each group begins with the first device. For each kind two, four, ... up to LARGEST_PART, and all; all
    kinds together where there are several.
    """
    by_kind = _by_kind(cluster)
    groups = []
    for _, devices in sorted(by_kind.items()):
        count = len(devices)
        if count > 1:
            parts = {2**power for power in range(1, LARGEST_PART.bit_length()) if 2**power <= count}
            groups.append((tuple(devices), tuple(sorted(parts | {count}))))
    if len(by_kind) > 1:
        everyone = tuple(device for _, devices in sorted(by_kind.items()) for device in devices)
        groups.append((everyone, (len(everyone),)))
    return groups


def _by_kind(cluster: Cluster) -> dict[str, list[Device]]:
    """Return the real devices of one host: CPUs, and the GPUs of the node that has most, numbered there."""
    gpus = [[d for d in node.devices if d.is_gpu] for node in cluster.nodes]
    found: dict[str, list[Device]] = {}
    for device in [*(d for d in cluster.devices if d.kind == CPU), *max(gpus, key=len)]:
        found.setdefault(device.kind, []).append(device)
    return found


def measure_links(cluster: Cluster) -> dict[str, Link]:
    """Measure the links between the kinds of real devices, by "kind>kind", both directions alike."""
    links: dict[str, Link] = {}
    for one, other in pairs_of_devices(cluster):
        found = _run(link_rank, (one, other), ((one, other),))
        links[f"{one.kind}>{other.kind}"] = links[f"{other.kind}>{one.kind}"] = found[0]
    return links


def measure_all_reduces(cluster: Cluster) -> tuple[MeasuredAllReduce, ...]:
    """Measure all-reduces within groups of real devices, as `groups_of_devices` has them."""
    return tuple(
        row
        for devices, sizes in groups_of_devices(cluster)
        for row in _run(all_reduce_rank, devices, (devices, sizes))
    )


def _run(main: Callable[..., None], devices: Sequence[Device], arguments: tuple[Any, ...]) -> list[Any]:
    """Return what the first rank emits as "found", with one rank for each device."""
    found: list[Any] = []
    names = tuple(device.name for device in devices)
    group = RankGroup(names, (1,) * len(devices), backend=Staging.of(devices).backend)
    run_ranks(main, arguments, group, lambda event: found.append(event["found"]))
    return found


# ---- links


def link_rank(devices: Sequence[Device], *, rank: int, emit: Emit) -> None:
    """Send messages to the other end and back, receives posted ahead; rank 0 emits the `MeasuredLink`.

    A message takes half of its round trip: from its dispatch until its receiver has it. What a message takes
    longer than the smallest, it occupies the link.
    """
    sizes = mixed((LATENCY_BYTES, *MESSAGE_BYTES))
    both_ways = [(size, size) for size in sizes]
    if rank == 1:
        return_messages(devices, both_ways)
        return
    found = _by_size(sizes, round_trips_s(devices, both_ways))
    emit({"event": "link", "found": link_of({size: [s / 2 for s in times] for size, times in found.items()})})


def mixed(sizes: Sequence[int]) -> list[int]:
    """Return the sizes in random order, the same on all ranks, so that a busy moment does not hit one only.

    The larger a size, the less often; before all, each of them WARMUP times.
    """
    times = {size: min(MOST_ROUNDS, max(LEAST_ROUNDS, BYTES_PER_SIZE // size)) for size in sizes}
    rounds = [size for size in sizes for _ in range(times[size])]
    return [*sizes] * WARMUP + Random(0).sample(rounds, len(rounds))


def _by_size(sizes: Sequence[int], seconds: Sequence[float]) -> dict[int, list[float]]:
    """Return the seconds of each size, those of the warm-up left out."""
    found: dict[int, list[float]] = {}
    for size, duration_s in zip(sizes, seconds, strict=True):
        found.setdefault(size, []).append(duration_s)
    return {size: times[WARMUP:] for size, times in found.items()}


def link_of(seconds: dict[int, list[float]]) -> MeasuredLink:
    """Return the link on which messages of rising sizes took these seconds in one direction.

    A size never occupies the link for less than a smaller one.
    """
    (_, smallest), *larger = seconds.items()
    latency_s = statistics.median(smallest)
    occupied = accumulate((max(0.0, statistics.median(found) - latency_s) for _, found in larger), max)
    sizes, occupied_s = tuple(size for size, _ in larger), tuple(occupied)
    last_s = occupied_s[-1] - occupied_s[-2]
    by_last = (sizes[-1] - sizes[-2]) / last_s if last_s > 0 else sizes[-1] / max(occupied_s[-1], 1e-9)
    error = standard_error_of_median(smallest) / latency_s
    return MeasuredLink(latency_s, by_last, sizes, occupied_s, error)


def round_trips_s(devices: Sequence[Device], sizes: Sequence[tuple[int, int]]) -> list[float]:
    """Return the seconds of round trips, as rank 0; sizes: bytes there and back of each."""
    place, transport = _transport(devices, 0, len(sizes))
    seconds = []
    for index, (there, back) in enumerate(sizes):
        sent = (torch.zeros(there // 4, device=place),)
        receive = Transfer(Direction.RECV, Pass.BACKWARD, 0, 0, index)
        send = Transfer(Direction.SEND, Pass.FORWARD, 0, 0, index)
        transport.post_receive(receive, (TensorShape((back // 4,), torch.float32),))
        _finish(place)
        begin_s = time.perf_counter()
        transport.send(send, sent)
        transport.receive(receive)
        _finish(place)
        seconds.append(time.perf_counter() - begin_s)
        transport.release(send)
    return seconds


def return_messages(devices: Sequence[Device], sizes: Sequence[tuple[int, int]]) -> None:
    """Answer each message of `round_trips_s`, as rank 1: by itself, where what goes back is as large."""
    place, transport = _transport(devices, 1, len(sizes))

    def post(index: int) -> Transfer:
        receive = Transfer(Direction.RECV, Pass.FORWARD, 0, 1, index)
        transport.post_receive(receive, (TensorShape((sizes[index][0] // 4,), torch.float32),))
        return receive

    answers = {back: (torch.zeros(back // 4, device=place),) for there, back in sizes if there != back}
    receive = post(0)
    for index, (there, back) in enumerate(sizes):
        received = transport.receive(receive)
        if index + 1 < len(sizes):
            receive = post(index + 1)
        _finish(place)
        answer = received if there == back else answers[back]
        transport.send(Transfer(Direction.SEND, Pass.BACKWARD, 0, 1, index), answer)
        if index > 0:  # the message at hand proves that the one before was received
            transport.release(Transfer(Direction.SEND, Pass.BACKWARD, 0, 1, index - 1))
    transport.finish()


def _transport(
    devices: Sequence[Device], rank: int, num_messages: int
) -> tuple[torch.device, DistributedTransport]:
    """Return the executor's transport for as many messages in each direction between two stages."""
    place = torch_device(devices[rank])
    stages = tuple(Stage((device.name,), (index, index + 1), 1) for index, device in enumerate(devices))
    plan = Plan("manual", "links", num_messages, (Pipeline(1, num_messages, stages),))
    ranks = tuple(
        tuple(
            Transfer(direction, op, 0, stage, index)
            for index in range(num_messages)
            for direction, op in (
                (Direction.SEND, Pass.BACKWARD if stage else Pass.FORWARD),
                (Direction.RECV, Pass.FORWARD if stage else Pass.BACKWARD),
            )
        )
        for stage in (0, 1)
    )
    return place, DistributedTransport(Program(plan, (), ranks), rank, place, TIMEOUT_S, Staging.of(devices))


def _finish(place: torch.device) -> None:
    # not the whole device: a receive that is posted ahead would be waited for, whose sender waits for us
    synchronize_stream(place)


# ---- all-reduces


def all_reduce_rank(devices: Sequence[Device], sizes: Sequence[int], *, rank: int, emit: Emit) -> None:
    """Sum over the first two, four, ... ranks; rank 0 emits a `MeasuredAllReduce` per size of group."""
    place, staging, order = torch_device(devices[rank]), Staging.of(devices), mixed(ALL_REDUCE_BYTES)
    for size in sizes:
        ranks = range(size)
        group = staging.new_group(ranks, timedelta(seconds=TIMEOUT_S))
        if rank < size:
            found = _by_size(order, _all_reduces_s(order, group, place, staging.copies(rank, ranks)))
        if rank == 0:
            kinds = tuple(sorted(device.kind for device in devices[:size]))
            medians = tuple(statistics.median(found[num_bytes]) for num_bytes in ALL_REDUCE_BYTES)
            emit({"event": "all_reduce", "found": MeasuredAllReduce(kinds, ALL_REDUCE_BYTES, medians)})
        dist.all_reduce(torch.zeros(1))  # the others must not open the next group beside this one


def _all_reduces_s(
    order: Sequence[int], group: dist.ProcessGroup | None, place: torch.device, copied: bool
) -> list[float]:
    """Return the seconds of sums in a row: each begins when its members have the last.

    copied: through the host's memory, as in `GradientSync`.
    """
    buffers = {num_bytes: torch.zeros(num_bytes // 4, device=place) for num_bytes in set(order)}
    moved = {size: room_on_host(buffer) if copied else buffer for size, buffer in buffers.items()}
    seconds = []
    for num_bytes in order:
        begin_s = time.perf_counter()
        if copied:
            moved[num_bytes].copy_(buffers[num_bytes])
        work = dist.all_reduce(moved[num_bytes], group=group, async_op=True)
        assert work is not None
        work.wait()
        if copied:
            buffers[num_bytes].copy_(moved[num_bytes])
        _finish(place)
        seconds.append(time.perf_counter() - begin_s)
    return seconds
