"""The most samples of a cluster, given what each vector of device counts does as one pipeline.

State of the programme over whole pipelines: a count vector. Label: the most samples of pipelines on disjoint
parts of it. Transition: one of the vectors below it as a pipeline, the rest split as well as can be.
Source: the unbounded knapsack recurrence (Gilmore and Gomory, Operations Research 1966), with vectors of
counts for sizes. Complexity: O(pairs of a vector and one below it), `num_parts`.

With at most k pipelines there is no such recurrence in one table: from the table of at most n pipelines comes
that of at most 2 n, since either half of the pipelines has a part of the devices to itself, and k is put
together of powers of two. Complexity: O(log k * pairs); the last sum is needed for all devices alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from partition.column_generation.master_problem import solve_master
from partition.estimates.arrays import Places
from partition.exact.count_vectors import CountVectors

NEW, CLOSE = 20, 1e-6  # columns added at a time, and how near to the best mixture


@dataclass(frozen=True, slots=True)
class _Split:
    """The most samples of some pipelines by vector, and of two such splits which part the first has.

    Without a first split it is one pipeline on a part of the devices.
    """

    samples: Places
    part: Places | None = None
    first: "_Split | None" = None
    second: "_Split | None" = None

    def used(self, vectors: CountVectors, one: Places, vector: int) -> list[int]:
        """Return the vectors of the pipelines on a vector of devices."""
        if self.part is None or self.first is None or self.second is None:
            below = vectors.below(vector)
            best = int(below[one[below].argmax()])
            return [best] if one[best] else []
        part = int(self.part[vector])
        return self.first.used(vectors, one, part) + self.second.used(vectors, one, vector - part)


Sums = Callable[[Places, Places], tuple[Places, Places]]
"""(best sums of two tables by vector, the part that the first table has)."""


def _at_most(vectors: CountVectors, one: Places, most_pipelines: int, sums: Sums) -> tuple[float, list[int]]:
    """Return (samples, vectors) of the best way to part all devices among so many pipelines at the most."""
    grid = one.reshape([count + 1 for count in reversed(vectors.counts)])
    for axis in range(grid.ndim):
        grid = np.maximum.accumulate(grid, axis=axis)
    splits = [_Split(grid.ravel())]  # of at most 1, 2, 4 ... pipelines
    powers = [power for power in range(most_pipelines.bit_length()) if most_pipelines >> power & 1]
    if powers == [0]:
        return float(splits[0].samples[-1]), splits[0].used(vectors, one, vectors.size - 1)

    def together(first: _Split, second: _Split) -> _Split:
        return _Split(*sums(first.samples, second.samples), first, second)

    if len(powers) == 1:
        powers = [powers[0] - 1] * 2
    for _ in range(max(powers)):
        splits.append(together(splits[-1], splits[-1]))
    *others, last = (splits[power] for power in powers)
    first = reduce(together, others)
    samples = first.samples + last.samples[::-1]  # of a vector and of what it leaves of all
    part = int(samples.argmax())
    used = first.used(vectors, one, part) + last.used(vectors, one, vectors.size - 1 - part)
    return float(samples[part]), used


def _used(best: Places, part: Places) -> list[int]:
    """Return the vectors of the best split of all devices, from one part of each best split."""
    used, vector = [], len(best) - 1
    while vector and best[vector] and part[vector]:
        used.append(int(part[vector]))
        vector -= used[-1]
    return used


def num_parts(counts: Sequence[int]) -> int:
    """Return the number of pairs of a vector and one below it."""
    return math.prod((count + 1) * (count + 2) // 2 for count in counts)


def _binding(vectors: CountVectors, most_pipelines: int | None) -> int | None:
    """Return the limit; None where there are no more devices than that."""
    return most_pipelines if most_pipelines is not None and most_pipelines < sum(vectors.counts) else None


class WholeVectors:
    """Whole pipelines: the best sum of samples over disjoint vectors, in NumPy.

    A plan of a small cluster needs no compiler for it (`count_dp` says what that takes).
    most_pipelines: that a split may have; None for any number.
    """

    def __init__(self, vectors: CountVectors, most_pipelines: int | None = None) -> None:
        self._vectors, self._most = vectors, _binding(vectors, most_pipelines)
        self._below = [vectors.below(vector) for vector in range(vectors.size)]

    def best(self, one: Places) -> tuple[float, list[int]]:
        """Return (samples, vectors) of the best way to part all devices; one: samples that a vector does."""
        if self._most is not None:
            return _at_most(self._vectors, one, self._most, self._sums)
        count = len(self._below)
        best, part = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)  # [vector]
        for vector, below in enumerate(self._below):
            values = one[below] + best[vector - below]
            pick = int(values.argmax())
            best[vector], part[vector] = values[pick], below[pick]
        return float(best[-1]), _used(best, part)

    def _sums(self, first: Places, second: Places) -> tuple[Places, Places]:
        best, part = np.zeros_like(first), np.zeros_like(first)  # [vector]
        for vector, below in enumerate(self._below):
            values = first[below] + second[vector - below]
            pick = int(values.argmax())
            best[vector], part[vector] = values[pick], below[pick]
        return best, part


class CompiledVectors:
    """The same as `WholeVectors`, compiled, for many vectors."""

    def __init__(self, vectors: CountVectors, most_pipelines: int | None = None) -> None:
        self._vectors, self._most = vectors, _binding(vectors, most_pipelines)

    def best(self, one: Places) -> tuple[float, list[int]]:
        """Return (samples, vectors) of the best way to part all devices; one: samples that a vector does."""
        if self._most is not None:
            return _at_most(self._vectors, one, self._most, self._sums)
        best = np.zeros_like(one)
        part = self._fill(one, best, best)
        return float(best[-1]), _used(best, part)

    def _sums(self, first: Places, second: Places) -> tuple[Places, Places]:
        best = np.zeros_like(first)
        return best, self._fill(first, second, best)

    def _fill(self, first: Places, second: Places, best: Places) -> Places:
        from partition.exact.split_kernel import best_parts  # loads a compiler, which few vectors do without

        part: Places = best_parts(first, second, best, self._vectors.digits, self._vectors.strides)
        return part


class MixedVectors:
    """Parts of pipelines too: the linear programme over all vectors, its columns found by their prices.

    A limit on the number of pipelines is one more row, in which each of them counts as one.
    """

    def __init__(self, vectors: CountVectors, most_pipelines: int | None = None) -> None:
        self._digits, self._counts = vectors.digits.astype(np.float64), vectors.counts
        if most_pipelines is not None:
            self._digits = np.hstack([self._digits, np.ones((vectors.size, 1))])
            self._counts = (*vectors.counts, most_pipelines)
        self._known = [vectors.size - 1]

    def best(self, one: Places) -> tuple[float, list[int]]:
        """Return (no fewer samples than the best mixture does, vectors of a good one)."""
        counts = np.array(self._counts, dtype=np.float64)
        while True:
            rows, values = self._digits[self._known].tolist(), one[self._known].tolist()
            master = solve_master(rows, values, list(counts))
            prices = np.maximum(master.prices, 1e-9 * max(1.0, float(master.prices.max())))
            ratio = one / np.maximum(self._digits @ prices, 1e-300)
            dearest = float(ratio.max())
            new = [int(vector) for vector in np.argsort(-ratio)[:NEW] if ratio[vector] > 1 + CLOSE]
            if dearest <= 1 + CLOSE or not set(new) - set(self._known):
                used = [v for v, amount in zip(self._known, master.amounts, strict=True) if amount > CLOSE]
                return dearest * float(prices @ counts), used
            self._known = list(dict.fromkeys([*self._known, *new]))
