"""Philox 4x32-10 as one kernel of Triton, which draws and applies: for CUDA and ROCm."""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetpipe.models.philox_torch import Draw

BLOCKS = 256
"""Blocks of four elements that one program of the kernel draws."""


@triton.jit(do_not_specialize=["sample", "call", "key", "last"])  # type: ignore[untyped-decorator]  # triton
def _apply(
    x: tl.tensor,
    out: tl.tensor,
    num_elements: tl.tensor,
    sample: tl.tensor,
    call: tl.tensor,
    key: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    num_blocks: tl.constexpr,
) -> None:
    """x, out: [samples, elements], of samples that follow each other from `sample` on."""
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * num_blocks + tl.arange(0, num_blocks)
    identity = sample.to(tl.int64) + place
    zero = tl.zeros([num_blocks], tl.uint32)
    low, high = zero + (identity & 0xFFFFFFFF).to(tl.uint32), zero + (identity >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key.to(tl.uint64), block.to(tl.uint32), low, high, zero + call.to(tl.uint32))
    first, at = place * num_elements, 4 * block
    _store(x, out, first, at, w0, last, num_elements, scale)
    _store(x, out, first, at + 1, w1, last, num_elements, scale)
    _store(x, out, first, at + 2, w2, last, num_elements, scale)
    _store(x, out, first, at + 3, w3, last, num_elements, scale)


@triton.jit  # type: ignore[untyped-decorator]  # triton
def _store(
    x: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    word: tl.tensor,
    last: tl.tensor,
    num_elements: tl.tensor,
    scale: tl.tensor,
) -> None:
    inside = at < num_elements
    values = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.where(word.to(tl.int64) <= last, scale, 0.0)
    tl.store(out + first + at, (values * factors).to(out.dtype.element_ty), mask=inside)


def applied(x: Tensor, draw: Draw, num_blocks: int = BLOCKS) -> Tensor:
    """Return x with elements dropped and the others scaled; x: contiguous, float32 or lower.

    What the kernel needs to know are numbers among its arguments, so that the host waits for nothing.
    """
    rows = x.view(len(draw.samples), -1)
    out = torch.empty_like(rows)
    num_elements = rows.shape[1]
    for start, stop in _runs(draw.samples):
        grid = (stop - start, triton.cdiv(num_elements, 4 * num_blocks))
        part = rows[start:stop], out[start:stop], num_elements
        identity = draw.samples[start], draw.call, draw.key
        _apply[grid](*part, *identity, draw.last, draw.scale, num_blocks)
    return out.view(x.shape)


def _runs(samples: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of samples that follow each other by one; those of a microbatch mostly do."""
    start = 0
    for stop in range(1, len(samples) + 1):
        if stop == len(samples) or samples[stop] != samples[stop - 1] + 1:
            yield start, stop
            start = stop
