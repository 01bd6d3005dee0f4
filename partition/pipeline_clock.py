"""The makespan of one pipeline under 1F1B, on devices and links that it has for itself.

The same rules as the simulator's, for the search: a plan's time that a user sees comes from the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one microbatch: forward and backward per stage, and on each link between stages there and back.

    link_s is (there, back, latency there, latency back); a message occupies its direction without latency.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    link_s: tuple[tuple[float, float, float, float], ...]


def one_f_one_b_s(
    full: Seconds, in_flight: Sequence[int], num_microbatches: int, last: Seconds | None = None
) -> float:
    """Seconds from the first forward to the last backward; `last` are those of a smaller last microbatch.

    Each stage's list is that of `hetpipe.schedules.one_f_one_b`; in_flight must not rise along the pipeline.
    """
    return PipelineClock(full, in_flight).makespan_s(num_microbatches, last)


class PipelineClock:
    """Makespans of a pipeline for any numbers of microbatches, which begin alike; owns how they begin.

        F0 F1 B0 F2 B1 F3 | B2 B3      in_flight = 2: up to the last forward as with more microbatches

    In round m each stage does the forward of microbatch m, and after it the backward of microbatch
    m - in_flight + 1, if there is one: all that these wait for is of earlier rounds, or of neighbours in this
    one. What the last round leaves are in_flight - 1 backwards.
    """

    def __init__(self, full: Seconds, in_flight: Sequence[int]) -> None:
        self._full, self._in_flight = full, tuple(in_flight)
        count = len(self._in_flight)
        self._arrived: list[list[float]] = [[] for _ in range(count)]  # gradients at a stage, by microbatch
        self._states = [([0.0] * count, [0.0] * count, [0.0] * count)]
        """After so many rounds: when each stage is done, and when its links, there and back, are free."""

    def makespan_s(self, num_microbatches: int, last: Seconds | None = None) -> float:
        """Seconds from the first forward to the last backward; `last` are those of a smaller last one."""
        full, last, final = self._full, last or self._full, num_microbatches - 1
        if len(self._in_flight) == 1:
            busy = full.forward_s[0] + full.backward_s[0]
            return final * busy + last.forward_s[0] + last.backward_s[0]
        while len(self._states) <= final:
            self._go_on()
        clock, there, back = map(list, self._states[final])
        _forwards(last, clock, there)
        arrived: list[float] = []
        first = num_microbatches  # the first of `arrived`, here the last stage's own
        for stage in range(len(clock) - 1, -1, -1):
            now, free, known, sent = clock[stage], back[stage], self._arrived[stage], list[float]()
            before = first
            first = max(0, num_microbatches - self._in_flight[stage])
            for microbatch in range(first, num_microbatches):
                seconds = full if microbatch < final else last
                if stage + 1 < len(clock):
                    due = known[microbatch] if microbatch < before else arrived[microbatch - before]
                    now = due if due > now else now
                now += seconds.backward_s[stage]
                if stage:
                    _, occupied, _, latency = seconds.link_s[stage - 1]
                    free = (now if now > free else free) + occupied
                    sent.append(free + latency)
            clock[stage], arrived = now, sent
        return max(clock)

    def _go_on(self) -> None:
        """One more round."""
        full, microbatch = self._full, len(self._states) - 1
        clock, there, back = map(list, self._states[-1])
        _forwards(full, clock, there)
        for stage in range(len(clock) - 1, -1, -1):
            done = microbatch - self._in_flight[stage] + 1
            if done < 0:
                break  # nor has any stage before it, where no fewer are in flight
            now = clock[stage]
            if stage + 1 < len(clock):
                due = self._arrived[stage][done]
                now = due if due > now else now
            clock[stage] = now = now + full.backward_s[stage]
            if stage:
                _, occupied, _, latency = full.link_s[stage - 1]
                free = back[stage]
                back[stage] = free = (now if now > free else free) + occupied
                self._arrived[stage - 1].append(free + latency)
        self._states.append((clock, there, back))


def _forwards(seconds: Seconds, clock: list[float], there: list[float]) -> None:
    """One microbatch through all stages; moves what each stage and the link behind it is free from."""
    arrived = 0.0
    for stage, ((occupied, _, latency, _), busy_s) in enumerate(
        zip((*seconds.link_s, (0.0, 0.0, 0.0, 0.0)), seconds.forward_s, strict=True)
    ):
        now = clock[stage]
        clock[stage] = now = (arrived if arrived > now else now) + busy_s
        free = there[stage]
        there[stage] = free = (now if now > free else free) + occupied
        arrived = free + latency
