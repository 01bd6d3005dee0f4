"""How many CPU threads each rank has. Needs no torch itself."""

import os
from collections.abc import Sequence

from cost_model.cluster import CPU, Device
from partition.plan import OPTIMIZER_STEP, Plan


def threads_for(kind: str, count: int) -> int:
    """Return the CPU threads of a rank of a kind of which `count` share this host."""
    return max(1, (os.cpu_count() or 1) // max(1, count)) if kind == CPU else 1


def rank_threads(
    devices: Sequence[Device], local: Sequence[int] | None = None, plan: Plan | None = None
) -> tuple[int, ...]:
    """Return the CPU threads of each rank; ranks on GPUs have one, but where their host steps for them.

    Those share its cores, as `step_on_host_s` reckons: nothing else is computed there then. Those on CPUs
    share the cores; emulated devices have one.

    local: the ranks on this host, None for all. plan: what they run.
    """
    here = range(len(devices)) if local is None else local
    num_cpus = max(1, sum(devices[rank].kind == CPU for rank in here))
    threads = [threads_for(device.kind, num_cpus) for device in devices]
    stepping = [
        rank
        for rank in here
        if plan is not None
        and devices[rank].is_gpu
        and plan.offloaded_layers(devices[rank].name, OPTIMIZER_STEP)
    ]
    for rank in stepping:
        threads[rank] = max(1, (os.cpu_count() or 1) // len(stepping))
    return tuple(threads)
