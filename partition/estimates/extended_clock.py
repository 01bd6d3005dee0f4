"""The clock of a pipeline on devices of its own, for any number of equal microbatches.

Few are timed one by one; what many take is extended from the steady state, and never below Z
(`partition.estimates.closed_forms`).
"""

import math
from collections.abc import Sequence
from functools import cached_property

from partition.estimates.clocks import Clock, Clocks
from partition.estimates.pipeline_clock import Seconds
from partition.estimates.stage_needs import MANY

WARM, WARM_EXTRA = 2, 4  # the clock runs for WARM times the stages or in_flight, and WARM_EXTRA microbatches
SPAN = 4  # microbatches at the end of that, over which the seconds of one more are taken as a mean
MOST_TICKS = 400  # microbatches x stages that the clock runs through at most before it extrapolates
FILLING = 1e-3  # relative: a pace faster than the period by more shows a queue that is filling still
LATER = 1 + 1e-9  # times a step, so that rounding takes no microbatch off what may be in time
MOST_FILLING_TICKS = 1600  # microbatches x stages up to which the clock then goes on, twice as far each time


class ExtendedClock:
    """Seconds of equal microbatches, the optimizer step in them; owns those that it was asked for."""

    def __init__(
        self, full: Seconds, in_flight: Sequence[int], period_s: float, optimizer_s: float, clocks: Clocks
    ) -> None:
        """Ask nothing yet. period_s: of the busiest stage, or link in one direction."""
        self._clocks = clocks
        self._full, self._busy_s, self._in_flight = full, full.busy_s, tuple(in_flight)
        self._period_s, self._optimizer_s = period_s, optimizer_s
        self._whole: dict[int, float] = {}
        self._latest = 0

    @property
    def asked(self) -> bool:
        """Return whether any number of microbatches was timed."""
        return bool(self._whole)

    def whole_s(self, num_microbatches: int) -> float:
        """Return the seconds of equal microbatches; those of many are extended from the steady state."""
        if num_microbatches > self._first_warm and num_microbatches > self._warm:
            return max(begin + num_microbatches * each for begin, each in self._lines)
        return self._exact_s(num_microbatches)

    def _exact_s(self, num_microbatches: int) -> float:
        if num_microbatches not in self._whole:
            self._whole[num_microbatches] = self._optimizer_s + self._clock.makespan_s(num_microbatches)
        return self._whole[num_microbatches]

    @cached_property
    def _clock(self) -> Clock:
        """Return the clock with what is usually in flight."""
        return self._clocks.of(self._full, self._in_flight)

    @cached_property
    def _warm(self) -> int:
        """Return the microbatches after which each further one takes as long, as far as that is seen soon."""
        stages, warm = len(self._busy_s), self._first_warm
        if stages == 1:
            return 1
        # faster than the busiest stage or link: a queue in front of it is still filling
        while self._pace_s(warm) < self._period_s * (1 - FILLING) and 2 * warm * stages <= MOST_FILLING_TICKS:
            warm *= 2
        return warm

    @cached_property
    def _first_warm(self) -> int:
        stages = len(self._busy_s)
        if stages == 1:
            return 1
        most = max(flight for flight in self._in_flight if flight < MANY)  # MANY where there is no backward
        warm = WARM * max(stages, most) + WARM_EXTRA
        return min(warm, max(stages + WARM_EXTRA, MOST_TICKS // stages))

    def _pace_s(self, num_microbatches: int) -> float:
        """Return the seconds of one more microbatch, as a mean of the last few."""
        return (self._exact_s(num_microbatches) - self._exact_s(num_microbatches - SPAN)) / SPAN

    @cached_property
    def _lines(self) -> list[tuple[float, float]]:
        """Return (s, s per microbatch) of lines, of which the longest is what many microbatches take.

        One goes on as the clock did at last. If the queue in front of what is busiest is full only later,
        that may be too short: no step is shorter than the path to it and back, and all microbatches there (Z
        of `partition.estimates.closed_forms`).
        """
        if len(self._busy_s) == 1:
            return self._floors
        warm_s = self._exact_s(self._warm)
        pace = self._pace_s(self._warm)
        return _longest(
            [(warm_s - self._warm * pace, pace), *self._floors, *self._round_trips], from_count=self._warm
        )

    @cached_property
    def _floors(self) -> list[tuple[float, float]]:
        """Return (s, s per microbatch) of each stage and link: Z is the longest of these lines."""
        if len(self._busy_s) == 1:
            return [(self._optimizer_s, self._busy_s[0])]
        lines: list[tuple[float, float]] = []
        path_s = 0.0
        links = [*self._full.link_s, (0.0, 0.0, 0.0, 0.0)]
        for busy, link, after in zip(self._busy_s, links, [*self._busy_s[1:], 0.0], strict=True):
            path_s += busy
            lines.append((self._optimizer_s + path_s - busy, busy))
            path_s += sum(link)
            each = max(link[:2])
            lines.append((self._optimizer_s + path_s + after - each, each))
        return lines

    @cached_property
    def _round_trips(self) -> list[tuple[float, float]]:
        """Return (s, s per microbatch) of each stage that waits a round trip for what is in flight."""
        lines, before_s = [], 0.0
        round_trip_s = sum(self._busy_s) + sum(map(sum, self._full.link_s))
        links = [*self._full.link_s, (0.0,)]
        for busy, link, flight in zip(self._busy_s, links, self._in_flight, strict=True):
            lines.append((self._optimizer_s + before_s, round_trip_s / flight))
            before_s += busy + sum(link)
            round_trip_s -= busy + sum(link)
        return lines

    @cached_property
    def least_lines(self) -> list[tuple[float, float]]:
        """Return (s, s per microbatch) of the lines of Z that are not below another one everywhere."""
        return _longest([*self._floors, *self._round_trips], from_count=0)

    def no_more(self, step_s: float, limit: int) -> float:
        """Return as many microbatches as `most_whole`, or more, at most about `limit`: by Z alone."""
        late_s = step_s * LATER
        return min((late_s - begin) / each if each > 0 else limit for begin, each in self.least_lines)

    def most_whole(self, step_s: float) -> int:
        """Return the most full microbatches that take no longer than a step."""
        known, least = self._whole, self._latest
        if (  # mostly about as many as for the step that was asked before
            least < self._first_warm
            and known.get(least, math.inf) <= step_s < known.get(least + 1, -math.inf)
        ):
            return least
        self._latest = self._find_most_whole(step_s)
        return self._latest

    def _find_most_whole(self, step_s: float) -> int:
        known, period_s = self._whole, self._period_s
        if (known[1] if 1 in known else self.whole_s(1)) > step_s:
            return 0
        late = self._first_warm
        if step_s >= self._warm_floor_s:
            warm = self._warm
            if self._exact_s(warm) <= step_s:
                most = math.inf
                for begin, each in self._lines:
                    if each > 0 and (step_s - begin) / each < most:
                        most = (step_s - begin) / each
                return max(warm, int(most)) if most < warm + MANY else warm + MANY
            late = warm
        done = 1  # the answer is from this on, and below `late`
        guess = self._latest
        while late - done > 1:
            if guess <= done:
                guess = done + 1
            elif guess >= late:
                guess = late - 1
            spare = step_s - (known[guess] if guess in known else self._exact_s(guess))
            periods = int(abs(spare) / period_s) or 1 if period_s > 0 else 1
            if spare >= 0:
                done, guess = guess, guess + periods
            else:
                late, guess = guess, guess - periods
        return done

    @cached_property
    def _warm_floor_s(self) -> float:
        """Return the step below which there is no time for the microbatches of the warmup."""
        return max(begin + self._first_warm * each for begin, each in self._floors)


def _longest(lines: Sequence[tuple[float, float]], from_count: int) -> list[tuple[float, float]]:
    """Return the lines that may be the longest for so many microbatches or more."""
    kept: list[tuple[float, float]] = []
    longest_s = -math.inf
    for each, begin in sorted(((each, begin) for begin, each in lines), reverse=True):
        if begin + from_count * each > longest_s:
            longest_s = begin + from_count * each
            kept.append((begin, each))
    return kept
