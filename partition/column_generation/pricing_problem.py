"""Cheapest pipelines for given prices of the device classes: a dynamic programme over layers and time left.

A stage of class c costs prices[c].

    state       (start, z): the first layer of a suffix of stages, and the time that is left when its first
                microbatch arrives, z = step - (busy and link times before), on a grid of levels
    label       the least price of a suffix, and the window of its first stage
    transition  a stage (option, start, stop) in front of the state (stop, z - its busy and link time): it
                must pass all samples in z, and its memory take the in_flight that its round trip W asks for
    complexity  amounts x options x layers^2 x levels, in NumPy by start

That is the makespan bound Z of `partition.estimates.closed_forms` turned into a resource. An
estimate: time is rounded to the nearest level, W follows the window recursion, links are the best that the
classes have. The bound has a programme of its own (`partition.bounds.pricing_bound`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partition.estimates.arrays import Floats
from partition.estimates.class_pipeline import ColumnStage
from partition.estimates.stage_tables import ProblemTables, SizeTables

TOLERANCE = 1e-9
FILL = 10.0  # time left is followed down to the step less this many average microbatches


@dataclass(frozen=True, slots=True)
class PricedPipeline:
    """The cheapest pipeline that passes `num_samples` in microbatches of microbatch_size within the step."""

    price: float
    num_samples: int
    microbatch_size: int
    stages: tuple[ColumnStage, ...]


@dataclass(frozen=True, slots=True)
class _Labels:
    """The labels by [amount, start, level], and the choices that lead to them.

    price: of the cheapest suffix, inf where there is none. window: seconds from the start of the forward to
    the end of the backward of a microbatch in its first stage. stops, options: of that stage; nexts: the
    level after it.
    """

    price: Floats
    window: Floats
    stops: npt.NDArray[np.int32]
    options: npt.NDArray[np.int32]
    nexts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, num_amounts: int, num_layers: int, levels: int) -> "_Labels":
        """Return labels that know of the empty suffix only."""
        shape = (num_amounts, num_layers + 1, levels)
        price = np.full(shape, np.inf)
        price[:, num_layers] = 0.0
        stops, options, nexts = (np.zeros(shape, dtype=np.int32) for _ in range(3))
        return cls(price, np.zeros(shape), stops, options, nexts)


class PricingProblem:
    """The programme for one microbatch size and step time; prices may change between calls.

    amounts: several numbers of microbatches, priced side by side. cuts: where stages may begin and end, both
    ends included; None for every layer.
    """

    def __init__(
        self,
        tables: ProblemTables,
        microbatch_size: int,
        amounts: Sequence[int],
        step_s: float,
        *,
        levels: int,
        cuts: Sequence[int] | None = None,
        recompute: bool = True,
    ) -> None:
        self.microbatch_size, self.amounts, self.step_s = microbatch_size, tuple(amounts), step_s
        self._levels = levels
        self._cuts = np.arange(tables.num_layers + 1) if cuts is None else np.array(cuts)
        self._num_layers = len(self._cuts) - 1  # between cuts from here on
        size = tables.at(microbatch_size)
        counts = [float(amount) for amount in amounts]
        lowest = step_s * (1 - min(1.0, FILL / min(counts)))
        self._grid_s = (step_s - lowest) / levels
        self._left_s = lowest + self._grid_s * np.arange(1, levels + 1)
        caps, caps_again = (
            self._at_cuts(size.caps_for(min(counts), recompute=flag)) for flag in (False, True)
        )
        short = (caps < max(counts)) & (self._at_cuts(size.busy_s) <= step_s)
        self._ample = not short.any()
        classes = list(range(len(caps)))
        again = [index for index in classes if recompute and short[index].any()]
        self._options = [(index, False) for index in classes] + [(index, True) for index in again]
        self._classes = np.array(classes + again)  # by option
        self._microbatches = np.array(counts, dtype=np.float64)
        self._caps = np.concatenate([caps, caps_again[again]])
        link_s = (size.transfer_s[0] + size.transfer_s[1]).min(axis=1)[:, self._cuts]
        self._link = self._ended(link_s)[self._classes]
        self._tabulate(size, again)
        # [option, start, stop]: which stages are worth a look, whatever the prices
        self._able = (self._total <= step_s).any(axis=0) & (self._caps >= 1)

    def _tabulate(self, size: SizeTables, again: list[int]) -> None:
        busy, forward = self._at_cuts(size.busy_s), self._at_cuts(size.forward_s)
        optimizer = self._at_cuts(size.tables.optimizer_s)[self._classes]
        self._busy = np.concatenate([busy, busy[again] + forward[again]])
        self._total = self._microbatches[:, None, None, None] * self._busy + optimizer
        self._trip = self._busy + self._link[:, None, :]  # of a microbatch there and over the link
        steps = np.nan_to_num(np.rint(self._trip / self._grid_s), posinf=self._levels)
        self._steps = np.minimum(steps, self._levels).astype(np.int64)  # the levels that it takes
        self._soon = np.searchsorted(self._left_s, self._trip, side="right")  # first level with time for it
        self._soon[:, :, -1] = 0  # nothing is behind

    @staticmethod
    def _ended(links: Floats) -> Floats:
        """Return link times by layer, none at the end of the model."""
        links = links.copy()
        links[:, -1] = 0.0
        return links

    def _at_cuts(self, table: Floats) -> Floats:
        return table if len(self._cuts) == table.shape[-1] else table[:, self._cuts][:, :, self._cuts]

    def solve(self, prices: Floats) -> list[PricedPipeline | None]:
        """Return the cheapest pipeline for each amount of samples, None where none can do it."""
        labels = _Labels.of(len(self.amounts), self._num_layers, self._levels)
        cost = prices[self._classes]
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(self._num_layers - 1, -1, -1):
                option, stop = np.nonzero(self._able[:, start])
                if len(stop):
                    self._extend(labels, start, option, stop, cost[option])
        return [self._pipeline(which, labels) for which in range(len(self.amounts))]

    def _extend(
        self,
        labels: _Labels,
        start: int,
        option: npt.NDArray[np.int64],
        stop: npt.NDArray[np.int64],
        cost: Floats,
    ) -> None:
        """Label the suffixes that begin at a layer with one of these stages.

        Candidates are indexed [amount, level, stage]; what a stage leads to has no [amount]. Of the first
        layer one level alone counts: that with all of the step left.
        """
        count, levels = len(self.amounts), self._levels
        level = np.arange(0 if start else levels - 1, levels)
        at = np.maximum(level[:, None] - self._steps[option, start, stop], 0)
        flat = stop * levels + at
        candidate = labels.price.reshape(count, -1).take(flat, axis=1)
        candidate += cost
        left = self._left_s * (1 + TOLERANCE)
        in_time = np.searchsorted(left, self._total[:, option, start, stop])  # from which level on
        never = level[:, None] < np.maximum(in_time, self._soon[option, start, stop])[:, None]
        if not self._ample:
            round_trip = labels.window.reshape(count, -1).take(flat, axis=1)
            round_trip += self._trip[option, start, stop]
            allowed = left[level, None] * self._caps[option, start, stop]
            never |= self._microbatches[:, None, None] * round_trip > allowed
        np.putmask(candidate, never, np.inf)
        pick = candidate.argmin(axis=2)
        place = pick + np.arange(0, candidate.size, len(stop)).reshape(pick.shape)
        labels.price[:, start, level] = candidate.take(place)
        labels.stops[:, start, level], labels.options[:, start, level] = stop[pick], option[pick]
        labels.nexts[:, start, level] = at[np.arange(len(level)), pick]
        if self._ample or start == 0:
            return
        chosen = round_trip.take(place)
        period = self._left_s / self._microbatches[:, None]
        flights = np.maximum(np.ceil(chosen / period - TOLERANCE), 1.0)
        busy = self._busy[option, start, stop]
        labels.window[:, start] = np.maximum(chosen, (flights - 1) * period + busy[pick])

    def _pipeline(self, which: int, labels: _Labels) -> PricedPipeline | None:
        level = self._levels - 1
        if not np.isfinite(labels.price[which, 0, level]):
            return None
        start, stages = 0, []
        while start < self._num_layers:
            stop = int(labels.stops[which, start, level])
            class_index, recompute = self._options[labels.options[which, start, level]]
            first, end = int(self._cuts[start]), int(self._cuts[stop])
            stages.append(ColumnStage(class_index, first, end, recompute))
            start, level = stop, int(labels.nexts[which, start, level])
        samples = self.amounts[which] * self.microbatch_size
        return PricedPipeline(float(labels.price[which, 0, -1]), samples, self.microbatch_size, tuple(stages))
