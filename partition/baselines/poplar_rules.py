"""Poplar's own allocation of the batch, by the peak speed of each device.

Source: Zhang et al., "Poplar: Efficient Scaling of Distributed DNN Training on Heterogeneous GPU Clusters",
AAAI 2025, the offline analysis and batch allocation.

A device runs its share in microbatches of the size at which it is fastest, its peak. In ZeRO stages 0 and 1,
where gradients are summed once a step, device i gets global_batch_size * peak_i / sum of peaks.

What differs: the curve of time by microbatch is the profile's, linear between measured sizes, where the paper
lays a cubic spline through them, which is no nearer to what was measured between them
(`examples/benchmarks/batch_curves`); so its peak is at a size that the kind was profiled at or at the largest
that fits (`largest_microbatch`), and only those are tried. Where the shares are no whole numbers the largest
remainders get one more. A device that the model does not fit on is left out. States of stage 1 lie on owners
by free memory.
"""

from functools import partial

from partition.baselines.largest_microbatch import tried_sizes
from partition.baselines.strategy import missing_bytes
from partition.baselines.whole_models import WholeModels, sharded
from partition.estimates.batch_split import in_proportion
from partition.plan import Plan
from partition.problem import Evaluate, Problem


def poplar_0(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Share out samples in proportion to the peak speeds of the devices; evaluate is not asked.

    Raises: InfeasibleError if the model fits on no device.
    """
    return _at_their_peaks("poplar-0", problem)


def poplar_1(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Share out samples as `poplar_0`, with optimizer states sharded.

    Raises: InfeasibleError if the model fits on no device even so.
    """
    return sharded(problem, partial(_at_their_peaks, "poplar-1"))


def _at_their_peaks(name: str, problem: Problem) -> Plan:
    copies, batch = WholeModels(problem), problem.global_batch_size
    peaks = {
        device.name: max((copies.rate(device, size), -size) for size in fitting)
        for device in copies.leaders
        if (fitting := tried_sizes(problem, device.kind, copies.largest(device)))
    }
    if not peaks:
        smallest = min(*problem.microbatch_sizes, batch)
        lacking = (copies.shortfall(name, [device], smallest) for device in copies.leaders)
        raise min(lacking, key=missing_bytes)
    timed, speeds = copies.by_speed({leader: -size for leader, (_, size) in peaks.items()})
    return copies.plan(name, timed, in_proportion(speeds, batch))
