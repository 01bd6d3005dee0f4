"""Buffers whose numbers are rounded to fewer bits in their own memory, and widened again: none is added."""

from collections.abc import Iterator

import torch
from torch import Tensor

_FIRST = 1024
"""Numbers at the front of a buffer that go through a copy: their places before and after overlap."""


def front(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the front of a buffer's memory as room for its numbers in another dtype: [numbers].

    buffer: [numbers], contiguous. dtype: of at most half the bytes.
    """
    return buffer.view(dtype)[: buffer.numel()]


@torch.no_grad()
def round_in_place(buffer: Tensor, dtype: torch.dtype) -> None:
    """Round all numbers to nearest, ties to even, into the front of the buffer's memory."""
    room = front(buffer, dtype)
    for first, part in _parts(buffer):
        room[part].copy_(buffer[part].to(dtype) if first else buffer[part])


@torch.no_grad()
def widen_in_place(buffer: Tensor, dtype: torch.dtype) -> None:
    """Give all numbers back their places: the inverse of `round_in_place`, but for the rounding."""
    room = front(buffer, dtype)
    for first, part in reversed(list(_parts(buffer))):
        buffer[part].copy_(room[part].clone() if first else room[part])


def _parts(buffer: Tensor) -> Iterator[tuple[bool, slice]]:
    """Yield whether a part is the first, and the part: each but the first is as long as all before it.

    Numbers [a, 2 a) of 4 bytes, or more, are at bytes from 4 a on, and have at most bytes [2 a, 4 a) as
    numbers of 2: no part overlaps its own places, nor any that is still to be read.
    """
    start, stop = 0, min(_FIRST, buffer.numel())
    while start < buffer.numel():
        yield start == 0, slice(start, stop)
        start, stop = stop, min(2 * stop, buffer.numel())
