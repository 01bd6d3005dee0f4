"""How many devices of each class are used."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]


class CountVectors:
    """All vectors of how many devices of each class are used, numbered in mixed radix."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.strides = np.concatenate([[1], np.cumprod(np.array(counts) + 1)[:-1]]).astype(np.int64)
        self.size = math.prod(count + 1 for count in counts)
        index = np.arange(self.size)
        self.digits = (index[:, None] // self.strides[None]) % (np.array(counts) + 1)[None]
        self.totals = self.digits.sum(axis=1)

    def below(self, vector: int) -> Places:
        """Return all vectors that use no more of any class than this one."""
        index = np.zeros(1, dtype=np.int64)
        for digit, stride in zip(self.digits[vector], self.strides, strict=True):
            index = np.add.outer(np.arange(digit + 1) * stride, index).ravel()
        return index

    def users(self, total: int, class_index: int) -> Places:
        """Return the vectors of `total` devices that use at least one of a class."""
        return np.flatnonzero((self.totals == total) & (self.digits[:, class_index] > 0))
