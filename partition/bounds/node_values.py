"""What a node can be worth in a step at prices of layers, its card shared by activations and sums.

A layer's price is that of the whole batch passing through it. The node holds some layers, and sums them with
other nodes; runs of consecutive stages on it pass samples, whose activations come and go over its card where
they begin and end, but at the ends of the model.

For a multiplier m >= 0 of the card's seconds no node is worth more than

    max over runs r:  m * step - cost of the sums of r + the best runs whose sums take no longer than r's

where a run is worth its samples times (prices - m * seconds on the card of a sample), and runs together take
no more devices than there are (a knapsack over devices). Take for r the run whose sums take longest: the node
holds it, and others of no longer sums. Each r has the least over a grid of multipliers.
"""

import numpy as np

from partition.estimates.arrays import Floats
from partition.estimates.layer_bytes import between

MULTIPLIERS = 24
TINY = 1e-300


class NodeRuns:
    """The runs of layers of equal nodes in a step: owner of what does not depend on prices.

    most: samples over the batch, by [devices, start, stop]. card_s: of the batch's activations at the ends of
    a run, by [start, stop]. sums_s: of runs on the card, own_s: of each layer alone, without what is tied; 0
    where they do not count. whole: whether a run may be the whole model.
    """

    def __init__(
        self, most: Floats, card_s: Floats, sums_s: Floats, own_s: Floats, step_s: float, *, whole: bool
    ) -> None:
        self.step_s, self.own_s = step_s, own_s
        start, stop = np.triu_indices(len(card_s), 1)
        keep = (most[:, start, stop].max(axis=0) > 0) & (sums_s[start, stop] <= step_s)
        if not whole:
            keep &= (start > 0) | (stop < len(card_s) - 1)
        start, stop = start[keep], stop[keep]
        order = np.argsort(sums_s[start, stop], kind="stable")
        self.start, self.stop = start[order], stop[order]
        self.most, self.card_s = most[:, self.start, self.stop], card_s[self.start, self.stop]

    def value(self, prices: Floats, sum_price: float, most_moved: float) -> float:
        """Return the most that a node is worth.

        Sums over n nodes move 2 (n - 1) times their bytes over all cards, and over each of these cards
        at least once theirs: a node pays twice for its own sums, and is paid for all that its card moves.

        prices: of the layers; sum_price: of a second of sums; most_moved: over the card, times its own sums.
        """
        if not len(self.start):
            return 0.0
        gains = between(prices)[self.start, self.stop]
        bounds = [
            self._bounds(gains, each, sum_price, most_moved)
            for each in self._multipliers(gains, sum_price, most_moved)
        ]
        return max(0.0, float(np.min(bounds, axis=0).max()))

    def _multipliers(self, gains: Floats, sum_price: float, most_moved: float) -> Floats:
        """Return multipliers at which no sums are worth more than they cost."""
        paid = np.where(self.card_s > 0, gains / np.maximum(self.card_s, TINY), 0.0)
        lowest = sum_price * (most_moved - 2) / most_moved
        highest = max(float(paid.max()), 2 * sum_price)
        return lowest + (highest - lowest) * np.concatenate([[0.0], np.linspace(0.02, 1.0, MULTIPLIERS)])

    def _bounds(self, gains: Floats, each: float, sum_price: float, most_moved: float) -> Floats:
        """Return for a multiplier what a node is worth whose longest sums are those of each run."""
        paid = (most_moved - 1) * max(sum_price - each, 0.0)
        costs = between(self.own_s * max(0.0, each + sum_price - paid))[self.start, self.stop]
        worth = np.maximum(self.most * (gains - each * self.card_s), 0.0)
        return np.asarray(each * self.step_s - costs + _packed(np.maximum.accumulate(worth, axis=1)))


def _packed(worth: Floats) -> Floats:
    """Return the most that runs on all devices are worth together; worth: by [devices, ...]."""
    packed = np.zeros_like(worth)
    for width in range(1, len(worth)):
        packed[width] = np.max(
            [worth[count] + packed[width - count] for count in range(1, width + 1)], axis=0
        )
    return np.asarray(packed[-1])
