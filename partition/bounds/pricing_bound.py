"""Lower bounds on the price of every pipeline that does an amount of samples within a step.

A dynamic programme over suffixes of stages, from the last to the first; its own, the resource is that of
`column_generation.pricing_problem`, rounded so that it bounds from below.

    state       (start, u): the first layer of the suffix, and its share u of the pipeline's path: the busy
                and link times of the first forward and the last backward, in steps of a grid
    label       the least price of a suffix of that state; prices are whole numbers, exact in single precision
    transition  a stage (option, start, stop) in front of the state (stop, u - its own share), rounded down
    complexity  ranges x options x layers^2 x levels, in NumPy by start

Given U, the whole path of the pipeline, u tells both what Z needs and what Little's law needs: A, the path
before a stage, is at least U - u, and the round trip W of a microbatch from the stage on is at least u. So
for pipelines of U from `low` on, a stage is allowed if

    total time + max(0, low - u) <= step  and  passes * W / in_flight + max(0, low - u) <= step

and also with what the stage waits in its warmup and cooldown (`relaxed_stages.waited_s`) in the total time.
The narrower the ranges of U that are looked at one by one, the less is lost. Links are the best that the
classes have.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from partition.bounds.relaxed_stages import TOLERANCE, FamilyStages, PathRange, RelaxedStages, Space, waited_s
from partition.estimates.amounts import Amount
from partition.estimates.arrays import Bools, Floats, Integers, Places, Singles
from partition.estimates.class_pipeline import ColumnStage
from partition.estimates.stage_tables import ProblemTables

SLACK = 1e-6  # of a step of the grid
MOST_CELLS = 1_200_000  # candidates looked at together
FAR = 2**24  # sums of whole prices below it are exact in single precision


@dataclass(frozen=True, slots=True)
class PriceBound:
    """The least price, and a pipeline of it, with its path in steps of the grid; inf where there is none.

    real: the pipeline passes the samples, nothing rounded.
    """

    price: float
    stages: tuple[ColumnStage, ...] = ()
    path: int = 0
    real: bool = False


class PriceBounds:
    """The owner of the arrays of a step time.

    cuts: where stages may begin and end, both ends included; None for every layer. With fewer cuts the bounds
    are of fewer pipelines.
    """

    def __init__(
        self,
        tables: ProblemTables,
        families: dict[object, FamilyStages],
        step_s: float,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.tables, self.step_s, self._families = tables, step_s, families
        self.cuts = list(range(tables.num_layers + 1)) if cuts is None else list(cuts)
        self._space = Space(tables, step_s, self.cuts)
        self._amounts: dict[tuple[Amount, int], RelaxedStages] = {}

    def stages(self, amount: Amount, size: int) -> RelaxedStages:
        if (amount, size) not in self._amounts:
            key = (size, min(amount.full, 1), amount.least, amount.most, amount.rest)
            if key not in self._families:
                self._families[key] = FamilyStages(self.tables, amount, size)
            made = RelaxedStages(self._families[key], amount, size, self._space)
            self._amounts[amount, size] = made
        return self._amounts[amount, size]

    def solve(self, asked: Sequence[PathRange], prices: Floats) -> Iterable[tuple[int, PriceBound]]:
        """Yield (index, bound) for each of those asked, in any order; prices are whole."""
        groups: dict[object, list[int]] = {}
        for index, path_range in enumerate(asked):
            stages = self._stages_of(path_range)
            if not stages.options or path_range.first > stages.longest(path_range):
                yield index, PriceBound(np.inf)
                continue
            key = (stages.options, -(-stages.levels(path_range) // 32))
            groups.setdefault(key, []).append(index)
        for members in groups.values():
            members.sort(key=lambda index: (asked[index].size, asked[index].amount.full))
            levels = max(self._stages_of(asked[index]).levels(asked[index]) for index in members)
            num_options = len(self._stages_of(asked[members[0]]).options)
            cells = num_options * len(self.cuts) * (levels + 1) // 3
            together = max(1, MOST_CELLS // cells)
            for start in range(0, len(members), together):
                part = members[start : start + together]
                programme = _Programme(self, [asked[index] for index in part], levels, prices)
                yield from zip(part, programme.bounds(), strict=True)

    def _stages_of(self, path_range: PathRange) -> RelaxedStages:
        return self.stages(path_range.amount, path_range.size)


@dataclass(frozen=True, slots=True)
class _StageLevels:
    """The levels of the stages of several path ranges; arrays by [range, option, start, stop].

    steps: of the grid that a stage adds to the path of its suffix. least, most: between these levels of the
    suffix that begins with it a stage is allowed, both included; nowhere if least is above most.
    """

    steps: Integers
    least: Integers
    most: Integers

    def at(self, index: tuple[int | Integers, ...]) -> tuple[Integers, Integers, Integers]:
        """Return (steps, least, most) of some stages."""
        return self.steps[index], self.least[index], self.most[index]


class _Programme:
    """The programme for several path ranges with the same options.

    levels: the highest state of any range; pad: states below 0, which nothing reaches. tops: the highest
    state of each range, which in open ranges (`PathRange.last` None) stands for all longer paths too.

    price: by [range, start, pad + level], the least price of a suffix of exactly that level. beyond: by
    [range, start, level], of a suffix of that level or a higher one; empty without open ranges.
    cost: by option. reach: by start, the highest level of a suffix, -1 where there is none.
    """

    def __init__(self, owner: PriceBounds, asked: Sequence[PathRange], levels: int, prices: Floats) -> None:
        self.asked, self.levels, self.step_s = asked, levels, owner.step_s
        self.cuts = owner.cuts
        self.num_layers = len(self.cuts) - 1  # between cuts
        self.made = [owner.stages(path_range.amount, path_range.size) for path_range in asked]
        self.options = self.made[0].options
        num_classes = len(owner.tables.classes.members)
        self.classes = [option % num_classes for option in self.options]
        self.recompute = [option >= num_classes for option in self.options]
        self.cost: Singles = prices[self.classes].astype(np.float32)
        self.open: Bools = np.array([path_range.last is None for path_range in asked])
        tops = [stages.levels(path_range) for path_range, stages in zip(asked, self.made, strict=True)]
        self.tops: Places = np.array(tops)
        self.stage_levels = self._stage_levels()
        allowed = self.stage_levels.least <= np.minimum(self.stage_levels.most, levels)
        self.alive: Bools = np.asarray(allowed.any(axis=0))  # [option, start, stop]
        self.pad = levels + 1
        shape = (len(asked), self.num_layers + 1, self.pad + levels + 1)
        self.price: Singles = np.full(shape, np.inf, dtype=np.float32)
        self.price[:, -1, self.pad] = 0.0
        # windows of these rule out levels: all below some place, or all from it on
        edge = np.repeat(np.array([np.inf, 0.0], dtype=np.float32), levels + 2)
        self.falling: Singles = sliding_window_view(edge, levels + 1)
        self.rising: Singles = sliding_window_view(edge[::-1].copy(), levels + 1)
        self.any_open = bool(self.open.any())
        beyond = (*shape[:2], levels + 1) if self.any_open else (0, 0, 0)
        self.beyond: Singles = np.full(beyond, np.inf, dtype=np.float32)
        if self.any_open:
            self.beyond[:, -1, 0] = 0.0
        self.reach: Places = np.full(self.num_layers + 1, -1)
        self.reach[-1] = 0
        self._run()

    def _stage_levels(self) -> _StageLevels:
        rows = []
        for path_range, stages in zip(self.asked, self.made, strict=True):
            grid_s = stages.grid_s(path_range)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                steps = np.floor(stages.path_s / grid_s - TOLERANCE)
                least = np.ceil(path_range.first - (self.step_s - stages.total_s) / grid_s - SLACK)
                passes = stages.passes * stages.family.round_trip_share / np.maximum(stages.caps, 1e-9)
                most = self.step_s / (passes * grid_s)
                narrow = (self.step_s / grid_s - path_range.first) / (passes - 1)
                most = np.where(passes > 1, np.minimum(most, np.maximum(narrow, 0.0)), np.inf)
                least, most = self._waiting(stages, path_range.first, grid_s, least, most)
                most = np.floor(most * (1 + TOLERANCE) + SLACK)
            bad = ~stages.allowed
            steps = np.where(bad, self.levels + 1, np.clip(steps, 0, self.levels + 1))
            least = np.where(bad, self.levels + 1, np.clip(least, 0, self.levels + 1))
            rows.append([steps, least, np.clip(most, -1, self.levels)])
        steps, least, most = np.array(rows).transpose(1, 0, 2, 3, 4)
        least[self._too_dear(least <= np.minimum(most, self.levels))] = self.levels + 1
        return _StageLevels(*(table.astype(np.int32) for table in (steps, least, most)))

    def _waiting(
        self, stages: RelaxedStages, low: int, grid_s: float, least: Floats, most: Floats
    ) -> tuple[Floats, Floats]:
        """Return the levels between which stages are in time with what they wait (`waited_s`) too."""
        share, spare_s = stages.family.round_trip_share, self.step_s - stages.total_s
        single, both = (
            (spare_s + gap_s) / grid_s * (1 + TOLERANCE) + SLACK for gap_s in (stages.gap_s, stages.gaps_s)
        )
        most = np.fmin(most, np.fmin(single, both / 2) / share)
        if low:
            if share < 1:
                least = np.fmax(least, np.ceil((low - single) / (1 - share) - SLACK))
            elif share > 1:
                most = np.fmin(most, np.maximum((single - low) / (share - 1), 0.0))
            if share > 0.5:
                most = np.fmin(most, np.maximum((both - low) / (2 * share - 1), 0.0))
        return least, most

    def _too_dear(self, allowed: Bools) -> Bools:
        """Return the stages with which a pipeline costs more than its limit, whatever its path."""
        cost = np.where(allowed, self.cost[:, None, None], np.inf)
        step = cost.min(axis=1)
        before = np.full((len(self.asked), self.num_layers + 1), np.inf)
        after = before.copy()
        before[:, 0] = after[:, -1] = 0.0
        for place in range(1, self.num_layers + 1):
            before[:, place] = (before[:, :place] + step[:, :place, place]).min(axis=1)
            after[:, -1 - place] = (step[:, -1 - place] + after).min(axis=1)
        limits = np.array([path_range.limit for path_range in self.asked])
        through = before[:, None, :, None] + cost + after[:, None, None, :]
        return np.asarray(~(through <= limits[:, None, None, None]))

    def _stops(self, start: int) -> Places:
        """Return where useful stages end that begin at a place, by [option, any], filled up with others."""
        useful = self.alive[:, start] & (self.reach >= 0)
        most = int(useful.sum(axis=1).max())
        return np.argsort(~useful, axis=1, kind="stable")[:, :most]

    def _run(self) -> None:
        levels, count, pad = self.levels, len(self.asked), self.pad
        windows = sliding_window_view(self.price, levels + 1, axis=2)
        which, option = np.arange(count)[:, None, None], np.arange(len(self.options))[:, None]
        for start in range(self.num_layers - 1, -1, -1):
            stops = self._stops(start)
            if not stops.shape[1]:
                continue
            index = (which, option, start, stops)
            steps, least, most = self.stage_levels.at(index)
            used = np.where(least <= levels, np.minimum(steps, levels), 0)
            top = min(levels, int((self.reach[stops] + used).max()))
            level = np.arange(top + 1, dtype=np.int32)
            candidate = windows[:, :, :, : top + 1][which, stops, pad - steps]
            self._rule_out(candidate, least, most)
            best = candidate.min(axis=2) + self.cost[:, None]
            row = best.min(axis=1)
            self._clamp(row, start, stops)
            row[level > self.tops[:, None]] = np.inf
            self.price[:, start, pad : pad + top + 1] = row
            if self.any_open:
                self.beyond[:, start, : top + 1] = np.minimum.accumulate(row[:, ::-1], axis=1)[:, ::-1]
            finite = np.flatnonzero(np.isfinite(row).any(axis=0))
            self.reach[start] = int(finite[-1]) if len(finite) else -1

    def _rule_out(self, candidate: Singles, least: Integers, most: Integers) -> None:
        """Set the levels to inf that a stage is not allowed at."""
        many, middle = candidate.shape[-1], self.levels + 2
        if least.max() > 0:
            np.maximum(candidate, self.falling[:, :many][middle - least], out=candidate)
        if most.min() < many - 1:
            np.maximum(candidate, self.rising[:, :many][middle - 1 - most], out=candidate)

    def _clamp(self, row: Singles, start: int, stops: Places) -> None:
        """Set the highest level of open ranges, from every level that the stage takes there or beyond."""
        opened = np.flatnonzero(self.open & (self.tops < row.shape[1]))
        if len(opened):
            after = self._into_top(opened, start, stops) + self.cost[:, None]
            row[opened, self.tops[opened]] = after.min(axis=(1, 2))

    def _into_top(self, which: Places, start: int, stops: Places) -> Singles:
        """Return least prices of what follows stages into the highest level, by [range, option, stop]."""
        index = (which[:, None, None], np.arange(len(self.options))[:, None], start, stops)
        steps, least, most = self.stage_levels.at(index)
        top = self.tops[which][:, None, None]
        after = self.beyond[which[:, None, None], stops, np.maximum(top - steps, 0)]
        after[(least > top) | (most < top)] = np.inf
        return np.asarray(after)

    def bounds(self) -> list[PriceBound]:
        return [self._bound(which) for which in range(len(self.asked))]

    def _bound(self, which: int) -> PriceBound:
        first, top = self.asked[which].first, int(self.tops[which])
        row = self.price[which, 0, self.pad + first : self.pad + top + 1]
        if not len(row) or not np.isfinite(row.min()):
            return PriceBound(np.inf)
        if row.min() > self.asked[which].limit:
            return PriceBound(float(row.min()))
        path = first + int(row.argmin())
        chosen = self._chosen(which, path)
        stages = tuple(
            ColumnStage(self.classes[option], self.cuts[start], self.cuts[stop], self.recompute[option])
            for option, start, stop in chosen
        )
        return PriceBound(float(row.min()), stages, path, self._real(which, chosen))

    def _chosen(self, which: int, level: int) -> list[tuple[int, int, int]]:
        start, found = 0, []
        while start < self.num_layers:
            option, stop, level = self._stage(which, start, level)
            found.append((option, start, stop))
            start = stop
        return found

    def _stage(self, which: int, start: int, level: int) -> tuple[int, int, int]:
        """Return (option, stop, level that follows) of the least price at a state."""
        stops, option = self._stops(start), np.arange(len(self.options))[:, None]
        highest = bool(self.open[which]) and level == self.tops[which]
        if highest:
            value = self._into_top(np.array([which]), start, stops)[0]
        else:
            index = (which, option, start, stops)
            steps, least, most = self.stage_levels.at(index)
            value = self.price[which, stops, self.pad + level - steps]
            value = np.where((least <= level) & (most >= level), value, np.inf)
        value = value + self.cost[:, None]
        best, place = np.unravel_index(int(value.argmin()), value.shape)
        stop = int(stops[best, place])
        after = level - int(self.stage_levels.steps[which, best, start, stop])
        if highest:
            after = max(after, 0)
            after += int(self.price[which, stop, self.pad + after : self.pad + level + 1].argmin())
        return int(best), stop, after

    def _real(self, which: int, chosen: Sequence[tuple[int, int, int]]) -> bool:
        """Return whether stages pass the amount in the step, by Z and Little's law, nothing rounded."""
        stages = self.made[which]
        index = tuple(np.array(part) for part in zip(*chosen, strict=True))
        path_s = stages.path_s[index]
        before_s = np.concatenate([[0.0], np.cumsum(path_s)[:-1]])
        round_trip_s = np.cumsum(path_s[::-1])[::-1] * stages.family.round_trip_share
        limit_s = self.step_s * (1 + TOLERANCE)
        waited = waited_s(stages.total_s[index], stages.gap_s[index], stages.gaps_s[index], round_trip_s)
        late = before_s + np.maximum(waited, stages.passes * round_trip_s / stages.caps[index]) > limit_s
        return not late.any()
