"""Dynamic programme over device counts: the least makespan of one pipeline for every count vector.

State: (devices of each class that a suffix of stages uses, class of its first stage, its first layer).
Label: one pair (Z, W) per state: the least makespan bound of `partition.estimates.closed_forms` and, on its
own, the least round trip of a microbatch from there. They may come of different suffixes, so results are
lower bounds. With up to 3 devices and 5 layers they were the optimum in all of 1,112 count vectors drawn
first, and in 298 of 300 problems drawn later; in the other two 0.8 and 0.9 % below it.
Transition: a stage in front adds its own busy time and link to both. Z is at least the time in which all
samples pass the stage and the round trips that full microbatches take one after the other, since memory takes
no more of them in flight. Nor is a stage busy all the time. Until the first backward comes, W less that
backward after the first forward, it can do no more forwards than memory takes in flight; and while the last
microbatch goes on and comes back no more backwards than were in flight. What W takes longer, in the warmup
and in the cooldown, the stage waits (`SizeTables.gaps`).
Source: the recurrence over layers and devices of PipeDream (Narayanan et al., SOSP 2019, section 3.1), with
Z in place of the period and counts of unequal devices in place of a number of equal ones.
Complexity: O(amounts * vectors * classes * (classes * layers + stages)) for the stages [start, stop) that
memory takes, at most layers^2 / 2 of each class, with and without recompute.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from partition.estimates.amounts import Amount
from partition.estimates.arrays import Places, Singles
from partition.estimates.class_pipeline import ColumnStage
from partition.estimates.stage_tables import FAR_S, ProblemTables
from partition.exact.count_stages import SINGLE, Stages, StageTables
from partition.exact.count_vectors import CountVectors

ROUNDED = 1e-5  # relative: more than the rounding of all sums in single precision
MOST_CELLS = 200_000  # candidates looked at together


class CountProgramme:
    """The programme for several amounts of samples side by side, each in microbatches of its own size.

    Numbers are of single precision, and makespans lower by what that may have rounded. ceiling_s: labels
    beyond it are dropped. compiled: by `partition.exact.suffix_kernel`, which is sooner where vectors are
    many; NumPy's loop does without a compiler, which takes 0.6 s to load and 2.8 s the first time, where
    the programmes of a small cluster take 0.2 to 0.5 s in all.
    """

    def __init__(
        self,
        tables: ProblemTables,
        vectors: CountVectors,
        amounts: Sequence[tuple[int, Amount]],
        ceiling_s: float,
        *,
        compiled: bool = False,
    ) -> None:
        self._vectors, self._compiled = vectors, compiled
        self._ceiling_s = float(ceiling_s) * (1 + ROUNDED)  # rounding must not drop what is at the ceiling
        self.num_layers = tables.num_layers
        made = StageTables(tables, amounts, self._ceiling_s)
        self._link_s, self._round_trip_s = made.links()
        self._stages = list(made.stages())
        self._by_start = [stages.by_start(self.num_layers) for stages in self._stages] if compiled else []
        # Z and W of suffixes: [amount, vector, class of the first stage, start]; inf where there is none
        shape = (len(amounts), vectors.size, len(vectors.counts), self.num_layers + 1)
        self._makespan, self._trip = np.full(shape, np.inf, SINGLE), np.full(shape, np.inf, SINGLE)
        self._end = np.full((len(amounts), 1, self.num_layers + 1), np.inf, SINGLE)  # [amount, any, layer]
        self._end[..., -1] = 0.0
        self._run()

    def _run(self) -> None:
        vectors, counts = self._vectors, self._vectors.counts
        with np.errstate(invalid="ignore"):
            for total in range(1, min(sum(counts), self.num_layers) + 1):
                alive = False
                for class_index in range(len(counts)):
                    users = vectors.users(total, class_index)
                    if len(users):
                        step = self._extend_compiled if self._compiled else self._extend
                        alive |= step(total, class_index, users)
                if not alive:
                    break

    def _extend(self, total: int, class_index: int, users: Places) -> bool:
        """Note the labels of suffixes that begin with a stage of a class; return whether there are any."""
        if total == 1:
            makespan = trip = self._end
        else:
            makespan, trip = self._followers(class_index, users - self._vectors.strides[class_index])
        finite = np.logical_or.reduce(np.isfinite(makespan), axis=0)  # [vector, layer]
        going = finite.any(axis=1)
        stages = self._stages[class_index]
        stages = stages.only(finite.any(axis=0)[stages.stop])
        if not len(stages.start):
            return False
        starts, places = np.unique(stages.start, return_index=True)
        rows = np.flatnonzero(going)
        cells = makespan.shape[0] * stages.total_s.shape[1] * len(stages.start)
        alive = False
        for part in np.array_split(rows, min(len(rows), -(-len(rows) * cells // MOST_CELLS))):
            candidates = self._candidates(stages, makespan[:, part], trip[:, part])
            least, around = _by_start(*candidates, places, self._ceiling_s)
            where = np.s_[:, users[part][:, None], class_index, starts]
            self._makespan[where], self._trip[where] = least, around
            alive |= bool(np.isfinite(least).any())
        return alive

    def _extend_compiled(self, total: int, class_index: int, users: Places) -> bool:
        """Do what `_extend` does, compiled."""
        from partition.exact.suffix_kernel import extend

        before = users - self._vectors.strides[class_index] if total > 1 else users[:0]
        link_s, round_trip_s = (
            np.ascontiguousarray(table[:, class_index]) for table in (self._link_s, self._round_trip_s)
        )
        numbers, last = self._by_start[class_index]
        labels = self._makespan, self._trip
        return bool(
            extend(*labels, class_index, users, before, numbers, last, link_s, round_trip_s, self._ceiling_s)
        )

    def _followers(self, class_index: int, before: Places) -> tuple[Singles, Singles]:
        """Return the label of what comes after a stage of a class, with its link: [amount, vector, layer]."""
        makespan = self._makespan[:, before] + self._link_s[:, None, class_index]
        trip = self._trip[:, before] + self._round_trip_s[:, None, class_index]
        return makespan.min(axis=2), np.where(np.isfinite(makespan), trip, np.inf).min(axis=2)

    def _candidates(self, stages: Stages, makespan: Singles, trip: Singles) -> tuple[Singles, Singles]:
        """Return suffixes that begin with stages, late ones too: [amount, vector, recompute, stage]."""
        least = np.take(makespan, stages.stop, axis=-1)[:, :, None] + stages.before_s[:, None]
        around = np.take(trip, stages.stop, axis=-1)[:, :, None] + stages.busy_s[:, None]
        own = np.maximum(around - stages.warm_s[:, None], 0.0)
        if (stages.cool_s < FAR_S).any():
            own += np.maximum(around - stages.cool_s[:, None], 0.0)
        own += stages.total_s[:, None]
        np.maximum(least, own, out=least)
        np.maximum(least, stages.share[:, None] * around + stages.beyond_s[:, None], out=least)
        return least, around

    def least_s(self) -> npt.NDArray[np.float64]:
        """Return what no pipeline on so many devices goes below, inf if none fits: [amount, vector]."""
        least = self._makespan[..., 0].min(axis=2).astype(np.float64)
        return np.asarray(least * (1 - ROUNDED))

    def stages(self, which: int, vector: int) -> tuple[ColumnStage, ...]:
        """Return the stages of the pipeline of least Z for an amount of samples on exactly these devices."""
        found: list[ColumnStage] = []
        start, after, trip_s = 0, -1, math.inf
        while start < self.num_layers:
            choices = list(self._choices(which, vector, after, start))
            # merged labels may claim a round trip that no pipeline has
            kept = [choice for choice in choices if choice.trip_s <= trip_s * (1 + ROUNDED)] or choices
            if not kept:
                return ()
            best = min(kept, key=lambda choice: choice.least_s)
            found.append(best.stage)
            vector -= int(self._vectors.strides[best.stage.class_index])
            start, after, trip_s = best.stage.stop, best.stage.class_index, best.beyond_s
        return tuple(found)

    def _choices(self, which: int, vector: int, after: int, start: int) -> Iterator["_Choice"]:
        """Yield what a suffix on just these devices may begin with, after a stage of a class, -1 for none."""
        for class_index in map(int, np.flatnonzero(self._vectors.digits[vector])):
            link_s = self._link_s[which, after, class_index, start] if after >= 0 else 0.0
            round_trip_s = self._round_trip_s[which, after, class_index, start] if after >= 0 else 0.0
            if self._vectors.totals[vector] == 1:
                makespan = trip = self._end
            else:
                before = np.array([vector]) - self._vectors.strides[class_index]
                makespan, trip = self._followers(class_index, before)
            stages = self._stages[class_index]
            stages = stages.only(stages.start == start)
            if not len(stages.stop):
                continue
            with np.errstate(invalid="ignore"):
                tables = self._candidates(stages, makespan, trip)
            least, around = (table[which, 0] for table in tables)
            least = _on_time(least, self._ceiling_s) + link_s
            for recompute, place in np.argwhere(np.isfinite(least)):
                stage = ColumnStage(class_index, start, int(stages.stop[place]), bool(recompute))
                around_s = float(around[recompute, place])
                beyond_s = around_s - float(stages.busy_s[which, recompute, place])
                total_s = float(least[recompute, place])
                yield _Choice(total_s, around_s + float(round_trip_s), beyond_s, stage)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A first stage; makespan and round trip with it and the link before it, and the round trip after it."""

    least_s: float
    trip_s: float
    beyond_s: float
    stage: ColumnStage


def _on_time(makespan: Singles, ceiling_s: float) -> Singles:
    return np.where(makespan <= ceiling_s, makespan, np.inf)


def _by_start(least: Singles, around: Singles, places: Places, ceiling_s: float) -> tuple[Singles, Singles]:
    """Return the label of the candidates by [amount, vector, start].

    places: where the stages of each start begin.
    """
    around += (least > ceiling_s).astype(around.dtype) * FAR_S  # sums are faster than masks
    # one by one: of a short axis in the middle this is faster than min()
    tables = (reduce(np.minimum, np.moveaxis(table, 2, 0)) for table in (least, around))
    makespan, trip = (np.minimum.reduceat(table, places, axis=-1) for table in tables)
    makespan = _on_time(makespan, ceiling_s)
    return makespan, np.where(np.isfinite(makespan), trip, np.inf)
