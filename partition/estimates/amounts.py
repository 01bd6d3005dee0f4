"""Amounts of samples that one pipeline passes in a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Amount:
    """The samples of a pipeline, which passes `full` full microbatches; 0: a single one of least to most.

    least, most: samples of the last microbatch, on the way back. Where it may be smaller than the others,
    what is computed is a lower bound for every amount from full * size on that ends so.
    passes: microbatches that Little's law may count, as large as any. rest: the last microbatch, of least
    to most samples, comes on top of the full ones and is counted at its least. below: what is computed holds
    in proportion for the smaller amounts too, down to those of more than so many full microbatches. behind:
    samples of a smaller last microbatch that is not among these, but follows them.
    """

    full: int
    least: int
    most: int
    passes: float
    rest: bool = False
    below: int | None = None
    behind: int = 0

    @classmethod
    def exact(cls, num_samples: int, microbatch_size: int) -> "Amount":
        full, rest = divmod(num_samples, microbatch_size)
        if not rest:
            return cls.whole(full, microbatch_size)
        return cls(full, rest, rest, float(full), rest=full > 0)

    @classmethod
    def whole(cls, num_microbatches: int, microbatch_size: int) -> "Amount":
        return cls(num_microbatches, microbatch_size, microbatch_size, float(num_microbatches))

    @classmethod
    def before_last(cls, num_samples: int, microbatch_size: int) -> "Amount | None":
        """Return the full microbatches with a smaller one behind them; None where none or all are full."""
        full, rest = divmod(num_samples, microbatch_size)
        if not full or not rest:
            return None
        return cls(full, microbatch_size, microbatch_size, float(full), behind=rest)

    @property
    def counted(self) -> bool:
        """Whether it has just so many full microbatches, as one by one they pass a stage."""
        alone = self.below is None or self.below == self.full - 1
        return alone and self.full >= 1 and self.passes == self.full

    def num_microbatches(self, microbatch_size: int) -> tuple[int, int]:
        """Return the fewest and most microbatches of the pipelines for which memory is asked."""
        most = self.full + 1 if not self.full or self.least < microbatch_size else self.full
        return (most if self.below is None else self.below + 1), most
