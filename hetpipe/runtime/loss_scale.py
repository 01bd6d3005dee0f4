"""The factor by which losses are multiplied, so that gradients in float16 are neither lost nor too large."""

import math
from dataclasses import dataclass, replace

from pydantic import ConfigDict, with_config

from cost_model.errors import InputError

GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
SMALLEST = 2.0**-24


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True, slots=True)
class LossScale:
    """A loss scale, one for all ranks, and how many steps since it last changed were finite.

    Dynamic as Micikevicius et al. (ICLR 2018) describe it, with the defaults of torch.amp.GradScaler; but it
    never falls below SMALLEST, where GradScaler's goes to zero. A power of two: scaling rounds nothing.
    """

    value: float = 2.0**16
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.value < math.inf):
            raise InputError(f"the loss scale is {self.value:g}; give a finite number above zero")
        if self.good_steps < 0:
            raise InputError(f"good_steps of the loss scale is {self.good_steps}; give zero or more")

    def after_step(self, *, finite: bool) -> "LossScale":
        """Return the scale of the next step; finite: whether all gradients of this one were.

        >>> LossScale(8.0, 5).after_step(finite=False), LossScale(8.0, 1999).after_step(finite=True)
        (LossScale(value=4.0, good_steps=0), LossScale(value=16.0, good_steps=0))
        """
        if not finite:
            return LossScale(max(SMALLEST, self.value * BACKOFF))
        if self.good_steps + 1 < GROWTH_INTERVAL:
            return replace(self, good_steps=self.good_steps + 1)
        grown = self.value * GROWTH
        return LossScale(grown if grown < 2.0**127 else self.value)  # as GradScaler: within float32
