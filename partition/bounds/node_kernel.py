"""The inner loops of the bound of nodes, compiled."""

import numpy as np

from partition.estimates.arrays import Floats
from partition.estimates.compiled import compiled


@compiled
def fill_most(
    most: Floats,
    amounts: Floats,
    beyond: Floats,
    times: Floats,
    each_s: Floats,
    sums_s: Floats,
    shares: Floats,
    limits: tuple[float, float],
) -> None:
    """Raise the most samples of runs, by [share, devices, start, stop], to what they do in some times.

    beyond: what a run does at the most that does an amount and not the next. times: of the layers in front of
    each place, the rows of `node_samples.LayerTimes`, and their own sums; each_s: its other table. sums_s:
    least seconds of the sums of layers [start, stop). shares: times its own bytes that a run's sums move
    over the card. limits: (step, samples from which on a stage's work outweighs what a stage behind it waits
    longer).
    """
    last, front, behind, forward, backward, optimizer, own = times
    num_shares, width = most.shape[0], most.shape[1] - 1
    num_layers = most.shape[2] - 1
    step_s, fewest = limits
    for start in range(num_layers):
        for index in range(len(amounts)):
            samples, whole = amounts[index], amounts[index] >= fewest
            at = start
            for count in range(1, width + 1):
                far, left_s = at, sums_s[start, at]
                for stop in range(start + 1, num_layers + 1):
                    place = min(at, stop - 1)
                    taken_s = samples * each_s[place, stop] + optimizer[stop] - optimizer[place]
                    if taken_s > step_s:
                        if stop > at:
                            break
                        continue
                    top = num_shares - 1
                    if whole:
                        taken_s += front[start] + forward[place] - forward[start]
                        ending_s = sums_s[start, stop] - last[stop - 1] + last[place]
                        if stop > at:
                            left_s = max(left_s, ending_s)
                            after_s = left_s
                        else:
                            after_s = max(sums_s[start, place], ending_s)
                        after_s = max(after_s, behind[start] + backward[place] - backward[start])
                        if taken_s + after_s > step_s:
                            if stop > at:
                                break
                            continue
                        room_s = step_s - taken_s + last[stop - 1] - last[place]
                        while top > 0 and shares[top] * (own[stop] - own[start]) > room_s:
                            top -= 1
                    most[top, count, start, stop] = max(most[top, count, start, stop], beyond[index])
                    if stop > at:
                        far = stop
                if far == start:
                    break
                at = far


@compiled
def least_worth(
    most: Floats, runs: Floats, shares: Floats, step_s: float, sum_price: float, multipliers: Floats
) -> float:
    """Return the least over multipliers of what a node is worth, each run paying for its share of devices.

    most: samples over the batch by [share, devices, run]. runs: by [what, run], prices, card seconds of the
    batch and seconds of own sums. shares: how many times its own bytes a run's sums move at the least, and
    behind them the most.
    """
    width, count = most.shape[1] - 1, most.shape[2]
    gains, card_s, own_s = runs
    least = np.inf
    for index in range(len(multipliers)):
        each = multipliers[index]
        earned = sum_price - each
        best, packed = np.zeros(width + 1), np.zeros(width + 1)
        for share in range(len(shares) - 1 if earned > 0 else 1):
            moved = shares[share + 1] if earned > 0 else shares[share]
            paid = (moved * earned - 2 * sum_price) / width
            for devices in range(1, width + 1):
                for run in range(count):
                    samples = most[share, devices, run]
                    if samples > 0:
                        worth = samples * (gains[run] - each * card_s[run]) + devices * paid * own_s[run]
                        best[devices] = max(best[devices], worth)
        for devices in range(1, width + 1):
            for taken in range(1, devices + 1):
                packed[devices] = max(packed[devices], best[taken] + packed[devices - taken])
        least = min(least, each * step_s + packed[width])
    return least
