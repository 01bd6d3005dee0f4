"""Runs of one plan, in turn with those of other plans: what they measured, and whether losses agree."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cost_model.dtypes import FLOAT32
from hetpipe.runs.run_report import DeviceReport, RunReport

LOSSES_AGREE = 2e-6
"""How far losses of equal steps may lie apart in float32: sums of other orders round otherwise."""


@dataclass(frozen=True, slots=True)
class MeasuredRounds:
    """The runs of a strategy's plan, one for each round.

    losses: of every step of a run, which is the same in each. like: the strategy with an equal plan that ran
    in its place, if there is one.
    """

    strategy: str
    reports: tuple[RunReport, ...]
    losses: tuple[tuple[float, ...], ...]
    like: str | None = None

    @property
    def step_seconds(self) -> list[float]:
        """Return the seconds of all timed steps, the first of each run left out."""
        return [seconds for report in self.reports for seconds in report.step_s_all[1:] or report.step_s_all]

    @property
    def step_s(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def predicted_step_s(self) -> float:
        return self.reports[0].predicted_step_s

    @property
    def error(self) -> float:
        """Return measured over predicted step, less 1."""
        return self.step_s / self.predicted_step_s - 1 if self.predicted_step_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Return the median over the runs, by the wall clock."""
        return statistics.median(report.samples_per_s for report in self.reports)

    @property
    def fullest(self) -> tuple[str, DeviceReport]:
        """Return the device that has least memory left, by its measured peak where that is known."""
        return max(self.reports[0].devices.items(), key=lambda entry: _full(entry[1]))

    @property
    def peak_bytes(self) -> dict[str, float]:
        """Return the measured peak of each device whose bytes are counted."""
        devices = self.reports[0].devices.items()
        return {name: device.peak_bytes for name, device in devices if device.peak_bytes is not None}

    def to_json(self) -> dict[str, Any]:
        """Return what --json says of a strategy that was run."""
        seconds, devices = self.step_seconds, self.reports[0].devices
        return {
            "measured_step_s": self.step_s,
            "measured_steps_s": seconds,
            "measured_samples_per_s": self.samples_per_s,
            "host_overloaded": any(report.host_overloaded for report in self.reports),
            "losses": list(self.losses[0]),
            "run_as": self.like,
            "devices": {
                name: {
                    "predicted_bytes": device.predicted_bytes,
                    "peak_bytes": device.peak_bytes,
                    "usable_bytes": device.usable_bytes,
                }
                for name, device in devices.items()
            },
        }


def losses_apart(rounds: Sequence[MeasuredRounds]) -> float | None:
    """Return how far the losses of one step lie apart at most, relative to them; None of a single run."""
    runs = [losses for each in rounds if each.like is None for losses in each.losses]
    if len(runs) < 2:
        return None
    apart = 0.0
    for step in zip(*runs, strict=True):
        largest = max(map(abs, step))
        apart = max(apart, (max(step) - min(step)) / largest if largest else 0.0)
    return apart


def must_agree(dtype: str, rounds: Sequence[MeasuredRounds]) -> bool:
    """Return whether losses agree by design: all is float32, the gradients that travel too."""
    return dtype == FLOAT32 and all(run.gradient_dtype == FLOAT32 for each in rounds for run in each.reports)


def _full(device: DeviceReport) -> float:
    used = device.predicted_bytes if device.peak_bytes is None else device.peak_bytes
    return used / device.usable_bytes if device.usable_bytes else 0.0
