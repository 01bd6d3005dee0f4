"""The most samples that pipelines with all layers on one node do in a step, by the devices that they take."""

from dataclasses import dataclass, field

import numpy as np

from partition.bounds.card_bound import SAFETY
from partition.bounds.pipeline_amounts import PipelineAmounts, all_amounts
from partition.bounds.run_tables import RunKind, RunTables
from partition.estimates.arrays import Bools, Floats

CLOSE = 1 / 512  # of the batch, of the amounts that are not told apart


@dataclass(slots=True)
class WholePipelines:
    """Owns what pipelines of a kind of node need for amounts of samples."""

    runs: RunTables
    kind: RunKind
    _known: dict[PipelineAmounts, tuple[Floats, Floats, float]] = field(default_factory=dict)
    _amounts: list[PipelineAmounts] = field(default_factory=list)

    def most_samples(self, step_s: float, *, sums_s: float = 0.0, single: bool = False) -> Floats:
        """Return the most samples of whole pipelines on so many devices, from 0 to all of the node.

        single: of one pipeline. sums_s: for which the node's card is busy with sums of layers that others
        have, too. None of them has begun before the last backward of the last such layer: so at the
        earliest when its last microbatch is at the end of the model, and on a single device no more than a
        backward of the layers in front of that layer before its work is over.
        """
        batch = self.runs.tables.problem.global_batch_size
        shape = self.runs.shapes[self.kind.shape]
        width, highest = shape.width, shape.rate * step_s * (1 + SAFETY)
        most = np.zeros(width + 1)
        waiting = sorted((one for one in self._all() if one.first <= highest), key=lambda one: one.last)
        while waiting:
            amounts = waiting.pop()
            better = self._in_time(amounts, step_s, sums_s) & (most < amounts.last)
            if not better[1:].any():
                continue
            if amounts.last - amounts.first <= CLOSE * batch:
                most[better] = amounts.last
            else:
                waiting += amounts.parts()
        if single:
            return np.maximum.accumulate(most)
        packed = np.zeros(width + 1)
        for devices in range(1, width + 1):
            packed[devices] = max(most[count] + packed[devices - count] for count in range(1, devices + 1))
        return packed

    def _all(self) -> list[PipelineAmounts]:
        if not self._amounts:
            self._amounts = list(all_amounts(self.runs.tables.problem))
        return self._amounts

    def _in_time(self, amounts: PipelineAmounts, step_s: float, sums_s: float) -> Bools:
        """Return by devices whether a pipeline may do some such amount."""
        if amounts not in self._known:
            self._known[amounts] = self._needed(amounts)
        needed_s, arrived_s, alone_s = self._known[amounts]
        in_time = (needed_s <= step_s) & (arrived_s + sums_s <= step_s)
        in_time[1] &= alone_s + sums_s <= step_s
        return np.asarray(in_time)

    def _needed(self, amounts: PipelineAmounts) -> tuple[Floats, Floats, float]:
        """Return what pipelines need by devices, and to the end of the last forward; and a single device.

        The latter to when the last backward of the last layer is over.
        """
        table = self.runs.needed_by_whole(self.kind, amounts).astype(np.float64)
        last = self.runs.times(self.kind.shape, amounts).rows[0]
        table[0] = np.inf
        return table[:, 1], table[:, -1], float(table[1, 0] - last[-2])
