"""The measurement of the link between two hosts, each direction apart, sent as the executor does."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from random import Random

import torch
import torch.distributed as dist

from cost_model.cluster import Device
from cost_model.measured_links import MeasuredLink
from hetpipe.profiling.link_profiler import LATENCY_BYTES, link_of, return_messages, round_trips_s
from hetpipe.runtime.processes import Emit

LARGEST_BYTES = 16 * 2**20
SMALLEST_BYTES = 16 * 2**10
LONGEST_S = 0.5
"""About so long does the largest message take."""
ROUNDS = 3
SMALL_ROUNDS = 40
WARMUP = 1


def host_link_rank(devices: Sequence[Device], *, rank: int, emit: Emit) -> None:
    """Measure the link between two devices of two hosts; rank 0 emits both directions, as plain data.

    A large message goes one way and a small one answers it; half of the shortest exchange is the latency,
    and what a large one takes beyond the small ones occupies the link in its direction.
    """
    sizes = sizes_up_to(_largest(rank))
    trips = mixed_trips(sizes)
    if rank == 1:
        return_messages(devices, trips)
        return
    seconds: dict[tuple[int, int], list[float]] = {}
    for trip, duration_s in zip(trips, round_trips_s(devices, trips), strict=True):
        seconds.setdefault(trip, []).append(duration_s)
    there, back = both_ways({trip: times[WARMUP:] for trip, times in seconds.items()}, sizes)
    found = {"there": dataclasses.asdict(there), "back": dataclasses.asdict(back)}
    emit({"event": "link", "found": found})


def sizes_up_to(largest_bytes: int) -> tuple[int, ...]:
    """Return the sizes of messages that are measured, each four times the one before.

    >>> sizes_up_to(2**20)
    (16384, 65536, 262144, 1048576)
    """
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 4 <= largest_bytes:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def mixed_trips(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bytes there and back of each round trip, in an order that is random and the same on both."""
    small = (LATENCY_BYTES, LATENCY_BYTES)
    large = [trip for size in sizes for trip in ((size, LATENCY_BYTES), (LATENCY_BYTES, size))]
    rounds = large * ROUNDS + [small] * SMALL_ROUNDS
    return [small, *large] * WARMUP + Random(0).sample(rounds, len(rounds))


def both_ways(
    seconds: dict[tuple[int, int], list[float]], sizes: Sequence[int]
) -> tuple[MeasuredLink, MeasuredLink]:
    """Return the link there and the link back, of round trips by their bytes there and back."""
    small = seconds[LATENCY_BYTES, LATENCY_BYTES]
    half_s = statistics.median(small) / 2
    latencies = [found / 2 for found in small]

    def one_way(trips: Sequence[tuple[int, int]]) -> MeasuredLink:
        larger = {max(trip): [found - half_s for found in seconds[trip]] for trip in trips}
        return link_of({LATENCY_BYTES: latencies, **larger})

    there = one_way([(size, LATENCY_BYTES) for size in sizes])
    return there, one_way([(LATENCY_BYTES, size) for size in sizes])


def _largest(rank: int) -> int:
    """Return, on both ranks, how large a message may be: sizes rise until one takes long.

    The first of the ladder opens the connection, and is not looked at.
    """
    size, chosen = torch.tensor(SMALLEST_BYTES), torch.zeros(1, dtype=torch.int64)
    while True:
        message = torch.zeros(int(size) // 4)
        if rank == 1:
            dist.recv(message, 0)
            dist.send(chosen, 0)
            dist.recv(chosen, 0)
        else:
            begun_s = time.perf_counter()
            dist.send(message, 1)
            dist.recv(chosen, 1)
            took_s = time.perf_counter() - begun_s
            is_last = size >= LARGEST_BYTES or (took_s > LONGEST_S / 4 and size > SMALLEST_BYTES)
            dist.send(chosen.fill_(is_last), 1)
        if chosen:
            return int(size)
        size *= 4
