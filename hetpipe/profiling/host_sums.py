"""The measurement of a sum over hosts, one device of each, as the executor does it."""

import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from cost_model.cluster import Device
from hetpipe.runtime.accelerators import synchronize_stream
from hetpipe.runtime.host_staging import Staging, room_on_host
from hetpipe.runtime.processes import Emit
from hetpipe.runtime.rank_setup import torch_device

ROUNDS = 5
TIMEOUT_S = 120.0


def host_sum_rank(devices: Sequence[Device], sizes: Sequence[int], *, rank: int, emit: Emit) -> None:
    """Sum over all ranks; rank 0 emits the median seconds by size.

    sizes: bytes that each rank gives. A sum begins when its members have the last; one of each size, which
    opens connections, is not looked at.
    """
    place, staging = torch_device(devices[rank]), Staging.of(devices)
    ranks = range(len(devices))
    group, copied = staging.new_group(ranks, timedelta(seconds=TIMEOUT_S)), staging.copies(rank, ranks)
    found = []
    for size in sizes:
        buffer = torch.zeros(size // 4, device=place)
        moved = room_on_host(buffer) if copied else buffer
        seconds = []
        for _ in range(ROUNDS + 1):
            begin_s = time.perf_counter()
            if copied:
                moved.copy_(buffer)
            dist.all_reduce(moved, group=group)
            if copied:
                buffer.copy_(moved)
            synchronize_stream(place)
            seconds.append(time.perf_counter() - begin_s)
        found.append(statistics.median(seconds[1:]))
    if rank == 0:
        emit({"event": "sum", "found": found})
