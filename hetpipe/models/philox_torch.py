"""The draws of Philox 4x32-10, by whole numbers, which torch has on every device: slow, and the reference."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10
MASK = 0xFFFFFFFF
WORDS = 2**32


class Draw(NamedTuple):
    """The draw of one dropout: what its masks depend on, and how they are applied.

    key and samples, the identity of each: [0, 2 ** 63). call: which draw of this key, [0, 2 ** 32). An
    element is kept where its word is at most `last`, and is multiplied by `scale` then; all others by 0.
    """

    key: int
    call: int
    samples: tuple[int, ...]
    last: int
    scale: float


def draw(key: int, call: int, samples: Sequence[int], keep_probability: float) -> Draw:
    """Return a draw that keeps elements with this probability, more than 0; good to 2 ** -32."""
    last = max(1, round(keep_probability * WORDS)) - 1
    return Draw(key, call, tuple(samples), last, 1.0 / keep_probability)


def words(drawn: Draw, num_elements: int, device: torch.device) -> Tensor:
    """Return the word of each element of each sample: [samples, num_elements], int64 in [0, 2 ** 32)."""
    blocks = torch.arange(-(-num_elements // 4), device=device)
    halves = torch.tensor([(sample & MASK, sample >> 32) for sample in drawn.samples])
    low, high = halves.to(device, non_blocking=True).unbind(1)  # the host waits for nothing
    counter = [blocks[None, :], low[:, None], high[:, None], torch.full_like(low, drawn.call)[:, None]]
    found = torch.stack(rounds(counter, (drawn.key & MASK, drawn.key >> 32)), dim=-1)
    return found.view(len(drawn.samples), -1)[:, :num_elements]


def rounds(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Return the four words of each counter, all of them of int64 in [0, 2 ** 32)."""
    x0, x1, x2, x3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]  # torch
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # int64 wraps around: the low 64 bits of a product are right, its high word as an unsigned one
        p0, p1 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1 = (p1 >> 32 & MASK) ^ x1 ^ k0, p1 & MASK
        x2, x3 = (p0 >> 32 & MASK) ^ x3 ^ k1, p0 & MASK
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return [x0, x1, x2, x3]
