"""Events of work that a GPU does while the host goes on: when it was done, and waits with a time limit."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.runtime.accelerators import Event, current_stream, new_stream, on_stream
from hetpipe.runtime.pace import Pace

LOOK_S = 20e-6
"""How long the host sleeps between two looks at whether the GPU is done."""

SPIN_S = 100e-6
"""How long the host looks without sleeping first: a sleep of LOOK_S takes some 0.1 ms with Linux's timers."""


class GpuPace(Pace):
    """The pace of a GPU, to which the host hands in work ahead, without waiting for it.

    The times that it gives are when the host handed something in; `settle` tells when the GPU was there. Owns
    the events on the GPU's stream, which it uses again in every step.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        """Begin without events.

        new_event: makes one that tells times, on the current stream (`accelerators.new_event`).
        """
        super().__init__()
        self._new_event = new_event
        self._events: list[Event] = []
        self._given_s: list[float] = []
        self._spans: list[tuple[float, float]] = []

    def start_step(self, start_s: float) -> None:
        super().start_step(start_s)
        self._given_s, self._spans = [], []
        self._mark()

    def begin(self, ready_s: float) -> float:
        """Note where an operation starts; what it needs, the stream waits for."""
        del ready_s
        return self._mark()

    def end(self, start_s: float, nominal_s: float) -> float:
        del nominal_s
        end_s = self._mark()
        self._spans.append((start_s, end_s))
        return end_s

    def part(self, start_s: float, nominal_s: float) -> float:
        del start_s, nominal_s
        return self._mark()

    def wait(self, due_s: float) -> float:
        del due_s
        return self._mark()

    def finish(self) -> None:
        """Wait for the last event of the step."""
        self._events[len(self._given_s) - 1].synchronize()

    def settle(self) -> dict[float, float]:
        """Return the host's seconds at which the GPU was at each time given."""
        first, origin_s = self._events[0], self._given_s[0]
        events = self._events[: len(self._given_s)]
        found = {
            given_s: origin_s + first.elapsed_time(event) / 1e3
            for given_s, event in zip(self._given_s, events, strict=True)
        }
        self.busy_s = sum(found[end_s] - found[start_s] for start_s, end_s in self._spans)
        return found

    def _mark(self) -> float:
        if len(self._given_s) == len(self._events):
            self._events.append(self._new_event())
        self._events[len(self._given_s)].record()
        now_s = time.monotonic()
        while self._given_s and now_s <= self._given_s[-1]:  # each is another one
            now_s = time.monotonic()
        self._given_s.append(now_s)
        self.now_s = now_s
        return now_s


def wait_for_gpu(work: dist.Work, timeout_s: float) -> None:
    """Wait until a communication between GPUs is over, on the host and on the current stream.

    NOTE: NCCL's own wait with a time limit looks once a millisecond; without one only the stream waits.

    Raises: RuntimeError if it takes longer.
    """
    begin_s = time.monotonic()
    while not work.is_completed():
        waited_s = time.monotonic() - begin_s
        if waited_s > timeout_s:
            raise RuntimeError(f"timed out after {timeout_s:g} s")
        if waited_s > SPIN_S:
            time.sleep(LOOK_S)
    work.wait()


class SideStream:
    """A stream of a GPU beside that of the computations; owns it, made by `open` or when first needed.

    NCCL begins what it is handed in when all is done that was handed in on the current stream before
    (ProcessGroupNCCL::pointToPoint, syncStream). A receive needs nothing of that: handed in here, it takes
    its message while the GPU still computes. Its memory is of this stream too: of the other's, it could still
    be in use there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def open(self) -> Any:
        """Make the stream, unless it is made."""
        if self._stream is None:
            self._stream = new_stream(self._device, urgent=True)
        return self._stream

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Hand in here what is handed in inside, and take memory of this stream."""
        with on_stream(self.open(), self._device):
            yield

    def give(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors made here, for the computations: those handed in from now on wait for them."""
        current = current_stream(self._device)
        current.wait_stream(self.open())
        given = tuple(tensors)
        for tensor in given:  # else the next receive may be written there while they still compute
            tensor.record_stream(current)
        return given
