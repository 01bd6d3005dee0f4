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
def _apply(x: Any, numbers: Words, last: Any, scale: Any, out: Any) -> None:
    """x, out: [samples, elements]. numbers: see `_numbers`."""
    none = scale * 0
    k0, k1, call = numbers[0, 0], numbers[0, 1], numbers[1, 0]
    num_blocks = x.shape[1] // 4
    for sample in range(x.shape[0]):
        row, result, low, high = x[sample], out[sample], numbers[sample + 2, 0], numbers[sample + 2, 1]
        for block in range(num_blocks):
            w0, w1, w2, w3 = _rounds(np.uint32(block), low, high, call, k0, k1)
            at = 4 * block
            result[at] = row[at] * (scale if w0 <= last else none)
            result[at + 1] = row[at + 1] * (scale if w1 <= last else none)
            result[at + 2] = row[at + 2] * (scale if w2 <= last else none)
            result[at + 3] = row[at + 3] * (scale if w3 <= last else none)
        rest = _rounds(np.uint32(num_blocks), low, high, call, k0, k1)
        for place in range(x.shape[1] - 4 * num_blocks):
            at = 4 * num_blocks + place
            result[at] = row[at] * (scale if rest[place] <= last else none)


@compiled
def _keep(numbers: Words, last: Any, out: Any) -> None:
    """numbers: see `_numbers`. out: [samples, elements], bool."""
    k0, k1, call = numbers[0, 0], numbers[0, 1], numbers[1, 0]
    num_blocks = out.shape[1] // 4
    for sample in range(out.shape[0]):
        result, low, high = out[sample], numbers[sample + 2, 0], numbers[sample + 2, 1]
        for block in range(num_blocks):
            w0, w1, w2, w3 = _rounds(np.uint32(block), low, high, call, k0, k1)
            at = 4 * block
            result[at], result[at + 1] = w0 <= last, w1 <= last
            result[at + 2], result[at + 3] = w2 <= last, w3 <= last
        rest = _rounds(np.uint32(num_blocks), low, high, call, k0, k1)
        for place in range(out.shape[1] - 4 * num_blocks):
            result[4 * num_blocks + place] = rest[place] <= last


def applied(x: Tensor, draw: Draw) -> Tensor:
    """Return x with elements dropped and the others scaled; x: contiguous, float32 or float64, on the CPU."""
    out = torch.empty_like(x)
    if isinstance(out, FakeTensor):  # has a shape and no memory: its bytes are counted
        return out
    values, results = x.numpy(), out.numpy()
    shape = (len(draw.samples), -1)
    scale = values.dtype.type(draw.scale)
    numbers = _numbers(draw.key, draw.call, draw.samples)
    _apply(values.reshape(shape), numbers, np.uint32(draw.last), scale, results.reshape(shape))
    return out


def kept(draw: Draw, num_elements: int) -> Tensor:
    """Return which elements of each sample are kept: [samples, num_elements], bool."""
    out = torch.empty((len(draw.samples), num_elements), dtype=torch.bool)
    if isinstance(out, FakeTensor):
        return out
    _keep(_numbers(draw.key, draw.call, draw.samples), np.uint32(draw.last), out.numpy())
    return out


@lru_cache(maxsize=64)
def _numbers(key: int, call: int, samples: tuple[int, ...]) -> Words:
    """Return the low and high 32 bits of the key, the call and each sample: [2 + samples, 2]."""
    return np.array([(number & MASK, number >> 32) for number in (key, call, *samples)], np.uint32)


def words(counter: Sequence[int], key: Sequence[int]) -> Words:
    """Return the four words of a counter of four."""
    found: Words = _words(np.array(counter, np.uint32), np.array(key, np.uint32))
    return found
