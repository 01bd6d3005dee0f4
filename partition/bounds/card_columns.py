"""A bound from whole pipelines and cards together: Farley's argument with prices of cards and of sums.

Its space is that of `node_bound`: all plans whose pipelines share no device and whose states are not sharded,
however sums are made, and whenever they begin behind the last backward of their layer; its two cases, too.

In a step T all pipelines together keep these rows, each with a price that is not negative:

    devices     of each shape of node no more than there are
    cards       a node's card has T seconds for the activations at the ends of the runs on it and for what the
                sums of the layers U on it move: f times the bytes of a layer, f from 1 (of a layer that is on
                no other node 0) to 2 (`sync_tables.ring_bytes`)
    sums        all sums together move 2 (n - 1) times the bytes of a layer on n nodes: over all nodes the sum
                of (2 - f) * bytes is no more than 2 * the bytes of the model
    pipelines   where some layer is on one node alone, which all pipelines pass, no more than that node has
    devices;
                of slow cards one more node at the most has such layers (`node_bound`)

The sums of a node are shared by its runs: each run of m devices of the node's g counts m / g of what its
layers move. The layers of a node cost no less so, since each is in runs of g devices at the most and, by the
prices taken, costs something: price of cards * f + price of sums * (2 - f) >= 0.

If no pipeline does more samples for its price than the batch asks for of the value of all rows, no plan does
the batch in T (Farley, Operations Research, 1990). The least price of a pipeline for at least so many
samples comes from `run_kernel`: forwards in front of a run and backwards behind it on the devices that the
pipeline has, and behind the last stage of a run all that its sums move. Prices are those of the linear
programme over the pipelines that stood against a proof. Of Little's law only the
round trip on the fastest devices counts; queues are left out.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from partition.bounds.card_bound import (
    SAFETY,
    NodeShape,
    card_bytes,
    device_shapes,
    gradient_bytes,
    node_shapes,
    output_bytes,
)
from partition.bounds.node_samples import LayerTimes, layer_times
from partition.bounds.pipeline_amounts import PipelineAmounts, all_amounts
from partition.bounds.run_kernel import least_price, needed_s
from partition.bounds.sync_tables import card_directions_s, ring_bytes, summed_bytes
from partition.column_generation.master_problem import MasterProblem, solve_master
from partition.estimates.arrays import Floats, Places, Singles
from partition.estimates.stage_tables import ProblemTables

MOST_KEPT = 600  # tables of runs, each of some 200 KiB
BUCKETS = 64  # of a step, for the paths of pipelines
MOST_MOVED = 2.0  # times its bytes that a layer's sums leave a node, at the most that counts
MOST_LONE = 2  # nodes with a layer for themselves where cards are slow
ROUNDS, TOGETHER = 40, 8  # of prices, and of pipelines that stand against them before others are made
SMOOTH = 0.3  # of the prices before


@dataclass(frozen=True, slots=True)
class _Kind:
    """Nodes of a shape; lone: those that may have layers for themselves; scarce: of which there are few."""

    shape: int
    lone: bool = False
    scarce: bool = False


@dataclass(frozen=True, slots=True)
class _Tables:
    """What `least_price` is given beside prices and samples; card_s: of one sample. fewest: as LayerTimes."""

    times: Floats
    each_s: Floats
    card_s: Floats
    links_s: Floats
    fewest: float


@dataclass(frozen=True, slots=True)
class _Column:
    """What a pipeline takes of each row, what it does, and the step in which it was found."""

    rows: Floats
    samples: float
    step_s: float


@dataclass(slots=True)
class CardColumns:
    """Owns the pipelines that stood against a proof, and the prices.

    home: the shape of a node that alone has some layer, so that all pipelines pass it, none of which is on
    one node; that node is the last of `shapes`. None where every layer is on two nodes or more.
    cards: whether nodes and their cards count; else each device is a node by itself, that sends for nothing.
    """

    tables: ProblemTables
    home: int | None = None
    cards: bool = True
    shapes: list[NodeShape] = field(init=False)
    own: Floats = field(init=False)
    found: list[_Column] = field(default_factory=list)
    prices: Floats | None = None
    _kinds: list[_Kind] = field(default_factory=list)
    _times: dict[tuple[int, ...], list[LayerTimes]] = field(default_factory=dict)
    _needed: dict[object, Singles] = field(default_factory=dict)
    _given: dict[object, _Tables] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.tables.problem
        self.shapes = node_shapes(self.tables) if self.cards else device_shapes(self.tables)
        if self.home is not None:
            home = self.shapes[self.home]
            self.shapes[self.home] = replace(home, count=home.count - 1)
            self.shapes = [*(shape for shape in self.shapes if shape.count), replace(home, count=1)]
        own = ring_bytes(problem, self.tables.network)
        self.own = own if self.cards else np.zeros_like(own)

    def rules_out(self, step_s: float, end_s: float = math.inf) -> bool:
        """Return whether no pipelines do the batch in a step. end_s: on the monotonic clock."""
        step_s *= 1 + SAFETY
        self._kinds = list(self._kinds_of(step_s))
        if self.home is not None and not self._kinds[-1].lone:
            return True
        limits, batch = self._limits(step_s), self.tables.problem.global_batch_size
        prices = self._first_prices() if self.prices is None else self.prices
        waiting = list(all_amounts(self.tables.problem))
        for _ in range(ROUNDS):
            blocking, waiting = self._blocking(prices, step_s, waiting, end_s)
            if time.monotonic() >= end_s or prices @ limits <= 0:
                break
            if not blocking:
                self.prices = prices
                return True
            self.found += blocking
            master = self._master(limits, step_s)
            if master.samples >= batch:
                break
            fresh = master.prices / max(float(master.prices @ limits), 1e-300)
            old = prices / max(float(prices @ limits), 1e-300)
            prices = SMOOTH * old + (1 - SMOOTH) * fresh
        self.prices = prices
        return False

    def _kinds_of(self, step_s: float) -> Iterator[_Kind]:
        """Yield the nodes in a step; none has a layer for itself where its card does not take the batch."""
        for index, shape in enumerate(self.shapes):
            is_home = self.home is not None and index == len(self.shapes) - 1
            if not is_home:
                yield _Kind(index)
            if self.home is not None and step_s >= self._passing_s(shape):
                yield _Kind(index, lone=True, scarce=not is_home and self._slow(shape, step_s))

    def _passing_s(self, shape: NodeShape) -> float:
        """Return the least seconds in which the batch passes a node's card, once for each sample."""
        least = float(gradient_bytes(self.tables)[1:-1].min(initial=np.inf))
        return self.tables.problem.global_batch_size * shape.s_per_byte * least

    def _slow(self, shape: NodeShape, step_s: float) -> bool:
        """Return whether a card takes less than two messages a sample for the batch."""
        return step_s < 2 * self._passing_s(shape)

    @property
    def _least_s(self) -> float:
        return min(shape.s_per_byte for shape in self.shapes)

    def _limits(self, step_s: float) -> Floats:
        """Return what there is of each row: devices and cards by shape, sums, pipelines if limited."""
        rows = [float(shape.count * shape.width) for shape in self.shapes]
        rows += [shape.count * step_s for shape in self.shapes]
        rows.append(2 * self._least_s * float(self.own.sum()))
        if self.home is not None:
            others = MOST_LONE - self._slow(self.shapes[-1], step_s)
            rows += [float(self.shapes[-1].width), float(others)]
        return np.array(rows)

    def _first_prices(self) -> Floats:
        """Return prices of devices by their speed, and none of others."""
        prices = np.zeros(len(self._limits(1.0)))
        prices[: len(self.shapes)] = [shape.rate / shape.width for shape in self.shapes]
        return prices

    def _master(self, limits: Floats, step_s: float) -> MasterProblem:
        known = [column for column in self.found if column.step_s <= step_s]
        rows = [column.rows.tolist() for column in known]
        return solve_master(rows, [column.samples for column in known], limits.tolist())

    def _blocking(
        self, prices: Floats, step_s: float, waiting: list[PipelineAmounts], end_s: float
    ) -> tuple[list[_Column], list[PipelineAmounts]]:
        """Return pipelines that do too much for their price, and the amounts as they are best asked next."""
        limits, batch = self._limits(step_s), self.tables.problem.global_batch_size
        kinds = self._priced(prices)
        each = float(prices[2 * len(self.shapes) + 1]) if self.home is not None else 0.0
        ratio = float(prices @ limits) / batch * (1 + SAFETY)
        found: list[_Column] = []
        order, passed, turn = list(waiting), [], 0
        while turn < len(order) and len(found) < TOGETHER and time.monotonic() < end_s:
            amounts = order[turn]
            turn += 1
            answer = self._asked(kinds, amounts, step_s, amounts.last * ratio - each)
            if answer is None:
                passed.append(amounts)
                continue
            price, column = answer
            if price + each < amounts.first * ratio:
                found.append(column)
                passed.insert(0, amounts)
            else:
                order[turn:turn] = amounts.parts()
        return found, [*passed, *order[turn:]] if len(found) >= TOGETHER else passed

    def _priced(self, prices: Floats) -> Floats:
        """Return the rows of `least_price` by kind, at prices at which sums cost something."""
        count = len(self.shapes)
        rows = []
        for kind in self._kinds:
            shape = self.shapes[kind.shape]
            sums = prices[2 * count] * self._least_s / max(shape.s_per_byte, 1e-300)
            card = prices[count + kind.shape]
            each = prices[kind.shape] + (prices[-1] / shape.width if kind.scarce else 0.0)
            least = 0.0 if kind.lone else 1.0
            alone = self.home is None
            passed = not alone and kind.shape == count - 1
            rows.append([each, card, sums, least, MOST_MOVED, shape.width, float(alone), float(passed)])
        return np.array(rows)

    def _asked(
        self, kinds: Floats, amounts: PipelineAmounts, step_s: float, limit: float
    ) -> tuple[float, _Column] | None:
        """Return the least price of a pipeline below a limit, and that pipeline; None where there is none."""
        if limit <= 0:
            return None
        samples, known = float(amounts.first), self._tables_of(amounts)
        need = np.stack([self._need(kind, amounts) for kind in self._kinds])
        card_s = samples * known.card_s
        many = float(samples >= known.fewest)
        given = np.array([step_s, samples, limit, BUCKETS, many, float(self.home is not None)])
        price, runs, sums_s = least_price(
            kinds, need, known.times, known.each_s, card_s, known.links_s, given
        )
        if price >= limit:
            return None
        return price, _Column(self._column(runs, sums_s, card_s), samples, step_s)

    def _tables_of(self, amounts: PipelineAmounts) -> _Tables:
        """Return what all amounts have in common that end so."""
        shapes = tuple(kind.shape for kind in self._kinds)
        key = (shapes, amounts.size, amounts.least, amounts.most)
        if key not in self._given:
            layers = self._layer_times(amounts)
            paces = np.array([shape.s_per_byte for shape in self.shapes])
            own_s = np.concatenate([[0.0], np.cumsum(self.own)])
            self._given[key] = _Tables(
                np.stack([np.vstack([self._rows(layers[one]), own_s * paces[one]]) for one in shapes]),
                np.stack([layers[one].each_s for one in shapes]),
                paces[list(shapes)][:, None, None] * card_bytes(self.tables),
                self._links_s(amounts),
                max(layers[one].fewest for one in shapes),
            )
        return self._given[key]

    def _column(self, runs: Places, sums_s: Floats, card_s: Floats) -> Floats:
        """Return what a pipeline takes of each row."""
        count = len(self.shapes)
        rows = np.zeros(len(self._limits(1.0)))
        held = np.concatenate([[0.0], np.cumsum(self.own)])
        for (start, stop, index, devices), moved_s in zip(runs, sums_s, strict=True):
            kind = self._kinds[index]
            shape = self.shapes[kind.shape]
            share = devices / shape.width
            rows[kind.shape] += devices
            rows[count + kind.shape] += card_s[index, start, stop] + share * moved_s
            moved_bytes = moved_s / shape.s_per_byte if shape.s_per_byte else 0.0
            rows[2 * count] += share * self._least_s * (2 * (held[stop] - held[start]) - moved_bytes)
            if kind.scarce:
                rows[-1] += share
        if self.home is not None:
            rows[2 * count + 1] = 1.0
        return rows

    @staticmethod
    def _rows(times: LayerTimes) -> Floats:
        """Return the rows of `run_kernel`: last backward, forward, backward and optimizer on the node."""
        last, _, _, forward, backward, optimizer = times.rows
        return np.array([last, forward, backward, optimizer])

    def _layer_times(self, amounts: PipelineAmounts) -> list[LayerTimes]:
        """Return the times of each shape of node."""
        key = (amounts.size, amounts.least, amounts.most)
        if key not in self._times:
            lasts = range(amounts.least, amounts.most + 1)
            self._times[key] = [
                layer_times(self.tables, shape.classes, amounts.size, lasts) for shape in self.shapes
            ]
        return self._times[key]

    def _need(self, kind: _Kind, amounts: PipelineAmounts) -> Singles:
        key = (kind.shape, kind.lone, amounts.size, amounts.least, amounts.most, amounts.first)
        if key not in self._needed:
            if len(self._needed) >= MOST_KEPT:
                self._needed.clear()
            shape, times = self.shapes[kind.shape], self._layer_times(amounts)[kind.shape]
            sums_s = np.maximum(summed_bytes(self.tables.problem), 0.0) * shape.s_per_byte
            if kind.lone:
                sums_s = 0 * sums_s
            rows = self._rows(times)
            widest = max(each.width for each in self.shapes)
            stages_s = times.stages_s(amounts.first, amounts.size)
            self._needed[key] = needed_s(rows, stages_s, sums_s, shape.width, widest)
        return self._needed[key]

    def _links_s(self, amounts: PipelineAmounts) -> Floats:
        """Return the least seconds of a message in front of each layer, between nodes: forward, both ways."""
        cluster, network = self.tables.problem.cluster, self.tables.network
        if not self.cards:  # the next stage may be on the same node
            return np.zeros((2, self.tables.num_layers + 1))
        pace = min(min(card_directions_s(cluster, network, node.devices)) for node in cluster.nodes)
        forward_s = amounts.size * pace * output_bytes(self.tables)
        return np.array([forward_s, forward_s + amounts.least * pace * gradient_bytes(self.tables)])
