"""Runs a program on a virtual clock, by the rules R1 to R11 and R14 of docs/clock.md."""

import heapq
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from cost_model.errors import InputError
from cost_model.network import FreeAt, idle
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Direction,
    Gather,
    Instruction,
    Message,
    Norm,
    Reduce,
    Round,
    Step,
    Sync,
    Transfer,
    incoming,
)
from hetpipe.program.layer_rounds import awaited_rounds
from hetpipe.program.sync_starts import inner_syncs
from hetpipe.program.trace import Event, Trace

_BY_TIME = attrgetter("start_s", "end_s")
_SEND = Direction.SEND
_LATER = object()
"""What a rank waits for that first moves its clock: its turn."""


def inner_starts_s(costs: ProgramCosts, rank: int) -> dict[int, float]:
    """Return how long before the end of a backward each SYNC inside it begins (R7), by the SYNC's place."""
    instructions = costs.program.ranks[rank]
    found: dict[int, float] = {}
    for place, syncs in inner_syncs(costs.program, rank).items():
        compute = instructions[place]
        assert isinstance(compute, Compute)
        found.update({sync.place: costs.after_layer_s(rank, compute, sync.layer) for sync in syncs})
    return found


def simulate(costs: ProgramCosts) -> Trace:
    """Return the trace of one step of the program on devices that compute and links that queue.

    Devices run their lists in order (R1); sends and SYNCs go on beside them (R4); links and network cards are
    first-in first-out in the order of dispatch (R2, R5). Every predicted time that a user sees comes from
    here.

    Raises: InputError if the program deadlocks, naming the instructions that wait.
    """
    return _Simulation(costs).run()


