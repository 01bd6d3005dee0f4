"""The most samples of a cluster, given what each vector of device counts does as one pipeline.

State of the programme over whole pipelines: a count vector. Label: the most samples of pipelines on disjoint
parts of it. Transition: one of the vectors below it as a pipeline, the rest split as well as can be.
Source: the unbounded knapsack recurrence (Gilmore and Gomory, Operations Research 1966), with vectors of
counts for sizes. Complexity: O(pairs of a vector and one below it), `num_parts`.
"""

import math
from collections.abc import Sequence

import numpy as np

from partition.column_generation.master_problem import solve_master
from partition.exact.count_vectors import CountVectors, Places

NEW, CLOSE = 20, 1e-6  # columns added at a time, and how near to the best mixture


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


class WholeVectors:
    """Whole pipelines: the best sum of samples over disjoint vectors, in NumPy.

    A plan of a small cluster needs no compiler for it (`count_dp` says what that takes).
    """

    def __init__(self, vectors: CountVectors) -> None:
        self._below = [vectors.below(vector) for vector in range(vectors.size)]

    def best(self, one: Places) -> tuple[float, list[int]]:
        """Return (samples, vectors) of the best way to part all devices; one: samples that a vector does."""
        count = len(self._below)
        best, part = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)  # [vector]
        for vector, below in enumerate(self._below):
            values = one[below] + best[vector - below]
            pick = int(values.argmax())
            best[vector], part[vector] = values[pick], below[pick]
        return float(best[-1]), _used(best, part)


class CompiledVectors:
    """The same as `WholeVectors`, compiled, for many vectors."""

    def __init__(self, vectors: CountVectors) -> None:
        self._vectors = vectors

    def best(self, one: Places) -> tuple[float, list[int]]:
        """Return (samples, vectors) of the best way to part all devices; one: samples that a vector does."""
        from partition.exact.split_kernel import best_parts  # loads a compiler, which few vectors do without

        best, part = best_parts(one, self._vectors.digits, self._vectors.strides)
        return float(best[-1]), _used(best, part)


class MixedVectors:
    """Parts of pipelines too: the linear programme over all vectors, its columns found by their prices."""

    def __init__(self, vectors: CountVectors) -> None:
        self._digits, self._counts = vectors.digits.astype(np.float64), vectors.counts
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
