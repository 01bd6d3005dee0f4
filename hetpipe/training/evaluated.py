"""What the figures of held-out data said so far: the last, the best, and how long ago that was."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import ConfigDict, with_config

from hetpipe.runs.settings import LOSS


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True, slots=True)
class Evaluated:
    """What held-out losses and figures said up to a step, the same on all ranks.

    step, loss, figures: of the last. best_step, best_loss, best_figures: of the best, the first of equal
    ones: the least loss, or the largest figure where `by` names one. worse: since then, one after another.
    of: the hash of the held-out data, "" in a checkpoint that does not tell; figures of other data are not
    compared.
    """

    step: int
    loss: float | None
    best_step: int = 0
    best_loss: float | None = None
    worse: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    best_figures: dict[str, float] = field(default_factory=dict)
    by: str = LOSS
    of: str = ""

    @property
    def is_best(self) -> bool:
        """Whether the last is the least of all."""
        return self.step == self.best_step

    @property
    def score(self) -> float | None:
        """Return what is best when least, of the last: the loss, or a figure with its sign turned."""
        if self.loss is None:
            return None
        return self.loss if self.by == LOSS else -self.figures[self.by]

    @property
    def best_text(self) -> str:
        """Return what decided for the best, for people."""
        assert self.best_loss is not None, self
        return f"{self.best_loss if self.by == LOSS else self.best_figures[self.by]:.4f}"

    def compares(self, other: "Evaluated") -> bool:
        """Return whether the scores of both are of the same figure and data."""
        return self.by == other.by and self.of == other.of

    def compared_otherwise(self, now: str, by: str) -> str:
        """Return what to tell of a run that goes on with held-out data of this hash, the best by `by`.

        "" where both are as before.
        """
        if self.of == now and self.by != by:
            return f"the best is by {by}, before the checkpoint by {self.by}; what is best is found anew"
        if self.of == now:
            return ""
        if not self.of:
            return "the checkpoint does not tell of which data its best is; what is best is found anew"
        return (
            f"the held-out data are others (sha256 {now[:12]}) than before the checkpoint ({self.of[:12]}); "
            "what is best is found anew"
        )

    @classmethod
    def after(
        cls,
        before: "Evaluated | None",
        step: int,
        loss: float,
        figures: Mapping[str, float] | None = None,
        by: str = LOSS,
        *,
        of: str = "",
    ) -> "Evaluated":
        """Return what one loss more says, with its figures; one that is not finite is no best."""
        told, named = loss if math.isfinite(loss) else None, dict(figures or {})
        now = cls(step, told, figures=named, by=by, of=of)
        if before is not None and not before.compares(now):
            before = None  # what was best is not, by another figure or of other data
        if before is None:
            before = replace(now, worse=0)
        least = None
        if before.best_loss is not None:
            least = before.best_loss if by == LOSS else -before.best_figures[by]
        if now.score is not None and (least is None or now.score < least):
            return replace(now, best_step=step, best_loss=told, best_figures=named)
        return replace(before, step=step, loss=told, figures=named, worse=before.worse + 1, of=of)
