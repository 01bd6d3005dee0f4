"""The pace of a device: when its operations start and end, on this host's CPU or emulated."""

import os
import re
import time
from dataclasses import dataclass, field

from cost_model.errors import InputError
from hetpipe.runtime.processes import SLOWDOWN_VARIABLE

CARRY_S = 0.05
"""Lateness up to this much is carried: the next operation starts when this one should have ended."""


@dataclass(frozen=True, slots=True)
class HostTimes:
    """The host's clock, in seconds, at moments of a device's own clock: begins of operations, and ends."""

    begins: dict[float, float] = field(default_factory=dict)
    ends: dict[float, float] = field(default_factory=dict)

    def of_begin(self, device_s: float) -> float:
        """Return when something began by the host's clock; as by the device's, where that was not noted."""
        return self.begins.get(device_s, self.of_end(device_s))

    def of_end(self, device_s: float) -> float:
        """Return when something ended by the host's clock."""
        return self.ends.get(device_s, device_s)


class Pace:
    """The times at which a device's operations start and end: on a CPU, the real ones; owns its clock."""

    def __init__(self) -> None:
        self.step = 0  # index of the step at hand
        self.now_s = 0.0
        self.busy_s = 0.0
        self.over_budget_s = 0.0

    def start_step(self, start_s: float) -> None:
        """Wait for the common start of a step; seconds on the host's monotonic clock."""
        sleep_until(start_s)
        self.now_s, self.busy_s, self.over_budget_s = start_s, 0.0, 0.0

    def begin(self, ready_s: float) -> float:
        """Start an operation whose inputs are due at ready_s; return its start."""
        sleep_until(ready_s)
        self.now_s = time.monotonic()
        return self.now_s

    def end(self, start_s: float, nominal_s: float) -> float:
        """End the operation that began at start_s and should take nominal_s; return its end."""
        del nominal_s
        self.now_s = time.monotonic()
        self.busy_s += self.now_s - start_s
        return self.now_s

    def part(self, start_s: float, nominal_s: float) -> float:
        """Return when what is done so far of an operation is over on the device's clock.

        nominal_s: what that should take of the operation that began at start_s.
        """
        del start_s, nominal_s
        return time.monotonic()

    def leave_out(self, cpu_s: float) -> None:
        """Take so many CPU seconds of this thread for none of the operation at hand."""

    def wait(self, due_s: float) -> float:
        """Wait for something that is due; return the time."""
        sleep_until(due_s)
        self.now_s = time.monotonic()
        return self.now_s

    def finish(self) -> None:
        """Wait, at the end of a step, until the device has done all of it."""

    def settle(self) -> dict[float, float]:
        """Return, after `finish`, the right times in place of those not known when they were given."""
        return {}

    @property
    def host_times(self) -> HostTimes | None:
        """Return the host's clock at the times given in the step; None where those are the host's own."""
        return None


class EmulatedPace(Pace):
    """A pace whose operations really compute, and end nominal_s after their start on the device's clock.

    That clock lags the host's by what operations were late, at most CARRY_S, so that a late wake-up does not
    add up. cpu_speed: charge the CPU seconds of the thread over this speed, instead of nominal_s.
    slowdown: (times, step): from that step on, by its number, each operation takes so many times as long.
    """

    def __init__(self, cpu_speed: float | None = None, slowdown: tuple[float, int] = (1.0, 0)) -> None:
        super().__init__()
        self._slowdown = slowdown
        self._cpu_speed = cpu_speed
        self._cpu_s = 0.0
        self._wall_s = 0.0
        self._host_times = HostTimes()

    def start_step(self, start_s: float) -> None:
        super().start_step(start_s)
        self._host_times = HostTimes()

    def begin(self, ready_s: float) -> float:
        start = self._reach(max(self.now_s, ready_s))
        self._cpu_s, self._wall_s = time.thread_time(), time.monotonic()
        self._host_times.begins[start] = self._wall_s
        return start

    def end(self, start_s: float, nominal_s: float) -> float:
        wall_s = time.monotonic() - self._wall_s
        if self._cpu_speed is not None:
            nominal_s = (time.thread_time() - self._cpu_s) / self._cpu_speed
        nominal_s *= self._slower
        self.over_budget_s += max(0.0, wall_s - nominal_s)
        end = self._reach(start_s + nominal_s)
        self.busy_s += end - start_s
        self._host_times.ends[end] = time.monotonic()
        return end

    def part(self, start_s: float, nominal_s: float) -> float:
        if self._cpu_speed is not None:
            nominal_s = (time.thread_time() - self._cpu_s) / self._cpu_speed
        now_s, target_s = time.monotonic(), start_s + nominal_s * self._slower
        return target_s if now_s - target_s <= CARRY_S else now_s

    def leave_out(self, cpu_s: float) -> None:
        self._cpu_s += cpu_s

    def wait(self, due_s: float) -> float:
        target_s = max(self.now_s, due_s)
        # a real sum may take this host longer than the emulated links
        self.over_budget_s += max(0.0, time.monotonic() - target_s - CARRY_S)
        reached = self._reach(target_s)
        self._host_times.ends[reached] = time.monotonic()
        return reached

    @property
    def host_times(self) -> HostTimes:
        return self._host_times

    @property
    def _slower(self) -> float:
        times, since = self._slowdown
        return times if self.step + 1 >= since else 1.0

    def _reach(self, target_s: float) -> float:
        late_s = time.monotonic() - target_s
        if late_s < 0:
            sleep_until(target_s)
        self.now_s = target_s if late_s <= CARRY_S else target_s + late_s
        return self.now_s


def slowdown_of(device: str) -> tuple[float, int]:
    """Return how much slower an emulated device becomes in a run, and from which step on.

    `SLOWDOWN_VARIABLE` says so, for trials: "big/1=2@40" makes big/1 take twice its time from step 40 on.

    Raises: InputError if it says something else.
    """
    for text in filter(None, os.environ.get(SLOWDOWN_VARIABLE, "").split(",")):
        match = re.fullmatch(r"(.+)=([0-9]{1,6}(?:\.[0-9]{1,6})?)@([0-9]{1,12})", text.strip())
        if match is None or not float(match[2]) > 0:
            raise InputError(
                f"{SLOWDOWN_VARIABLE} holds {text!r}; write DEVICE=TIMES@STEP, such as big/1=2@40"
            )
        if match[1] == device:
            return float(match[2]), int(match[3])
    return 1.0, 0


def sleep_until(when_s: float) -> None:
    """Sleep to a time of the monotonic clock; at once if it is past."""
    while (left_s := when_s - time.monotonic()) > 0:
        time.sleep(left_s)
