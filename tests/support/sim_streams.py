"""Streams and events of a device made of Python, and what the host knows of them.

Work is done when it is handed in, but nobody may rely on that: a stream knows of the work of others, and the
host of all of it, only what an event or a wait has told. So who reads too early is found, always and not by
chance.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

Clock = dict[int, int]
"""By number of a stream: how much of its work is known to be done."""

_numbers = count()
_all: list["Stream"] = []


class TooEarlyError(RuntimeError):
    """Something was used before it was there."""


class Stream:
    """A queue of work of a device, by index; clock: what its next work comes after."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.number = next(_numbers)
        self.clock: Clock = {self.number: 0}
        _all.append(self)

    def hand_in(self) -> int:
        """Return the place of a new piece of work in the queue."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def wait_event(self, event: "Event") -> None:
        _add(self.clock, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        _add(self.clock, stream.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        HOST.wait(self.clock)


class Event:
    """A timed mark in a stream."""

    def __init__(self, enable_timing: bool = True) -> None:
        self.clock: Clock = {}
        self._timed, self._looked = enable_timing, False
        self._when_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark a stream, the current one of the current device if none is given."""
        self.clock = dict((stream or current_stream(CURRENT.device)).clock)
        self._when_s, self._looked = time.monotonic(), False

    def synchronize(self) -> None:
        HOST.wait(self.clock)

    def query(self) -> bool:
        """Return whether the mark is reached: not yet, when it is first asked."""
        if not HOST.knows(self.clock) and not self._looked:
            self._looked = True
            return False
        HOST.learn(self.clock)
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this mark to another.

        Raises: TooEarlyError if the host does not know that both are reached.
        """
        if not (self._timed and end_event._timed and HOST.knows(self.clock) and HOST.knows(end_event.clock)):
            raise TooEarlyError("the time of an event was asked for before the host had waited for it")
        return 1e3 * (end_event._when_s - self._when_s)


@dataclass(frozen=True, slots=True)
class _Late:
    """A copy that is under way to or from the host: what happens when the host knows that it is done."""

    stream: int
    place: int
    arrive: Callable[[], None]


class Host:
    """What the host knows of the device's work; owns the copies that are under way, and counts its waits."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.waits = 0
        self._late: list[_Late] = []

    def knows(self, clock: Clock) -> bool:
        return all(self.clock.get(stream, 0) >= place for stream, place in clock.items())

    def wait(self, clock: Clock) -> None:
        self.waits += 1
        self.learn(clock)

    def learn(self, clock: Clock) -> None:
        _add(self.clock, clock)
        arrived = [late for late in self._late if self.clock.get(late.stream, 0) >= late.place]
        self._late = [late for late in self._late if late not in arrived]
        for late in arrived:
            late.arrive()

    def expect(self, stream: Stream, place: int, arrive: Callable[[], None]) -> None:
        self._late.append(_Late(stream.number, place, arrive))

    @property
    def num_late(self) -> int:
        return len(self._late)


@dataclass(slots=True)
class Uses:
    """Who wrote a piece of memory last, and who has read it since: (stream, place in it)."""

    written: tuple[int, int] | None = None
    read: tuple[tuple[int, int], ...] = ()

    def note(self, stream: Stream, place: int, *, writes: bool) -> TooEarlyError | None:
        """Note a use; return what is wrong where the stream does not know that those before it are done."""
        error = None
        before = [self.written, *self.read] if writes else [self.written]
        for use in before:
            if use is not None and stream.clock.get(use[0], 0) < use[1]:
                what = "wrote" if use == self.written else "read"
                who = f"stream {stream.number} uses what stream {use[0]}"
                error = TooEarlyError(f"{who} {what} last, and has not waited for it")
        if writes:
            self.written, self.read = (stream.number, place), ()
        else:
            self.read = (*(use for use in self.read if use[0] != stream.number), (stream.number, place))
        return error


def _add(clock: Clock, other: Clock) -> None:
    for stream, place in other.items():
        clock[stream] = max(clock.get(stream, 0), place)


class Current:
    """The device on which things are made and the streams to which they are handed in, by device."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


HOST, CURRENT = Host(), Current()


def current_stream(device: int) -> Stream:
    """Return the stream to which a device's work is handed in: one that is always there, or `stream`'s."""
    if device not in CURRENT.streams:
        CURRENT.streams[device] = Stream(device)
    return CURRENT.streams[device]


def synchronize(device: int) -> None:
    """Let the host wait for all streams of a device."""
    clock: Clock = {}
    for each in _all:
        if each.device == device:
            _add(clock, each.clock)
    HOST.wait(clock)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Hand work in to another stream."""
    before = current_stream(chosen.device)
    CURRENT.streams[chosen.device] = chosen
    try:
        yield
    finally:
        CURRENT.streams[chosen.device] = before
