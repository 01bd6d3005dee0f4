"""The memory of a device made of Python, given out as torch's allocator gives out a GPU's."""

from bisect import bisect_left, insort

import torch

BLOCK = 512
"""Bytes of which all blocks are multiples."""

ENDLESS = 2.0**40


class Memory:
    """Blocks that are in use, and such as are kept for later; owns the figures.

    A block that is let go of stays reserved, and is used again for what is at most as large. Where the driver
    has no more, all that is kept is given back to it, which waits for the device, and it is asked again.

    capacity_bytes: what the device has, with driver_bytes, which no tensor has. num_retries: how often the
    driver was asked again; num_refused: in vain.
    """

    def __init__(self, name: str) -> None:
        self.capacity_bytes, self.driver_bytes = ENDLESS, 0.0
        self.live_bytes = self.peak_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_retries = self.num_refused = 0
        self._name = name
        self._kept: list[int] = []

    def restart(self) -> None:
        """Begin new peaks at what is in use now."""
        self.peak_bytes, self.peak_reserved_bytes = self.live_bytes, self.reserved_bytes

    def take(self, num_bytes: int) -> int:
        """Return the bytes of a block for so many.

        Raises: torch.OutOfMemoryError if they do not fit beside what is in use.
        """
        size = -(-num_bytes // BLOCK) * BLOCK
        place = bisect_left(self._kept, size)
        if place < len(self._kept):
            rest = self._kept.pop(place) - size
            if rest:
                insort(self._kept, rest)
        else:
            if self.reserved_bytes + size > self.capacity_bytes - self.driver_bytes:
                self.num_retries += 1
                self.give_back()
            if self.reserved_bytes + size > self.capacity_bytes - self.driver_bytes:
                self.num_refused += 1
                raise torch.OutOfMemoryError(
                    f"{self._name}: {size} bytes do not fit beside {self.live_bytes} of {self.capacity_bytes}"
                )
            self.reserved_bytes += size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return size

    def let_go(self, size: int) -> None:
        self.live_bytes -= size
        insort(self._kept, size)

    def give_back(self) -> None:
        """Give all that is kept for later back to the driver."""
        self.reserved_bytes -= sum(self._kept)
        self._kept.clear()
