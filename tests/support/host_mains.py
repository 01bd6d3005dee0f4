"""Two launchers that share a group of ranks, as two hosts do: what they run, and the second of them."""

import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from hetpipe.runtime.processes import Emit, RankGroup, run_ranks
from hetpipe.runtime.remote_store import LeadersStore
from hetpipe.training.common_clock import CommonClock

TOKEN = b"0123456789abcdef0123456789abcdef"


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


def proven_group(port: int, local: tuple[int, ...]) -> RankGroup:
    """The same ranks, which meet at a store that asks for the token."""
    store = LeadersStore(("127.0.0.1", port), TOKEN, 60.0)
    return replace(group_of(port, local), store=store)


def pair_up(*, rank: int, emit: Emit) -> None:
    """Emit the sum over rank + 1 of all, and that of the first and the last, to whom alone it is one."""
    last = dist.get_world_size() - 1
    every, pair = torch.tensor(rank + 1.0), torch.tensor(rank + 1.0)
    both = dist.new_group([0, last])
    dist.all_reduce(every)
    if rank in (0, last):
        dist.all_reduce(pair, group=both)
    emit({"event": "sums", "rank": rank, "all": every.item(), "pair": pair.item()})


def tell_clocks(*, rank: int, emit: Emit) -> None:
    """Start a step together, and tell when that was by the own clock, and how long it was waited for."""
    clock = CommonClock.of_all()
    common_s, begun_s = clock.start_s(), time.monotonic()
    own_s = clock.own_s(common_s)
    time.sleep(max(0.0, own_s - begun_s))
    slept_s = time.monotonic() - begun_s
    emit({"event": "clock", "rank": rank, "figures": clock.figures, "lead_s": clock.lead_s,
          "own_start_s": own_s, "slept_s": slept_s})  # fmt: skip


if __name__ == "__main__":  # the second host: port, failing rank or null, "proven" or "clocks", its ranks
    second: list[dict[str, Any]] = []
    port, failing, *local = sys.argv[1:]
    here = tuple(map(int, local))
    try:
        if failing == "proven":
            run_ranks(pair_up, (), proven_group(int(port), here), second.append)
        elif failing == "clocks":
            run_ranks(tell_clocks, (), group_of(int(port), here), second.append)
        else:
            run_ranks(add_up, (json.loads(failing),), group_of(int(port), here), second.append)
    except RuntimeError as error:
        second.append({"error": str(error)})
    print(json.dumps(second))
