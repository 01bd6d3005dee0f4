"""Data parallelism whose shares are decided by one figure a device, its speed: Whale, HAP, Cephalo.

Speed is samples a second at the largest microbatch that all kinds were profiled at, for the peak FLOPS of the
papers, since an emulated device has none.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from cost_model.cluster import Device
from partition.baselines.strategy import missing_bytes
from partition.baselines.whole_models import LEAST_S, WholeModels, sharded
from partition.estimates.batch_split import in_proportion
from partition.plan import Plan
from partition.problem import Evaluate, Problem

PRECISION = 1e-9  # of a step


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


def cephalo(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Choose microbatch and number of them for each device so that the last ends first; states lie apart.

    Cephalo (Guo et al., ICS 2025): its programme over devices, samples and sizes has the least longest time
    of them all, which is found here by bisection, since nothing else couples the devices. Its states are
    sharded by free memory whoever computes; here optimizer states alone are (ZeRO stage 1), weights and
    gradients are on every device that computes. It computes all microbatches of a layer before the next, to
    gather weights once; here microbatches follow one another. evaluate is not asked.

    Raises: InfeasibleError if the model fits on no device.
    """
    return sharded(problem, partial(_soonest, "cephalo"))


def _soonest(name: str, problem: Problem) -> Plan:
    copies, batch = WholeModels(problem), problem.global_batch_size
    sizes = {min(size, batch) for size in problem.microbatch_sizes}
    options = {
        device.name: [(max(copies.pipeline(device, size).timing.busy_s[0], LEAST_S), size) for size in fit]
        for device in copies.leaders
        if (fit := sorted(copies.fitting(device, sizes)))
    }
    if not options:
        lacking = (copies.shortfall(name, [device], min(sizes)) for device in copies.leaders)
        raise min(lacking, key=missing_bytes)
    counts = Counter(leader for leader in copies.leader_of.values() if leader in options)
    best = _least_step(options, counts, batch)
    timed = copies.timed({leader: size for leader, (_, size) in best.items()})
    shares = [best[copies.leader_of[each.devices[0].name]][0] for each in timed]
    surplus = sum(shares) - batch
    for place in sorted(range(len(shares)), key=lambda place: -timed[place].timing.total_s(shares[place])[0]):
        taken = min(surplus, timed[place].microbatch_size, shares[place])
        shares[place], surplus = shares[place] - taken, surplus - taken
    return copies.plan(name, timed, shares)


def _least_step(
    options: Mapping[str, Sequence[tuple[float, int]]], counts: Mapping[str, int], batch: int
) -> dict[str, tuple[int, int]]:
    """Return (samples, microbatch size) of the devices of each class, for the least step that does the batch.

    options: (seconds, samples) of a microbatch. counts: devices of each class.
    """

    def within(step_s: float) -> dict[str, tuple[int, int]]:
        return {
            leader: max((size * int(step_s / seconds * (1 + PRECISION)), size) for seconds, size in each)
            for leader, each in options.items()
        }

    def done(step_s: float) -> int:
        return sum(counts[leader] * samples for leader, (samples, _) in within(step_s).items())

    low, high = 0.0, min(math.ceil(batch / size) * s for each in options.values() for s, size in each)
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) >= batch else (middle, high)
    return within(high)


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
