"""Lower bounds on the price of every pipeline that does an amount of samples within a step.

A dynamic programme from the last stage to the first. Its state is the first layer of a suffix of stages and
the suffix's share u of the pipeline's way, the busy and link times of the first forward and the last
backward, in steps of a grid that each stage's share is rounded down to. Given U, the whole way of the
pipeline, u tells both what Z needs and what Little's law needs: A, the way before a stage, is at least U - u,
and the round trip W of a microbatch from the stage on is at least u. So for pipelines of U from `low` on, a
stage is allowed if

    total time + max(0, low - u) <= step  and  passes * W / in_flight + max(0, low - u) <= step

and also with what the stage waits in its warmup and cooldown (`relaxed_stages.waited_s`) in the total time,
and the narrower the ranges of U that are looked at one by one, the less is lost. Links are the best that the
classes have. Prices are whole numbers, so that single precision is exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from partition.bounds.relaxed_stages import TOLERANCE, FamilyStages, PathRange, RelaxedStages, Space, waited_s
from partition.estimates.arrays import Floats
from partition.estimates.class_pipeline import ColumnStage
from partition.estimates.stage_tables import Amount, ProblemTables

SLACK = 1e-6  # of a step of the grid
MOST_CELLS = 1_200_000  # candidates looked at together
FAR = 2**24  # sums of whole prices below it are exact in single precision

Singles = npt.NDArray[np.float32]
Places = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class PriceBound:
    """The least price, and a pipeline of it, with its way in steps of the grid; inf where there is none.

    real: the pipeline passes the samples, nothing rounded.
    """

    price: float
    stages: tuple[ColumnStage, ...] = ()
    way: int = 0
    real: bool = False


class PriceBounds:
    """Owns the arrays of a step time.

    cuts: where stages may begin and end, both ends included; None for every layer. With fewer cuts the floors
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
        """(index, floor) for each of those asked, in any order; prices are whole."""
        groups: dict[object, list[int]] = {}
        for index, ways in enumerate(asked):
            stages = self.stages(ways.amount, ways.size)
            if not stages.options or ways.first > stages.longest(ways):
                yield index, PriceBound(np.inf)
                continue
            key = (stages.options, -(-stages.levels(ways) // 32))
            groups.setdefault(key, []).append(index)
        for members in groups.values():
            first = self.stages(asked[members[0]].amount, asked[members[0]].size)
            members.sort(key=lambda index: (asked[index].size, asked[index].amount.full))
            levels = max(
                self.stages(asked[index].amount, asked[index].size).levels(asked[index]) for index in members
            )
            cells = len(first.options) * len(self.cuts) * (levels + 1) // 3
            many = max(1, MOST_CELLS // cells)
            for start in range(0, len(members), many):
                part = members[start : start + many]
                programme = _Programme(self, [asked[index] for index in part], levels, prices)
                yield from zip(part, programme.floors(), strict=True)


class _Programme:
    """The programme for several ways with the same options; arrays by [ways, option, start, stop]."""

    def __init__(self, owner: PriceBounds, asked: Sequence[PathRange], levels: int, prices: Floats) -> None:
        self.asked, self.levels, self.step_s = asked, levels, owner.step_s
        self.cuts = owner.cuts
        self.num_layers = len(self.cuts) - 1  # between cuts
        made = [owner.stages(ways.amount, ways.size) for ways in asked]
        self.made, self.options = made, made[0].options
        count = len(owner.tables.classes.members)
        self.entries = [option % count for option in self.options]
        self.again = [option >= count for option in self.options]
        self.cost = prices[self.entries].astype(np.float32)
        self._tabulate()
        # by [ways, layer, pad + level]: nothing reaches the pad
        self.pad = levels + 1
        shape = (len(asked), self.num_layers + 1, self.pad + levels + 1)
        self.price = np.full(shape, np.inf, dtype=np.float32)
        self.price[:, -1, self.pad] = 0.0
        # windows of these rule out levels: all below some place, or all from it on
        edge = np.repeat(np.array([np.inf, 0.0], dtype=np.float32), levels + 2)
        self.falling = sliding_window_view(edge, levels + 1)
        self.rising = sliding_window_view(edge[::-1].copy(), levels + 1)
        self.any_open = bool(self.open.any())
        if self.any_open:  # the least of a level and all above
            self.beyond = np.full((*shape[:2], levels + 1), np.inf, dtype=np.float32)
            self.beyond[:, -1, 0] = 0.0
        self._run()

    def _tabulate(self) -> None:
        grids, rows = [], []
        for ways, one in zip(self.asked, self.made, strict=True):
            grid_s = one.grid_s(ways)
            grids.append(grid_s)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                steps = np.floor(one.way_s / grid_s - TOLERANCE)
                least = np.ceil(ways.first - (self.step_s - one.total_s) / grid_s - SLACK)
                trips = one.passes * one.family.trip_share / np.maximum(one.caps, 1e-9)
                most = self.step_s / (trips * grid_s)
                narrow = (self.step_s / grid_s - ways.first) / (trips - 1)
                most = np.where(trips > 1, np.minimum(most, np.maximum(narrow, 0.0)), np.inf)
                least, most = self._waiting(one, ways.first, grid_s, least, most)
                most = np.floor(most * (1 + TOLERANCE) + SLACK)
            bad = ~one.allowed
            steps = np.where(bad, self.levels + 1, np.clip(steps, 0, self.levels + 1))
            least = np.where(bad, self.levels + 1, np.clip(least, 0, self.levels + 1))
            rows.append([steps, least, np.clip(most, -1, self.levels)])
        steps, least, most = np.array(rows).transpose(1, 0, 2, 3, 4)
        least[self._too_dear(least <= np.minimum(most, self.levels))] = self.levels + 1
        self.steps, self.least, self.most = (table.astype(np.int32) for table in (steps, least, most))
        self.alive = (self.least <= np.minimum(self.most, self.levels)).any(axis=0)  # [option, start, stop]
        self.open = np.array([ways.last is None for ways in self.asked])
        self.tops = np.array([one.levels(ways) for ways, one in zip(self.asked, self.made, strict=True)])

    def _waiting(
        self, one: RelaxedStages, low: int, grid_s: float, least: Floats, most: Floats
    ) -> tuple[Floats, Floats]:
        """The levels between which stages are in time with what they wait (`waited_s`) too."""
        share, spare = one.family.trip_share, self.step_s - one.total_s
        single, both = (
            (spare + gap_s) / grid_s * (1 + TOLERANCE) + SLACK for gap_s in (one.gap_s, one.gaps_s)
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

    def _too_dear(self, allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Stages with which a pipeline costs more than its limit, if only the stages count, not the ways."""
        cost = np.where(allowed, self.cost[:, None, None], np.inf)
        step = cost.min(axis=1)
        before = np.full((len(self.asked), self.num_layers + 1), np.inf)
        after = before.copy()
        before[:, 0] = after[:, -1] = 0.0
        for place in range(1, self.num_layers + 1):
            before[:, place] = (before[:, :place] + step[:, :place, place]).min(axis=1)
            after[:, -1 - place] = (step[:, -1 - place] + after).min(axis=1)
        limits = np.array([ways.limit for ways in self.asked])
        through = before[:, None, :, None] + cost + after[:, None, None, :]
        return np.asarray(~(through <= limits[:, None, None, None]))

    def _stops(self, start: int) -> Places:
        """By [option, any]: where the stages of use end that begin at a place; filled up with others."""
        useful = self.alive[:, start] & (self.reach >= 0)
        most = int(useful.sum(axis=1).max())
        return np.argsort(~useful, axis=1, kind="stable")[:, :most]

    def _run(self) -> None:
        levels, count, pad = self.levels, len(self.asked), self.pad
        self.reach = np.full(self.num_layers + 1, -1)
        self.reach[-1] = 0
        windows = sliding_window_view(self.price, levels + 1, axis=2)
        which, option = np.arange(count)[:, None, None], np.arange(len(self.options))[:, None]
        for start in range(self.num_layers - 1, -1, -1):
            stops = self._stops(start)
            if not stops.shape[1]:
                continue
            index = (which, option, start, stops)
            steps, least, most = self.steps[index], self.least[index], self.most[index]
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

    def _rule_out(self, candidate: Singles, least: Places, most: Places) -> None:
        """Sets the levels to inf that a stage is not allowed at."""
        many, middle = candidate.shape[-1], self.levels + 2
        if least.max() > 0:
            np.maximum(candidate, self.falling[:, :many][middle - least], out=candidate)
        if most.min() < many - 1:
            np.maximum(candidate, self.rising[:, :many][middle - 1 - most], out=candidate)

    def _clamp(self, row: Singles, start: int, stops: Places) -> None:
        """The highest level of open ways comes from every level that the stage takes there or beyond."""
        opened = np.flatnonzero(self.open & (self.tops < row.shape[1]))
        if len(opened):
            after = self._into_top(opened, start, stops) + self.cost[:, None]
            row[opened, self.tops[opened]] = after.min(axis=(1, 2))

    def _into_top(self, which: Places, start: int, stops: Places) -> Singles:
        """Least prices of what follows stages into the highest level, by [ways, option, place in stops]."""
        index = (which[:, None, None], np.arange(len(self.options))[:, None], start, stops)
        steps, least, most = self.steps[index], self.least[index], self.most[index]
        top = self.tops[which][:, None, None]
        after = self.beyond[which[:, None, None], stops, np.maximum(top - steps, 0)]
        after[(least > top) | (most < top)] = np.inf
        return np.asarray(after)

    def floors(self) -> list[PriceBound]:
        return [self._floor(which) for which in range(len(self.asked))]

    def _floor(self, which: int) -> PriceBound:
        first, top = self.asked[which].first, int(self.tops[which])
        row = self.price[which, 0, self.pad + first : self.pad + top + 1]
        if not len(row) or not np.isfinite(row.min()):
            return PriceBound(np.inf)
        if row.min() > self.asked[which].limit:
            return PriceBound(float(row.min()))
        way = first + int(row.argmin())
        chosen = self._chosen(which, way)
        stages = tuple(
            ColumnStage(self.entries[option], self.cuts[start], self.cuts[stop], self.again[option])
            for option, start, stop in chosen
        )
        return PriceBound(float(row.min()), stages, way, self._real(which, chosen))

    def _chosen(self, which: int, level: int) -> list[tuple[int, int, int]]:
        start, found = 0, []
        while start < self.num_layers:
            option, stop, level = self._stage(which, start, level)
            found.append((option, start, stop))
            start = stop
        return found

    def _stage(self, which: int, start: int, level: int) -> tuple[int, int, int]:
        """(option, stop, level that follows) of the least price at a state."""
        stops, option = self._stops(start), np.arange(len(self.options))[:, None]
        highest = bool(self.open[which]) and level == self.tops[which]
        if highest:
            value = self._into_top(np.array([which]), start, stops)[0]
        else:
            index = (which, option, start, stops)
            value = self.price[which, stops, self.pad + level - self.steps[index]]
            value = np.where((self.least[index] <= level) & (self.most[index] >= level), value, np.inf)
        value = value + self.cost[:, None]
        best, place = np.unravel_index(int(value.argmin()), value.shape)
        stop = int(stops[best, place])
        after = level - int(self.steps[which, best, start, stop])
        if highest:
            after = max(after, 0)
            after += int(self.price[which, stop, self.pad + after : self.pad + level + 1].argmin())
        return int(best), stop, after

    def _real(self, which: int, chosen: Sequence[tuple[int, int, int]]) -> bool:
        """Whether the stages pass the amount in the step, by Z and Little's law with nothing rounded."""
        one = self.made[which]
        index = tuple(np.array(part) for part in zip(*chosen, strict=True))
        way = one.way_s[index]
        before = np.concatenate([[0.0], np.cumsum(way)[:-1]])
        trips = np.cumsum(way[::-1])[::-1] * one.family.trip_share
        limit = self.step_s * (1 + TOLERANCE)
        waited = waited_s(one.total_s[index], one.gap_s[index], one.gaps_s[index], trips)
        late = before + np.maximum(waited, one.passes * trips / one.caps[index]) > limit
        return not late.any()
