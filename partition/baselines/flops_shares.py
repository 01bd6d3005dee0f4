"""Data parallelism whose shares are decided by one figure a device, its speed: Whale, HAP.

Speed is samples a second at the largest microbatch that all kinds were profiled at, for the peak FLOPS of the
papers, since an emulated device has none.
"""

import math
from collections.abc import Sequence

from cost_model.cluster import Device
from partition.baselines.strategy import missing_bytes
from partition.baselines.whole_models import WholeModels
from partition.estimates.batch_split import in_proportion
from partition.plan import Plan
from partition.problem import Evaluate, Problem


def whale_dp(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Give samples by FLOPS, and move what memory does not take to the devices that are used least.

    The rule inside a replicated TaskGraph (Whale: Jia et al., USENIX ATC 2022, section 3.5). All devices do
    as many microbatches, the fewest that memory allows, each of its own size. Here what is moved goes to all
    devices with room, so that they are used equally; there step by step to the one that is used least.
    evaluate is not asked.

    Raises: InfeasibleError if the model fits on no device.
    """
    copies, batch = WholeModels(problem), problem.global_batch_size
    most = {device.name: size for device in copies.leaders if (size := copies.largest(device))}
    if not most:
        raise min((copies.shortfall("whale-dp", [device], 1) for device in copies.leaders), key=missing_bytes)
    timed, _ = copies.by_speed(most)
    speeds = _speeds(problem, copies, [each.devices[0] for each in timed])
    room = [each.microbatch_size for each in timed]
    num_microbatches = math.ceil(batch / sum(room))
    shares = filled(speeds, [num_microbatches * each for each in room], batch)
    pipelines = [
        copies.pipeline(each.devices[0], math.ceil(max(share, 1) / num_microbatches))
        for each, share in zip(timed, shares, strict=True)
    ]
    return copies.plan("whale-dp", pipelines, shares)


def hap(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Give every device samples by its FLOPS: HAP's ratios where nothing but the batch is sharded.

    HAP (Zhang et al., EuroSys 2024, section 5) solves a linear programme for the ratio of each device: least
    sum over instructions of the longest computation and the longest communication. Of a program that is data
    parallel the sums of gradients do not depend on the ratios, so that its optimum is in proportion to
    FLOPS, in closed form. Its other programs shard tensors, which no plan here does, nor its search for them.
    Like there a share is one microbatch; in several where memory takes no such one. evaluate is not asked.

    Raises: InfeasibleError if the model does not fit on one of the devices.
    """
    copies, batch = WholeModels(problem), problem.global_batch_size
    devices = problem.cluster.devices
    most = {device.name: copies.largest(device) for device in copies.leaders}
    if not all(most.values()):
        raise copies.shortfall("hap", copies.leaders, 1)
    shares = in_proportion(_speeds(problem, copies, devices), batch)
    pipelines = [
        copies.pipeline(each.devices[0], math.ceil(share / math.ceil(share / each.microbatch_size) or 1))
        for each, share in zip(copies.timed(most), (max(share, 1) for share in shares), strict=True)
    ]
    return copies.plan("hap", pipelines, shares)


def _speeds(problem: Problem, copies: WholeModels, devices: Sequence[Device]) -> list[float]:
    size = min(max(problem.microbatch_sizes), problem.global_batch_size)
    return [copies.rate(device, size) for device in devices]


def filled(weights: Sequence[float], room: Sequence[int], total: int) -> list[int]:
    """Return whole numbers in proportion to weights, none above its room, that add up.

    What does not fit goes to those with room left, in proportion again.

    >>> filled([3.0, 1.0, 1.0], [2, 9, 9], 10)
    [2, 4, 4]
    """
    amounts, open_places, left = [0] * len(weights), list(range(len(weights))), total
    while left:
        more = in_proportion([weights[place] for place in open_places], left)
        for place, amount in zip(open_places, more, strict=True):
            taken = min(amount, room[place] - amounts[place])
            amounts[place] += taken
            left -= taken
        open_places = [place for place in open_places if amounts[place] < room[place]]
    return amounts
