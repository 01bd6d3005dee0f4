"""What follows when a device has become slow: layers and shares move, when that gains more than it costs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cost_model.errors import InfeasibleError, InputError
from cost_model.units import format_seconds
from hetpipe.reporting.pages import write_page
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import RunReport, read_report, report_text
from hetpipe.simulation.prediction import Prediction
from hetpipe.training.recovery import Replan
from partition.plan import Plan

WRITTEN_BYTES_PER_S = 100e6
"""What a disk is taken to write and read at, where a checkpoint moves layers."""

Adapt = Callable[[frozenset[str], Mapping[str, float], Mapping[str, float], Plan | None], Prediction]
"""(lost devices, how many times slower each slow one is, the bytes of those that were too full, a plan) ->
what that plan does then; without one, what a new plan does. Raises InfeasibleError or InputError for none."""


@dataclass(slots=True)
class Adaptation:
    """Decides on the slow devices of a run; adapt: None where they are named alone.

    checkpoint_bytes: what moves. tell: takes the sentence of each decision. slowed: how many times slower the
    plan at hand has each slow device. pending: what to go on with, after the checkpoint of the step at hand;
    taken by `take`.
    """

    steps: int
    checkpoint_bytes: float
    adapt: Adapt | None
    tell: Callable[[str], object]
    slowed: dict[str, float] = field(default_factory=dict)
    pending: Prediction | None = None
    _heard: list[str] = field(default_factory=list)  # in all attempts
    _slow: dict[str, float] = field(default_factory=dict)  # in this one: so many times slower than planned
    _undecided: dict[str, float] = field(default_factory=dict)  # slow since this step; what the others take
    _begun_s: float = 0.0
    _start_s: float | None = None  # what the attempt at hand took until its first step was over

    def begin(self) -> None:
        """Note that an attempt begins."""
        self._begun_s, self._start_s, self.pending = time.monotonic(), None, None
        self._slow, self._undecided = {}, {}

    def replanned(self, replan: Replan) -> Replan:
        """Return what plans as before, with the devices as slow as the plan at hand has them.

        What a rank says then of a slow one is once more relative to that.
        """

        def planned(lost: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
            if self.adapt is None or not self.slowed:
                return replan(lost, room_bytes)
            return self.adapt(lost, self.slowed, room_bytes, None)

        return planned

    def saw(
        self,
        event: Mapping[str, Any],
        current: Plan,
        lost: frozenset[str],
        room_bytes: Mapping[str, float],
    ) -> bool:
        """Take what a rank emits; return whether the attempt is to end, for a new plan.

        All that became slow with a step is decided on together, with what is slow already.
        lost, room_bytes: as for `Recovery`.
        """
        if event["event"] == "step" and self._start_s is None:
            self._start_s = time.monotonic() - self._begun_s
        if event["event"] != "slow":
            return False
        self._heard.append(str(event["text"]))
        self.tell(self._heard[-1])
        device = str(event["device"])
        if event["ended"]:
            self._slow.pop(device, None)
        else:
            self._slow[device] = float(event["ratio"])
            self._undecided[device] = float(event["others"])
        if self.adapt is None or event["more"] or not self._undecided:
            return False
        names, errs = ", ".join(self._undecided), min(self._undecided.values())
        self._undecided = {}
        slowed = self._all_slowed()
        try:
            as_is = self.adapt(lost, slowed, room_bytes, current)
            new = self.adapt(lost, slowed, room_bytes, None)
        except (InfeasibleError, InputError) as error:
            self.tell(f"no other plan for {names} slowed: {error}")
            return False
        if not self._is_worth_it(
            as_is.step_s * errs, new.step_s * errs, int(event["step"]), _moves(new.plan)
        ):
            return False
        self.pending = new
        return True

    def completed(self, folder: RunFolder) -> RunReport:
        """Return the report of a run, with what was slow in attempts before the last one; write that too."""
        report = read_report(folder.report)
        if set(self._heard) <= set(report.slow_devices):
            return report
        report = replace(report, slow_devices=tuple(self._heard))
        folder.write(folder.report, report_text(report))
        write_page(folder)
        return report

    @property
    def cost_s(self) -> float:
        """Seconds to move: a start as long as that of this attempt, a checkpoint written and read."""
        return (self._start_s or 0.0) + 2 * self.checkpoint_bytes / WRITTEN_BYTES_PER_S

    def take(self) -> Prediction | None:
        """Return what to go on with, None if nothing is pending; once."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.slowed = self._all_slowed()
        return pending

    def _all_slowed(self) -> dict[str, float]:
        """Return how many times slower devices are: as the plan at hand has them, and by what came after."""
        return self.slowed | {name: self.slowed.get(name, 1.0) * ratio for name, ratio in self._slow.items()}

    def _is_worth_it(self, now_s: float, new_s: float, step: int, moves: str) -> bool:
        gain_s = (now_s - new_s) * (self.steps - step)
        steps = (
            f"{format_seconds(now_s)} a step with it, {format_seconds(new_s)} planned again: "
            f"{format_seconds(max(0.0, gain_s))} over the {self.steps - step} steps left"
        )
        cost = f"moving costs {format_seconds(self.cost_s)}"
        if gain_s <= self.cost_s:
            self.tell(f"the plan stays: {steps}; {cost}")
            return False
        self.tell(f"planned again: {steps}; {cost}; {moves}")
        return True


def _moves(plan: Plan) -> str:
    held = {name: plan.layers_of(name) for name in plan.device_names}
    return ", ".join(f"{name} runs layers {layers[0]} to {layers[-1]}" for name, layers in held.items())
