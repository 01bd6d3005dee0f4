"""How ranks come to the device made of Python, which nothing but those ranks may have loaded."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from hetpipe.data.task import TaskFactory
from hetpipe.runtime.cuda_events import GpuPace
from hetpipe.training import rank as ranks

Emit = Callable[[dict[str, Any]], None]


def call(name: str, *arguments: Any, rank: int, emit: Emit) -> None:
    """Call a function of `sim_mains`, and emit what it emits."""
    getattr(import_module("sim_mains"), name)(
        *arguments, rank=rank, emit=lambda found: emit({"event": "found", "rank": rank, **found})
    )


def train_rank(folder: str, make_task: TaskFactory, handover: str, *, rank: int, emit: Emit) -> None:
    """Train as a rank whose GPU is the device; emit after the last step how often the host has waited."""
    device = import_module("sim_device")
    vars(ranks).update(torch_device=lambda _: device.DEVICE, pace_of=lambda *_: GpuPace(device.MODULE.Event))
    ranks.train_rank(folder, make_task, handover, rank=rank, emit=emit)
