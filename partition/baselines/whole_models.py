"""Pipelines of one stage each, which hold the whole model: what all strategies of data parallelism share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from partition.baselines.strategy import missing_bytes, shortfall
from partition.estimates.device_classes import equal_devices
from partition.estimates.optimizer_sharding import SHARES, unsharded, with_state_owners
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache
from partition.plan import Plan
from partition.problem import Problem

LEAST_S = 1e-300
"""In place of no time at all, where seconds divide."""


class WholeModels:
    """Pipelines that hold the whole model, and the first device of each class, the leaders."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._costs = problem, PipelineCosts(problem)
        self._timings = TimingCache(self._costs)
        self._members = {group[0].name: group for group in equal_devices(problem.cluster).members}
        self.leaders = tuple(group[0] for group in self._members.values())
        self.leader_of = {device.name: leader for leader, group in self._members.items() for device in group}

    def pipeline(self, device: Device, size: int) -> TimedPipeline:
        return self._timings.pipeline([TimedStage(device, 0, self._problem.profile.num_layers)], size)

    def timed(self, sizes: Mapping[str, int]) -> list[TimedPipeline]:
        """Return one for every device of the leaders named, as in the cluster, of the size given."""
        size_of = {device.name: size for name, size in sizes.items() for device in self._members[name]}
        devices = self._problem.cluster.devices
        return [self.pipeline(device, size_of[device.name]) for device in devices if device.name in size_of]

    def by_speed(self, sizes: Mapping[str, int]) -> tuple[list[TimedPipeline], list[float]]:
        """Return as `timed`, and the samples a second of each."""
        timed = self.timed(sizes)
        return timed, [each.microbatch_size / max(each.timing.busy_s[0], LEAST_S) for each in timed]

    def fitting(self, device: Device, sizes: Iterable[int]) -> set[int]:
        """Return the microbatch sizes with which the model fits on the device."""
        return {size for size in sizes if self.pipeline(device, size).timing.fits}

    def shortfall(self, strategy: str, devices: Sequence[Device], size: int) -> InfeasibleError:
        """Return the error of the device that lacks most bytes."""
        layouts = [((device, 0, self._problem.profile.num_layers),) for device in devices]
        errors = (self._costs.shortfall(layout, size) for layout in layouts)
        error = max((error for error in errors if error is not None), key=missing_bytes)
        return InfeasibleError(
            f"{strategy}: {error}; let `auto` cut the model",
            device=error.device,
            missing_bytes=error.missing_bytes,
        )

    def plan(self, strategy: str, timed: Sequence[TimedPipeline], shares: Sequence[int]) -> Plan:
        pairs = zip(timed, shares, strict=True)
        pipelines = tuple(pipeline.pipeline(share) for pipeline, share in pairs if share)
        return self._problem.plan(strategy, pipelines)

    def rate(self, device: Device, size: int) -> float:
        """Return samples a second of microbatches of a size."""
        return size / max(self.pipeline(device, size).timing.busy_s[0], LEAST_S)

    def largest(self, device: Device) -> int:
        """Return the largest microbatch that fits, up to the largest size allowed; 0 where none does."""
        most = min(max(self._problem.sizes_of(device.kind)), self._problem.global_batch_size)
        return largest_fitting(lambda size: bool(self.fitting(device, [size])), most)


def largest_fitting(fits: Callable[[int], bool], most: int, guess: int = 1) -> int:
    """Return the largest of 1 to most that fits, 0 where none does: steps that double, then bisection.

    What fits in a microbatch fits in a smaller one. guess: where the steps begin, either way.

    >>> largest_fitting(lambda size: size <= 11, 64), largest_fitting(lambda size: size <= 11, 64, guess=40)
    (11, 11)
    >>> largest_fitting(lambda size: False, 64)
    0
    """
    low, high, step = 0, most + 1, 1
    guess = min(max(1, guess), most)
    if most and fits(guess):
        low = guess
        while low + step <= most and fits(low + step):
            low, step = low + step, 2 * step
        high = min(low + step, most + 1)
    elif most:
        high = guess
        while high > step and not fits(high - step):
            high, step = high - step, 2 * step
        low = max(0, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sharded(problem: Problem, plan_of: Callable[[Problem], Plan]) -> Plan:
    """Return the plan of a strategy with sharded optimizer states (ZeRO stage 1), owners by free memory.

    plan_of: the strategy, asked for problems whose states take less and less: of the plans that fit with all
    states it is the one for which these were smallest, which has the largest microbatches.

    Raises: InfeasibleError of what lacks least.
    """
    errors: list[InfeasibleError] = []
    for share in sorted(SHARES):
        try:
            plan = plan_of(unsharded(problem, share))
        except InfeasibleError as error:
            errors.append(error.with_traceback(None))  # which has this frame, that has all errors
            continue
        owned = with_state_owners(plan, problem.profile, problem.cluster)
        lacking = shortfall(problem, owned)
        if lacking is None:
            return owned
        errors.append(lacking)
    raise copy(min(errors, key=missing_bytes))  # as in `least_of`
