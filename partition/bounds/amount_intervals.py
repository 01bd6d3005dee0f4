"""Amounts of samples and paths of pipelines that `column_bound` looks at together, and how they are split."""

import math
from dataclasses import dataclass, replace

from partition.bounds.pricing_bound import PriceBound
from partition.bounds.relaxed_stages import PathRange
from partition.estimates.amounts import Amount

WIDE, NARROW = 1.3, 1.06  # most samples over fewest: wider is split before paths, or before single paths
COARSE, FINE, FINEST = 6, 24, 96  # steps of the grid in a microbatch's mean pace
PATHS = (0.0, 2.0, 3.0, 4.5, 7.0)  # in paces: where the ranges of paths begin that are looked at first


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
        """The amount that bounds all of them from below."""
        rest = self.first > 0 and self.least < self.size
        return Amount(self.first, self.least, self.most, float(self.first), rest=rest)

    @property
    def memory_size(self) -> int:
        """The microbatch size that memory is asked for, at the least."""
        return self.size if self.first else self.least

    @property
    def exact(self) -> bool:
        """True of a single amount of samples."""
        return self.first == self.last and self.least == self.most

    def parts(self) -> list["Interval"]:
        """Return smaller intervals; none of a single amount."""
        if self.first < self.last:
            middle = (self.first + self.last + 1) // 2
            return [replace(self, last=middle - 1), replace(self, first=middle)]
        if self.least < self.most:
            middle = (self.least + self.most + 1) // 2
            return [replace(self, most=middle - 1), replace(self, least=middle)]
        return []

    def above(self, samples: float) -> "Interval":
        """Leave out amounts below these samples, as far as it stays an interval; the top is not below."""
        if self.first == 0:
            return replace(self, least=max(self.least, math.ceil(samples)))
        rest = self.most if self.least < self.size else 0
        raised = replace(self, first=max(self.first, math.ceil((samples - rest) / self.size)))
        if raised.first == raised.last and self.least < self.size:
            least = math.ceil(samples) - raised.first * self.size
            raised = replace(raised, least=max(self.least, least))
        return raised


@dataclass(frozen=True, slots=True)
class Node:
    """Amounts of samples, and paths of the pipelines that do them, in paces * fineness steps of a grid."""

    interval: Interval
    paces: float
    fineness: int = COARSE
    first: int = 0
    last: int | None = None

    @classmethod
    def whole(cls, interval: Interval) -> "Node":
        """Return the node of all paths, on a coarse grid."""
        return cls(interval, max(1.0, interval.amount.passes))

    def within(self, interval: Interval) -> "Node":
        """Return the same with fewer amounts.

        If the last microbatch is another, paths are counted anew. They only get longer, so first stays.
        """
        if self.fineness == COARSE:
            return Node.whole(interval)
        same = (interval.least, interval.most) == (self.interval.least, self.interval.most)
        return replace(self, interval=interval, last=self.last if same else None)

    def path_range(self, limit: float) -> PathRange:
        interval = self.interval
        amount, size = interval.amount, interval.memory_size
        return PathRange(amount, size, self.paces, self.fineness, self.first, self.last, limit)

    def parts(self, bound: PriceBound, most_stages: int) -> list["Node"]:
        """Return smaller nodes, one of which may rule out the pipeline of a bound; none at the end.

        What is widest is split first: amounts, then paths, and last the grid gets finer.
        """
        spread = self.interval.top / self.interval.fewest
        amounts = [self.within(interval) for interval in self.interval.parts()]
        if spread > WIDE or bound.real:
            return amounts
        if self.fineness == COARSE:
            edges = [round(edge * FINE) for edge in PATHS]
            lasts = [*(edge - 1 for edge in edges[1:]), None]
            pairs = zip(edges, lasts, strict=True)
            return [replace(self, fineness=FINE, first=first, last=last) for first, last in pairs]
        if self.last is None or self.last - self.first >= self.fineness:
            return self._halves(bound)
        if spread > NARROW and amounts:
            return amounts
        if self.last > self.first:
            return self._halves(bound)
        if self.fineness < FINEST:
            last = 2 * (self.last + most_stages)
            return [replace(self, fineness=2 * self.fineness, first=2 * self.first, last=last)]
        return amounts

    def _halves(self, bound: PriceBound) -> list["Node"]:
        if self.last is None:
            middle = max(bound.path, self.first + self.fineness // 4)
        else:
            middle = (self.first + self.last + 1) // 2
        return [replace(self, last=middle - 1), replace(self, first=middle)]
