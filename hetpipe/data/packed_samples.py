"""Samples packed into rows of one length: what fills rows up shrinks, and no sample sees another."""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_model.errors import InputError
from hetpipe.data.dataset import IGNORE_LABEL, num_learned
from hetpipe.data.keyed_order import permuted
from hetpipe.data.kind import CountedTerms, IntArray, StepData
from hetpipe.models.task_inputs import POSITIONS, TOKENS


def best_fit_decreasing(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """Return items row after row, and where each row ends among them; no row is longer than the capacity.

    The longest item comes first, each into the row with the least room that it fits (Johnson, "Near-optimal
    bin packing algorithms", MIT 1973; of training samples Ding et al., "Fewer Truncations Improve Language
    Modeling", ICML 2024). Equal lengths give equal rows.

    >>> [part.tolist() for part in best_fit_decreasing(np.array([2, 5, 3, 4]), 6)]
    [[1, 3, 0, 2], [1, 3, 4]]
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows, by the room that is left in them
    rooms: list[int] = []  # for which there are rows, rising
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        rows[row].append(item)
        if left := room - length:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(row)
    items = [item for row in rows for item in row]
    return np.array(items, np.int64), np.cumsum([len(row) for row in rows], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PackedSamples(CountedTerms):
    """The endless training order over rows, each of samples that together are at most sequence_length long.

    Rows are the same in each epoch, their order is not: as in `Dataset`, a position in it is the state to
    save. Positions begin anew with each sample, and with what fills a row up; the first token of a sample is
    never a label, so that no sample is asked for the next one.

    tokens: flat ids. starts, lengths: of each sample in them, 1 to sequence_length. learned: 1 where a token
    is a label, None for everywhere. terms: of the loss of each sample, above 0. filler: the id that fills up.
    what: the samples, in the plural. said: what there is to tell beside.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    starts: IntArray
    lengths: IntArray
    learned: npt.NDArray[np.uint8] | None
    terms: IntArray
    sequence_length: int
    seed: int
    filler: int
    what: str
    said: tuple[str, ...] = ()
    samples: IntArray = field(init=False)
    ends: IntArray = field(init=False)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InputError(f"seed {self.seed} is negative; choose 0 or more")
        samples, ends = best_fit_decreasing(self.lengths, self.sequence_length)
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "ends", ends)

    @property
    def num_samples(self) -> int:
        """Return the rows of one epoch."""
        return len(self.ends)

    @property
    def num_terms(self) -> int:
        """Return how many tokens enter the loss of an epoch."""
        return int(self.terms.sum())

    @property
    def count_terms(self) -> Callable[[Any], int]:
        """Return what counts them in the labels of a step."""
        return num_learned

    def row(self, row: int) -> IntArray:
        """Return the samples of a row."""
        return self.samples[0 if row == 0 else self.ends[row - 1] : self.ends[row]]

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the rows at positions [first_sample, first_sample + num_samples), as `Dataset.batch`."""
        inputs = np.full((num_samples, self.sequence_length), self.filler, np.int64)
        labels = np.full_like(inputs, IGNORE_LABEL)
        positions = np.zeros_like(inputs)
        terms = 0
        for place, row in enumerate(permuted(self.seed, self.num_samples, first_sample, num_samples)):
            at = 0
            for sample in self.row(int(row)):
                start, length = int(self.starts[sample]), int(self.lengths[sample])
                ids = self.tokens[start : start + length].astype(np.int64)
                inputs[place, at : at + length] = ids
                positions[place, at : at + length] = np.arange(length)
                is_label = True if self.learned is None else self.learned[start : start + length] > 0
                labels[place, at : at + length] = np.where(is_label, ids, IGNORE_LABEL)
                labels[place, at] = IGNORE_LABEL
                at += length
                terms += int(self.terms[sample])
            positions[place, at:] = np.arange(self.sequence_length - at)
        order = np.arange(first_sample, first_sample + num_samples)
        return StepData({TOKENS: inputs, POSITIONS: positions}, labels, order, terms)

    def filling(self) -> tuple[float, float]:
        """Return how much of all rows is filling, in [0, 1], and how much would be, a sample a row."""
        filled = float(self.lengths.sum()) / self.sequence_length
        return 1 - filled / len(self.ends), 1 - filled / len(self.lengths)

    def notes(self) -> list[str]:
        """Return how many samples are in how many rows, and how much of these is filling."""
        now, alone = self.filling()
        return [
            f"{len(self.lengths):,} {self.what} packed into {self.num_samples:,} rows of "
            f"{self.sequence_length} tokens, {len(self.lengths) / self.num_samples:.1f} a row; {now:.1%} is "
            f"filling, {alone:.0%} if each had a row; {self.num_terms:,} tokens are learned",
            *self.said,
        ]
