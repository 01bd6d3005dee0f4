"""The samples of a step, shared out between pipelines so that they end together."""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from partition.estimates.timed_pipeline import PipelineTiming, TimedPipeline

NEAR = 0.02  # share of the range: no guess is nearer to its ends, or it would hardly narrow
NEARLY = 0.98  # times a step that is long enough: the first guess that may be too short


def share_out(
    timed: Sequence[TimedPipeline], batch: int, tolerance: float = 1e-5, within_s: float = math.inf
) -> tuple[float, list[int]]:
    """Return (seconds, samples of each pipeline) of the least step in which they do the batch.

    Samples grow nearly in proportion to the step: two of three guesses go by proportion (regula falsi), the
    third one halves the range on a logarithmic scale (bisection), which ends it whatever the samples do.
    Pipelines may get none. Seconds are inf where the pipelines cannot do it, or not within so many seconds.
    """
    counts: dict[int, tuple[PipelineTiming, int]] = {}
    for pipeline in timed:
        timing, count = counts.get(id(pipeline.timing), (pipeline.timing, 0))
        counts[id(pipeline.timing)] = (timing, count + 1)
    able = [(timing, count) for timing, count in counts.values() if timing.fits]
    if sum(count * timing.room(batch) for timing, count in able) < batch:
        return math.inf, [0] * len(timed)

    def done(step_s: float) -> int:
        return sum(count * timing.most(step_s, batch) for timing, count in able)

    if within_s < math.inf:
        if sum(count * timing.no_more(within_s, batch) for timing, count in able) < batch:
            return math.inf, [0] * len(timed)
        low, high = NEARLY * within_s, within_s
        more = done(high)
        if more < batch:
            return math.inf, [0] * len(timed)
    else:
        # a little more than one pipeline alone needs, so that rounding does not take a sample from it
        high = (1 + tolerance) * min(timing.time_s(batch) for timing, _ in able)
        low, more = high / (2 * len(timed)), batch
        while done(high) < batch:  # one pipeline alone has no room for all
            high *= 2
    less = done(low)
    while less >= batch and low > 0:
        low, high = low / 2, low
        less, more = done(low), less
    turn = 0
    while high > low * (1 + tolerance):
        if turn % 3 < 2 and low > 0:
            middle = _between(low, high, (batch - 0.5 - less) / max(more - less, 1))
        else:
            middle = math.sqrt(low * high) if low > 0 else high / 2
        samples, turn = done(middle), turn + 1
        if samples >= batch:
            high, more = middle, samples
        else:
            low, less = middle, samples
    return high, _within(timed, batch, high)


def _between(low: float, high: float, share: float) -> float:
    """Return what lies by a share between low and high, but not too near to either."""
    return low + (high - low) * min(max(share, NEAR), 1 - NEAR)


def _within(timed: Sequence[TimedPipeline], batch: int, step_s: float) -> list[int]:
    """Return the samples of each pipeline in a step; the surplus is taken from those that end last."""
    timings = [pipeline.timing for pipeline in timed]
    distinct = {id(timing): timing for timing in timings}
    most = {key: timing.most(step_s, batch) if timing.fits else 0 for key, timing in distinct.items()}
    samples = [most[id(timing)] for timing in timings]
    surplus = sum(samples) - batch
    if surplus <= 0:
        return samples
    ends = {key: timing.time_s(most[key]) for key, timing in distinct.items()}
    last = [(-ends[id(timings[at])], -at) for at, count in enumerate(samples) if count]
    heapify(last)
    while surplus > 0:
        at = -last[0][1]
        size = timings[at].microbatch_size
        taken = min(surplus, (samples[at] - 1) % size + 1)
        samples[at] -= taken
        surplus -= taken
        if samples[at]:
            heapreplace(last, (-timings[at].time_s(samples[at]), -at))
        else:
            heappop(last)
    return samples


def in_proportion(weights: Sequence[float], total: int) -> list[int]:
    """Return whole numbers in proportion to weights that add up, by largest remainders.

    >>> in_proportion([2.0, 1.0, 1.0], 5)
    [3, 1, 1]
    """
    amounts = [total * weight / sum(weights) for weight in weights]
    whole = [int(amount) for amount in amounts]
    order = sorted(range(len(amounts)), key=lambda place: (whole[place] - amounts[place], place))
    for place in order[: total - sum(whole)]:
        whole[place] += 1
    return whole
