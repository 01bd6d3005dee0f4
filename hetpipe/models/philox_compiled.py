"""Philox 4x32-10 as machine code for the CPU. To import this loads a compiler, for half a second."""

from collections.abc import Iterable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hetpipe.models.philox_torch import MASK, MULTIPLIERS, NUM_ROUNDS, WEYL, Draw
from partition.exact.compiled import compiled

Words = npt.NDArray[np.uint32]

M0, M1 = map(np.uint64, MULTIPLIERS)
W0, W1 = map(np.uint32, WEYL)
HALF = np.uint64(32)


@numba.njit(inline="always")
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
def _apply(x: Any, samples: Words, key: Words, last: Any, scales: Any, out: Any) -> None:
    """x, out: [samples, elements]. samples: [samples, 2], low and high half. scales: dropped, kept."""
    none, scale = scales[0], scales[1]
    zero = np.uint32(0)
    num_blocks = x.shape[1] // 4
    for sample in range(x.shape[0]):
        row, result, low, high = x[sample], out[sample], samples[sample, 0], samples[sample, 1]
        for block in range(num_blocks):
            w0, w1, w2, w3 = _rounds(np.uint32(block), low, high, zero, key[0], key[1])
            at = 4 * block
            result[at] = row[at] * (scale if w0 <= last else none)
            result[at + 1] = row[at + 1] * (scale if w1 <= last else none)
            result[at + 2] = row[at + 2] * (scale if w2 <= last else none)
            result[at + 3] = row[at + 3] * (scale if w3 <= last else none)
        rest = _rounds(np.uint32(num_blocks), low, high, zero, key[0], key[1])
        for place in range(x.shape[1] - 4 * num_blocks):
            at = 4 * num_blocks + place
            result[at] = row[at] * (scale if rest[place] <= last else none)


@compiled
def _keep(samples: Words, key: Words, last: Any, out: Any) -> None:
    """out: [samples, elements], bool."""
    zero = np.uint32(0)
    num_blocks = out.shape[1] // 4
    for sample in range(out.shape[0]):
        result, low, high = out[sample], samples[sample, 0], samples[sample, 1]
        for block in range(num_blocks):
            w0, w1, w2, w3 = _rounds(np.uint32(block), low, high, zero, key[0], key[1])
            at = 4 * block
            result[at], result[at + 1] = w0 <= last, w1 <= last
            result[at + 2], result[at + 3] = w2 <= last, w3 <= last
        rest = _rounds(np.uint32(num_blocks), low, high, zero, key[0], key[1])
        for place in range(out.shape[1] - 4 * num_blocks):
            result[4 * num_blocks + place] = rest[place] <= last


def applied(x: Tensor, draw: Draw) -> Tensor:
    """Return x with elements dropped and the others scaled; x: contiguous, float32 or float64, on the CPU."""
    out = torch.empty_like(x)
    values, results = (tensor.view(len(draw.samples), -1).numpy() for tensor in (x, out))
    scales = np.array([0.0, draw.scale], values.dtype)
    _apply(values, _halves(draw.samples), _halves([draw.key])[0], np.uint32(draw.last), scales, results)
    return out


def kept(draw: Draw, num_elements: int) -> Tensor:
    """Return which elements of each sample are kept: [samples, num_elements], bool."""
    out = torch.empty((len(draw.samples), num_elements), dtype=torch.bool)
    _keep(_halves(draw.samples), _halves([draw.key])[0], np.uint32(draw.last), out.numpy())
    return out


def _halves(numbers: Iterable[int]) -> Words:
    """Return the low and high 32 bits of whole numbers: [numbers, 2]."""
    return np.array([(number & MASK, number >> 32) for number in numbers], np.uint32)


def words(counter: Sequence[int], key: Sequence[int]) -> Words:
    """Return the four words of a counter of four."""
    return _words(np.array(counter, np.uint32), np.array(key, np.uint32))
