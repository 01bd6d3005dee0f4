"""Two launchers that share a group of ranks, as two hosts do: what they run, and the second of them."""

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from hetpipe.runtime.processes import Emit, RankGroup, run_ranks


@dataclass(frozen=True)
class Meeting:
    """Opens a store of torch on this machine."""

    port: int

    def __call__(self, world: int) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, world, is_master=False)


def group_of(port: int, local: tuple[int, ...]) -> RankGroup:
    names = ("big/0", "big/1", "small/0", "small/1")
    return RankGroup(names, (1,) * 4, timeout_s=60.0, local=local, store=Meeting(port))


def add_up(failing: int | None, *, rank: int, emit: Emit) -> None:
    """Emit the sum of what all ranks give; one may fail instead."""
    if rank == failing:
        raise ZeroDivisionError("division by zero")
    value = torch.tensor(2.0**rank)
    dist.all_reduce(value)
    emit({"event": "sum", "rank": rank, "sum": value.item()})


if __name__ == "__main__":  # the second host: port, failing rank or null, its ranks
    second: list[dict[str, Any]] = []
    port, failing, *local = map(json.loads, sys.argv[1:])
    try:
        run_ranks(add_up, (failing,), group_of(port, tuple(local)), second.append)
    except RuntimeError as error:
        second.append({"error": str(error)})
    print(json.dumps(second))
