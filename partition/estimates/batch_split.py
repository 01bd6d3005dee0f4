"""The samples of a step, shared out between workers so that they end together."""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from partition.estimates.timed_pipeline import Timing, Worker

NEAR = 0.02  # of the range: no guess is nearer to its ends
NEARLY = 0.98  # of a step that is long enough: what is asked for next


def share_out(
    workers: Sequence[Worker], batch: int, tolerance: float = 1e-5, within_s: float = math.inf
) -> tuple[float, list[int]]:
    """(seconds, samples of each worker): the least step in which they do the batch.

    Samples grow nearly in proportion to the step: every third guess halves it, the others go by proportion.
    Workers may get none. Seconds are inf where the workers cannot do it, or not within so many seconds.
    """
    counts: dict[int, tuple[Timing, int]] = {}
    for worker in workers:
        timing, count = counts.get(id(worker.timing), (worker.timing, 0))
        counts[id(worker.timing)] = (timing, count + 1)
    able = [(timing, count) for timing, count in counts.values() if timing.fits]
    if not able:
        return math.inf, [0] * len(workers)

    def done(step_s: float) -> int:
        return sum(count * timing.most(step_s, batch) for timing, count in able)

    if within_s < math.inf:
        if sum(count * timing.no_more(within_s, batch) for timing, count in able) < batch:
            return math.inf, [0] * len(workers)
        low, high = NEARLY * within_s, within_s
        more = done(high)
        if more < batch:
            return math.inf, [0] * len(workers)
    else:
        # a little more than one worker alone needs, so that rounding does not take a sample from it
        high = (1 + tolerance) * min(timing.time_s(batch) for timing, _ in able)
        low, more = high / (2 * len(workers)), batch
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
    return high, _within(workers, batch, high)


def _between(low: float, high: float, share: float) -> float:
    """By a share from low to high, but not too near to either."""
    return low + (high - low) * min(max(share, NEAR), 1 - NEAR)


def _within(workers: Sequence[Worker], batch: int, step_s: float) -> list[int]:
    """Samples of each worker in a step of step_s seconds; the surplus is taken from those that end last."""
    most = {id(worker.timing): worker.timing.most(step_s, batch) for worker in workers}
    samples = [most[id(worker.timing)] if worker.timing.fits else 0 for worker in workers]
    surplus = sum(samples) - batch
    if surplus <= 0:
        return samples
    ends = {id(worker.timing): worker.timing.time_s(most[id(worker.timing)]) for worker in workers}
    last = [(-ends[id(workers[at].timing)], -at) for at, count in enumerate(samples) if count]
    heapify(last)
    while surplus > 0:
        at = -last[0][1]
        size = workers[at].microbatch_size
        taken = min(surplus, (samples[at] - 1) % size + 1)
        samples[at] -= taken
        surplus -= taken
        if samples[at]:
            heapreplace(last, (-workers[at].timing.time_s(samples[at]), -at))
        else:
            heappop(last)
    return samples
