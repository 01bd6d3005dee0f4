"""What the ranks of launch and transport tests run: apart, so that a rank imports little."""

import glob
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from cost_model.errors import InputError
from hetpipe.program.instructions import Direction, Pass, Program, Transfer
from hetpipe.runtime.heartbeats import within_step
from hetpipe.runtime.transport import DistributedTransport, TensorShape
from hetpipe.training.meeting import all_done, gather

Emit = Callable[[dict[str, Any]], None]
SHAPES = (TensorShape((2, 3), torch.float32), TensorShape((2,), torch.int64))


def limit_waits(timeout_s: float, *groups: dist.ProcessGroup) -> None:
    """Have the ranks, now that all are here, wait for each other no longer between steps and in groups.

    Until then a busy machine may start them one by one.
    """
    dist.barrier()
    for group in (dist.group.WORLD, *groups):
        _set_pg_timeout(timedelta(seconds=timeout_s), group)


def exchange(program: Program, *, rank: int, emit: Emit) -> None:
    transport = DistributedTransport(program, rank, torch.device("cpu"), 20.0)
    if rank == 0:
        send = Transfer(Direction.SEND, Pass.FORWARD, 0, 0, 0)
        transport.send(send, (torch.arange(6.0).view(3, 2).t(), torch.tensor([4, 5])))  # not contiguous
        transport.finish()
    else:
        receive = Transfer(Direction.RECV, Pass.FORWARD, 0, 1, 0)
        transport.post_receive(receive, SHAPES)
        values, ids = transport.receive(receive)
        emit({"event": "got", "values": values.tolist(), "ids": ids.tolist()})


def write_slowly(slow_s: float, timeout_s: float, failing: int | None, *, rank: int, emit: Emit) -> None:
    """Write something that takes rank 1 so long; emit what all wrote. timeout_s: of a meeting."""
    limit_waits(timeout_s)

    def work() -> str:
        time.sleep(slow_s * rank)
        if rank == failing:
            raise InputError("no room is left")
        return f"written by {rank}"

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while not all_done(future, timeout_s / 3):
            pass
        emit({"event": "written", "found": gather(future.result())})


def lose_the_peer(program: Program, peer: str, *, rank: int, emit: Emit) -> None:
    transport = DistributedTransport(program, rank, torch.device("cpu"), 60.0)
    if peer == "stays silent":
        transport._timeout = timedelta(seconds=0.5)  # now that the ways are open
    if rank == 0:
        if peer == "stays silent":
            time.sleep(60)
        return  # leaves the group without having sent
    receive = Transfer(Direction.RECV, Pass.FORWARD, 0, 1, 2)
    transport.post_receive(receive, SHAPES)
    transport.receive(receive)


def fail(kind: str, others: str, *, rank: int, emit: Emit) -> None:
    """Rank 1 fails in a way; the others wait in a collective, stop, or compute without end."""
    emit({"event": "pid", "rank": rank, "pid": os.getpid()})
    dist.barrier()
    if rank == 1:
        if kind == "input error":
            raise InputError("no such file: corpus.txt")
        if kind == "error":
            raise ZeroDivisionError("division by zero")
        if kind == "memory":
            raise torch.OutOfMemoryError("small/0: 9 bytes are needed, the device has 8")
        os.kill(os.getpid(), signal.SIGSEGV if kind == "crash" else signal.SIGKILL)
    if others == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while others == "busy":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()


def wait_forever(folder: str, *, rank: int, emit: Emit) -> None:
    """Write the process id into the folder, then hang in a collective that rank 0 never joins."""
    path = Path(folder) / f"rank-{rank}"
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def gather_all(values: list[Any], *, rank: int, emit: Emit) -> None:
    """Gather each value, of which rank 1 gives a long text instead; emit what both gave."""
    found = [gather([rank, value if rank == 0 else "x" * 1000]) for value in values]
    emit({"event": "gathered", "found": [row[0] for row in found], "other": [row[1] for row in found]})


def tell_listening(*, rank: int, emit: Emit) -> None:
    """Emit the addresses on which this process listens (IPv4; IPv6 as the kernel writes it)."""
    dist.barrier()
    own = {os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.exists(path)}
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            for line in list(file)[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    digits = words[1].partition(":")[0]
                    packed = bytes.fromhex(digits)[::-1]
                    found.append(socket.inet_ntoa(packed) if table == "tcp" else digits)
    emit({"event": "listening", "rank": rank, "listening": found})
    dist.barrier()


def hang_in_a_step(*, rank: int, emit: Emit) -> None:
    """In the second step rank 1 hangs, after its last message; rank 0 has done its part, and waits for it."""
    for first in (True, False):
        with within_step(first=first):
            dist.barrier()
            if rank == 1 and not first:
                time.sleep(600)
        gather(rank)


class LateStore(Store):
    """A file of values, of which what is asked comes late."""

    LATE_S = 0.02
    _open: ClassVar[list["LateStore"]] = []  # torch keeps the half in C++ alone

    def __init__(self, values: Store) -> None:
        super().__init__()
        self._values = values
        self._open.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        time.sleep(self.LATE_S)
        return self._values.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        time.sleep(self.LATE_S)
        self._values.wait(keys)

    def add(self, key: str, amount: int) -> int:
        return self._values.add(key, amount)


@dataclass(frozen=True)
class OneIsLate:
    """Opens, in a rank, a file of values; one rank gets them late, as one that waits for a core."""

    path: Path
    late: int

    def __call__(self, world: int) -> Store:
        values = FileStore(str(self.path), world)
        is_late = multiprocessing.current_process().name.endswith(f" {self.late}")
        return LateStore(values) if is_late else values


def leave_at_once(*, rank: int, emit: Emit) -> None:
    """Do nothing."""
