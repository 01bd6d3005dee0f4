"""Which sets of pipelines respect what is forced."""

from collections.abc import Sequence

from partition.column_generation.master_problem import NO_LIMITS, Limits
from partition.estimates.device_classes import DeviceClasses
from partition.estimates.timed_pipeline import TimedPipeline
from partition.problem import Forced, Problem


class WishedSets:
    """The sets of pipelines, no device in two of them, that respect what a problem's user has decided."""

    def __init__(self, problem: Problem) -> None:
        self.forced = problem.forced
        self._pins = {pin.device: (pin.start, pin.stop) for pin in problem.forced.pins}

    def limits(self, classes: DeviceClasses) -> Limits:
        """Return what is forced as limits of the programme over pipelines on these classes."""
        if self.forced == Forced():
            return NO_LIMITS
        number = self.forced.num_pipelines
        needed = [index for index, group in enumerate(classes.members) if group[0].name in self._pins]
        return Limits(number, number or 0, self.forced.max_devices, tuple(needed))

    def hold(self, timed: Sequence[TimedPipeline]) -> bool:
        """Return whether a set is one of them, if every pipeline that must gets a sample."""
        number, most = self.forced.num_pipelines, self.forced.max_devices
        if number is not None and len(timed) != number:
            return False
        if most is not None and sum(len(pipeline.stages) for pipeline in timed) > most:
            return False
        return not self._pins or self._pins == {
            stage.device.name: (stage.start, stage.stop)
            for pipeline in timed
            for stage in pipeline.stages
            if stage.device.name in self._pins
        }

    def step_s(self, timed: Sequence[TimedPipeline], seconds: float) -> float:
        """Return the seconds of a set in which all that must run do; inf for a set that is none of them."""
        if self.forced == Forced():
            return seconds
        if not self.hold(timed):
            return float("inf")
        return max([seconds, *(pipeline.timing.time_s(1) for pipeline in timed if self._must_run(pipeline))])

    def samples(self, timed: Sequence[TimedPipeline], samples: Sequence[int]) -> list[int]:
        """Return samples of which each pipeline that must run has one at least."""
        given = [
            max(count, int(self._must_run(pipeline))) for pipeline, count in zip(timed, samples, strict=True)
        ]
        for _ in range(sum(given) - sum(samples)):
            given[given.index(max(given))] -= 1
        return given

    def _must_run(self, pipeline: TimedPipeline) -> bool:
        return self.forced.num_pipelines is not None or any(
            device.name in self._pins for device in pipeline.devices
        )
