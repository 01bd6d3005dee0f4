"""Philox 4x32-10 as machine code for the CPU. To import this loads a compiler, for half a second."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hetpipe.models.philox_torch import MASK, MULTIPLIERS, NUM_ROUNDS, WEYL, Draw
from partition.estimates.compiled import compiled

Words = npt.NDArray[np.uint32]

M0, M1 = map(np.uint64, MULTIPLIERS)
W0, W1 = map(np.uint32, WEYL)
HALF = np.uint64(32)
HELD_BLOCKS = 256
"""Blocks whose words are held at once: 4 KiB."""


@numba.njit(inline="always")  # type: ignore[untyped-decorator]  # numba
def _rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    for _ in range(NUM_ROUNDS):
        p0, p1 = M0 * np.uint64(c0), M1 * np.uint64(c2)
        c0, c1 = np.uint32(np.uint32(p1 >> HALF) ^ c1 ^ k0), np.uint32(p1)
        c2, c3 = np.uint32(np.uint32(p0 >> HALF) ^ c3 ^ k1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + W0), np.uint32(k1 + W1)
    return c0, c1, c2, c3


@compiled
def _words(counter: Words, key: Words) -> Words:
    return np.array(_rounds(counter[0], counter[1], counter[2], counter[3], key[0], key[1]))


@compiled
def _fill(out: Any, samples: Any, key: Any, call: Any, last: Any, yes: Any, no: Any) -> None:
    """Write `yes` where an element is kept, else `no`; out: [samples, elements].

    Words are drawn into one row for each of the four of a block, side by side: so the compiler makes vector
    instructions of it.
    """
    k0, k1 = np.uint32(key & MASK), np.uint32(key >> 32)
    drawn = np.empty((4, HELD_BLOCKS), np.uint32)
    row0, row1, row2, row3 = drawn[0], drawn[1], drawn[2], drawn[3]
    most, turn, num_elements = np.uint32(last), np.uint32(call), out.shape[1]
    for place in range(out.shape[0]):
        low, high = np.uint32(samples[place] & MASK), np.uint32(samples[place] >> 32)
        for begin in range(0, num_elements, 4 * HELD_BLOCKS):
            result = out[place, begin : begin + 4 * HELD_BLOCKS]
            first, num_whole = np.uint32(begin // 4), result.size // 4
            for block in range((result.size + 3) // 4):
                words = _rounds(np.uint32(first + np.uint32(block)), low, high, turn, k0, k1)
                row0[block], row1[block], row2[block], row3[block] = words
            for block in range(num_whole):
                result[4 * block] = yes if row0[block] <= most else no
                result[4 * block + 1] = yes if row1[block] <= most else no
                result[4 * block + 2] = yes if row2[block] <= most else no
                result[4 * block + 3] = yes if row3[block] <= most else no
            for rest in range(4 * num_whole, result.size):
                result[rest] = yes if drawn[rest - 4 * num_whole, num_whole] <= most else no


def factors(draw: Draw, x: Tensor) -> Tensor:
    """Return what dropout multiplies x with: its shape and dtype, float32 or float64, on the CPU."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if isinstance(out, FakeTensor):  # has a shape and no memory: its bytes are counted
        return out
    values = out.numpy().reshape(len(draw.samples), -1)
    one = values.dtype.type
    _fill(values, _array(draw.samples), draw.key, draw.call, draw.last, one(draw.scale), one(0.0))
    return out


def applied(x: Tensor, draw: Draw) -> Tensor:
    """Return x with elements dropped and the others scaled; x: float32 or float64, on the CPU."""
    return factors(draw, x).mul_(x)


def kept(draw: Draw, num_elements: int) -> Tensor:
    """Return which elements of each sample are kept: [samples, num_elements], bool."""
    out = torch.empty((len(draw.samples), num_elements), dtype=torch.bool)
    if not isinstance(out, FakeTensor):
        _fill(out.numpy(), _array(draw.samples), draw.key, draw.call, draw.last, True, False)
    return out


@lru_cache(maxsize=64)
def _array(samples: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(samples, np.int64)


def words(counter: Sequence[int], key: Sequence[int]) -> Words:
    """Return the four words of a counter of four."""
    found: Words = _words(np.array(counter, np.uint32), np.array(key, np.uint32))
    return found
