"""What losses and gradients say of the health of a run; the same on all ranks, which see the same numbers."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from hetpipe.runtime.step_outcome import StepOutcome

MOST_SKIPPED = 10
MOST_SKIPPED_SCALED = 40
"""Steps in a row that change nothing, before a run counts as diverged; with a loss scale, what takes it from
the first value to the smallest."""

WINDOW, LEAST = 50, 10
SPREADS, LEAST_RISE = 8.0, 0.1
NORMAL = 1.4826
"""A median absolute deviation times this is the standard deviation, if the deviations are normal."""


@dataclass(slots=True)
class LossWatch:
    """Counts steps that changed nothing, and spikes of the loss.

    A spike is a loss that is not finite, or, after `LEAST` steps, lies above the median of the last `WINDOW`
    by more than `SPREADS` standard deviations (estimated by the median absolute deviation) and by more than
    `LEAST_RISE` of the median.

    skipped_in_a_row: up to the last step. num_skipped, num_spikes: of all steps seen.
    """

    skipped_in_a_row: int = 0
    num_skipped: int = 0
    num_spikes: int = 0
    diverged: bool = False
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def see(self, outcome: StepOutcome) -> bool:
        """Take the outcome of a step; return whether its loss is a spike."""
        is_spike = self._is_spike(outcome.loss)
        self.num_spikes += is_spike
        if math.isfinite(outcome.loss):
            self._losses.append(outcome.loss)
        changed = outcome.finite and math.isfinite(outcome.loss)
        self.num_skipped += not outcome.finite
        self.skipped_in_a_row = 0 if changed else self.skipped_in_a_row + 1
        most = MOST_SKIPPED if outcome.loss_scale is None else MOST_SKIPPED_SCALED
        self.diverged = self.skipped_in_a_row >= most
        return is_spike

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(self._losses) < LEAST:
            return False
        middle = statistics.median(self._losses)
        spread = NORMAL * statistics.median(abs(found - middle) for found in self._losses)
        return loss - middle > max(SPREADS * spread, LEAST_RISE * abs(middle))
