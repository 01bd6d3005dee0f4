"""What stages take at the least for amounts of samples, in the pipelines that `pricing_bound` looks at."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partition.estimates.amounts import Amount
from partition.estimates.arrays import Floats
from partition.estimates.stage_tables import FAR_S, ProblemTables, SizeTables

TOLERANCE = 1e-9
FILL = 10  # paces up to which a path is followed


@dataclass(frozen=True, slots=True)
class PathRange:
    """Amounts of samples, from one on, and paths U of pipelines in steps of the grid; last None: any longer.

    size: of the microbatches, for their memory at the least. fineness: steps of the grid in a pace, which is
    the step over so many `paces`. limit: dearer pipelines are of no interest, whatever they are.
    """

    amount: Amount
    size: int
    paces: float
    fineness: int
    first: int
    last: int | None
    limit: float


@dataclass(frozen=True, slots=True)
class Space:
    """The pipelines that are looked at: stages begin and end at cuts, both ends included, within a step."""

    tables: ProblemTables
    step_s: float
    cuts: Sequence[int]


def waited_s(total_s: Floats, gap_s: Floats, gaps_s: Floats, round_trip_s: Floats) -> Floats:
    """Return the seconds from the first to the last microbatch of stages, waiting included.

    A stage waits in its warmup and in its cooldown, each if its round trip is longer than a gap.

    gap_s: the lesser round trip from which on one of both waits begins; gaps_s: the two together.
    """
    waits = np.maximum(round_trip_s - gap_s, 2 * round_trip_s - gaps_s)
    return np.asarray(total_s + np.maximum(waits, 0.0))


class FamilyStages:
    """What stages of a microbatch size take if the last microbatch has least to most samples.

    Arrays by [option, start, stop]; options are the classes, then the same with recompute. path_s: forward
    of a full microbatch, backward of the last one, and both directions of the link after the stage.
    round_trip_share: no stage's full microbatch takes less than so much of path_s, its link included.
    """

    def __init__(self, tables: ProblemTables, amount: Amount, size: int) -> None:
        one = Amount(min(amount.full, 1), amount.least, amount.most, 1.0, rest=amount.rest)
        made, full = tables.at(size).amount(one), tables.at(size)
        self.busy_s = np.concatenate([full.busy_s, full.busy_s + full.forward_s])
        singles = [table - made.end_s for table in (made.total_s, made.again_total_s)]
        self.each_s = self.busy_s if one.full else np.nan_to_num(np.concatenate(singles), nan=np.inf)
        with np.errstate(invalid="ignore"):
            self.rest_s = np.concatenate([made.total_s, made.again_total_s]) - one.full * self.busy_s
        self.rest_s = np.nan_to_num(self.rest_s, nan=np.inf)
        before = np.concatenate([made.before_s, made.again_before_s])
        link = self._ended(made.link_s.min(axis=1))
        full_link = self._ended((full.transfer_s[0] + full.transfer_s[1]).min(axis=1))
        self.path_s = before + link
        round_trip = (self.busy_s if one.full else before) + (full_link if one.full else link)
        positive = np.isfinite(self.path_s) & (self.path_s > 0)
        self.round_trip_share = float((round_trip[positive] / self.path_s[positive]).min(initial=1e9))
        self.round_trip_share *= 1 - TOLERANCE

    @staticmethod
    def _ended(links: Floats) -> Floats:
        """Return link times by [option, 1, stop] from [class, layer], none at the end of the model."""
        links = links.copy()
        links[:, -1] = 0.0
        return np.concatenate([links, links])[:, None]


class RelaxedStages:
    """The stages for an amount of samples and a step time, by [option, start, stop]; useful options only."""

    def __init__(self, family: FamilyStages, amount: Amount, size: int, space: Space) -> None:
        self.family, self.amount, self.step_s = family, amount, space.step_s
        step_s, cuts = space.step_s, list(space.cuts)
        count = len(space.tables.classes.members)
        self.passes = max(1.0, amount.passes)
        with np.errstate(invalid="ignore"):
            total = family.rest_s + amount.full * family.busy_s if amount.full else family.rest_s
        # a larger microbatch may need less: its later layers leave more room for a workspace
        sizes = [size] if amount.full else range(amount.least, amount.most + 1)
        caps = np.max([self._caps(space.tables.at(one), amount) for one in sizes], axis=0)
        fits = total <= step_s * (1 + TOLERANCE)
        split = (2, count, *caps.shape[1:])
        gaps = space.tables.at(size).gaps(amount, family.each_s.reshape(split), caps.reshape(split))
        warm, cool = (gap.reshape(caps.shape) for gap in gaps)
        # recompute pays for a longer round trip, or where all in flight leave no gap in the cooldown
        with np.errstate(invalid="ignore"):
            waits = (cool < FAR_S) & (step_s - total > (caps - 1) * family.each_s)
        lacking = (caps < self.passes * family.round_trip_share) | waits
        short = (lacking & fits)[:count].any(axis=(1, 2))
        allowed = fits & (caps >= 1) & np.isfinite(family.path_s)
        allowed = allowed[:, cuts][:, :, cuts]
        useful = [option for option in range(count) if allowed[option].any()]
        useful += [count + index for index in range(count) if short[index] and allowed[count + index].any()]
        self.options = tuple(useful)
        self.short = bool(short.any())
        self.allowed = allowed[useful]
        self.total_s, self.path_s, self.caps, self.gap_s, self.gaps_s = (
            table[useful][:, cuts][:, :, cuts]
            for table in (total, family.path_s, caps, np.minimum(warm, cool), warm + cool)
        )
        self._rule_out()
        self.most = self.caps[:, 0][self.allowed[:, 0]].max(initial=0.0)

    @staticmethod
    def _caps(table: SizeTables, amount: Amount) -> Floats:
        return np.concatenate([table.most_in_flight(amount, recompute=flag) for flag in (False, True)])

    def _rule_out(self) -> None:
        """Drop the stages that are too slow for the shortest paths before and after them."""
        path = np.where(self.allowed, self.path_s, np.inf).min(axis=0, initial=np.inf)
        count = path.shape[0]
        before, after = np.full(count, np.inf), np.full(count, np.inf)
        before[0] = after[-1] = 0.0
        for place in range(1, count):
            before[place] = (before[:place] + path[:place, place]).min()
            after[-1 - place] = (path[-1 - place] + after).min()
        passes_s = self.passes * self.family.round_trip_share * (self.path_s + after)
        with np.errstate(invalid="ignore"):
            round_trip_s = self.family.round_trip_share * (self.path_s + after)
            busy = np.maximum(
                waited_s(self.total_s, self.gap_s, self.gaps_s, round_trip_s),
                passes_s / np.maximum(self.caps, 1.0),
            )
            self.allowed &= before[:, None] + busy <= self.step_s * (1 + TOLERANCE)

    def grid_s(self, path_range: PathRange) -> float:
        return self.step_s / (path_range.paces * path_range.fineness)

    def levels(self, path_range: PathRange) -> int:
        """Return the highest state: the last path, or the one from which on all are one."""
        longest = self.longest(path_range)
        if path_range.last is None:
            return max(path_range.first, min(longest, FILL * path_range.fineness))
        return min(path_range.last, longest)

    def longest(self, path_range: PathRange) -> int:
        """Return the longest path: more would take the whole step, or more in flight than fits."""
        share = min(1.0, self.most / (self.passes * self.family.round_trip_share)) if self.short else 1.0
        return int(share * path_range.paces * path_range.fineness * (1 + TOLERANCE)) + 1
