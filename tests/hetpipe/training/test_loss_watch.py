"""Spikes and divergence are found, and noise is neither."""

import math
import random

import pytest

from hetpipe.runtime.step_outcome import StepOutcome
from hetpipe.training.loss_watch import MOST_SKIPPED, MOST_SKIPPED_SCALED, LossWatch


def outcome(loss: float, *, finite: bool = True, scale: float | None = None) -> StepOutcome:
    return StepOutcome(loss, 1.0, finite, scale, 0.0, 1.0, 1.0, 0.0, ())


def test_a_jump_is_a_spike_and_what_training_does_by_itself_is_none():
    """Losses that fall from 10 to 3 with noise of 1 to 5 %, over 10,000 steps in all."""
    generator = random.Random(0)
    for noise in (0.01, 0.02, 0.05):
        watch = LossWatch()
        for step in range(3_333):
            watch.see(outcome((3 + 7 * math.exp(-step / 200)) * generator.gauss(1, noise)))
        assert watch.num_spikes == 0
        assert watch.see(outcome(5.0)) and watch.num_spikes == 1
        assert not watch.see(outcome(1.0))  # a fall is none
        assert not watch.diverged


def test_the_first_losses_and_equal_ones_are_no_spikes():
    watch = LossWatch()
    assert not any(watch.see(outcome(loss)) for loss in (1.0, 100.0, 1.0))
    watch = LossWatch()
    assert not any(watch.see(outcome(0.0)) for _ in range(60)) and watch.see(outcome(1e-9))


@pytest.mark.parametrize(("scale", "most"), [(None, MOST_SKIPPED), (2.0**16, MOST_SKIPPED_SCALED)])
@pytest.mark.parametrize("loss", [3.0, math.nan, math.inf])
def test_many_steps_in_a_row_that_change_nothing_are_a_divergence(scale, most, loss):
    watch = LossWatch()
    bad, good = outcome(loss, finite=False, scale=scale), outcome(3.0, scale=scale)
    for _ in range(5):
        for _ in range(most - 1):
            watch.see(bad)
        assert not watch.diverged and watch.skipped_in_a_row == most - 1
        watch.see(good)
        assert watch.skipped_in_a_row == 0
    for _ in range(most):
        watch.see(bad)
    assert watch.diverged and watch.num_skipped == 5 * (most - 1) + most
