"""The innermost loops of `count_dp`, compiled.

The bound of a cluster looks at 1e9 to 1e10 candidates: NumPy takes some 10 ns for each, most of it for
temporary arrays, these loops less than 1 ns.
"""

import numpy as np
import numpy.typing as npt

from partition.estimates.arrays import Places, Singles
from partition.estimates.compiled import compiled

TILE = 128  # vectors looked at together: their labels stay in the nearest cache


@compiled
def _add_followers(
    makespan: Singles,
    trip: Singles,
    link: Singles,
    hop: Singles,
    after_s: Singles,
    around_s: Singles,
    some: npt.NDArray[np.bool_],
) -> None:
    """Note the least labels of what may follow a stage, with its link: from [class, layer] to [layer]."""
    for following in range(makespan.shape[0]):
        for layer in range(makespan.shape[1]):
            seconds = makespan[following, layer] + link[following, layer]
            if seconds < np.inf:
                after_s[layer] = min(after_s[layer], seconds)
                around_s[layer] = min(around_s[layer], trip[following, layer] + hop[following, layer])
                some[layer] = True


@compiled
def _add_stage(
    stage: Singles, after_s: Singles, after_trip_s: Singles, least: Singles, around: Singles, ceiling_s: float
) -> None:
    """Note the least labels of suffixes with one more stage in front, by vector; see `count_dp`."""
    total_s, before_s, busy_s, share, warm_s, cool_s, beyond_s = (
        stage[0],
        stage[1],
        stage[2],
        stage[3],
        stage[4],
        stage[5],
        stage[6],
    )
    far, none, ceiling = np.float32(np.inf), np.float32(0), np.float32(ceiling_s)
    for vector in range(len(least)):
        trip_s = after_trip_s[vector] + busy_s
        warmup_s, cooldown_s = trip_s - warm_s, trip_s - cool_s
        own_s = (
            total_s + (warmup_s if warmup_s > none else none) + (cooldown_s if cooldown_s > none else none)
        )
        seconds = after_s[vector] + before_s
        seconds = own_s if own_s > seconds else seconds
        little_s = share * trip_s + beyond_s
        seconds = little_s if little_s > seconds else seconds
        trip_s = trip_s if seconds <= ceiling else far
        seconds = seconds if seconds <= ceiling else far
        least[vector] = seconds if seconds < least[vector] else least[vector]
        around[vector] = trip_s if trip_s < around[vector] else around[vector]


@compiled
def extend(
    makespan: Singles,
    trip: Singles,
    class_index: int,
    users: Places,
    before: Places,
    stages: Singles,
    last: Places,
    link: Singles,
    hop: Singles,
    ceiling_s: float,
) -> bool:
    """Note the labels of suffixes that begin with a stage of a class; return whether there are any.

    makespan, trip: [amount, vector, class, start], noted for the vectors `users`, and read of those without
    the device of the stage, `before`; empty if nothing comes after it. stages: [amount, recompute, start,
    stop, number], total, before, busy, share, warm, cool and beyond of `count_dp`. last: the last stop
    allowed, by [amount, recompute, start]. link, hop: [amount, class that follows, layer].
    """
    ends, alive = makespan.shape[3], False
    shape = (min(TILE, len(users)), ends)
    for amount in range(makespan.shape[0]):
        for first in range(0, len(users), TILE):
            tile = users[first : first + TILE]
            rows, rows_around = np.full(shape, np.inf, np.float32), np.full(shape, np.inf, np.float32)
            some = np.zeros(ends, np.bool_)
            for row in range(len(tile)):
                if len(before):
                    vector = before[first + row]
                    _add_followers(
                        makespan[amount, vector],
                        trip[amount, vector],
                        link[amount],
                        hop[amount],
                        rows[row],
                        rows_around[row],
                        some,
                    )
                else:
                    rows[row, -1] = rows_around[row, -1] = 0.0
                    some[-1] = True
            after_s, after_trip_s = rows.T.copy(), rows_around.T.copy()
            for start in range(ends - 1):
                least = np.full(shape[0], np.inf, np.float32)
                around = np.full(shape[0], np.inf, np.float32)
                for flag in range(last.shape[1]):
                    for stop in range(start + 1, last[amount, flag, start] + 1):
                        if some[stop]:
                            stage = stages[amount, flag, start, stop]
                            _add_stage(stage, after_s[stop], after_trip_s[stop], least, around, ceiling_s)
                for row, vector in enumerate(tile):
                    alive |= least[row] < np.inf
                    makespan[amount, vector, class_index, start] = least[row]
                    trip[amount, vector, class_index, start] = around[row]
    return alive
