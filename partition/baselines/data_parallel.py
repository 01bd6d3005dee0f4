"""Strategies that hold the whole model on every device and share out the samples."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from partition.estimates.batch_split import share_out
from partition.estimates.device_classes import equal_devices
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache
from partition.plan import Plan
from partition.problem import Evaluate, Problem


def ddp(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Return the whole model on every device, equally many samples each (Horovod, 2018; HetSeq, 2020).

    All have the same microbatch size, the one with which the slowest device ends first; evaluate is not
    asked. Where the batch does not divide, the first devices get a sample more.

    Raises: InfeasibleError if the model does not fit on one of them, or there are fewer samples than devices.
    """
    devices, batch = problem.cluster.devices, problem.global_batch_size
    if batch < len(devices):
        raise InfeasibleError(
            f"ddp: {batch} samples for {len(devices)} devices, each needs one; raise global_batch_size or "
            f"exclude {len(devices) - batch} devices"
        )
    shares = [batch // len(devices) + (place < batch % len(devices)) for place in range(len(devices))]
    crew = _Crew(problem)
    sizes = {min(size, shares[0]) for size in problem.microbatch_sizes}
    fitting = set.intersection(*(crew.fitting(device, sizes) for device in crew.leaders))
    if not fitting:
        raise min((crew.shortfall("ddp", crew.leaders, size) for size in sizes), key=_missing_bytes)

    def step_s(size: int) -> float:
        timings = [crew.pipeline(device, size).timing for device in devices]
        return max(timing.time_s(share) for timing, share in set(zip(timings, shares, strict=True)))

    size = min(sorted(fitting), key=step_s)
    return crew.plan("ddp", [crew.pipeline(device, size) for device in devices], shares)


def poplar(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Return the whole model on every device that it fits on, samples shared out so that all end together.

    Shares and microbatch sizes come from the measured times of each class of devices (Poplar, Zhang et al.,
    AAAI 2025); evaluate is not asked. Of few samples slow devices get none.

    Raises: InfeasibleError if the model fits on no device.
    """
    crew, batch = _Crew(problem), problem.global_batch_size
    sizes = {min(size, batch) for size in problem.microbatch_sizes}
    fitting = {device.name: crew.fitting(device, sizes) for device in crew.leaders}
    if not any(fitting.values()):
        alone = itertools.product(crew.leaders, sizes)
        raise min((crew.shortfall("poplar", [device], size) for device, size in alone), key=_missing_bytes)
    # at first one size for all that fits there, then each class its best for the step that this gives
    same = [crew.timed({name: size for name, fit in fitting.items() if size in fit}) for size in sizes]
    step_s = min(share_out(timed, batch)[0] for timed in same if timed)
    best = {
        device.name: max(
            (crew.pipeline(device, size).timing.most(step_s, batch), -size) for size in fitting[device.name]
        )
        for device in crew.leaders
        if fitting[device.name]
    }
    timed = crew.timed({name: -size for name, (_, size) in best.items()})
    return crew.plan("poplar", timed, share_out(timed, batch)[1])


class _Crew:
    """Pipelines that hold the whole model, and the first device of each class, the leaders."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._costs = problem, PipelineCosts(problem)
        self._timings = TimingCache(self._costs)
        self._members = {group[0].name: group for group in equal_devices(problem.cluster).members}
        self.leaders = tuple(group[0] for group in self._members.values())

    def pipeline(self, device: Device, size: int) -> TimedPipeline:
        return self._timings.pipeline([TimedStage(device, 0, self._problem.profile.num_layers)], size)

    def timed(self, sizes: Mapping[str, int]) -> list[TimedPipeline]:
        """Return one for every device of the leaders named, as in the cluster, of the size given."""
        size_of = {device.name: size for name, size in sizes.items() for device in self._members[name]}
        devices = self._problem.cluster.devices
        return [self.pipeline(device, size_of[device.name]) for device in devices if device.name in size_of]

    def fitting(self, device: Device, sizes: Iterable[int]) -> set[int]:
        """Return the microbatch sizes with which the model fits on the device."""
        return {size for size in sizes if self.pipeline(device, size).timing.fits}

    def shortfall(self, strategy: str, devices: Sequence[Device], size: int) -> InfeasibleError:
        """Return the error of the device that lacks most bytes."""
        layouts = [((device, 0, self._problem.profile.num_layers),) for device in devices]
        errors = (self._costs.shortfall(layout, size) for layout in layouts)
        error = max((error for error in errors if error is not None), key=_missing_bytes)
        return InfeasibleError(
            f"{strategy}: {error}; let `auto` cut the model",
            device=error.device,
            missing_bytes=error.missing_bytes,
        )

    def plan(self, strategy: str, timed: Sequence[TimedPipeline], shares: Sequence[int]) -> Plan:
        pairs = zip(timed, shares, strict=True)
        pipelines = tuple(pipeline.pipeline(share) for pipeline, share in pairs if share)
        return self._problem.plan(strategy, pipelines)


def _missing_bytes(error: InfeasibleError) -> float:
    return error.missing_bytes
