"""Small clusters: the least makespan of one pipeline for every count of devices of each class.

The state is (how many devices of each class the suffix of stages uses, class of its first stage, its first
layer); its labels are pairs (Z, W): the makespan bound of `partition.estimates.closed_forms` and the round
trip of a
microbatch from there. A stage adds its own busy time and link to both, and Z is at least the time in which
all samples pass the stage and, by Little's law, full microbatches * W / (what memory takes in flight).
Nor is a stage busy all the time. Until the first backward comes, W less that backward after the first
forward, it can do no more forwards than memory takes in flight; and while the last microbatch goes on and
comes back no more backwards than were in flight. What W takes longer, in the warmup and in the cooldown, the
stage waits (`SizeTables.gaps`).
At most `max_labels` labels are kept; the last one then takes the least Z and the least W of all that it
replaces, so that the result stays a lower bound (docs/planning.md, "The bound").
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from partition.estimates.class_pipeline import ColumnStage
from partition.estimates.stage_tables import FAR_S, Amount, ProblemTables
from partition.exact.count_stages import Floats, Stages, StageTables
from partition.exact.count_vectors import CountVectors, Places

TOLERANCE = 1e-9
ROUNDED = 1e-5  # relative: more than the rounding of all sums in single precision
MOST_CELLS = 200_000  # candidates looked at together

Labels = list[tuple[Floats, Floats]]
"""(makespans, round trips), the least makespans first."""


class CountProgramme:
    """The programme for several amounts of samples side by side, each in microbatches of its own size.

    ceiling_s: labels beyond it are dropped. max_labels: None keeps all and is exact; with one label numbers
    are of single precision, and makespans lower by what that may have rounded. compiled: with one label, by
    `partition.exact.suffix_kernel`, which is sooner where vectors are many.
    """

    def __init__(
        self,
        tables: ProblemTables,
        vectors: CountVectors,
        amounts: Sequence[tuple[int, Amount]],
        ceiling_s: float,
        *,
        max_labels: int | None = 2,
        recompute: bool = True,
        compiled: bool = False,
    ) -> None:
        assert max_labels == 1 or not compiled
        self._vectors, self._compiled = vectors, compiled
        self._max_labels, self._flags = max_labels, (False, True) if recompute else (False,)
        self._kind: type[np.floating] = np.float32 if max_labels == 1 else np.float64
        # rounding must not drop what is at the ceiling
        self._ceiling_s = float(ceiling_s) * (1 + ROUNDED * (max_labels == 1))
        self.num_layers = tables.num_layers
        made = StageTables(tables, amounts, self._flags, self._ceiling_s, self._kind)
        self._link, self._hop = made.links()
        self._stages = list(made.stages())
        self._by_start = [stages.by_start(self.num_layers) for stages in self._stages] if compiled else []
        shape = (len(amounts), vectors.size, len(vectors.counts), self.num_layers + 1)
        kind = self._kind
        self._makespan = [np.full(shape, np.inf, kind)]
        self._trip = [np.full(shape, np.inf, kind)]
        self._end = np.full((len(amounts), 1, 1, self.num_layers + 1), np.inf, kind)
        self._end[..., -1] = 0.0
        self._run()

    def _run(self) -> None:
        vectors, counts = self._vectors, self._vectors.counts
        with np.errstate(invalid="ignore"):
            for total in range(1, min(sum(counts), self.num_layers) + 1):
                alive = False
                for entry in range(len(counts)):
                    users = vectors.users(total, entry)
                    if len(users):
                        step = self._extend_compiled if self._compiled else self._extend
                        alive |= step(total, entry, users)
                if not alive:
                    break

    def _extend(self, total: int, entry: int, users: Places) -> bool:
        """Labels of suffixes that begin with a stage of a class; False if there are none."""
        if total == 1:
            makespan = trip = self._end
        else:
            makespan, trip = self._followers(entry, users - self._vectors.strides[entry])
        finite = np.logical_or.reduce(np.isfinite(makespan), axis=(0, 2))  # [vector, layer]
        going = finite.any(axis=1)
        stages = self._stages[entry]
        stages = stages.only(finite.any(axis=0)[stages.stop])
        if not len(stages.start):
            return False
        starts, places = np.unique(stages.start, return_index=True)
        rows = np.flatnonzero(going)
        cells = makespan.shape[0] * makespan.shape[2] * len(self._flags) * len(stages.start)
        alive = False
        for part in np.array_split(rows, min(len(rows), -(-len(rows) * cells // MOST_CELLS))):
            least, around = self._candidates(stages, makespan[:, part], trip[:, part])
            labels = _by_start(least, around, places, self._ceiling_s, self._max_labels)
            alive |= self._keep(entry, users[part], starts, labels)
        return alive

    def _extend_compiled(self, total: int, entry: int, users: Places) -> bool:
        """`_extend` for one label."""
        from partition.exact.suffix_kernel import extend  # 0.3 s, and compiles the first time

        before = users - self._vectors.strides[entry] if total > 1 else users[:0]
        link, hop = (np.ascontiguousarray(table[:, entry]) for table in (self._link, self._hop))
        numbers, last = self._by_start[entry]
        labels = self._makespan[0], self._trip[0]
        return bool(extend(*labels, entry, users, before, numbers, last, link, hop, self._ceiling_s))

    def _keep(self, entry: int, users: Places, starts: Places, labels: Labels) -> bool:
        """Notes the labels [amount, vector, start]; False if none of them is finite."""
        alive = False
        for label, (least, shortest) in enumerate(labels):
            if label == len(self._makespan):
                self._makespan.append(np.full_like(self._makespan[0], np.inf))
                self._trip.append(np.full_like(self._makespan[0], np.inf))
            self._makespan[label][:, users[:, None], entry, starts] = least
            self._trip[label][:, users[:, None], entry, starts] = shortest
            alive |= bool(np.isfinite(least).any())
        return alive

    def _followers(self, entry: int, before: Places) -> tuple[Floats, Floats]:
        """Labels of what comes after a stage of a class, with its link: [samples, vector, label, layer]."""
        link = self._link[:, None, entry]
        hop = self._hop[:, None, entry]
        makespans = [labels[:, before] + link for labels in self._makespan]
        trips = [labels[:, before] + hop for labels in self._trip]
        merged = _labels(np.concatenate(makespans, axis=2), np.concatenate(trips, axis=2), self._max_labels)
        return np.stack([one for one, _ in merged], axis=2), np.stack([one for _, one in merged], axis=2)

    def _candidates(self, stages: Stages, makespan: Floats, trip: Floats) -> tuple[Floats, Floats]:
        """Suffixes that begin with stages, late ones too: [amount, vector, label x recompute, stage]."""
        least = np.take(makespan, stages.stop, axis=-1)[..., None, :] + stages.before_s[:, None, None]
        around = np.take(trip, stages.stop, axis=-1)[..., None, :] + stages.busy_s[:, None, None]
        own = np.maximum(around - stages.warm_s[:, None, None], 0.0)
        if (stages.cool_s < FAR_S).any():
            own += np.maximum(around - stages.cool_s[:, None, None], 0.0)
        own += stages.total_s[:, None, None]
        np.maximum(least, own, out=least)
        np.maximum(least, stages.share[:, None, None] * around, out=least)
        shape = (*least.shape[:2], least.shape[2] * least.shape[3], len(stages.stop))
        return least.reshape(shape), around.reshape(shape)

    def least_s(self) -> Floats:
        """[samples, counts]: no pipeline on so many devices passes the samples sooner; inf if none can."""
        least = self._makespan[0][..., 0].min(axis=2).astype(np.float64)
        return np.asarray(least * (1 - ROUNDED) if self._kind is np.float32 else least)

    def stages(self, which: int, vector: int) -> tuple[ColumnStage, ...]:
        """The stages of the pipeline of least Z for an amount of samples on exactly these devices."""
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
        """What a suffix on just these devices may begin with, after a stage of a class, -1 for none."""
        for entry in np.flatnonzero(self._vectors.digits[vector]):
            link = self._link[which, after, entry, start] if after >= 0 else 0.0
            hop = self._hop[which, after, entry, start] if after >= 0 else 0.0
            if self._vectors.totals[vector] == 1:
                makespan = trip = self._end
            else:
                before = np.array([vector]) - self._vectors.strides[entry]
                makespan, trip = self._followers(int(entry), before)
            stages = self._stages[entry]
            stages = stages.only(stages.start == start)
            if not len(stages.stop):
                continue
            with np.errstate(invalid="ignore"):
                tables = self._candidates(stages, makespan, trip)
            least, around = (table[which, 0] for table in tables)
            least = _on_time(least, self._ceiling_s) + link
            for label, place in np.argwhere(np.isfinite(least)):
                flag = int(label) % len(self._flags)
                stage = ColumnStage(int(entry), start, int(stages.stop[place]), bool(flag))
                around_s = float(around[label, place])
                beyond_s = around_s - float(stages.busy_s[which, flag, place])
                yield _Choice(float(least[label, place]), around_s + float(hop), beyond_s, stage)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A first stage; makespan and round trip with it and the link before it, and the round trip after it."""

    least_s: float
    trip_s: float
    beyond_s: float
    stage: ColumnStage


