"""Samples of like length in the same step, which is filled up to the longest of them alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from hetpipe.data.keyed_order import GROUP_STREAM, draws, permuted
from hetpipe.data.kind import IntArray, Samples, StepData

STEPS_SORTED = 64
"""Of so many steps the samples are sorted together; the more, the less is filling, and the less at random."""

LENGTH_MULTIPLE = 8
"""Of the tokens of a step: what GPUs multiply fast, and few lengths for which kernels are chosen."""

MOST_COUNTED = 2**18
"""Samples of an epoch up to which the note counts all of them."""


class FilledSamples(Samples, Protocol):
    """Samples of unlike lengths, which are filled up."""

    @property
    def sequence_length(self) -> int:
        """Return the length that none exceeds."""

    @property
    def seed(self) -> int:
        """Return the seed of the order."""

    @property
    def lengths(self) -> IntArray:
        """Return the length of each sample of an epoch."""

    def rows(self, samples: IntArray, first_sample: int, length: int) -> StepData:
        """Return samples by their number, filled up to a length that none of them exceeds.

        first_sample: the position of the first of them in the training order.
        """


@dataclass(frozen=True, eq=False)
class LengthGroups:
    """The endless training order of samples of which those of a step are of like length.

    An epoch has each sample once, in the keyed order of a seed; of `STEPS_SORTED` steps in it the samples are
    sorted by length, cut into steps, and these put into an order of their own (as `group_by_length` of
    transformers sorts "mega-batches", which leaves the steps sorted). As in `Dataset`, the position is the
    state to save; the order depends on the samples of a step, too. A step in which an epoch ends has the
    samples of both as they come.

    samples_per_step: the samples of a step on all devices.
    """

    samples: FilledSamples
    samples_per_step: int
    _sorted: Callable[[int, int], IntArray] = field(init=False)
    _lengths: IntArray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lengths", self.samples.lengths)  # computed anew of all whenever asked for
        object.__setattr__(self, "_sorted", lru_cache(maxsize=4)(self._sorted_part))

    @property
    def num_samples(self) -> int:
        """Return the samples of one epoch."""
        return self.samples.num_samples

    @property
    def num_terms(self) -> int:
        """Return how many terms the loss of an epoch sums."""
        return self.samples.num_terms

    @property
    def count_terms(self) -> Callable[[Any], int] | None:
        """Return what counts the terms in the labels of a step, as the samples do."""
        return self.samples.count_terms

    def num_loss_tokens(self, num_samples: int) -> int:
        """Return how many terms the loss of so many samples has, where it is the same for all."""
        return self.samples.num_loss_tokens(num_samples)

    def order(self, first_sample: int, num_samples: int) -> IntArray:
        """Return which samples are at positions [first_sample, first_sample + num_samples)."""
        position, end, parts = first_sample, first_sample + num_samples, [np.empty(0, np.int64)]
        while position < end:
            start, stop = self._part_at(position)
            parts.append(self._sorted(start, stop)[position - start : end - start])
            position = stop
        return np.concatenate(parts)

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the samples at positions [first_sample, first_sample + num_samples), as `Dataset.batch`.

        They are as long as the longest of the steps that they are in, whoever asks for which of these.
        """
        length = self.length_at(first_sample, num_samples)
        return self.samples.rows(self.order(first_sample, num_samples), first_sample, length)

    def length_at(self, first_sample: int, num_samples: int) -> int:
        """Return the tokens of each sample in the steps of these positions."""
        first = first_sample // self.samples_per_step * self.samples_per_step
        last = -(-(first_sample + num_samples) // self.samples_per_step) * self.samples_per_step
        longest = int(self._lengths[self.order(first, last - first)].max())
        rounded = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        return min(self.samples.sequence_length, rounded)

    def notes(self) -> list[str]:
        """Return what there is to tell of the samples, and how much of the steps is filling."""
        count = min(self.num_samples, MOST_COUNTED)
        steps = [
            (first, min(self.samples_per_step, count - first))
            for first in range(0, count, self.samples_per_step)
        ]
        tokens = sum(number * self.length_at(first, number) for first, number in steps)
        real = int(self._lengths[self.order(0, count)].sum())
        return [
            *self.samples.notes(),
            f"grouped by length, {self.samples_per_step} a step: {1 - real / tokens:.0%} is filling",
        ]

    def _part_at(self, position: int) -> tuple[int, int]:
        """Return what positions are sorted together: [start, stop) of an epoch and `STEPS_SORTED` steps."""
        many = STEPS_SORTED * self.samples_per_step
        epoch, part = position // self.num_samples, position // many
        start = max(epoch * self.num_samples, part * many)
        return start, min((epoch + 1) * self.num_samples, (part + 1) * many)

    def _sorted_part(self, start: int, stop: int) -> IntArray:
        samples = permuted(self.samples.seed, self.num_samples, start, stop - start)
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        head = min(-start % self.samples_per_step, len(samples))
        num_steps = (len(samples) - head) // self.samples_per_step
        whole = samples[head : head + num_steps * self.samples_per_step].reshape(
            num_steps, self.samples_per_step
        )
        keys = draws(num_steps, self.samples.seed, GROUP_STREAM, start)
        tail = samples[head + whole.size :]
        return np.concatenate((samples[:head], whole[np.argsort(keys, kind="stable")].ravel(), tail))
