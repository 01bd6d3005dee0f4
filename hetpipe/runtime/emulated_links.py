"""The emulated links and network cards of a host, which its ranks reserve in shared memory."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cost_model.network import reserve
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Broadcast,
    Direction,
    Exchange,
    Gather,
    Norm,
    Program,
    Reduce,
    Sync,
    Transfer,
)

HERE_S = 0.5e-3
"""What it takes at most to receive a message of another host that is here; longer is a wait for the link."""


class Board:
    """The table in shared memory on which the ranks of a host reserve emulated links and network cards.

    Rows: when each resource is free; when each message of the step is due; per collective (an instruction in
    which several ranks meet) and rank the step it joined in, when it was ready and when it is due. Owns the
    file's map. What comes from another host takes what the real link does, and is due when it is here.
    """

    def __init__(self, path: Path, costs: ProgramCosts, local: Sequence[int] | None = None) -> None:
        """Open the table; local: the ranks of this host, None for all."""
        self._costs = costs
        self._local = frozenset(range(len(costs.program.ranks)) if local is None else local)
        self._slots = {message: slot for slot, message in enumerate(_messages(costs.program))}
        self._rows = {entry: row for row, entry in enumerate(_collectives(costs.program))}
        shapes = self._shapes(costs)
        table = np.memmap(path, dtype=np.float64, mode="r+", shape=(sum(map(int, map(np.prod, shapes))),))
        parts = np.split(table, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
        arrays = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._free_at, self._due, self._joined, self._ready, self._collective_due = arrays
        self._lock_file = os.open(path, os.O_RDWR)

    @staticmethod
    def _shapes(costs: ProgramCosts) -> list[tuple[int, ...]]:
        table = (len(_collectives(costs.program)), len(costs.program.ranks))
        return [(len(costs.network.resources),), (len(_messages(costs.program)),), table, table, table]

    @classmethod
    def create(cls, path: Path, costs: ProgramCosts) -> None:
        """Make the empty table that all ranks then open."""
        count = sum(int(np.prod(shape)) for shape in cls._shapes(costs))
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
        """Reserve the links of a message that is ready now; return and note when it is due."""
        if self._costs.program.rank_of(send.pipeline, send.peer_stage) not in self._local:
            return ready_s
        route, num_bytes = self._costs.route(send), self._costs.transfer_bytes(send)
        with self._lock():
            free_at = self._free_at.tolist()
            due = reserve(free_at, route, ready_s, num_bytes)
            self._free_at[:] = free_at
            self._due[self._slots[send.message]] = due
        return due

    def due_s(self, message: object, asked_s: float) -> float:
        """Return when a message is due; its data must have arrived, which proves that the sender noted it.

        asked_s: when the rank began to wait for the data. One of another host is due now if it was waited
        for: a device whose clock lags this host's has waited, too. Else 0.0: it came before, at some time.
        """
        due_s = float(self._due[self._slots[message]])
        if due_s:
            return due_s
        now_s = time.monotonic()
        return now_s if now_s - asked_s > HERE_S else 0.0

    def join(self, collective: Exchange, rank: int, step: int, ready_s: float) -> None:
        """Note that a rank is ready for a collective, before it takes part in the real one.

        The last to join reserves its messages, as in the simulator.
        """
        row, members = self._rows[collective], self._members(collective, rank)
        if not self._local.issuperset(self._touched(collective, members)):
            return
        with self._lock():
            self._ready[row, rank] = ready_s
            self._joined[row, rank] = step + 1
            if any(self._joined[row, member] != step + 1 for member in members):
                return
            ready = {member: float(self._ready[row, member]) for member in members}
            free_at = self._free_at.tolist()
            match collective:
                case Sync():
                    due = self._costs.sync_due(free_at, collective.bucket, ready)
                case Norm():
                    due = self._costs.norm_due(free_at, ready)
                case Broadcast():
                    due = self._costs.broadcast_due(free_at, collective.bucket, ready)
                case Reduce() | Gather():
                    due = self._costs.round_due(free_at, collective, ready)
            self._free_at[:] = free_at
            for member, end in due.items():
                self._collective_due[row, member] = end

    def _members(self, collective: Exchange, rank: int) -> Sequence[int]:
        program = self._costs.program
        if isinstance(collective, Norm):
            return range(len(program.ranks))
        if isinstance(collective, Reduce | Gather):
            return program.ranks_in(collective, rank)
        return program.buckets[collective.bucket].ranks

    def _touched(self, collective: Exchange, members: Sequence[int]) -> Sequence[int]:
        """Return the ranks between which data moves: the owner is none of those that join a GATHER of one."""
        if not isinstance(collective, Gather):
            return members
        owner = self._costs.program.buckets[collective.bucket].state_owner
        return members if owner is None else (*members, owner)

    def collective_due_s(self, collective: Exchange, rank: int) -> float:
        """Return when a rank has the sum; the real collective must be over: then all have joined.

        One over several hosts is due now.
        """
        return float(self._collective_due[self._rows[collective], rank]) or time.monotonic()


def _collectives(program: Program) -> list[Exchange]:
    """Return the instructions in which several ranks meet, each once."""
    return list(
        dict.fromkeys(
            entry for instructions in program.ranks for entry in instructions if isinstance(entry, Exchange)
        )
    )


def _messages(program: Program) -> list[object]:
    return [
        instruction.message
        for instructions in program.ranks
        for instruction in instructions
        if isinstance(instruction, Transfer) and instruction.direction is Direction.SEND
    ]
