"""The rows that all pipelines of a plan keep together in a step, with cards and sums (see `card_columns`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partition.bounds.card_bound import NodeShape, gradient_bytes
from partition.bounds.home_parts import HomePart
from partition.bounds.run_tables import RunKind, shares_of_sums
from partition.estimates.arrays import Bools, Floats, Singles
from partition.estimates.stage_tables import ProblemTables

MOST_LONE = 2  # nodes with a layer for themselves where cards are slow


@dataclass(frozen=True, slots=True)
class Given:
    """What `least_price` is given beside prices, samples and needs; runs_s: of one sample.

    elsewhere: bytes of runs that are not at home, over those of the model and the batch.
    """

    ways: Floats
    sums_s: Singles
    inside_s: Singles
    runs_s: Floats
    open_runs: Bools
    links_s: Floats
    elsewhere: Floats


@dataclass(frozen=True, slots=True)
class Run:
    """Devices of a node in a pipeline; paid, free: times that bytes move which others sum, too, or not."""

    start: int
    stop: int
    kind: int
    devices: int
    paid: float
    free: float


@dataclass(frozen=True, slots=True)
class Column:
    """A pipeline on kinds of nodes, what it does, and the step in which it was found.

    left_s: seconds of sums, that it leaves, behind its last backward of the last layer.
    """

    runs: tuple[Run, ...]
    samples: float
    step_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class CardRows:
    """What there is of each row, and what a pipeline takes of it.

    Devices and cards by shape of node, sums; if all pipelines pass home, the last of the shapes, pipelines
    and scarce nodes; if home has the whole model, the bytes of samples elsewhere beyond what it sums.
    own: bytes of each layer that count as sums.
    """

    tables: ProblemTables
    shapes: Sequence[NodeShape]
    own: Floats
    has_home: bool
    whole: bool

    def passing_s(self, shape: NodeShape) -> float:
        """Return the least seconds in which the batch passes a node's card, once for each sample."""
        least = float(gradient_bytes(self.tables)[1:-1].min(initial=np.inf))
        return self.tables.problem.global_batch_size * shape.s_per_byte * least

    def slow(self, shape: NodeShape, step_s: float) -> bool:
        """Return whether a card takes less than two messages a sample for the batch."""
        return step_s < 2 * self.passing_s(shape)

    @property
    def least_s(self) -> float:
        return min(shape.s_per_byte for shape in self.shapes)

    def shares(self, part: HomePart) -> Floats:
        """Return what runs count of their layers' sums, by [shape, devices]."""
        widest = max(shape.width for shape in self.shapes)
        most = part.most_pipelines(self.shapes[-1].width) if self.has_home else widest
        return np.array([shares_of_sums(shape.width, most, widest) for shape in self.shapes])

    def limits(self, part: HomePart, step_s: float) -> Floats:
        """Return what there is of each row in a step."""
        rows = [float(shape.count * shape.width) for shape in self.shapes]
        rows += [shape.count * step_s for shape in self.shapes]
        rows.append(2 * self.least_s * float(self.own.sum()))
        if self.has_home:
            rows[len(self.shapes) - 1] -= part.first
            others = MOST_LONE - self.slow(self.shapes[-1], step_s)
            rows += [float(part.most_pipelines(self.shapes[-1].width)), float(others)]
        if self.whole:
            rows.append(0.0)
        return np.array(rows)

    def left(self, part: HomePart, limits: Floats) -> Floats:
        """Return what is left of each row beside what home sums at the least."""
        count, num_bytes = len(self.shapes), part.least * float(self.own.sum())
        left = limits.copy()
        left[2 * count - 1] -= num_bytes * self.shapes[-1].s_per_byte
        left[2 * count] -= num_bytes * self.least_s
        return np.maximum(left, 0.0)

    def value(self, part: HomePart, prices: Floats, limits: Floats) -> float:
        """Return what there is of all rows at their prices, less what home sums at the least."""
        count, num_bytes = len(self.shapes), part.least * float(self.own.sum())
        card = prices[2 * count - 1] * self.shapes[-1].s_per_byte
        sums = prices[2 * count] * self.least_s
        return float(prices @ limits) - num_bytes * float(card + min(card, sums))

    def ratio(self, part: HomePart, prices: Floats, limits: Floats, done: Floats) -> float:
        """Return the price of a sample above which the batch is not done; infinite where it is at any price.

        If no pipeline does more samples than its price pays for, those of a plan do less than what whole
        pipelines leave over. done: the most samples of these, by the devices of home that they take.
        """
        batch = self.tables.problem.global_batch_size
        value, found = self.value(part, prices, limits), 0.0
        each = self.price_of_device(prices) if self.whole else 0.0
        for devices in range(part.first, part.last + 1):
            left = batch - float(done[devices])
            if left <= 0:
                return math.inf
            found = max(found, (value - (devices - part.first) * each) / left)
        return found + (float(prices[-1]) * part.most / batch if self.whole else 0.0)

    def price_of_device(self, prices: Floats) -> float:
        """Return the price of a device of home, and of being one more pipeline there."""
        count = len(self.shapes)
        return float(prices[count - 1] + prices[2 * count + 1])

    def taken(self, column: Column, kinds: Sequence[RunKind], given: Given, part: HomePart) -> Floats:
        """Return what a pipeline takes of each row."""
        count, shares = len(self.shapes), self.shares(part)
        rows = np.zeros(2 * count + 1 + 2 * self.has_home + self.whole)
        for run in column.runs:
            kind = kinds[run.kind]
            shape, index = self.shapes[kind.shape], (run.kind, run.start, run.stop)
            share = shares[kind.shape, run.devices]
            sample_s, paid_s, free_s = (float(each[index]) for each in given.runs_s)
            rows[kind.shape] += run.devices
            rows[count + kind.shape] += column.samples * sample_s
            rows[count + kind.shape] += share * (run.paid * paid_s + run.free * free_s)
            left_s = (2 - run.paid) * paid_s + (2 - run.free) * free_s
            rows[2 * count] += share * left_s * self.least_s / max(shape.s_per_byte, 1e-300)
            if kind.scarce:
                rows[2 * count + 2] += run.devices / shape.width
            if self.whole:
                rows[-1] += column.samples * given.elsewhere[index]
        if self.has_home:
            rows[2 * count + 1] = 1.0
        if self.whole:
            rows[-1] -= column.samples * part.most / self.tables.problem.global_batch_size
        return rows

    def whole_devices(self, part: HomePart, done: Floats) -> tuple[list[list[float]], list[float]]:
        """Return rows and samples of more devices of home in whole pipelines than the part's first number."""
        rows, samples = [], []
        for devices in range(part.first + 1, part.last + 1):
            row = np.zeros(2 * len(self.shapes) + 4)
            row[[len(self.shapes) - 1, 2 * len(self.shapes) + 1]] = devices - part.first
            rows.append(row.tolist())
            samples.append(float(done[devices] - done[part.first]))
        return rows, samples
