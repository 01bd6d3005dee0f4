"""The critical path of a step: the chain of events that its time is made of."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Gather,
    Instruction,
    Norm,
    Pass,
    Reduce,
    Step,
    Sync,
    Transfer,
)
from hetpipe.program.trace import Event, Trace
from hetpipe.reporting.idle_time import (
    ROUNDING,
    Cause,
    awaited,
    cause_text,
    channel_of,
    events_by_rank,
    sends_of,
    span_of,
)


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A part of the critical path, from start_s to end_s of the trace.

    where: the device that computes, the resource of the network that a message occupies or queues for, the
    bucket of a sync or broadcast.
    """

    cause: Cause
    where: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def __str__(self) -> str:
        return cause_text(self.cause, self.where)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a path with one cause at one place; fraction of the makespan, in [0, 1]."""

    cause: Cause
    where: str
    duration_s: float
    fraction: float

    def __str__(self) -> str:
        return f"{self.fraction:.0%} {cause_text(self.cause, self.where)}"


def critical_path(trace: Trace, costs: ProgramCosts) -> tuple[PathSegment, ...]:
    """Return the segments that the makespan is made of, in order of time and without gaps.

    Found backwards from the end of the last STEP (critical path analysis of a trace: Yang and Miller, ICDCS
    1988): each event was held up by the device's computation before it, or by what it waited for. A message
    that queued was held up by the one that occupied the resource before it.
    """
    return _Path(trace, costs).walk()


def shares(path: Sequence[PathSegment]) -> tuple[Share, ...]:
    """Sum a path by cause and place, the longest first; fractions add up to 1 unless the path is empty."""
    total = sum(segment.duration_s for segment in path)
    seconds: dict[tuple[Cause, str], float] = {}
    for segment in path:
        key = (segment.cause, segment.where)
        seconds[key] = seconds.get(key, 0.0) + segment.duration_s
    return tuple(
        Share(cause, where, duration, duration / total)
        for (cause, where), duration in sorted(seconds.items(), key=lambda item: -item[1])
    )


@dataclass(frozen=True, slots=True)
class _Occupation:
    """The time in which a message has its resources for itself; its latency follows."""

    event: Event
    resources: tuple[int, ...]
    start_s: float
    end_s: float


class _Queues:
    """The order in which messages occupied each resource; built when the first queue is met."""

    def __init__(self, sends: Iterable[Event], costs: ProgramCosts) -> None:
        occupations = [_occupation(event, costs) for event in sends]
        occupations.sort(
            key=lambda occupation: (occupation.end_s, occupation.start_s, occupation.event.start_s)
        )
        self._order = {occupation.event.instruction: index for index, occupation in enumerate(occupations)}
        self._occupations = occupations
        self._of: dict[int, list[int]] = {}
        for index, occupation in enumerate(occupations):
            for resource in occupation.resources:
                self._of.setdefault(resource, []).append(index)

    def before(self, occupation: _Occupation) -> tuple[int, _Occupation] | None:
        """Return the resource that was free last, and the message that occupied it until then."""
        own = self._order[occupation.event.instruction]
        found: list[tuple[int, int]] = []
        for resource in occupation.resources:
            line = self._of[resource]
            position = bisect_left(line, own)
            if position:
                found.append((line[position - 1], resource))
        if not found:
            return None
        index, resource = max(found)
        return resource, self._occupations[index]


def _occupation(event: Event, costs: ProgramCosts) -> _Occupation:
    """Return when a message had its resources, from its arrival backwards."""
    assert isinstance(event.instruction, Transfer)
    route = costs.route(event.instruction)
    end = max(event.start_s, event.end_s - route.link.latency_s)
    seconds = route.link.occupancy_s(costs.transfer_bytes(event.instruction))
    return _Occupation(event, route.resources, max(event.start_s, end - seconds), end)


class _Path:
    """A walk back through one trace; `_time` is where it has come to, `_segments` what lies behind it."""

    def __init__(self, trace: Trace, costs: ProgramCosts) -> None:
        self._trace, self._costs = trace, costs
        self._begin, self._time = span_of(trace)
        self._shortest = ROUNDING * trace.makespan_s
        self._sends = sends_of(trace)
        ranks = events_by_rank(trace)
        self._computes = [[e for e in events if isinstance(e.instruction, Compute)] for events in ranks]
        self._syncs = [[e for e in events if isinstance(e.instruction, Sync)] for events in ranks]
        self._rounds = [[e for e in events if isinstance(e.instruction, Reduce | Gather)] for events in ranks]
        self._norms = [event for event in trace.events if isinstance(event.instruction, Norm)]
        self._segments: list[PathSegment] = []

    @cached_property
    def _queues(self) -> _Queues:
        return _Queues(self._sends.values(), self._costs)

    def walk(self) -> tuple[PathSegment, ...]:
        step = self._last_step()
        self._spend(Cause.OPTIMIZER, self._trace.device_names[step.rank], step.start_s)
        rank = step.rank
        if self._norms:
            last = max(self._norms, key=lambda event: event.start_s)
            self._spend(Cause.NORM, "", last.start_s)
            rank = last.rank
        rank = self._before_norm(rank)
        if self._computes[rank]:
            self._walk_computes(rank)
        self._spend(Cause.OTHER, "", self._begin)
        return tuple(reversed(self._segments))

    def _last_step(self) -> Event:
        """Return the last STEP, or the one that held up the last broadcast."""
        events = self._trace.events
        steps = [event for event in events if isinstance(event.instruction, Step)]
        broadcasts = [event for event in events if isinstance(event.instruction, Broadcast)]
        last = max(broadcasts, key=lambda event: event.end_s, default=None)
        if last is None:
            return max(steps, key=lambda event: event.end_s)
        assert isinstance(last.instruction, Broadcast)
        members = [event for event in broadcasts if event.instruction == last.instruction]
        late = max(members, key=lambda event: event.start_s)
        self._spend(Cause.BROADCAST, str(last.instruction.bucket), late.start_s)
        return next(event for event in steps if event.rank == late.rank)

    def _before_norm(self, rank: int) -> int:
        """Return the rank that held up the sync that held up a rank's NORM, or the rank itself."""
        rank = self._through_rounds(rank, self._ended(rank))
        sync = max(self._syncs[rank], key=lambda event: event.end_s, default=None)
        if sync is None or sync.end_s <= self._ended(rank):
            return rank
        assert isinstance(sync.instruction, Sync)
        members = [e for events in self._syncs for e in events if e.instruction == sync.instruction]
        last = max(members, key=lambda event: event.start_s)
        self._spend(Cause.SYNC, str(sync.instruction.bucket), last.start_s)
        return last.rank

    def _through_rounds(self, rank: int, ended_s: float) -> int:
        """Walk through the rounds that held up a rank after its last computation; return whose."""
        while self._time - ended_s > self._shortest:
            rounds = [
                event for event in self._rounds[rank] if ended_s < event.end_s <= self._time + self._shortest
            ]
            held_up = max(rounds, key=lambda event: event.end_s, default=None)
            if held_up is None:
                break
            members = self._members(held_up)
            late = max(members, key=lambda event: event.start_s)
            if late.start_s >= self._time:
                break
            cause = Cause.REDUCE if isinstance(late.instruction, Reduce) else Cause.GATHER
            self._spend(Cause.OTHER, "", held_up.end_s)
            self._spend(cause, "", late.start_s)
            rank = late.rank
            place = bisect_right(self._computes[rank], self._time, key=lambda event: event.end_s) - 1
            ended_s = self._computes[rank][place].end_s if place >= 0 else self._begin
        return rank

    def _members(self, event: Event) -> list[Event]:
        """Return the events of all ranks of a round; of a GATHER for one rank its own alone."""
        assert isinstance(event.instruction, Reduce | Gather)
        ranks = self._costs.program.ranks_in(event.instruction, event.rank)
        return [e for rank in ranks for e in self._rounds[rank] if e.instruction == event.instruction]

    def _ended(self, rank: int) -> float:
        return self._computes[rank][-1].end_s if self._computes[rank] else self._begin

    def _walk_computes(self, rank: int) -> None:
        index_of = {  # of several layers of a stage the last one
            _place(event.instruction): index
            for events in self._computes
            for index, event in enumerate(events)
        }
        # a sync may have begun before the rank's last computations
        index = bisect_right(self._computes[rank], self._time, key=lambda event: event.start_s) - 1
        while index >= 0:
            event = self._computes[rank][index]
            assert isinstance(event.instruction, Compute)
            self._spend(Cause.OTHER, "", event.end_s)
            self._spend(Cause.COMPUTE, self._trace.device_names[rank], event.start_s)
            index -= 1
            sent = self._sends.get(awaited(event.instruction, self._costs))
            before = self._computes[rank][index].end_s if index >= 0 else self._begin
            come_s = before if sent is None else max(before, sent.end_s)
            if self._rounds[rank] and self._time - come_s > self._shortest:
                came_to_s, other = self._time, self._through_rounds(rank, come_s)
                if other != rank or self._time < came_to_s:
                    rank = other
                    index = bisect_right(self._computes[rank], self._time, key=lambda each: each.end_s) - 1
                    continue
            if sent is None or sent.end_s <= before:
                continue
            self._spend(Cause.OTHER, "", sent.end_s)
            sent = self._walk_messages(sent)
            assert isinstance(sent.instruction, Transfer)
            send = sent.instruction
            rank = sent.rank
            index = index_of[_place(send)]

    def _walk_messages(self, sent: Event) -> Event:
        """Walk through a message and its queue; return the first of them, sent when it was ready."""
        occupation = _occupation(sent, self._costs)
        self._spend(Cause.MESSAGE, channel_of(self._costs, sent), occupation.start_s)
        while occupation.start_s - occupation.event.start_s > self._shortest:
            held_up = self._queues.before(occupation)
            if held_up is None or occupation.start_s - held_up[1].end_s > self._shortest:
                # a sync had the resources
                self._spend(Cause.QUEUE, channel_of(self._costs, occupation.event), occupation.event.start_s)
                break
            resource, occupation = held_up
            self._spend(Cause.QUEUE, self._costs.network.resources[resource], occupation.start_s)
        return occupation.event

    def _spend(self, cause: Cause, where: str, start_s: float) -> None:
        """Go back to start_s; do nothing where that is not before."""
        if start_s < self._time:
            self._segments.append(PathSegment(cause, where, start_s, self._time))
            self._time = start_s


def _place(entry: Instruction) -> tuple[Pass, int, int, int]:
    """Return what a computation and the send of its result have in common."""
    assert isinstance(entry, Compute | Transfer)
    return entry.op, entry.pipeline, entry.stage, entry.microbatch
