"""Makes this process behave as a device of a given speed and memory, and messages as if on given links."""

import fcntl
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cost_model.network import reserve
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Direction, Program, Transfer

CARRY_S = 0.05
"""Lateness up to this much is carried: the next operation starts when this one should have ended."""


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts the bytes of all tensors made while it is active; owns the count.

    A tensor counts from the operation that makes its storage until the storage dies. Costs about a tenth of
    the CPU time, so it runs in the first step only. What existed before is added by `add`.

    cap_bytes: exceeding it raises torch.OutOfMemoryError, as a device of that memory would.
    """

    def __init__(self, cap_bytes: float = float("inf"), name: str = "device") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cap_bytes = cap_bytes
        self.name = name
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        num_bytes = storage.nbytes()
        self._known[key] = num_bytes
        weakref.finalize(storage, self._release, key)
        self.live_bytes += num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if self.live_bytes > self.cap_bytes:
            raise torch.OutOfMemoryError(
                f"{self.name}: {self.live_bytes:,} bytes are needed, the device has {self.cap_bytes:,.0f}"
            )

    def _release(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)

    def restart_peak(self) -> int:
        """Give the peak since the last call, and begin a new one at what is alive now."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak


class Pace:
    """When the operations of a device start and end: on a CPU, when they do. Owns its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy_s = 0.0
        self.over_budget_s = 0.0

    def start_step(self, start_s: float) -> None:
        """Wait for the common start of a step; seconds on the host's monotonic clock."""
        sleep_until(start_s)
        self.now_s, self.busy_s, self.over_budget_s = start_s, 0.0, 0.0

    def begin(self, ready_s: float) -> float:
        """Start an operation whose inputs are due at ready_s; gives its start."""
        sleep_until(ready_s)
        self.now_s = time.monotonic()
        return self.now_s

    def end(self, start_s: float, nominal_s: float) -> float:
        """End the operation that began at start_s and should take nominal_s; gives its end."""
        del nominal_s
        self.now_s = time.monotonic()
        self.busy_s += self.now_s - start_s
        return self.now_s

    def wait(self, due_s: float) -> float:
        """Wait for something that is due; gives the time."""
        sleep_until(due_s)
        self.now_s = time.monotonic()
        return self.now_s

    def settle(self) -> dict[float, float]:
        """At the end of a step: the right times in place of those given that were not known by then."""
        return {}


class EmulatedPace(Pace):
    """An operation really computes, then ends nominal_s after its start on the device's own clock.

    That clock lags the host's by what operations were late, at most CARRY_S, so that a late wake-up does not
    add up. cpu_speed: charge the CPU seconds of the thread over this speed, instead of nominal_s.
    """

    def __init__(self, cpu_speed: float | None = None) -> None:
        super().__init__()
        self._cpu_speed = cpu_speed
        self._cpu_s = 0.0
        self._wall_s = 0.0

    def begin(self, ready_s: float) -> float:
        start = self._reach(max(self.now_s, ready_s))
        self._cpu_s, self._wall_s = time.thread_time(), time.monotonic()
        return start

    def end(self, start_s: float, nominal_s: float) -> float:
        wall_s = time.monotonic() - self._wall_s
        if self._cpu_speed is not None:
            nominal_s = (time.thread_time() - self._cpu_s) / self._cpu_speed
        self.over_budget_s += max(0.0, wall_s - nominal_s)
        end = self._reach(start_s + nominal_s)
        self.busy_s += end - start_s
        return end

    def wait(self, due_s: float) -> float:
        target_s = max(self.now_s, due_s)
        # a real sum may take this host longer than the emulated links
        self.over_budget_s += max(0.0, time.monotonic() - target_s - CARRY_S)
        return self._reach(target_s)

    def _reach(self, target_s: float) -> float:
        late_s = time.monotonic() - target_s
        if late_s < 0:
            sleep_until(target_s)
        self.now_s = target_s if late_s <= CARRY_S else target_s + late_s
        return self.now_s


def sleep_until(when_s: float) -> None:
    """Sleep to a time of the monotonic clock; at once if it is past."""
    while (left_s := when_s - time.monotonic()) > 0:
        time.sleep(left_s)


