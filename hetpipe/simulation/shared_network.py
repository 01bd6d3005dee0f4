"""How long a step takes where messages share the network, and computations are not all as long as measured.

By the rules of `simulator` messages take turns (R2 and R5 of docs/clock.md), so that those of several
pipelines may fit into each other's gaps, always in the same way. Connections of a real network share it, and
no two steps are alike: the more of their time cards are in use, the longer messages wait. This is a second
clock for that: it says how far a prediction depends on messages that do not meet.
"""

import heapq
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cost_model.collectives import tree_broadcast, tree_reduce
from cost_model.network import idle
from cost_model.sum_resources import all_reduce_holds_s, messages_hold_s
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Direction,
    Instruction,
    Message,
    Norm,
    Step,
    Sync,
    Transfer,
    incoming,
)
from hetpipe.simulation.fair_shares import FairShares, Lane
from hetpipe.simulation.simulator import inner_starts_s
from partition.plan import Plan

VARIED = 0.02
"""The share of its seconds by which a computation may be longer or shorter than measured."""
UNEVEN = 2.0
"""How many times as much as another one a connection may get where both share something."""
STEPS = 3
"""Steps that are run, each with other draws of these; the one in the middle counts."""
LARGE = 150_000
"""The work of a plan of which one step is run, of half a second or more; draws hardly matter there."""
INSTRUCTIONS = 4
"""Of a microbatch at a stage, about: what it computes, sends and receives, forward and backward."""


def shared_step_s(
    costs: ProgramCosts, *, varied: float = VARIED, uneven: float = UNEVEN, steps: int | None = None
) -> float | None:
    """Return the seconds of a step where messages share the network; None of plans that go layer by layer.

    Messages and sums of gradients that are under way get fair shares of what their routes have in common, by
    weights between 1 and `uneven` (`fair_shares`); those from one device to another one come one after the
    other. Computations take up to `varied` of their seconds more or less. The same program has the same
    answer: the median of so many steps, None for `STEPS`, or for one of a `LARGE` plan.
    """
    if costs.program.plan.sharding.by_layer:
        return None
    if varied == 0 and uneven == 1:
        steps = 1
    elif steps is None:
        steps = STEPS if work_of(costs.program.plan) < LARGE else 1
    draws = [random.Random(number) for number in range(steps)]
    work = _Work(costs)
    return statistics.median(_SharedStep(work, draw, varied, uneven).run() for draw in draws)


def work_of(plan: Plan) -> int:
    """Return about how many instructions a step of a plan is: 5 us of each."""
    ticks = sum(entry.num_microbatches * len(entry.stages) for entry in plan.pipelines)
    return INSTRUCTIONS * ticks


