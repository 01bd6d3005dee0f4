"""Large clusters: a lower bound on the step of all plans whose pipelines share no device.

For a step time T and prices of the device classes, Farley's bound (Operations Research, 1990) says: if every
pipeline does fewer than batch / (value of all devices) samples per price of its devices, then no set of
pipelines does the batch in T. `column_dp`, relaxed, gives the least price of a pipeline for an amount of
samples; amounts are taken in intervals (most samples at the price of the fewest) that are split, and the time
grid refined, only where the bound is not proven yet. Prices come from the linear programme over the columns
that stood in the way.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partition.column_dp import ColumnProgramme
from partition.count_split import SAFETY, families
from partition.master import solve_master
from partition.tables import Amount, Floats, ProblemTables

GROWTH = 1.6
LEVELS, LEVELS_TRIED = 32, (64, 256)
SIDE_BY_SIDE = 10
WAVE = 120  # intervals looked at together, those that do most for their price first
ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Interval:
    """Amounts of samples: from first to last microbatches of a size, the last one of least to most samples.

    first = last = 0: a single microbatch of least to most samples.
    """

    size: int
    first: int
    last: int
    least: int
    most: int
    levels: int = LEVELS

    @property
    def fewest(self) -> int:
        if self.first == 0:
            return self.least
        return self.first * self.size + (self.least if self.least < self.size else 0)

    @property
    def top(self) -> int:
        if self.first == 0:
            return self.most
        return self.last * self.size + (self.most if self.least < self.size else 0)

    @property
    def amount(self) -> Amount:
        """What bounds all of them from below."""
        if self.first and self.first == self.last and self.least == self.most < self.size:
            return Amount.exact(self.top, self.size)
        return Amount(self.first, self.least, self.most, float(self.first))

    @property
    def memory_size(self) -> int:
        """The microbatch size that memory is asked for, at the least."""
        return self.size if self.first else self.least

    @property
    def exact(self) -> bool:
        """A single amount of samples."""
        return self.first == self.last and self.least == self.most

    def parts(self, most_levels: int) -> list["Interval"]:
        """Smaller intervals, or for a single amount a finer grid; none at the end."""
        if self.first < self.last:
            middle = (self.first + self.last + 1) // 2
            return [replace(self, last=middle - 1), replace(self, first=middle)]
        if self.least < self.most:
            middle = (self.least + self.most + 1) // 2
            return [replace(self, most=middle - 1), replace(self, least=middle)]
        return [replace(self, levels=2 * self.levels)] if self.levels < most_levels else []


@dataclass(slots=True)
class ColumnBound:
    """Owns the columns that stood in the way of a proof; `bound_s` searches the largest provable step."""

    tables: ProblemTables
    prices: Floats
    seconds: float
    _deadline: float = field(init=False)

    def bound_s(self, low_s: float, high_s: float, tolerance: float = 2e-3) -> float:
        """No plan of disjoint pipelines is faster; low_s is known to be a bound, high_s the time of a plan.

        Ends when the two meet within the tolerance, or the seconds are spent.
        """
        self._deadline = time.monotonic() + self.seconds
        low, high, share = low_s, high_s, 0.3
        while high > low * (1 + tolerance) and time.monotonic() < self._deadline:
            middle = low + (high - low) * share
            if self._proven(middle):
                low, share = middle, max(share, 0.5)
            else:
                high, share = middle, 0.5
        return low

    def _proven(self, step_s: float) -> bool:
        """Whether no set of disjoint pipelines does the batch in a step; prices are improved on the way."""
        return any(self._proven_at(step_s, levels) for levels in LEVELS_TRIED)

    def _proven_at(self, step_s: float, levels: int) -> bool:
        """The same with no finer grid of times than these levels."""
        counts = np.array(self.tables.classes.counts, dtype=np.float64)
        batch = self.tables.problem.global_batch_size
        found: dict[tuple[int, ...], int] = {}
        for _ in range(ROUNDS):
            floor = 1e-6 * max(float(self.prices.max()), 1e-12)
            prices = np.maximum(self.prices, floor)
            ratio = batch * (1 - SAFETY) / float(prices @ counts)
            blocking = self._blocking(step_s, prices, ratio, levels)
            if blocking is None:
                return True
            if time.monotonic() > self._deadline:
                return False
            for uses, samples in blocking.items():
                found[uses] = max(samples, found.get(uses, 0))
            master = solve_master(list(found), list(found.values()), list(counts))
            if master.samples >= batch:
                return False
            value = max(float(master.prices @ counts), 1e-12)
            self.prices = 0.3 * prices * (value / float(prices @ counts)) + 0.7 * master.prices
        return False

    def _blocking(
        self, step_s: float, prices: Floats, ratio: float, levels: int
    ) -> dict[tuple[int, ...], int] | None:
        """Devices and samples of pipelines that do too many for their price; None where there are none."""
        waiting = [(0.0, interval) for interval in self._intervals(step_s)]
        columns: dict[tuple[int, ...], int] = {}
        while waiting and len(columns) < 2 * len(prices) + 2:
            if time.monotonic() > self._deadline:
                return columns
            waiting.sort(key=lambda entry: entry[0])
            work, waiting = [interval for _, interval in waiting[:WAVE]], waiting[WAVE:]
            for interval, price, uses in self._priced(work, step_s, prices):
                if uses is None or interval.top < ratio * price:
                    continue
                parts = interval.parts(levels)
                if not parts:
                    columns[uses] = max(interval.top, columns.get(uses, 0))
                waiting += [(-part.fewest / price, part) for part in parts]
        return columns or None

    def _priced(
        self, intervals: Sequence[Interval], step_s: float, prices: Floats
    ) -> Iterable[tuple[Interval, float, tuple[int, ...] | None]]:
        """(interval, least price of its amounts, devices of each class of that pipeline)."""
        groups: dict[tuple[int, int], list[Interval]] = {}
        for interval in intervals:
            groups.setdefault((interval.memory_size, interval.levels), []).append(interval)
        for (size, levels), members in groups.items():
            members.sort(key=lambda entry: entry.fewest)
            for first in range(0, len(members), SIDE_BY_SIDE):
                part = members[first : first + SIDE_BY_SIDE]
                programme = ColumnProgramme(
                    self.tables,
                    size,
                    [interval.amount for interval in part],
                    step_s,
                    levels=levels,
                    relaxed=True,
                )
                for interval, pipeline in zip(part, programme.solve(prices), strict=True):
                    if pipeline is None:
                        yield interval, math.inf, None
                        continue
                    uses = [0] * len(prices)
                    for stage in pipeline.stages:
                        uses[stage.entry] += 1
                    yield interval, pipeline.price * (1 - SAFETY), tuple(uses)

    def _intervals(self, step_s: float) -> list[Interval]:
        """All amounts of samples, coarsely; those that no device order could do are found out at once."""
        batch, sizes = self.tables.problem.global_batch_size, self.tables.problem.microbatch_sizes
        found, below = [], 0
        for size in (size for size in sizes if size <= batch):
            if size - below > 1:
                found.append(Interval(size, 0, 0, below + 1, size - 1))
            below = size
            for _, least, most in families(size):
                first = 1
                while first * size <= batch:
                    last = min(batch // size, max(first, int(first * GROWTH) - 1))
                    found.append(Interval(size, first, last, least, most))
                    first = last + 1
        if max(sizes) > batch > below:
            found.append(Interval(batch + 1, 0, 0, below + 1, batch))
        return found
