"""Ranks that take part as on GPUs: connections that open at the first message, and a clock of events."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hetpipe.program.instructions import Compute, Step
from hetpipe.runtime.cuda_events import GpuPace
from random_cases import Case
from stress_ranks import OneProcess, Rank, compare

Emit = Callable[[dict[str, Any]], None]


class HostEvent:
    """A timed event of a stream on which all is done at once."""

    def record(self) -> None:
        self._when_s = time.monotonic()

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end_event: "HostEvent") -> float:
        return 1e3 * (end_event._when_s - self._when_s)


def open_at_the_first_message() -> None:
    """From now on, both ends wait for each other at the first message in a group, as with NCCL."""
    opened: set[dist.ProcessGroup | None] = set()

    def opening(post: Callable[..., Any]) -> Callable[..., Any]:
        def posted(
            tensor: Tensor, *arguments: Any, group: dist.ProcessGroup | None = None, **more: Any
        ) -> Any:
            if tensor.numel() > 0 and group not in opened:
                opened.add(group)
                dist.barrier(group=group)
            return post(tensor, *arguments, group=group, **more)

        return posted

    for name in ("isend", "irecv", "all_reduce", "reduce", "broadcast"):
        setattr(dist, name, opening(getattr(dist, name)))


def train_with_late_connections(cases: Sequence[Case], *, rank: int, emit: Emit) -> None:
    """Two steps of each program; rank 0 emits by how much the gradients differ from those of one process."""
    open_at_the_first_message()
    differences = []
    for case in cases:
        runner = Rank.open(case, rank)
        one = OneProcess(case.model) if rank == 0 else None
        differences += [compare(runner, one, step, 8, 1e-3, 1.0) for step in range(2)]
        runner.executor.close()
    if rank == 0:
        emit({"event": "trained", "differences": differences})


def time_by_events(case: Case, *, rank: int, emit: Emit) -> None:
    """A step on the clock of a GPU; each rank emits its events, how long it was busy, and its step."""
    runner = Rank.open(case, rank)
    runner.step(0, 8, 0.0, 1.0)
    runner.executor._pace = GpuPace(HostEvent)
    for step in (1, 2):
        outcome = runner.step(step, 8, 0.0, 1.0)
        spans = [
            (
                str(event.instruction),
                isinstance(event.instruction, Compute | Step),
                event.start_s,
                event.end_s,
            )
            for event in outcome.events
        ]
        found = {"busy_s": outcome.busy_s, "step_s": outcome.end_s - outcome.start_s, "spans": spans}
        emit({"event": "step", "rank": rank, **found})
    runner.executor.close()
