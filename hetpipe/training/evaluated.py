"""What the losses of held-out texts said so far: the last, the least, and how long ago that was."""

import math
from dataclasses import dataclass, replace

from pydantic import ConfigDict, with_config


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True, slots=True)
class Evaluated:
    """What held-out losses said up to a step, the same on all ranks.

    step, loss: of the last one. best_step, best_loss: of the least, the first of equal ones. worse: losses
    since then, one after another.
    """

    step: int
    loss: float | None
    best_step: int = 0
    best_loss: float | None = None
    worse: int = 0

    @property
    def is_best(self) -> bool:
        """Whether the last is the least of all."""
        return self.step == self.best_step

    @classmethod
    def after(cls, before: "Evaluated | None", step: int, loss: float) -> "Evaluated":
        """Return what one loss more says; one that is not finite is no least."""
        told = loss if math.isfinite(loss) else None
        least = None if before is None else before.best_loss
        if told is not None and (least is None or told < least):
            return cls(step, told, step, told)
        if before is None:
            return cls(step, told, worse=1)
        return replace(before, step=step, loss=told, worse=before.worse + 1)
