"""Small clusters: the least makespan of one pipeline for every count of devices of each class.

The state is (how many devices of each class the suffix of stages uses, class of its first stage, its first
layer); its labels are pairs (Z, W): the makespan bound of `partition.windows` and the round trip of a
microbatch from there. A stage adds its own busy time and link to both, and Z is at least the time in which
all samples pass the stage and, by Little's law, full microbatches * W / (what memory takes in flight).
At most `max_labels` labels are kept; the last one then takes the least Z and the least W of all that it
replaces, so that the result stays a lower bound (DESIGN section 6).
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from partition.column_dp import ColumnStage
from partition.tables import Amount, Floats, ProblemTables

TOLERANCE = 1e-9


class CountVectors:
    """All vectors of how many devices of each class are used, numbered in mixed radix."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.strides = np.concatenate([[1], np.cumprod(np.array(counts) + 1)[:-1]]).astype(np.int64)
        self.size = math.prod(count + 1 for count in counts)
        index = np.arange(self.size)
        self.digits = (index[:, None] // self.strides[None]) % (np.array(counts) + 1)[None]
        self.totals = self.digits.sum(axis=1)

    def users(self, total: int, entry: int) -> npt.NDArray[np.int64]:
        """The vectors of `total` devices that use at least one of a class."""
        return np.flatnonzero((self.totals == total) & (self.digits[:, entry] > 0))


class TypeCountProgramme:
    """The programme for one microbatch size and several amounts of samples, side by side.

    ceiling_s: labels beyond it are dropped. max_labels: None keeps all and is exact.
    """

    def __init__(
        self,
        tables: ProblemTables,
        vectors: CountVectors,
        microbatch_size: int,
        amounts: Sequence[Amount],
        ceiling_s: float,
        *,
        max_labels: int | None = 2,
        recompute: bool = True,
    ) -> None:
        self.microbatch_size, self.amounts = microbatch_size, tuple(amounts)
        self._tables, self._vectors, self._ceiling_s = tables, vectors, ceiling_s
        self._max_labels, self._recompute = max_labels, recompute
        self.num_layers = tables.num_layers
        self._tabulate()
        shape = (len(self.amounts), vectors.size, len(vectors.counts), self.num_layers + 1)
        self._makespan = [np.full(shape, np.inf)]
        self._trip = [np.full(shape, np.inf)]
        self._run()

    def _tabulate(self) -> None:
        """Arrays by [samples, recompute, class, start, stop]."""
        size = self._tables.at(self.microbatch_size)
        flags = (False, True) if self._recompute else (False,)
        made = [size.amount(amount) for amount in self.amounts]
        self._full = np.array([max(1.0, amount.passes) for amount in self.amounts])
        self._total = np.stack([np.stack([one.total_s, one.again_total_s])[: len(flags)] for one in made])
        self._before = np.stack([np.stack([one.before_s, one.again_before_s])[: len(flags)] for one in made])
        self._link = np.stack([one.link_s for one in made])  # [samples, class, next class, layer]
        firsts = [size if amount.full else self._tables.at(amount.least) for amount in self.amounts]
        self._hop = np.stack([first.hops[0] + first.hops[1] for first in firsts])
        self._busy = np.stack(
            [
                np.stack([first.busy_s, first.busy_s + first.forward_s])[: len(flags)]
                if amount.full
                else total - self._tables.optimizer_s
                for first, amount, total in zip(firsts, self.amounts, self._total, strict=True)
            ]
        )
        self._caps = np.stack(
            [
                np.stack([first.most_in_flight(amount, recompute=flag) for flag in flags])
                for first, amount in zip(firsts, self.amounts, strict=True)
            ]
        )
        self._allowed = (self._caps >= 1) & (self._total <= self._ceiling_s)

    def _run(self) -> None:
        vectors, counts = self._vectors, self._vectors.counts
        with np.errstate(invalid="ignore"):
            for total in range(1, min(sum(counts), self.num_layers) + 1):
                alive = False
                for entry in range(len(counts)):
                    users = vectors.users(total, entry)
                    if len(users):
                        alive |= self._extend(total, entry, users)
                if not alive:
                    break

    def _extend(self, total: int, entry: int, users: npt.NDArray[np.int64]) -> bool:
        """Labels of suffixes that begin with a stage of a class; False if there are none."""
        if total == 1:
            makespan = np.full((len(self.amounts), 1, 1, self.num_layers + 1), np.inf)
            makespan[..., -1] = 0.0
            trip = np.where(np.isfinite(makespan), 0.0, np.inf)
        else:
            makespan, trip = self._followers(entry, users - self._vectors.strides[entry])
        if not np.isfinite(makespan).any():
            return False
        alive = False
        for start in range(self.num_layers):
            allowed = self._allowed[:, :, entry, start]
            stops = np.flatnonzero(allowed.any(axis=(0, 1)))
            if not len(stops):
                continue
            labels = _labels(*self._stage(entry, start, stops, makespan, trip), self._max_labels)
            for label, (least, shortest) in enumerate(labels):
                if label == len(self._makespan):
                    self._makespan.append(np.full_like(self._makespan[0], np.inf))
                    self._trip.append(np.full_like(self._makespan[0], np.inf))
                self._makespan[label][:, users, entry, start] = least
                self._trip[label][:, users, entry, start] = shortest
                alive |= bool(np.isfinite(least).any())
        return alive

    def _followers(self, entry: int, before: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Labels of what comes after a stage of a class, with its link: [samples, vector, label, layer]."""
        link = self._link[:, None, entry]
        hop = self._hop[:, None, entry]
        makespans = [labels[:, before] + link for labels in self._makespan]
        trips = [labels[:, before] + hop for labels in self._trip]
        merged = _labels(np.concatenate(makespans, axis=2), np.concatenate(trips, axis=2), self._max_labels)
        return np.stack([one for one, _ in merged], axis=2), np.stack([one for _, one in merged], axis=2)

    def _stage(
        self, entry: int, start: int, stops: npt.NDArray[np.int64], makespan: Floats, trip: Floats
    ) -> tuple[Floats, Floats]:
        """Candidates [samples, vector, label x recompute x stop] of suffixes that begin at a layer."""
        index = (slice(None), slice(None), entry, start, stops)
        busy, caps = self._busy[index], self._caps[index]
        total = np.where(self._allowed[index], self._total[index], np.inf)
        shape = (makespan.shape[0], makespan.shape[1], makespan.shape[2], total.shape[1], len(stops))
        later = makespan[:, :, :, None, stops] + self._before[index][:, None, None]
        around = trip[:, :, :, None, stops] + busy[:, None, None]
        least = np.maximum(later, total[:, None, None])
        limit = (self._full[:, None, None] / np.maximum(caps, 1e-9))[:, None, None] * around
        np.maximum(least, limit, out=least)
        least[~(least <= self._ceiling_s)] = np.inf
        flat = (shape[0], shape[1], -1)
        return least.reshape(flat), np.broadcast_to(around, shape).reshape(flat)

    def least_s(self) -> Floats:
        """[samples, counts]: no pipeline on so many devices passes the samples sooner; inf if none can."""
        return np.asarray(self._makespan[0][..., 0].min(axis=2))

    def stages(self, which: int, vector: int) -> tuple[ColumnStage, ...]:
        """The stages of the pipeline of least Z for an amount of samples on exactly these devices."""
        found: list[ColumnStage] = []
        start, after = 0, -1
        with np.errstate(invalid="ignore"):
            while start < self.num_layers:
                best: tuple[float, int, int, bool] | None = None
                for entry in range(len(self._vectors.counts)):
                    if self._vectors.digits[vector, entry] == 0:
                        continue
                    here = np.array([vector])
                    link = self._link[which, after, entry, start] if after >= 0 else 0.0
                    if self._vectors.totals[vector] == 1:
                        makespan = np.full((len(self.amounts), 1, 1, self.num_layers + 1), np.inf)
                        makespan[..., -1] = 0.0
                        trip = np.where(np.isfinite(makespan), 0.0, np.inf)
                    else:
                        makespan, trip = self._followers(entry, here - self._vectors.strides[entry])
                    stops = np.flatnonzero(self._allowed[which, :, entry, start].any(axis=0))
                    if not len(stops):
                        continue
                    least = self._stage(entry, start, stops, makespan, trip)[0][which, 0]
                    pick = int(least.argmin())
                    value = float(least[pick]) + link
                    if np.isfinite(value) and (best is None or value < best[0]):
                        rest, stop = divmod(pick, len(stops))
                        flags = self._busy.shape[1]
                        best = (value, entry, int(stops[stop]), bool(rest % flags))
                if best is None:
                    return ()
                _, entry, stop, recompute = best
                found.append(ColumnStage(entry, start, stop, recompute))
                vector -= int(self._vectors.strides[entry])
                start, after = stop, entry
        return tuple(found)


def _labels(makespan: Floats, trip: Floats, most: int | None) -> list[tuple[Floats, Floats]]:
    """Pareto-optimal pairs along the third axis, least makespan first; the last one merges what is left."""
    labels: list[tuple[Floats, Floats]] = []
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
