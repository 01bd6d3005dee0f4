"""What a node can be worth in a step at prices of layers, its card shared by activations and sums.

A layer's price is that of the whole batch passing through it. The node holds some layers, and sums them with
other nodes; runs of consecutive stages on it pass samples, whose activations come and go over its card where
they begin and end, but at the ends of the model.

Sums over n nodes move 2 (n - 1) times their bytes over all cards together. So a node pays twice at the price
of sums for each of its layers, and is paid for what its card moves of it: f times its bytes, f from 1 (or 0
where the layer is on no other node) up to 2 (`sync_tables.ring_bytes`). For a multiplier m >= 0 of the
card's seconds

    worth <= m * step + sum over runs of samples * (prices - m * seconds on the card of a sample)
                      + sum over layers held of bytes * (f * (price - m) - 2 * price)

where no layer adds anything in the last sum. Two bounds, of which the lesser one counts:

longest     of the last sum the layers of the run count whose sums take longest: others are no longer.
shared      each run pays for its layers its share of the node's devices: a layer is paid for once at the
most.
            What a run's sums move takes time behind its last stage: the more, the fewer samples
            (`most_samples`).

A price of sums below 0, from -m on, is for what nodes hold, where each layer is on two nodes or more: then f
is 1, nothing of the last sum is positive either; all nodes hold the model twice together (docs/bounds.md).

Runs together take no more devices than there are (a knapsack over devices); the least over a grid of
multipliers counts.
"""

from dataclasses import dataclass

import numpy as np

from partition.estimates.arrays import Floats
from partition.estimates.layer_bytes import between

MULTIPLIERS = 24
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class RunTimes:
    """What is known of the runs of a node in a step.

    card_s: of the batch's activations at the ends of a run, by [start, stop]. sums_s: of runs on the card at
    the least, own_s: of each layer alone, without what is tied. shares: how many times its bytes a run's sums
    move, rising from the least to the most.
    """

    card_s: Floats
    sums_s: Floats
    own_s: Floats
    shares: Floats
    step_s: float


class NodeRuns:
    """The runs of layers of equal nodes in a step: owner of what does not depend on prices.

    most: samples over the batch, by [share, devices, start, stop]. whole: whether a run may be the whole
    model.
    """

    def __init__(self, most: Floats, times: RunTimes, *, whole: bool) -> None:
        self.times = times
        card_s, sums_s = times.card_s, times.sums_s
        start, stop = np.triu_indices(len(card_s), 1)
        keep = (most[0, :, start, stop].max(axis=1) > 0) & (sums_s[start, stop] <= times.step_s)
        if not whole:
            keep &= (start > 0) | (stop < len(card_s) - 1)
        start, stop = start[keep], stop[keep]
        own_s = between(times.own_s)
        order = np.argsort(own_s[start, stop], kind="stable")
        self.start, self.stop = start[order], stop[order]
        self.most = np.ascontiguousarray(most[:, :, self.start, self.stop])
        self.card_s, self.own_s = card_s[self.start, self.stop], own_s[self.start, self.stop]

    def value(self, prices: Floats, sum_price: float) -> float:
        """Return the most that a node is worth.

        prices: of the layers; sum_price: of a second of sums, or below 0 of what is held.
        """
        from partition.bounds.node_kernel import least_worth  # loads a compiler

        if not len(self.start):
            return 0.0
        gains = between(prices)[self.start, self.stop]
        multipliers = self._multipliers(gains, sum_price)
        runs = np.array([gains, self.card_s, self.own_s])
        shared = least_worth(self.most, runs, self.times.shares, self.times.step_s, sum_price, multipliers)
        longest = np.min([self._longest(gains, each, sum_price) for each in multipliers], axis=0).max()
        return max(0.0, min(float(shared), float(longest)))

    def _multipliers(self, gains: Floats, sum_price: float) -> Floats:
        """Return multipliers of the card's seconds."""
        paid = np.where(self.card_s > 0, gains / np.maximum(self.card_s, TINY), 0.0)
        highest = max(float(paid.max()), 2 * abs(sum_price))
        grid = highest * np.concatenate([[0.0], np.linspace(0.02, 1.0, MULTIPLIERS)])
        return grid if sum_price >= 0 else np.append(-sum_price, grid[grid > -sum_price])

    def _longest(self, gains: Floats, each: float, sum_price: float) -> Floats:
        """Return for a multiplier what a node is worth whose longest sums are those of each run."""
        least, most_moved = self.times.shares[0], self.times.shares[-1]
        earned = sum_price - each
        moved = most_moved if earned > 0 else least
        paid = self.own_s * (moved * earned - 2 * sum_price)
        worth = np.maximum(self.most[0] * (gains - each * self.card_s), 0.0)
        return np.asarray(each * self.times.step_s + paid + _packed(np.maximum.accumulate(worth, axis=1)))


def _packed(worth: Floats) -> Floats:
    """Return the most that runs on all devices are worth together; worth: by [devices, ...]."""
    packed = np.zeros_like(worth)
    for width in range(1, len(worth)):
        packed[width] = np.max(
            [worth[count] + packed[width - count] for count in range(1, width + 1)], axis=0
        )
    return np.asarray(packed[-1])
