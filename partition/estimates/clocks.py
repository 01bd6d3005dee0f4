"""The clocks of a search's pipelines, interpreted or compiled: results are the same."""

from collections.abc import Sequence
from typing import Protocol

from partition.estimates.pipeline_clock import PipelineClock, Seconds

MANY_STAGES = 20_000
"""Stages of all clocks so far from which on they are compiled: to load that takes as long as some 10,000, and
where twice as many were asked for there are mostly many more to come."""


class Clock(Protocol):
    """Makespans of one pipeline."""

    def makespan_s(self, num_microbatches: int, last: Seconds | None = None) -> float: ...


class Clocks:
    """A maker of clocks; owns the count of what it made, by which it chooses."""

    def __init__(self) -> None:
        self._stages = 0

    @property
    def many(self) -> bool:
        """Return whether so many were made that to load a compiler pays, for other loops too."""
        return self._stages >= MANY_STAGES

    def of(self, full: Seconds, in_flight: Sequence[int]) -> Clock:
        """Return the clock of a pipeline with so many microbatches in flight at each stage."""
        self._stages += len(in_flight)
        if not self.many or len(in_flight) == 1:
            return PipelineClock(full, in_flight)
        from partition.estimates.compiled_clock import CompiledClock  # loads a compiler

        return CompiledClock(full, in_flight)
