"""Amounts of samples of a pipeline that `card_columns` looks at together, and how they are split."""

from collections.abc import Iterator
from dataclasses import dataclass

from partition.exact.cluster_split import families
from partition.problem import Problem

GROWTH = 1.25  # of amounts of samples that are looked at together at first


@dataclass(frozen=True, slots=True)
class PipelineAmounts:
    """Samples of a pipeline, first to last, in microbatches of a size, the last one of least to most."""

    size: int
    least: int
    most: int
    first: int
    last: int

    def without_last(self) -> "PipelineAmounts | None":
        """Return the full microbatches in front of a smaller last one; None where there is none."""
        first, last = (count // self.size * self.size for count in (self.first, self.last))
        if self.most == self.size or not first:
            return None
        return PipelineAmounts(self.size, self.size, self.size, first, last)

    def parts(self) -> Iterator["PipelineAmounts"]:
        """Yield the lower and the upper half, without amounts that end in other microbatches."""
        middle = (self.first + self.last) // 2
        for first, last in ((self.first, middle), (middle + 1, self.last)):
            yield from self.within(first, last)

    def within(self, first: int, last: int) -> Iterator["PipelineAmounts"]:
        """Yield what of first to last samples ends in such a microbatch, if anything does."""
        ending = [self.least <= (count - 1) % self.size + 1 <= self.most for count in range(first, last + 1)]
        if any(ending):
            first, last = first + ending.index(True), last - ending[::-1].index(True)
            exact = (first - 1) % self.size + 1
            least, most = (exact, exact) if first == last else (self.least, self.most)
            yield PipelineAmounts(self.size, least, most, first, last)


def all_amounts(problem: Problem) -> Iterator[PipelineAmounts]:
    """Yield all amounts of samples of a pipeline, by microbatch size."""
    batch, sizes = problem.global_batch_size, problem.microbatch_sizes
    for size in (size for size in sizes if size <= batch):
        for _, least, most in families(size):
            first = size
            while first <= batch:
                last = min(batch, max(first, int(first * GROWTH)))
                yield from PipelineAmounts(size, least, most, first, last).within(first, last)
                first = last + 1
    for size in range(1, min(batch, max(sizes)) + 1):
        if size not in sizes:
            yield PipelineAmounts(size, size, size, size, size)
