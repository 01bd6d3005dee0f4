"""Measures the channel between two devices of this host, as the executor uses it."""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from cost_model.cluster import CPU, EMULATED, Cluster, Link
from hetpipe.launch import Emit, RankGroup, run_ranks

SMALL_BYTES, LARGE_BYTES = 1024, 8 * 2**20
ROUNDS = 15


def kind_pairs(cluster: Cluster) -> list[tuple[str, str]]:
    """Kinds of real devices between which messages can go; emulated links are as written in the file."""
    counts: dict[str, int] = {}
    for device in cluster.devices:
        if device.kind != EMULATED:
            counts[device.kind] = counts.get(device.kind, 0) + 1
    return [(a, b) for a in sorted(counts) for b in sorted(counts) if a < b or (a == b and counts[a] > 1)]


def measure_links(cluster: Cluster) -> dict[str, Link]:
    """The links between the kinds of real devices of the cluster, by "kind>kind", both ways alike."""
    links: dict[str, Link] = {}
    for pair in kind_pairs(cluster):
        found: list[Link] = []

        def on_event(event: dict[str, float | str], found: list[Link] = found) -> None:
            found.append(Link(float(event["latency_s"]), float(event["bandwidth_bytes_per_s"])))

        on_gpus = CPU not in pair
        group = RankGroup(pair, (1, 1), backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo")
        run_ranks(link_rank, (pair,), group, on_event)
        links[f"{pair[0]}>{pair[1]}"] = links[f"{pair[1]}>{pair[0]}"] = found[0]
    return links


def link_rank(kinds: Sequence[str], *, rank: int, emit: Emit) -> None:
    """Send messages there and back; rank 0 emits latency (half a small round trip) and bandwidth."""
    device = torch.device("cuda", rank) if CPU not in kinds else torch.device("cpu")
    seconds = {size: _round_trip_s(size, rank, device) for size in (SMALL_BYTES, LARGE_BYTES)}
    if rank == 0:
        latency_s = seconds[SMALL_BYTES] / 2
        transfer_s = max(seconds[LARGE_BYTES] / 2 - latency_s, 1e-9)
        emit({"event": "link", "latency_s": latency_s, "bandwidth_bytes_per_s": LARGE_BYTES / transfer_s})


def _round_trip_s(size: int, rank: int, device: torch.device) -> float:
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        if rank == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        else:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])