class Board:
    """The table in shared memory on which the ranks of a host reserve emulated links and network cards.

    Rows: when each resource is free; when each message of the step is due; per collective (SYNC of each
    bucket, NORM, broadcast of each bucket) and rank the step it joined in, when it was ready and when it is
    due. Owns the file's map.
    """

    def __init__(self, path: Path, costs: ProgramCosts) -> None:
        self._costs = costs
        self._slots = {message: slot for slot, message in enumerate(_messages(costs.program))}
        shapes = self._shapes(costs, len(self._slots))
        table = np.memmap(path, dtype=np.float64, mode="r+", shape=(sum(map(int, map(np.prod, shapes))),))
        parts = np.split(table, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
        arrays = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._free_at, self._due, self._joined, self._ready, self._collective_due = arrays
        self._lock_file = os.open(path, os.O_RDWR)

    @staticmethod
    def _shapes(costs: ProgramCosts, num_messages: int) -> list[tuple[int, ...]]:
        collectives, ranks = 2 * len(costs.program.buckets) + 1, len(costs.program.ranks)
        table = (collectives, ranks)
        return [(len(costs.network.resources),), (num_messages,), table, table, table]

    @classmethod
    def create(cls, path: Path, costs: ProgramCosts) -> None:
        """Make the empty table that all ranks then open."""
        count = sum(int(np.prod(shape)) for shape in cls._shapes(costs, len(_messages(costs.program))))
        path.write_bytes(np.zeros(max(1, count)).tobytes())

    def close(self) -> None:
        os.close(self._lock_file)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def send(self, send: Transfer, ready_s: float) -> float:
        """Reserve the way of a message that is ready now; gives and notes when it is due."""
        route, num_bytes = self._costs.route(send), self._costs.transfer_bytes(send)
        with self._lock():
            free_at = self._free_at.tolist()
            due = reserve(free_at, route, ready_s, num_bytes)
            self._free_at[:] = free_at
            self._due[self._slots[send.message]] = due
        return due

    def due_s(self, message: object) -> float:
        """When a message is due; its data must have arrived, which proves that the sender noted it."""
        return float(self._due[self._slots[message]])

    def join(self, collective: int, rank: int, step: int, ready_s: float) -> None:
        """Note that a rank is ready for a collective, before it takes part in the real one.

        The last to join reserves its messages, as in the simulator.
        """
        count = len(self._costs.program.buckets)
        members = self._members(collective)
        with self._lock():
            self._ready[collective, rank] = ready_s
            self._joined[collective, rank] = step + 1
            if any(self._joined[collective, member] != step + 1 for member in members):
                return
            ready = {member: float(self._ready[collective, member]) for member in members}
            free_at = self._free_at.tolist()
            if collective < count:
                due = self._costs.sync_due(free_at, collective, ready)
            elif collective == count:
                due = self._costs.norm_due(free_at, ready)
            else:
                due = self._costs.broadcast_due(free_at, collective - count - 1, ready)
            self._free_at[:] = free_at
            for member, end in due.items():
                self._collective_due[collective, member] = end

    def _members(self, collective: int) -> Sequence[int]:
        program = self._costs.program
        count = len(program.buckets)
        if collective == count:
            return range(len(program.ranks))
        return program.buckets[collective % (count + 1)].ranks

    def collective_due_s(self, collective: int, rank: int) -> float:
        """When a rank has the sum; the real collective must be over, which proves that all have joined."""
        return float(self._collective_due[collective, rank])


def _messages(program: Program) -> list[object]:
    return [
        entry.message
        for instructions in program.ranks
        for entry in instructions
        if isinstance(entry, Transfer) and entry.direction is Direction.SEND
    ]


class HostLoad:
    """CPU use of this host between two points in time, told apart by process group. Owns its counters."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._host_s = _host_cpu_s()
        self._own_s = time.process_time()

    def lap(self) -> tuple[float, float, float]:
        """(wall seconds, host CPU seconds, own CPU seconds) since the last lap."""
        now = (time.monotonic(), _host_cpu_s(), time.process_time())
        result = (now[0] - self._start_s, now[1] - self._host_s, now[2] - self._own_s)
        self._start_s, self._host_s, self._own_s = now
        return result

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is done meanwhile is part of no lap."""
        before = (time.monotonic(), _host_cpu_s(), time.process_time())
        yield
        self._start_s += time.monotonic() - before[0]
        self._host_s += _host_cpu_s() - before[1]
        self._own_s += time.process_time() - before[2]


def _host_cpu_s() -> float:
    """CPU seconds that all processes of the host have used; 0 where the kernel does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
