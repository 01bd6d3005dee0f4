"""The causes for which each device of a step waits."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Gather,
    Message,
    Norm,
    Reduce,
    Step,
    Sync,
    Transfer,
    incoming,
)
from hetpipe.program.trace import Event, Trace

Key = TypeVar("Key")
ROUNDING = 1e-9
"""Of the makespan: shorter than this is no wait."""
LAST_STEP = "the last optimizer step"


class Cause(StrEnum):
    """The activity that a part of a step went by with."""

    COMPUTE = "compute"
    OPTIMIZER = "optimizer"
    MESSAGE = "message"
    QUEUE = "queue"
    SYNC = "sync"
    NORM = "norm"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """The time of a device in a step; busy_s + waiting_s is the makespan.

    waiting_for: seconds by what it waited for.
    """

    busy_s: float
    waiting_s: float
    waiting_for: dict[str, float]


def exchange_words(events: Iterable[Event]) -> str:
    """Return what devices do together in a step, beside their computations: what thin lines of a picture are.

    >>> exchange_words([Event(0, Norm(), 0.0, 1.0), Event(0, Reduce(0, 0), 0.0, 1.0)])
    'gradient sync, norm'
    """
    kinds = {type(event.instruction) for event in events}
    words = {"gradient sync": (Sync, Reduce), "weights": (Gather, Broadcast), "norm": (Norm,)}
    return ", ".join(word for word, of in words.items() if not kinds.isdisjoint(of))


def cause_text(cause: Cause, where: str) -> str:
    """Return a cause and its place in words.

    >>> cause_text(Cause.COMPUTE, "big/0"), cause_text(Cause.QUEUE, "link a>b"), cause_text(Cause.NORM, "")
    ('compute on big/0', 'queue for link a>b', 'norm')
    """
    match cause:
        case Cause.MESSAGE:
            return where
        case Cause.COMPUTE | Cause.OPTIMIZER:
            return f"{cause} on {where}"
        case Cause.QUEUE:
            return f"queue for {where}"
        case _:
            return f"{cause} {where}".rstrip()


def device_times(trace: Trace, costs: ProgramCosts) -> tuple[DeviceTime, ...]:
    """Return busy and waiting seconds of each rank, and what it waited for.

    Until a message is sent, its receiver waits for the sender's device; then for the message.
    """
    result = []
    for rank, waits in enumerate(_waits_by_rank(trace, costs)):
        busy = trace.busy_s(rank)
        waiting = _summed((what, seconds) for _, what, seconds in waits)
        result.append(DeviceTime(busy, max(0.0, trace.makespan_s - busy), waiting))
    return tuple(result)


def waits_by_cause(trace: Trace, costs: ProgramCosts) -> tuple[dict[Cause, float], ...]:
    """Return the seconds that each rank waited, by their cause alone."""
    return tuple(
        _summed((cause, seconds) for cause, _, seconds in waits) for waits in _waits_by_rank(trace, costs)
    )


def _summed(waits: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for key, seconds in waits:
        found[key] = found.get(key, 0.0) + seconds
    return found


_Wait = tuple[Cause, str, float]
"""Why, for what in words, and for how many seconds a rank waited."""


def _waits_by_rank(trace: Trace, costs: ProgramCosts) -> list[list[_Wait]]:
    sends, span = sends_of(trace), span_of(trace)
    shortest = ROUNDING * (span[1] - span[0])
    return [
        [wait for wait in _waits(events, sends, costs, span) if wait[2] > shortest]
        for events in events_by_rank(trace)
    ]


def _waits(
    events: Iterable[Event],
    sends: Mapping[Message | None, Event],
    costs: ProgramCosts,
    span: tuple[float, float],
) -> Iterator[_Wait]:
    """Yield what one rank waits for, in order of time; waits of zero seconds or less are none."""
    free, end = span
    for event in events:
        match event.instruction:
            case Compute():
                sent = sends.get(awaited(event.instruction, costs))
                if sent is None:
                    by_layer = event.instruction.layer is not None
                    yield _wait(Cause.GATHER if by_layer else Cause.OTHER, "", event.start_s - free)
                else:
                    sent_s = max(free, min(sent.start_s, event.start_s))
                    yield _wait(Cause.COMPUTE, costs.device_names[sent.rank], sent_s - free)
                    come_s = event.start_s
                    if event.instruction.layer is not None:  # which waits for its weights, too
                        come_s = max(sent_s, min(sent.end_s, event.start_s))
                    yield _wait(Cause.MESSAGE, channel_of(costs, sent), come_s - sent_s)
                    yield _wait(Cause.GATHER, "", event.start_s - come_s)
            case Reduce():
                yield _wait(Cause.REDUCE, "", event.start_s - free)
                free = max(free, event.start_s)
                continue
            case Norm():
                yield _wait(Cause.SYNC, "", event.start_s - free)
                yield _wait(Cause.NORM, "", event.end_s - max(free, event.start_s))
            case Step():
                yield _wait(Cause.OTHER, "", event.start_s - free)
            case Broadcast():
                yield _wait(Cause.BROADCAST, "", event.end_s - free)
            case _:
                continue
        free = max(free, event.end_s)
    yield Cause.OPTIMIZER, LAST_STEP, end - free


def _wait(cause: Cause, where: str, seconds: float) -> _Wait:
    return cause, cause_text(cause, where), seconds


def span_of(trace: Trace) -> tuple[float, float]:
    """Return when a step begins and ends, in seconds of its trace."""
    begin = min(event.start_s for event in trace.events)
    return begin, begin + trace.makespan_s


def events_by_rank(trace: Trace) -> list[list[Event]]:
    """Return the events of each rank, in the order of the trace."""
    events: list[list[Event]] = [[] for _ in trace.device_names]
    for event in trace.events:
        events[event.rank].append(event)
    return events


def sends_of(trace: Trace) -> dict[Message | None, Event]:
    """Return the messages by the computation's `incoming`; a trace has the sends only."""
    return {
        event.instruction.message: event for event in trace.events if isinstance(event.instruction, Transfer)
    }


def awaited(compute: Compute, costs: ProgramCosts) -> Message | None:
    """Return the message that a computation waits for; None where it needs none."""
    return incoming(compute, costs.stages[compute.pipeline])


def channel_of(costs: ProgramCosts, send: Event) -> str:
    """Return the link's name of a message: the middle one of card, link, card, or the only one."""
    assert isinstance(send.instruction, Transfer)
    resources = costs.route(send.instruction).resources
    return costs.network.resources[resources[len(resources) // 2]]
