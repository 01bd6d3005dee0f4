"""The makespan of one pipeline under 1F1B, on devices and links that it has for itself.

R1 to R4 and R6 of docs/clock.md, as the simulator has them, and nothing else (R13): for the search. A plan's
time that a user sees comes from the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one microbatch: forward and backward per stage, and on each link between stages both ways.

    link_s is (forward, backward, forward latency, backward latency); a message occupies its direction without
    latency.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    link_s: tuple[tuple[float, float, float, float], ...]

    @property
    def busy_s(self) -> list[float]:
        """Return forward plus backward of each stage."""
        return [sum(pair) for pair in zip(self.forward_s, self.backward_s, strict=True)]

    @property
    def round_trips_s(self) -> list[float]:
        """Return what each link takes there and back, latency included."""
        return [(there + late) + (back + late_back) for there, back, late, late_back in self.link_s]


def one_f_one_b_s(
    full: Seconds, in_flight: Sequence[int], num_microbatches: int, last: Seconds | None = None
) -> float:
    """Return the seconds from the first forward to the last backward.

    Each stage's list is that of `hetpipe.program.schedules.one_f_one_b`; in_flight must not rise along the
    pipeline. last: the seconds of a smaller last microbatch (R6).
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
        self._forward_hops, self._backward_hops = forward_hops(full), backward_hops(full)
        count = len(self._in_flight)
        stages = zip(range(count), self._in_flight, self._backward_hops, strict=True)
        self._last_first = list(stages)[::-1]
        self._arrived: list[list[float]] = [[] for _ in range(count)]  # [stage][microbatch] of gradients, s
        self._states = [([0.0] * count, [0.0] * count, [0.0] * count)]
        """[round]: when each stage is done, and when what it sends forwards and backwards over is free, s."""

    def makespan_s(self, num_microbatches: int, last: Seconds | None = None) -> float:
        """Return the seconds from the first forward to the last backward; last: of a smaller last one."""
        full, final = self._full, num_microbatches - 1
        if len(self._in_flight) == 1:
            rest = last or full
            return final * (full.forward_s[0] + full.backward_s[0]) + rest.forward_s[0] + rest.backward_s[0]
        while len(self._states) <= final:
            self._go_on()
        hops = forward_hops(last) if last else self._forward_hops
        clock, _ = _forwards(hops, *self._states[final][:2])
        backward_free = self._states[final][2]
        last_hops = backward_hops(last) if last else self._backward_hops
        arrived = [0.0] * min(num_microbatches, self._in_flight[-1])  # the last stage waits for nobody
        before = num_microbatches - len(arrived)
        for stage in range(len(clock) - 1, -1, -1):
            now, free = clock[stage], backward_free[stage]
            first = max(0, num_microbatches - self._in_flight[stage])
            if first < before:
                arrived = self._arrived[stage][first:before] + arrived
            before, sent = first, []
            busy_s, occupied_s, latency_s = self._backward_hops[stage]
            for due in arrived[:-1]:
                now = (due if due > now else now) + busy_s
                free = (now if now > free else free) + occupied_s
                sent.append(free + latency_s)
            busy_s, occupied_s, latency_s = last_hops[stage]
            due = arrived[-1]
            clock[stage] = now = (due if due > now else now) + busy_s
            sent.append((now if now > free else free) + occupied_s + latency_s)
            arrived = sent
        return max(clock)

    def _go_on(self) -> None:
        """Add one more round."""
        microbatch = len(self._states) - 1
        clock, forward_free = _forwards(self._forward_hops, *self._states[-1][:2])
        backward_free = self._states[-1][2].copy()
        arrived, last_stage = self._arrived, len(clock) - 1
        for stage, in_flight, (busy_s, occupied_s, latency_s) in self._last_first:
            done = microbatch - in_flight + 1
            if done < 0:
                break  # nor has any stage before it, where no fewer are in flight
            now = clock[stage]
            if stage < last_stage:
                due = arrived[stage][done]
                now = due if due > now else now
            clock[stage] = now = now + busy_s
            if stage:
                free = backward_free[stage]
                backward_free[stage] = free = (now if now > free else free) + occupied_s
                arrived[stage - 1].append(free + latency_s)
        self._states.append((clock, forward_free, backward_free))


Hops = list[tuple[float, float, float]]
"""Of each stage and the link that it sends over: seconds, those for which it is occupied, latency."""


def forward_hops(seconds: Seconds) -> Hops:
    """Return what each stage and the link behind it take of a forward."""
    links = [(occupied_s, latency_s) for occupied_s, _, latency_s, _ in seconds.link_s]
    return [(busy, *link) for busy, link in zip(seconds.forward_s, [*links, (0.0, 0.0)], strict=True)]


def backward_hops(seconds: Seconds) -> Hops:
    """Return what each stage and the link in front of it take of a backward."""
    links = [(occupied_s, latency_s) for _, occupied_s, _, latency_s in seconds.link_s]
    return [(busy, *link) for busy, link in zip(seconds.backward_s, [(0.0, 0.0), *links], strict=True)]


def _forwards(hops: Hops, clock: list[float], forward_free: list[float]) -> tuple[list[float], list[float]]:
    """Return from when each stage and the link behind it are free once one more microbatch has passed."""
    clocks, frees, arrived = [], [], 0.0
    for (busy_s, occupied_s, latency_s), now, free in zip(hops, clock, forward_free, strict=True):
        done = (arrived if arrived > now else now) + busy_s  # R1
        sent = (done if done > free else free) + occupied_s  # R2, R4
        arrived = sent + latency_s  # R3
        clocks.append(done)
        frees.append(sent)
    return clocks, frees
