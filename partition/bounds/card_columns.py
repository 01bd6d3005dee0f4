"""A bound from whole pipelines and cards together: Farley's argument with prices of cards and of sums.

Its space is that of `node_bound`: all plans whose pipelines share no device and whose states are not sharded,
however sums are made, and whenever they begin behind the last backward of their layer. Its cases: whether
some layer is on one node only, the home of all pipelines, and then whether all pass home's card the same way.
If not, some end at home and some begin there, or are whole there, and home has all layers.

In a step T all pipelines together keep these rows, each with a price that is not negative:

    devices     of each shape of node no more than there are
    cards       a node's card has T seconds for the activations at the ends of the runs on it and for what the
                sums of the layers U on it move: f times the bytes of a layer, f from 1 (of a layer that is on
                no other node 0) to 2 (`sync_tables.ring_bytes`)
    sums        all sums together move 2 (n - 1) times the bytes of a layer on n nodes: over all nodes the sum
                of (2 - f) * bytes is no more than 2 * the bytes of the model
    pipelines   where there is a home no more than it has devices; of slow cards one more node at the most has
                layers for itself (`node_bound`), and none that is faster: the fastest of them is home
    elsewhere   where home has all layers it sums U bytes of them with others: all that they have. So its card
                has T seconds less f * U, and no pipeline has more than U elsewhere

Pipelines that are on home with all layers are in no linear programme: `whole_pipelines` has the most samples
that they do on so many devices of home, in whole pipelines, while home sums U bytes at the least. The others
do the rest of the batch, with the devices that are left to them, and no more pipelines than these. That is
asked for all numbers of devices and all U, and for parts of them until each is proven (`home_parts`). Where
all pass home the same way plans of one pipeline are asked for apart, which sum nothing, and of several, which
sum all that any device holds: also out of it over the links inside its node.

The sums of a node are shared by its runs: each run of m devices of the node's g counts m / g of what its
layers move, or more where pipelines are few (`run_tables.shares_of_sums`). The layers of a node cost no less
so, since runs that have one count no more than once for it and, by the prices taken, it costs something:
price of cards * f + price of sums * (2 - f) >= 0.

If no pipeline does more samples for its price than the batch asks for of the value of all rows, no plan does
the batch in T (Farley, Operations Research, 1990). The least price of a pipeline for at least so many
samples comes from `run_kernel`, which knows of a pipeline in T:

ahead       the forwards in front of a run, on the devices that the pipeline has
tail        when the last backward comes back to the end of a run on v, none of the sums of its layers has
            begun: each waits for the backward of its layer on v, and in every other pipeline, which has that
            layer, too. So when it begins at the end of the model, all that home sums is still to come. f
            times their bytes pass v's card, and home's where it has all layers; all of them leave the run's
            devices where there are several pipelines; and beside them come the run's backwards and the tail
            in front of it. All devices behind the run have ended by then
arrived     when a stage ends its last forward, no more microbatches wait for their backward there than memory
            takes at once: of all others it has done the backward, too. From there that microbatch goes on to
            the end and back, and then comes the tail of each run that it passes

Prices are those of the linear programme over the pipelines that stood against a proof. Of Little's law
only the round trip on the fastest devices counts; queues are left out.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partition.bounds.card_bound import SAFETY, NodeShape, device_shapes, node_shapes, one_way_s
from partition.bounds.card_rows import CardRows, Column, Given, Run
from partition.bounds.home_parts import HomePart, first_parts
from partition.bounds.pipeline_amounts import PipelineAmounts, all_amounts
from partition.bounds.run_tables import RunKind, RunTables
from partition.bounds.sync_tables import ring_bytes
from partition.bounds.whole_pipelines import WholePipelines
from partition.column_generation.master_problem import MasterProblem, solve_master
from partition.estimates.arrays import Floats
from partition.estimates.layer_bytes import between
from partition.estimates.stage_tables import ProblemTables

BUCKETS, LATE = 32, 8  # of a step, for the paths of pipelines, and for when their last microbatch arrives
MOST_PARTS = 32  # of the plans with a home, that are looked at in a step
ROUNDS, TOGETHER = 40, 8  # of prices, and of pipelines that stand against them before others are made
SMOOTH = 0.3  # of the prices before


@dataclass(slots=True)
class CardColumns:
    """Owns the pipelines that stood against a proof, and the prices.

    home: the shape of a node that alone has some layer, so that all pipelines pass it; no faster node has
    such layers. That node is the last of `shapes`. None where every layer is on two nodes or more. whole:
    whether some pipeline ends on that node and some begins there, or is there alone; if not, none is.
    cards: whether nodes and their cards count; else each device is a node by itself, that sends for nothing.
    """

    tables: ProblemTables
    home: int | None = None
    whole: bool = False
    cards: bool = True
    shapes: list[NodeShape] = field(init=False)
    own: Floats = field(init=False)
    found: dict[tuple[RunKind, ...], list[Column]] = field(default_factory=dict)
    prices: Floats | None = None
    _kinds: list[RunKind] = field(default_factory=list)
    _rows: CardRows = field(init=False)
    _runs: RunTables = field(init=False)
    _given: dict[object, Given] = field(default_factory=dict)
    _wholes: list[WholePipelines] = field(default_factory=list)  # one, several, several beside others
    _one_way_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem = self.tables.problem
        self.shapes = node_shapes(self.tables) if self.cards else device_shapes(self.tables)
        home_s_per_byte = 0.0
        if self.home is not None:
            home = self.shapes[self.home]
            self.shapes[self.home] = replace(home, count=home.count - 1)
            self.shapes = [*(shape for shape in self.shapes if shape.count), replace(home, count=1)]
            home_s_per_byte = home.s_per_byte if self.whole else 0.0
        own = ring_bytes(problem, self.tables.network)
        self.own = own if self.cards else np.zeros_like(own)
        self._rows = CardRows(self.tables, self.shapes, self.own, self.home is not None, self.whole)
        self._runs = RunTables(self.tables, self.shapes, self.own, self.cards, home_s_per_byte)
        if self.home is not None:
            self._one_way_s = [one_way_s(self.tables, shape) for shape in self.shapes]
        if self.whole:
            single = RunKind(len(self.shapes) - 1, lone=True)
            beside = replace(single, several=True)
            kinds = single, replace(beside, alone=True), beside
            self._wholes = [WholePipelines(self._runs, kind) for kind in kinds]

    def rules_out(self, step_s: float, end_s: float = math.inf) -> bool:
        """Return whether no pipelines do the batch in a step. end_s: on the clock of CPU seconds.

        Where all pass a home that is asked for all plans, and then for parts of them, until each part is
        proven (branch and bound).
        """
        step_s *= 1 + SAFETY
        self._runs.within(step_s)
        width, batch = self.shapes[-1].width, self.tables.problem.global_batch_size
        if self.home is not None and not self.whole and step_s < self._one_way_s[-1]:
            return True
        if self.whole:
            single, several, _ = self._wholes
            if single.most_samples(step_s, single=True)[width] >= batch:
                return False
            if width == 1:
                return True
            if several.most_samples(step_s)[width] >= batch:
                return False
        ends = float(self.own[0] + self.own[-1]) / max(float(self.own.sum()), 1e-300)
        firsts = first_parts(width, whole=self.whole, ends=ends)
        parts = [(part, list(all_amounts(self.tables.problem))) for part in firsts]
        for _ in range(MOST_PARTS):
            part, waiting = parts.pop()
            proven, waiting = self._proven(part, step_s, waiting, end_s)
            if not proven:
                smaller = part.parts(sums=bool(self.own.any())) if self.home is not None else ()
                if not smaller or time.process_time() >= end_s:
                    return False
                parts += [(one, list(waiting)) for one in smaller]
            if not parts:
                return True
        return False

    def _proven(
        self, part: HomePart, step_s: float, waiting: list[PipelineAmounts], end_s: float
    ) -> tuple[bool, list[PipelineAmounts]]:
        """Return whether no pipelines do the batch, and the amounts as they are best asked next."""
        left_s = part.least * float(self.own.sum()) * self.shapes[-1].s_per_byte  # of home's sums
        if step_s < left_s:
            return True, waiting
        self._given.clear()
        self._kinds = list(self._kinds_of(step_s, part))
        limits, done = self._rows.limits(part, step_s), np.zeros(1)
        if self.whole:
            done = self._wholes[-1].most_samples(step_s, sums_s=left_s)
        prices = self._first_prices(limits) if self.prices is None else self.prices
        columns = self.found.setdefault(tuple(self._kinds), [])
        for turn in range(ROUNDS):
            known = (limits, done), (step_s, left_s)
            master = self._master(part, columns, *known) if turn or columns else None
            if master is not None:
                if master.samples >= self.tables.problem.global_batch_size - done[part.first]:
                    break
                fresh = master.prices / max(float(master.prices @ limits), 1e-300)
                old = prices / max(float(prices @ limits), 1e-300)
                prices = SMOOTH * old + (1 - SMOOTH) * fresh
            ratio = self._rows.ratio(part, prices, limits, done)
            if not 0 < ratio < math.inf:
                break
            blocking, waiting = self._blocking(part, (prices, ratio), (step_s, left_s), waiting, end_s)
            if time.process_time() >= end_s:
                break
            if not blocking:
                self.prices = prices
                return True, waiting
            columns += blocking
        self.prices = prices
        return False, waiting

    def _kinds_of(self, step_s: float, part: HomePart) -> Iterator[RunKind]:
        """Yield the nodes in a step; none has a layer for itself where its card does not take the batch.

        A single pipeline has each layer on one node, so that all of its nodes have some.
        """
        *others, home = range(len(self.shapes))
        if self.home is None:
            others.append(home)
        for index in others if not part.single else []:
            yield RunKind(index)
        if self.home is None:
            return
        for index in others if not self.whole else []:
            shape = self.shapes[index]
            passed = shape.passed_by_all and step_s >= self._one_way_s[index]
            if passed and shape.rate <= self.shapes[home].rate:
                yield RunKind(index, True, self._rows.slow(shape, step_s), part.several)
        yield RunKind(home, lone=True, several=part.several)

    def _first_prices(self, limits: Floats) -> Floats:
        """Return prices of devices by their speed, and none of others."""
        prices = np.zeros(len(limits))
        prices[: len(self.shapes)] = [shape.rate / shape.width for shape in self.shapes]
        return prices

    def _master(
        self,
        part: HomePart,
        columns: Sequence[Column],
        rows: tuple[Floats, Floats],
        within_s: tuple[float, float],
    ) -> MasterProblem | None:
        """Solve the linear programme over the pipelines that were found within a step; None without any.

        rows: what there is of each, and samples of whole pipelines. within_s: as `_blocking` has it.
        """
        (limits, done), (step_s, left_s) = rows, within_s
        given = self._given_for(part, next(all_amounts(self.tables.problem)))
        known = [
            column
            for column in columns
            if column.step_s <= step_s
            and column.left_s >= left_s
            and all(given.open_runs[run.kind, run.start, run.stop] for run in column.runs)
        ]
        if not known:
            return None
        taken = [self._rows.taken(column, self._kinds, given, part).tolist() for column in known]
        samples, left = [column.samples for column in known], self._rows.left(part, limits).tolist()
        if self.whole:  # one number of devices of home, or parts of several
            more, beside = self._rows.whole_devices(part, done)
            taken = [[*row, 0.0] for row in taken] + [[*row, 1.0] for row in more]
            samples, left = samples + beside, [*left, 1.0]
        found = solve_master(taken, samples, left)
        return replace(found, prices=found.prices[: len(limits)])

    def _blocking(
        self,
        part: HomePart,
        priced: tuple[Floats, float],
        within_s: tuple[float, float],
        waiting: list[PipelineAmounts],
        end_s: float,
    ) -> tuple[list[Column], list[PipelineAmounts]]:
        """Return pipelines that do too much for their price, and the amounts as they are best asked next.

        priced: the prices of the rows, and the least of a sample. within_s: the step, and what is left of
        sums behind a pipeline's last backward of the last layer.
        """
        prices, ratio = priced[0], priced[1] * (1 + SAFETY)
        each = float(prices[2 * len(self.shapes) + 1]) if self.home is not None else 0.0
        found: list[Column] = []
        order, passed, turn = list(waiting), [], 0
        while turn < len(order) and len(found) < TOGETHER and time.process_time() < end_s:
            amounts = order[turn]
            turn += 1
            given = self._given_for(part, amounts)
            asked = amounts, (*within_s, amounts.last * ratio - each)
            answer = self._asked(part, given, prices, *asked)
            full = amounts.without_last() if answer is not None else None
            if full is not None and answer is not None:  # so do those in front of a smaller last microbatch
                stricter = self._asked(part, self._given_for(part, full), prices, full, asked[1])
                answer = max(answer, stricter, key=lambda one: one[0]) if stricter else None
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
            sums = prices[2 * count] * self._rows.least_s / max(shape.s_per_byte, 1e-300)
            card = prices[count + kind.shape]
            each = prices[kind.shape]
            if kind.scarce:
                each += prices[2 * count + 2] / shape.width
            passed = self.home is not None and kind.shape == count - 1
            rows.append([each, card, sums, shape.width, float(passed)])
        return np.array(rows)

    def _asked(
        self,
        part: HomePart,
        given: Given,
        prices: Floats,
        amounts: PipelineAmounts,
        limits: tuple[float, float, float],
    ) -> tuple[float, Column] | None:
        """Return the least price of a pipeline below a limit, and that pipeline; None where there is none.

        limits: as `_blocking` has them, and of the price.
        """
        from partition.bounds.run_kernel import least_price  # loads a compiler

        step_s, left_s, limit = limits
        if limit <= 0:
            return None
        kinds, shares = self._priced(prices), self._runs.shares
        runs_s = given.runs_s.copy()
        runs_s[0] *= amounts.first * kinds[:, 1, None, None]
        if self.whole:
            runs_s[0] += amounts.first * prices[-1] * given.elsewhere
        price, found = least_price(
            kinds,
            self._rows.shares(part)[[kind.shape for kind in self._kinds]],
            shares,
            self._runs.needed(self._kinds, amounts),
            self._runs.late_s(self._kinds, amounts, left_s),
            given.ways,
            given.sums_s,
            given.inside_s,
            runs_s,
            given.open_runs,
            given.links_s,
            np.array([step_s, limit, BUCKETS, LATE, float(self.home is not None), left_s]),
        )
        if price >= limit:
            return None
        runs = []
        for start, stop, kind, devices, share in found.tolist():
            dear = int(kinds[kind, 2] > kinds[kind, 1])
            runs.append(Run(start, stop, kind, devices, float(shares[dear, share]), 2.0 * dear))
        return price, Column(tuple(runs), amounts.first, step_s, left_s)

    def _given_for(self, part: HomePart, amounts: PipelineAmounts) -> Given:
        """Return what all amounts have in common that end so."""
        key = (amounts.size, amounts.least, amounts.most)
        if key not in self._given:
            kinds, runs, num_layers = self._kinds, self._runs, self.tables.num_layers
            runs_s, batch = runs.runs_s(kinds), self.tables.problem.global_batch_size
            open_runs = np.ones((len(kinds), num_layers + 1, num_layers + 1), np.bool_)
            share = between(self.own) / max(float(self.own.sum()), 1e-300)
            elsewhere = np.stack([share * (kind.shape != len(self.shapes) - 1) for kind in kinds])
            if self.home is not None:
                open_runs[:, 0, num_layers] = False
            if self.whole:
                open_runs &= elsewhere <= part.most * (1 + SAFETY)
                runs_s[1:, -1] = 0.0  # home sums what others have, too
            ways, links_s = runs.ways(kinds, amounts), runs.links_s(amounts)
            sums_s, inside_s = runs.sums_s(kinds), runs.inside_s(kinds)
            self._given[key] = Given(ways, sums_s, inside_s, runs_s, open_runs, links_s, elsewhere / batch)
        return self._given[key]
