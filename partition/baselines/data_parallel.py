"""Strategies that hold the whole model on every device and share out the samples."""

import itertools

from cost_model.errors import InfeasibleError
from partition.baselines.strategy import missing_bytes
from partition.baselines.whole_models import WholeModels
from partition.estimates.batch_split import share_out
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
    copies = WholeModels(problem)
    sizes = {min(size, shares[0]) for size in problem.microbatch_sizes}
    fitting = set.intersection(*(copies.fitting(device, sizes) for device in copies.leaders))
    if not fitting:
        raise min((copies.shortfall("ddp", copies.leaders, size) for size in sizes), key=missing_bytes)

    def step_s(size: int) -> float:
        timings = [copies.pipeline(device, size).timing for device in devices]
        return max(timing.time_s(share) for timing, share in set(zip(timings, shares, strict=True)))

    size = min(sorted(fitting), key=step_s)
    return copies.plan("ddp", [copies.pipeline(device, size) for device in devices], shares)


def poplar(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Return the whole model on every device that it fits on, samples shared out so that all end together.

    Shares and microbatch sizes come from the measured times of each class of devices (Poplar, Zhang et al.,
    AAAI 2025); evaluate is not asked. Of few samples slow devices get none.

    Raises: InfeasibleError if the model fits on no device.
    """
    copies, batch = WholeModels(problem), problem.global_batch_size
    sizes = {min(size, batch) for size in problem.microbatch_sizes}
    fitting = {device.name: copies.fitting(device, sizes) for device in copies.leaders}
    if not any(fitting.values()):
        alone = itertools.product(copies.leaders, sizes)
        raise min((copies.shortfall("poplar", [device], size) for device, size in alone), key=missing_bytes)
    # at first one size for all that fits there, then each class its best for the step that this gives
    same = [copies.timed({name: size for name, fit in fitting.items() if size in fit}) for size in sizes]
    step_s = min(share_out(timed, batch)[0] for timed in same if timed)
    best = {
        device.name: max(
            (copies.pipeline(device, size).timing.most(step_s, batch), -size) for size in fitting[device.name]
        )
        for device in copies.leaders
        if fitting[device.name]
    }
    timed = copies.timed({name: -size for name, (_, size) in best.items()})
    return copies.plan("poplar", timed, share_out(timed, batch)[1])
