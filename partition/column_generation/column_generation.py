"""Large clusters: a linear programme whose columns are pipelines over device classes.

For a step time T it chooses how many pipelines of each column to run so that most samples are done in T, with
no more devices of a class than there are; T is the least at which they do the batch. New columns come from
`pricing_problem` at the dual prices (column generation: Gilmore and Gomory, Operations Research 1961). A
column's samples are whole and come from the clock of its own 1F1B schedule, not from a closed form.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cost_model.cluster import Device
from partition.column_generation.master_problem import NO_LIMITS, Limits, MasterProblem, MasterProgramme
from partition.column_generation.pricing_problem import PricedPipeline, PricingProblem
from partition.estimates.arrays import Floats
from partition.estimates.class_pipeline import ColumnStage
from partition.estimates.device_classes import DeviceClasses
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import PipelineTiming, TimedStage, TimingCache

LEVELS = (24, 16)  # of the grid, in turn: one misses columns that the other finds
ROUNDS = 14
STALE = 3
CLOSE = 4e-3  # relative: how exactly the least step is found
KEPT = 0.97  # columns are added whose samples per price reach this share of the best
SMOOTH = 0.4
NEW = 60  # columns added in a round
MOST_CUTS = 40
UNMET = 1.25  # times the step from round to round, while columns do not keep to the limits
LONGEST = 1000.0  # times the guess: a step after which longer ones would not do either
WIDE, NEAR = 12, 4  # amounts of samples that stay in the search, and those tried a little more and less


@dataclass(frozen=True, slots=True)
class Column:
    """A pipeline on classes of devices: how many of each it takes, and its timing.

    most: samples that it may be asked for; as many steps' as it takes of what there is of a class.
    """

    microbatch_size: int
    stages: tuple[ColumnStage, ...]
    timing: PipelineTiming
    uses: tuple[int, ...]
    most: int


@dataclass(slots=True)
class ColumnPool:
    """The columns found so far, priced again and again at other step times."""

    tables: ProblemTables
    timings: TimingCache
    columns: dict[tuple[int, tuple[ColumnStage, ...]], Column] = field(default_factory=dict)

    def add(self, found: Iterable[PricedPipeline]) -> int:
        """Add pipelines that memory takes, and return how many columns are new.

        A column may take more devices of a class than there are: a part of it then counts in the relaxed
        programme, which drives the price of the class up.
        """
        before = len(self.columns)
        for pipeline in found:
            key = (pipeline.microbatch_size, pipeline.stages)
            if key not in self.columns:
                column = self._column(pipeline.microbatch_size, pipeline.stages)
                if column is not None:
                    self.columns[key] = column
        return len(self.columns) - before

    def _column(self, microbatch_size: int, stages: tuple[ColumnStage, ...]) -> Column | None:
        classes = self.tables.classes
        uses = [0] * len(classes.members)
        for stage in stages:
            uses[stage.class_index] += 1
        named = [
            TimedStage(classes.members[stage.class_index][0], stage.start, stage.stop, stage.recompute)
            for stage in stages
        ]
        channels = [
            best_channel(
                classes, self.timings, left.class_index, right.class_index, right.start, microbatch_size
            )
            for left, right in itertools.pairwise(stages)
        ]
        timing = self.timings.timing(named, channels, microbatch_size)
        if not timing.fits:
            return None
        parts = max(-(-use // count) for use, count in zip(uses, classes.counts, strict=True))
        most = parts * self.tables.problem.global_batch_size
        return Column(microbatch_size, stages, timing, tuple(uses), most)

    def values(self, step_s: float) -> list[int]:
        """Return the samples that each column can do in a step."""
        return [column.timing.most(step_s, column.most) for column in self.columns.values()]


def best_channel(
    classes: DeviceClasses, timings: TimingCache, first: int, second: int, layer: int, size: int
) -> tuple[Device, Device]:
    """Return the pair of devices with the fastest channel between two classes.

    A class of one device has none with itself: then the best of its channels stands for it, as in
    `pricing_problem`; such a column cannot become whole.
    """
    pairs = classes.channels(first, second) or tuple(
        pair for other in range(len(classes.members)) for pair in classes.channels(first, other)
    )
    message_s = timings.costs.message_s
    return min(pairs, key=lambda pair: sum(message_s(pair[0], pair[1], layer, size)))


@dataclass(frozen=True, slots=True)
class Columns:
    """The outcome of column generation: step_s is the least at which the columns do the batch, relaxed."""

    pool: ColumnPool
    step_s: float


def generate(
    tables: ProblemTables,
    timings: TimingCache,
    *,
    rounds: int = ROUNDS,
    levels: Sequence[int] = LEVELS,
    limits: Limits = NO_LIMITS,
    pool: ColumnPool | None = None,
) -> Columns:
    """Return columns and the step time of the linear programme; inf where no pipeline was found.

    pool: columns that are known already; more are added to it.
    """
    counts, batch = np.array(tables.classes.counts, dtype=np.float64), tables.problem.global_batch_size
    rates = _rates(tables)
    step_s = 1.1 * batch / float(rates @ counts)
    prices, fee = rates * batch / float(rates @ counts), 0.0
    pool = pool or ColumnPool(tables, timings)
    grid = {size: _amounts(size, batch, step_s, rates, tables) for size in tables.problem.microbatch_sizes}
    amounts, cuts = grid, search_cuts(tables)
    best, stale = math.inf, 0
    for turn in range(rounds):
        found = [
            (pipeline.num_samples / max(pipeline.price + fee, 1e-12), pipeline)
            for size, samples in amounts.items()
            if samples
            for pipeline in PricingProblem(
                tables,
                size,
                [value // size for value in samples],
                step_s,
                levels=levels[turn % len(levels)],
                cuts=cuts,
            ).solve(prices)
            if pipeline is not None
        ]
        found.sort(key=lambda pair: -pair[0])
        top = found[0][0] if found else 0.0
        new = pool.add(pipeline for ratio, pipeline in found[:NEW] if ratio >= min(1.001, KEPT * top))
        if not pool.columns:
            step_s *= 2
            grid = {size: _amounts(size, batch, step_s, rates, tables) for size in grid}
            amounts = grid
            continue
        least_s, master = least_step(pool, batch, counts, step_s, limits)
        stale = stale + 1 if least_s > best * (1 - 1e-3) or not new else 0
        best, step_s = min(best, least_s), least_s if math.isfinite(least_s) else UNMET * step_s
        if stale >= STALE:
            break
        smooth = SMOOTH if new else 0.0  # dual prices of few columns jump
        prices = smooth * prices + (1 - smooth) * master.prices
        fee = master.each
        amounts = (
            grid
            if stale == STALE - 1
            else _promising([(pipeline.microbatch_size, pipeline.num_samples) for _, pipeline in found])
        )
    return Columns(pool, best)


def least_step(
    pool: ColumnPool, batch: int, counts: Floats, guess_s: float, limits: Limits = NO_LIMITS
) -> tuple[float, MasterProblem]:
    """Return the least step time at which the pool's columns do the batch, and the programme there.

    The step is inf where they cannot do it within the limits, however long it is.
    """
    uses = [column.uses for column in pool.columns.values()]
    programme = MasterProgramme(uses, list(counts), limits)

    def master(step_s: float) -> MasterProblem:
        return programme.solve(pool.values(step_s))

    def done(found: MasterProblem) -> bool:
        return found.met and found.samples >= batch

    low, high = 0.0, guess_s
    answer = master(high)
    strict = limits.demanding or limits.most_devices is not None
    strict |= pool.tables.prices.first_trained > 0  # outputs that wait may have no room, in any time
    if strict and not done(answer) and not done(master(LONGEST * guess_s)):
        return math.inf, answer
    while not done(answer):
        low, high = high, 1.5 * high
        answer = master(high)
    while high > max(low, 1e-300) * (1 + CLOSE):
        share = batch / max(answer.samples, 1e-12)
        middle = max(high * share * 0.999, (low + high) / 2) if low else high * min(0.95, share)
        middle = middle if low < middle < high else (low + high) / 2
        trial = master(middle)
        if done(trial):
            high, answer = middle, trial
        else:
            low = middle
    return high, answer


def search_cuts(tables: ProblemTables, most: int = MOST_CUTS) -> list[int]:
    """Return where the stages of columns may begin and end: everywhere, or `most` places of equal work.

    The exact re-cut of each pipeline for its devices may then use every layer.
    """
    layers = tables.num_layers
    if layers <= most:
        return list(range(layers + 1))
    work = tables.at(1).busy_s[:, 0, :].min(axis=0)
    work[0] = 0.0
    targets = np.linspace(0, work[-1], most - 1)
    return sorted({0, 1, layers - 1, layers, *np.abs(work[None] - targets[:, None]).argmin(axis=1).tolist()})


def _rates(tables: ProblemTables) -> Floats:
    """Return samples per second of each class at its best microbatch size, as if it held all layers."""
    rates = [
        size / np.maximum(tables.at(size).busy_s[:, 0, -1], 1e-300)
        for size in tables.problem.microbatch_sizes
    ]
    return np.asarray(np.minimum(np.max(rates, axis=0), 1e12))


def _amounts(size: int, batch: int, step_s: float, rates: Floats, tables: ProblemTables) -> list[int]:
    """Return amounts of samples of a pipeline: a geometric grid of whole microbatches."""
    counts = np.sort(np.repeat(rates, np.minimum(tables.classes.counts, tables.num_layers)))[::-1]
    most = min(batch, int(2 * step_s * float(counts[: tables.num_layers].sum())) + size)
    grid = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048]
    return [size * count for count in grid if size * count <= most]


def _promising(ranked: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the amounts of samples that did best, by microbatch size, and those beside the very best."""
    amounts: dict[int, set[int]] = {}
    for place, (size, samples) in enumerate(ranked[:WIDE]):
        step = max(1, samples // size // 8) * size
        near = (samples - step, samples + step) if place < NEAR else ()
        amounts.setdefault(size, set()).update(value for value in (samples, *near) if value >= size)
    return {size: sorted(values) for size, values in amounts.items()}
