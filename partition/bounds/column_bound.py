"""Large clusters: a lower bound on the step of all plans whose pipelines share no device.

For a step time T and prices of the device classes, Farley's bound (Operations Research, 1990) says: if every
pipeline does fewer than batch / (value of all devices) samples per price of its devices, then no set of
pipelines does the batch in T. Any prices make a bound; good ones come from the linear programme over the
columns of the search and those that stood against a proof. `pricing_bound` gives the least price of a
pipeline for an amount of samples. Amounts are taken in intervals (most samples at the price of the fewest),
paths of pipelines in ranges; both are split, and the grid refined, only where the bound is not proven yet
(branch and bound).
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np

from partition.bounds.amount_intervals import Interval, Node
from partition.bounds.pricing_bound import FAR, PriceBounds
from partition.bounds.relaxed_stages import FamilyStages
from partition.column_generation.column_generation import ColumnPool, search_cuts
from partition.column_generation.master_problem import Limits, MasterProblem, solve_master
from partition.estimates.amounts import Amount
from partition.estimates.arrays import Floats
from partition.estimates.stage_tables import ProblemTables
from partition.exact.cluster_split import SAFETY, families

GROWTH = 1.6
WHOLE = 2**16  # what the dearest class costs
DEAR = 1000.0  # most that a pipeline costs beside its devices, over the dearest class
WAVE = 120  # intervals looked at together, those that do most for their price first
ROUNDS = 12
SMOOTH = 0.3
FEW_CUTS = 26
PATIENCE = 0.5  # of the seconds that are left, for one step


@dataclass(slots=True)
class ColumnBound:
    """The owner of the columns that stood against a proof; `bound_s` searches the largest provable step.

    pool: columns that a search has found, on classes that are parts of these; they make good prices from the
    start. exhausted: the last search ended with its seconds, not where its columns stand against it.
    most_pipelines: that a plan may have, None for any number; then the last price is that of being one.
    """

    tables: ProblemTables
    seconds: float
    pool: ColumnPool | None = None
    most_pipelines: int | None = None
    exhausted: bool = False
    prices: Floats = field(init=False)
    found: list[tuple[tuple[int, ...], float, float]] = field(default_factory=list)
    _families: dict[object, FamilyStages] = field(default_factory=dict)
    _deadline: float = field(init=False, default=math.inf)

    def __post_init__(self) -> None:
        self.prices = np.ones(len(self.limits))
        self.prices[self.num_classes :] = 0.0

    def bound_s(self, low_s: float, high_s: float, tolerance: float = 1e-2) -> float:
        """Return a step that no plan of disjoint pipelines undercuts.

        low_s is known to be a bound, high_s the time of a plan; the search ends when the two meet within the
        tolerance, or the seconds are spent.
        """
        begin = time.process_time()
        end, guess = begin + self.seconds, low_s + 0.5 * (high_s - low_s)
        if self.tables.num_layers > FEW_CUTS:
            few = search_cuts(self.tables, FEW_CUTS)
            reached, high_s = self._search(
                low_s, high_s, guess, tolerance=2 * tolerance, end=begin + 0.25 * self.seconds, cuts=few
            )
            guess = low_s + 0.6 * (reached - low_s) if reached > low_s else guess
        return self._search(low_s, high_s, guess, tolerance=tolerance, end=end)[0]

    def _search(
        self,
        low: float,
        high: float,
        guess: float,
        *,
        tolerance: float,
        end: float,
        cuts: list[int] | None = None,
    ) -> tuple[float, float]:
        """Return (the largest step proven for pipelines with such cuts, the least that is not)."""
        self.exhausted = False
        while high > low * (1 + tolerance):
            now = time.process_time()
            if now > end:
                self.exhausted = True
                break
            self._deadline = now + max(PATIENCE * (end - now), min(end - now, 0.1 * self.seconds))
            proven, reach = self._proven(guess, cuts)
            if proven:
                low = guess
                guess = low + 0.5 * (high - low)
            else:
                high = guess
                guess = 0.985 * reach if low < 0.985 * reach < high else low + 0.5 * (high - low)
        return low, high

    def _proven(self, step_s: float, cuts: list[int] | None) -> tuple[bool, float]:
        """Return whether no set of disjoint pipelines does the batch in a step, and where else to try."""
        known = self._known(step_s)
        if known:
            self._learn(self._master(known, step_s), 1.0)
        return self._rounds(PriceBounds(self.tables, self._families, step_s, cuts), known)

    def _rounds(self, bounds: PriceBounds, known: list[tuple[tuple[int, ...], float]]) -> tuple[bool, float]:
        """Answer as `_proven` does, for the pipelines of some price bounds, with ever better prices."""
        batch, step_s = self.tables.problem.global_batch_size, bounds.step_s
        for _ in range(ROUNDS):
            prices, each = self._whole_prices()
            value = float(prices @ self.limits[: self.num_classes]) + each * (self.most_pipelines or 0)
            blocking = self.blocking(bounds, prices, batch * (1 - SAFETY) / value, each)
            if blocking is None:
                return True, step_s
            if time.process_time() > self._deadline:
                break
            self.found += [(uses, samples, step_s) for uses, samples in blocking.items()]
            master = self._master(known, step_s)
            if master.samples >= batch:
                return False, step_s * batch / master.samples
            self._learn(master, 1 - SMOOTH)
        return False, 0.0

    @property
    def num_classes(self) -> int:
        return len(self.tables.classes.members)

    @property
    def limits(self) -> Floats:
        """How many devices of each class there are, and pipelines at the most, where these are limited."""
        pipelines = () if self.most_pipelines is None else (self.most_pipelines,)
        return np.array([*self.tables.classes.counts, *pipelines], dtype=np.float64)

    def _whole_prices(self) -> tuple[Floats, float]:
        """Return (prices of the classes as whole numbers, what a pipeline costs beside its devices)."""
        whole = min(WHOLE, FAR // (self.tables.num_layers + 1))
        classes, each = self.prices[: self.num_classes], float(self.prices[self.num_classes :].sum())
        scale = whole / max(float(classes.max()), each / DEAR, 1e-300)
        return np.maximum(1.0, np.rint(classes * scale)), float(np.rint(each * scale))

    def _known(self, step_s: float) -> list[tuple[tuple[int, ...], float]]:
        known = self._alone(step_s)
        if self.pool is not None:
            class_indices, count = self.tables.classes.class_indices(), self.num_classes
            into = np.zeros((len(self.pool.tables.classes.members), count), dtype=int)
            for part, group in enumerate(self.pool.tables.classes.members):
                into[part, class_indices[group[0].name]] = 1
            for column, value in zip(self.pool.columns.values(), self.pool.values(step_s), strict=True):
                if value:
                    known.append((tuple((np.array(column.uses) @ into).tolist()), float(value)))
        return known

    @property
    def _ends_s(self) -> Floats:
        """What a whole model on a device takes after its last backward, by class."""
        return self.tables.at(1).amount(Amount.whole(1, 1)).end_s[:, 0, -1]

    def _alone(self, step_s: float) -> list[tuple[tuple[int, ...], float]]:
        """Return single devices with what they do in a step: good prices where memory is ample."""
        batch, sizes = self.tables.problem.global_batch_size, self.tables.problem.microbatch_sizes
        busy = {one: self.tables.at(one).busy_s[:, 0, -1] for one in range(1, max(sizes) + 1)}
        most = np.zeros(self.num_classes, dtype=np.int64)
        for size in sizes:
            left = step_s - self._ends_s
            full = np.maximum(0, np.floor(left / busy[size])).astype(np.int64)
            rest = np.zeros_like(full)
            for one in range(1, size):
                rest = np.where(full * busy[size] + busy[one] <= left, one, rest)
            fits = self.tables.at(size).caps(recompute=False)[:, 0, -1] >= 1
            most = np.maximum(most, np.where(fits, full * size + rest, 0))
        done: list[int] = np.minimum(most, batch).tolist()
        rows: list[list[int]] = np.eye(len(done), dtype=int).tolist()
        return [(tuple(row), float(count)) for row, count in zip(rows, done, strict=True) if count]

    def _master(self, known: list[tuple[tuple[int, ...], float]], step_s: float) -> MasterProblem:
        """Solve the linear programme; columns that stood against longer steps do not count."""
        columns: dict[tuple[int, ...], float] = {}
        found = [(uses, samples) for uses, samples, found_s in self.found if found_s <= step_s]
        for uses, samples in [*known, *found]:
            columns[uses] = max(columns.get(uses, 0.0), samples)
        counts = self.tables.classes.counts
        limits = Limits(most_pipelines=self.most_pipelines)
        return solve_master(list(columns), list(columns.values()), counts, limits)

    def _learn(self, master: MasterProblem, share: float) -> None:
        """Move the prices nearer to those of the linear programme by a share."""
        prices = np.array([*master.prices, master.each][: len(self.limits)])
        value = float(prices @ self.limits)
        if value > 0:
            old = self.prices * (value / max(float(self.prices @ self.limits), 1e-300))
            self.prices = (1 - share) * old + share * prices

    def blocking(
        self, bounds: PriceBounds, prices: Floats, ratio: float, each: float = 0.0
    ) -> dict[tuple[int, ...], float] | None:
        """Return devices and samples of pipelines that do too many for their price; None where none does.

        The price is that of the devices, whole numbers by class, and what each pipeline costs beside them.
        """
        waiting = [(0.0, Node.whole(interval)) for interval in self._intervals()]
        columns: dict[tuple[int, ...], float] = {}
        most_stages = min(self.tables.num_layers, sum(self.tables.classes.counts))
        while waiting and len(columns) < 2 * len(prices) + 2:
            waiting.sort(key=lambda pair: pair[0])
            work, waiting = [node for _, node in waiting[:WAVE]], waiting[WAVE:]
            asked = [node.path_range(node.interval.top / ratio - each) for node in work]
            for index, bound in bounds.solve(asked, prices):
                node = work[index]
                if time.process_time() > self._deadline:
                    return columns
                price = bound.price + each
                if node.interval.top < ratio * price:
                    continue
                raised = node.within(node.interval.above(ratio * price))
                if bound.real and node.interval.fewest >= ratio * price:
                    parts = []
                else:
                    parts = raised.parts(bound, most_stages)
                    if not parts and raised != node:
                        parts = [raised]
                if not parts:
                    uses = [0] * len(prices)
                    for stage in bound.stages:
                        uses[stage.class_index] += 1
                    columns[tuple(uses)] = max(node.interval.fewest, columns.get(tuple(uses), 0.0))
                waiting += [(-part.interval.fewest / price, part) for part in parts]
        return columns or None

    def _intervals(self) -> list[Interval]:
        """Return all amounts of samples, coarsely; those that no order of devices does fall out at once."""
        batch, sizes = self.tables.problem.global_batch_size, self.tables.problem.microbatch_sizes
        found, below = [], 0
        for size in (size for size in sizes if size <= batch):
            if size - below > 1:
                found.append(Interval(size, 0, 0, below + 1, size - 1))
            below = size
            for _, least, most in families(size):
                first = 1
                while first * size <= batch:
                    last = min(batch // size, max(first, int(first * GROWTH) - 1))
                    found.append(Interval(size, first, last, least, most))
                    first = last + 1
        if max(sizes) > batch > below:
            found.append(Interval(batch + 1, 0, 0, below + 1, batch))
        return found