@dataclass(slots=True)
class _Simulation:
    """Owns the virtual clock of one step. A rank is in the queue, or waits for a key in `parked`.

    clock, position, events, buckets_of: [rank]. sync_ready, sync_due, broadcast_ready: [bucket], by rank.
    inner: [rank] by the place of a SYNC that begins inside a backward, how long before its end.
    awaited: [rank] by place, the rounds that must be over there (R14); round_ready, round_due: by rank.
    """

    costs: ProgramCosts
    clock: list[float] = field(init=False)
    position: list[int] = field(init=False)
    free_at: FreeAt = field(default_factory=idle)
    due: dict[Message, float] = field(default_factory=dict)
    sync_ready: list[dict[int, float]] = field(init=False)
    sync_due: list[dict[int, float]] = field(init=False)
    broadcast_ready: list[dict[int, float]] = field(init=False)
    norm_ready: dict[int, float] = field(default_factory=dict)
    norm_due: dict[int, float] = field(default_factory=dict)
    parked: dict[object, list[int]] = field(default_factory=dict)
    queue: list[tuple[float, int]] = field(init=False)
    events: list[list[Event]] = field(init=False)
    buckets_of: list[list[int]] = field(init=False)
    inner: list[dict[int, float]] = field(init=False)
    ends: list[float] = field(init=False)
    local: frozenset[tuple[int, int]] = field(init=False)
    awaited: list[dict[int, tuple[Round, ...]]] = field(init=False)
    round_ready: dict[Round, dict[int, float]] = field(default_factory=dict)
    round_due: dict[Round, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.costs.program
        count = len(program.ranks)
        self.local = program.local_boundaries
        self.clock = [0.0] * count
        self.position = [0] * count
        self.ends = [0.0] * count
        self.inner = [inner_starts_s(self.costs, rank) for rank in range(count)]
        self.sync_ready = [{} for _ in program.buckets]
        self.sync_due = [{} for _ in program.buckets]
        self.broadcast_ready = [{} for _ in program.buckets]
        self.queue = [(0.0, rank) for rank in range(count)]
        self.events = [[] for _ in range(count)]
        by_layer = program.plan.sharding.by_layer
        self.awaited = [awaited_rounds(program, rank) if by_layer else {} for rank in range(count)]
        self.buckets_of = [[] for _ in range(count)]
        for index, bucket in enumerate(() if by_layer else program.buckets):
            for rank in bucket.ranks:
                self.buckets_of[rank].append(index)

    def run(self) -> Trace:
        ranks, queue, clock, position = self.costs.program.ranks, self.queue, self.clock, self.position
        while queue:
            _, rank = heapq.heappop(queue)
            instructions = ranks[rank]
            # R5: go on with this rank for as long as it would be the next one taken from the queue
            while position[rank] < len(instructions):
                waits_for = self._execute(rank, instructions[position[rank]])
                if waits_for is _LATER:
                    heapq.heappush(queue, (clock[rank], rank))
                    break
                if waits_for is not None:
                    self.parked.setdefault(waits_for, []).append(rank)
                    break
                position[rank] += 1
                if queue and queue[0] < (clock[rank], rank):
                    heapq.heappush(queue, (clock[rank], rank))
                    break
        self._check_all_done()
        for events in self.events:
            events.sort(key=_BY_TIME)
        return Trace(self.costs.device_names, tuple(chain.from_iterable(self.events)))

    def _check_all_done(self) -> None:
        ranks = self.costs.program.ranks
        stuck = [
            f"{name}: {ranks[rank][self.position[rank]]}"
            for rank, name in enumerate(self.costs.device_names)
            if self.position[rank] < len(ranks[rank])
        ]
        if stuck:
            raise InputError(f"the program deadlocks, waiting at {'; '.join(stuck)}")

    def _execute(self, rank: int, instruction: Instruction) -> object | None:
        """Do it and move the rank's clock, or return the key that the rank must wait for."""
        match instruction:
            case Compute():
                return self._compute(rank, instruction)
            case Transfer():
                if instruction.direction is _SEND:
                    self._send(rank, instruction)
                return None
            case Sync():
                self._sync(rank, instruction)
                return None
            case Norm():
                return self._norm(rank)
            case Step():
                self._record(rank, instruction, self.clock[rank], self.costs.step_s(rank))  # R9
                return None
            case Broadcast():
                self._broadcast(rank, instruction)
                return None
            case Reduce() | Gather():
                return self._round(rank, instruction)

    def _record(self, rank: int, instruction: Instruction, start: float, duration: float) -> None:
        self.clock[rank] = start + duration
        self.events[rank].append(Event(rank, instruction, start, start + duration))

    def _wake(self, key: object) -> None:
        for rank in self.parked.pop(key, ()):
            heapq.heappush(self.queue, (self.clock[rank], rank))

    def _compute(self, rank: int, compute: Compute) -> object | None:
        message = incoming(compute, self.costs.stages[compute.pipeline])
        start = self.clock[rank]
        for entry in self.awaited[rank].get(self.position[rank], ()):
            if entry not in self.round_due:
                return entry
            start = max(start, self.round_due[entry][rank])  # R14
        if message is not None and (message[1], message[2]) not in self.local:
            if message not in self.due:
                return message
            start = max(start, self.due.pop(message))  # R1, R3
        self._record(rank, compute, start, self.costs.compute_s(rank, compute))
        self.ends[rank] = self.clock[rank]
        self._to_next_start(rank)
        return None

    def _to_next_start(self, rank: int) -> None:
        """Put the clock of a rank to where the next SYNC begins, if that is inside its last computation."""
        if self.inner[rank]:
            self.clock[rank] = self.ends[rank] - self.inner[rank].get(self.position[rank] + 1, 0.0)

    def _send(self, rank: int, send: Transfer) -> None:
        ready = self.clock[rank]
        due = self.costs.send_due(self.free_at, send, ready)  # R2, R4
        message = send.message
        self.due[message] = due
        self.events[rank].append(Event(rank, send, ready, due))
        self._wake(message)

    def _sync(self, rank: int, sync: Sync) -> None:
        ready = self.sync_ready[sync.bucket]
        ready[rank] = self.clock[rank]
        if self.position[rank] in self.inner[rank]:
            self._to_next_start(rank)
        if len(ready) < len(self.costs.program.buckets[sync.bucket].ranks):
            return  # R7: the last owner's starts the sum
        due = self.costs.sync_due(self.free_at, sync.bucket, ready)
        self.sync_due[sync.bucket] = due
        for member, end in due.items():
            self.events[member].append(Event(member, sync, ready[member], end))
        self._wake(sync)

    def _broadcast(self, rank: int, broadcast: Broadcast) -> None:
        ready = self.broadcast_ready[broadcast.bucket]
        ready[rank] = self.clock[rank]
        if len(ready) == len(self.costs.program.buckets[broadcast.bucket].ranks):
            # R10
            due = self.costs.broadcast_due(self.free_at, broadcast.bucket, ready)
            for member, end in due.items():
                self.events[member].append(Event(member, broadcast, ready[member], end))

    def _round(self, rank: int, entry: Round) -> object | None:
        """Join a REDUCE or GATHER, once what it waits for is over; the last of its ranks starts it (R14)."""
        until = self.clock[rank]
        for before in self.awaited[rank].get(self.position[rank], ()):
            if before not in self.round_due:
                return before
            until = max(until, self.round_due[before][rank])
        if until > self.clock[rank]:
            self.clock[rank] = until
            return _LATER
        members = self.costs.program.ranks_in(entry, rank)
        ready = self.round_ready.setdefault(entry, {})
        ready[rank] = until
        if len(ready) >= len(members) and ready.keys() >= set(members):
            due = self.costs.round_due(self.free_at, entry, {member: ready[member] for member in members})
            self.round_due.setdefault(entry, {}).update(due)
            for member, end in due.items():
                self.events[member].append(Event(member, entry, ready[member], end))
            self._wake(entry)
        return None

    def _norm(self, rank: int) -> object | None:
        if rank in self.norm_due:
            ready = self.norm_ready[rank]
            self._record(rank, Norm(), ready, self.norm_due[rank] - ready)
            return None
        ready = self.clock[rank]
        for entry in self.awaited[rank].get(self.position[rank], ()):
            if entry not in self.round_due:
                return entry
            ready = max(ready, self.round_due[entry][rank])  # R14
        for index in self.buckets_of[rank]:
            if not self.sync_due[index]:
                return Sync(index)
            ready = max(ready, self.sync_due[index][rank])
        self.norm_ready[rank] = ready
        if len(self.norm_ready) < len(self.costs.device_names):
            return Norm()
        # R8: the last rank's starts the norm
        self.norm_due = self.costs.norm_due(self.free_at, self.norm_ready)
        self._wake(Norm())
        self._record(rank, Norm(), ready, self.norm_due[rank] - ready)
        return None