def _on_time(makespan: Floats, ceiling_s: float) -> Floats:
    return np.where(makespan <= ceiling_s, makespan, np.inf)


def _by_start(least: Floats, around: Floats, places: Places, ceiling_s: float, most: int | None) -> Labels:
    """Labels of the candidates by [amount, vector, start]; places: where the stages of each start begin."""
    if most == 1:
        around += (least > ceiling_s).astype(around.dtype) * FAR_S  # sums are faster than masks
        # one by one: of a short axis in the middle this is faster than min()
        tables = (reduce(np.minimum, np.moveaxis(table, 2, 0)) for table in (least, around))
        makespan, trip = (np.minimum.reduceat(table, places, axis=-1) for table in tables)
        makespan = _on_time(makespan, ceiling_s)
        return [(makespan, np.where(np.isfinite(makespan), trip, np.inf))]
    least = _on_time(least, ceiling_s)
    flat = (*least.shape[:2], -1)
    found = [
        _labels(one.reshape(flat), other.reshape(flat), most)
        for one, other in zip(
            np.split(least, places[1:], axis=-1), np.split(around, places[1:], axis=-1), strict=True
        )
    ]
    none = np.full(least.shape[:2], np.inf)
    rows = [
        [labels[number] if number < len(labels) else (none, none) for labels in found]
        for number in range(max(map(len, found)))
    ]
    return [
        (np.stack([one for one, _ in row], axis=-1), np.stack([one for _, one in row], axis=-1))
        for row in rows
    ]


def _labels(makespan: Floats, trip: Floats, most: int | None) -> Labels:
    """Pareto-optimal pairs along the third axis, least makespan first; the last one merges what is left."""
    if most == 1:
        return [(makespan.min(axis=2), np.where(np.isfinite(makespan), trip, np.inf).min(axis=2))]
    labels: Labels = []
    rest = makespan
    while True:
        pick = rest.argmin(axis=2)[:, :, None]
        least = np.take_along_axis(rest, pick, axis=2)
        if labels and not np.isfinite(least).any():
            break
        if most is not None and len(labels) == most - 1:
            shortest = np.where(np.isfinite(rest), trip, np.inf).min(axis=2)
            labels.append((least[:, :, 0], shortest))
            break
        chosen = np.where(np.isfinite(least), np.take_along_axis(trip, pick, axis=2), np.inf)
        labels.append((least[:, :, 0], chosen[:, :, 0]))
        rest = np.where(trip < chosen * (1 - TOLERANCE), rest, np.inf)
    return labels
