"""The innermost loop of `cut_dp` as machine code: the same cuts, to the last bit."""

import numpy as np
import numpy.typing as npt

from partition.estimates.arrays import Floats
from partition.estimates.compiled import compiled

_WholeNumbers = npt.NDArray[np.int64]


@compiled
def place_cuts(
    stop: _WholeNumbers,
    busy_s: Floats,
    optimizer_s: Floats,
    caps: Floats,
    trip_s: Floats,
    link_s: Floats,
    makespan_s: Floats,
    window_s: Floats,
    count: float,
    period_s: float,
    first_trained: int,
) -> tuple[Floats, Floats, _WholeNumbers]:
    """Return (makespan bound, window, pick) by first layer once one more place in front holds a stage.

    The arrays are those of the place's stages, by [start, any], and of what comes behind it, by [layer];
    pick: which of the stages that begin there. trip_s, link_s: both ways of the link behind; its slower one.
    """
    ends, width = stop.shape
    longest, windows = np.full(ends + 1, np.inf), np.zeros(ends + 1)
    picks = np.zeros(ends, np.int64)
    many, most = max(count, 1.0), max(1.0, np.ceil(count))
    waits = count - 1 if count > 1 else 0.0
    for start in range(ends):
        best, best_needed, best_trip = np.inf, 1.0, 0.0
        for choice in range(width):
            held = caps[start, choice]
            after = stop[start, choice]
            if held < 1 or makespan_s[after] == np.inf:
                continue
            through = busy_s[start, choice] + trip_s[after]
            beyond = makespan_s[after]
            if waits > 0:
                beyond = max(beyond, waits * link_s[after])
            value = max(many * busy_s[start, choice] + optimizer_s[start, choice], through + beyond)
            if value >= best:
                continue
            round_trip = through + window_s[after]
            needed = max(np.ceil(round_trip / period_s - 1e-6), 1.0)
            if after <= first_trained:
                needed = most
            if min(needed, most) > held:
                continue
            best, best_needed, best_trip, picks[start] = value, needed, round_trip, choice
        if best < np.inf:
            longest[start] = best
            windows[start] = max(best_trip, (best_needed - 1) * period_s + busy_s[start, picks[start]])
    return longest, windows, picks