@dataclass(slots=True)
class _Work:
    """Owns what is the same in all steps of a program.

    inner: by rank and the place of a SYNC inside a backward, how long before its end. exchanges: by what has
    been asked for, `exchange`.
    """

    costs: ProgramCosts
    inner: list[dict[int, float]] = field(init=False)
    syncs: list[list[Sync]] = field(init=False)
    exchanges: dict[Sync | Broadcast, tuple[float, dict[int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lists = self.costs.program.ranks
        self.inner = [inner_starts_s(self.costs, rank) for rank in range(len(lists))]
        self.syncs = [[entry for entry in entries if isinstance(entry, Sync)] for entries in lists]

    def exchange(self, entry: Sync | Broadcast) -> tuple[float, dict[int, float]]:
        """Return the seconds of a sum or a broadcast alone, and what part of them holds each resource."""
        if entry not in self.exchanges:
            alone_s, held_s = _exchange_s(self.costs, entry)
            self.exchanges[entry] = alone_s, {key: held / alone_s for key, held in held_s.items() if alone_s}
        return self.exchanges[entry]


@dataclass(slots=True)
class _SharedStep:
    """Owns the clock of one step. A rank goes on until it computes, or waits for a key of `parked`.

    events: (seconds, number, what to do then). sending: what waits for the connection of two devices (names).
    joined: how many ranks are ready for a sum, or for new parameters. over: sums that are made. norm_ready:
    when each rank was.
    """

    work: _Work
    draw: random.Random
    varied: float
    uneven: float
    now_s: float = 0.0
    network: FairShares = field(default_factory=FairShares)
    costs: ProgramCosts = field(init=False)
    position: list[int] = field(init=False)
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    sending: dict[tuple[str, str], deque[Transfer]] = field(default_factory=dict)
    arrived: set[Message] = field(default_factory=set)
    joined: Counter[Sync | Broadcast] = field(default_factory=Counter)
    over: set[Sync | Broadcast] = field(default_factory=set)
    norm_ready: dict[int, float] = field(default_factory=dict)
    parked: dict[object, list[int]] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.costs = self.work.costs
        self.position = [0 for _ in self.costs.program.ranks]

    def run(self) -> float:
        """Return the seconds until all is over."""
        for rank in range(len(self.position)):
            self._go_on(rank)
        while self.events or self.network.next_end_s() < math.inf:
            end_s = self.network.next_end_s()
            if self.events and self.events[0][0] <= end_s:
                self.now_s, _, happen = heapq.heappop(self.events)
            else:
                self.now_s, happen = end_s, self.network.end_next()
            happen()
        ends = [at == len(rank) for at, rank in zip(self.position, self.costs.program.ranks, strict=True)]
        assert all(ends), "a program that the simulator runs does not deadlock"
        return self.now_s

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (seconds, self.count, happen))

    def _start(self, alone_s: float, lane: Lane, then: Callable[[], None]) -> None:
        if alone_s <= 0:
            self._at(self.now_s, then)
            return
        self.network.start(lane, alone_s, self.draw.uniform(1.0, self.uneven), self.now_s, then)

    def _go_on(self, rank: int) -> None:
        """Let a rank do what it comes to now."""
        instructions = self.costs.program.ranks[rank]
        while self.position[rank] < len(instructions):
            place = self.position[rank]
            instruction = instructions[place]
            waits_for = self._waits_for(rank, instruction)
            if waits_for is not None:
                self.parked.setdefault(waits_for, []).append(rank)
                return
            self.position[rank] += 1
            match instruction:
                case Compute():
                    self._compute(rank, instruction, place)
                    return
                case Norm():
                    self._norm(rank)
                    return
                case Step():  # R9
                    self._at(self.now_s + self.costs.step_s(rank), partial(self._go_on, rank))
                    return
                case Transfer():
                    if instruction.direction is Direction.SEND:
                        self._send(instruction)
                case Sync() | Broadcast():
                    if place not in self.work.inner[rank]:
                        self._join(instruction)

    def _waits_for(self, rank: int, instruction: Instruction) -> object | None:
        """Return the message or the sum that a rank must wait for; None where it may go on."""
        if isinstance(instruction, Compute):
            message = incoming(instruction, self.costs.stages[instruction.pipeline])
            if message is None or (message[1], message[2]) in self.costs.program.local_boundaries:
                return None
            return None if message in self.arrived else message
        if isinstance(instruction, Norm):
            return next((sync for sync in self.work.syncs[rank] if sync not in self.over), None)
        return None

    def _done(self, key: object) -> None:
        for rank in self.parked.pop(key, ()):
            self._go_on(rank)

    def _compute(self, rank: int, compute: Compute, place: int) -> None:
        varied = 1 + self.draw.uniform(-self.varied, self.varied)
        end_s = self.now_s + varied * self.costs.compute_s(rank, compute)
        instructions = self.costs.program.ranks[rank]
        inner = self.work.inner[rank]
        while (place := place + 1) in inner:  # R7: the SYNCs inside of it
            sync = instructions[place]
            assert isinstance(sync, Sync)
            ready_s = max(end_s - varied * inner[place], self.now_s)
            self._at(ready_s, partial(self._join, sync))
        self._at(end_s, partial(self._go_on, rank))

    def _send(self, send: Transfer) -> None:
        """Queue a message at the connection of its devices."""
        stages = self.costs.stages[send.pipeline]
        pair = stages[send.stage].device, stages[send.peer_stage].device
        waiting = self.sending.setdefault(pair, deque())
        waiting.append(send)
        if len(waiting) == 1:
            self._send_first(pair)

    def _send_first(self, pair: tuple[str, str]) -> None:
        send = self.sending[pair][0]
        route = self.costs.route(send)
        alone_s = route.link.occupancy_s(self.costs.transfer_bytes(send))
        self._start(alone_s, self.network.lane(route.resources), partial(self._sent, pair))

    def _sent(self, pair: tuple[str, str]) -> None:
        waiting = self.sending[pair]
        send = waiting.popleft()
        latency_s = self.costs.route(send).link.latency_s
        self._at(self.now_s + latency_s, partial(self._arrive, send.message))  # R3
        if waiting:
            self._send_first(pair)

    def _arrive(self, message: Message) -> None:
        self.arrived.add(message)
        self._done(message)

    def _join(self, entry: Sync | Broadcast) -> None:
        """Take a rank that is ready for a sum, or for new parameters; the last one starts it (R7, R10)."""
        self.joined[entry] += 1
        if self.joined[entry] == len(self.costs.program.buckets[entry.bucket].ranks):
            alone_s, parts = self.work.exchange(entry)
            self._start(alone_s, Lane(parts), partial(self._exchanged, entry))

    def _exchanged(self, entry: Sync | Broadcast) -> None:
        self.over.add(entry)
        self._done(entry)

    def _norm(self, rank: int) -> None:
        """Take a rank that is ready for the norm; the last one starts it (R8)."""
        self.norm_ready[rank] = self.now_s
        if len(self.norm_ready) == len(self.position):
            for member, due_s in self.costs.norm_due(idle(), self.norm_ready).items():
                self._at(due_s, partial(self._go_on, member))


def _exchange_s(costs: ProgramCosts, entry: Sync | Broadcast) -> tuple[float, dict[int, float]]:
    """Return the seconds of a sum or of a broadcast on an idle network, and those that each resource is held.

    As one flow: what its messages take of each resource all together.
    """
    bucket, network = costs.program.buckets[entry.bucket], costs.network
    ready_s = dict.fromkeys(bucket.ranks, 0.0)
    due = costs.sync_due if isinstance(entry, Sync) else costs.broadcast_due
    alone_s = max(due(idle(), entry.bucket, ready_s).values())
    names, num_bytes = [costs.device_names[rank] for rank in bucket.ranks], costs.sync_bytes(entry.bucket)
    if bucket.state_owner is None:
        held_s = all_reduce_holds_s(network, num_bytes, names, bucket.collective)
    else:
        root = costs.device_names[bucket.state_owner]
        groups = network.by_node(sorted(names, key=lambda name: name != root))
        if isinstance(entry, Sync):
            held_s = messages_hold_s(network, tree_reduce(num_bytes, groups))
        else:
            held_s = messages_hold_s(network, tree_broadcast(costs.parameter_bytes(entry.bucket), groups))
    return alone_s, {resource: min(seconds, alone_s) for resource, seconds in held_s.items()}
