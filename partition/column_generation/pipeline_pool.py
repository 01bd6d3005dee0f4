"""New sets of pipelines out of all those that a search has looked at."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from partition.column_generation.master_problem import NO_LIMITS, Limits, MasterProblem, solve_master
from partition.estimates.arrays import Floats
from partition.estimates.class_pipeline import ClassPipeline, ColumnStage
from partition.estimates.device_classes import DeviceClasses
from partition.estimates.extended_clock import LATER
from partition.estimates.timed_pipeline import PipelineTiming, TimingCache

PROMISED = 3e-3  # relative, shorter than the step that is known: else there is nothing to gain
CLOSE = 1e-3  # relative: how exactly the least step of the relaxed programme is found
SECANTS = 6
MOST_COLUMNS = 300  # of the integer programme
NO_LIMIT = (-math.inf, 1.0)  # a line of a clock that limits nothing

Uses = tuple[int, ...]
"""How many devices of each class a pipeline takes."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A relaxed programme of a step time. best: of each `Uses`, the most samples, and who does them."""

    step_s: float
    best: dict[Uses, tuple[int, PipelineTiming]]
    master: MasterProblem

    def worth(self, uses: Sequence[int], samples: int) -> float:
        """Return samples over the price of the devices that do them: 1 where the programme uses them."""
        price = float(np.dot(self.master.prices, uses)) + self.master.each
        return samples / max(price, 1e-9)

    def ranked(self) -> list[tuple[float, PipelineTiming]]:
        """Return (worth, timing) of the best pipeline on each devices, most worth first."""
        worths = [(self.worth(uses, samples), timing) for uses, (samples, timing) in self.best.items()]
        return sorted(worths, key=lambda pair: -pair[0])


@dataclass(slots=True)
class Ceilings:
    """Owns timings, and what none of them does more samples than in a step: all of it at once."""

    batch: int
    timings: list[PipelineTiming] = field(default_factory=list)
    _lines: Floats = field(default_factory=lambda: np.zeros((0, 0, 2)))  # of clocks: [timing, line, what]
    _sizes_and_rooms: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    _asked_s: list[float] = field(default_factory=list)  # the last step that was asked, 0 for none
    _done: list[int] = field(default_factory=list)  # its samples

    def take(self, timings: Sequence[PipelineTiming]) -> None:
        """Take up timings behind those that are there."""
        if not timings:
            return
        known, clocks = self._lines, [timing.clock.least_lines for timing in timings]
        width = max(known.shape[1], *map(len, clocks))
        self._lines = np.tile(NO_LIMIT, (len(known) + len(clocks), width, 1))
        self._lines[: len(known), : known.shape[1]] = known
        for row, lines in zip(self._lines[len(known) :], clocks, strict=True):
            row[: len(lines)] = [line if line[1] > 0 else NO_LIMIT for line in lines]
        sizes = [timing.microbatch_size for timing in timings]
        rooms = [timing.room(self.batch) for timing in timings]
        self._sizes_and_rooms = np.concatenate([self._sizes_and_rooms, [sizes, rooms]], axis=1)
        self.timings += timings
        self._asked_s += [0.0] * len(timings)
        self._done += [0] * len(timings)

    def in_step(self, step_s: float) -> list[float]:
        """Return samples of each timing: `PipelineTiming.no_more` where its clock has not been asked.

        Where it has, as many as it does or more.
        """
        if not self.timings:
            return []
        begins_s, each_s = np.moveaxis(self._lines, -1, 0)
        whole = ((step_s * LATER - begins_s) / each_s).min(axis=1)
        sizes, rooms = self._sizes_and_rooms
        ceilings = np.minimum(rooms, (np.floor(np.clip(whole, 0.0, self.batch)) + 1) * sizes - 1)
        shorter = np.array(self._asked_s) >= step_s  # no more in less time
        known: list[float] = np.where(shorter, np.minimum(ceilings, self._done), ceilings).tolist()
        return known

    def most(self, place: int, step_s: float) -> int:
        """Return the most samples that a timing does in a step, by its clock."""
        samples = self.timings[place].most(step_s, self.batch)
        self._asked_s[place], self._done[place] = step_s, samples
        return samples

    def was_asked(self, place: int) -> bool:
        """Return whether the clock of a timing was asked, here or elsewhere."""
        return self._asked_s[place] > 0 or self.timings[place].clock.asked


class PipelinePool:
    """The pipelines that a timing cache has made, as columns of a linear programme over device classes.

    The best set made of the routes that a local search has seen is often better than what it ends with
    (Rochat, Taillard, Journal of Heuristics 1, 1995). Owns the columns, by the devices that they take.
    """

    def __init__(
        self, timings: TimingCache, classes: DeviceClasses, batch: int, limits: Limits = NO_LIMITS
    ) -> None:
        """Start with no columns; devices of a class may stand for one another; batch: samples of a step."""
        self.classes, self.limits = classes, limits
        self._timings, self._batch = timings, batch
        self._class_index = classes.class_indices()
        self._known = 0
        self._ceilings = Ceilings(batch)
        self._columns: dict[Uses, list[int]] = {}  # places of timings in `_ceilings`

    def pipelines(self, step_s: float) -> tuple[float, list[ClassPipeline]]:
        """Return (seconds, whole pipelines) of a step shorter than step_s; (inf, none) if none is promised.

        The seconds are those of the relaxed programme, in which the whole pipelines do nearly the batch.
        """
        relaxed = self.least(step_s * (1 - PROMISED))
        return (math.inf, []) if relaxed is None else (relaxed.step_s, self._whole(relaxed))

    def least(self, step_s: float) -> Relaxed | None:
        """Return the relaxed programme of the least step up to step_s; None where none does the batch."""
        self._gather()
        found: Relaxed | None = None
        low, high, trial_s = 0.0, step_s, step_s
        for _ in range(SECANTS):
            relaxed = self._relaxed(trial_s)
            share = relaxed.master.samples / self._batch if relaxed.master.met else 0.0
            if share >= 1:
                found, high = relaxed, trial_s
                if share < 1 + CLOSE:
                    break
            elif found is None:
                return None
            else:
                low = trial_s
            margin = 0.1 * (high - low)
            trial_s = min(max(trial_s / max(share, 1e-9), low + margin), high - margin)
        return found

    def uses(self, timing: PipelineTiming) -> Uses:
        """Return how many devices of each class a pipeline takes."""
        uses = [0] * len(self.classes.members)
        for class_index in self.class_indices(timing):
            uses[class_index] += 1
        return tuple(uses)

    def class_indices(self, timing: PipelineTiming) -> list[int]:
        """Return the class of each stage's device."""
        return [self._class_index[stage.device.name] for stage in timing.stages]

    def _gather(self) -> None:
        """Take up the timings made since the last call."""
        timings, new = self._timings.timings, list[PipelineTiming]()
        for timing in timings[self._known :]:
            if timing.fits and all(map(operator.le, uses := self.uses(timing), self.classes.counts)):
                self._columns.setdefault(uses, []).append(len(self._ceilings.timings) + len(new))
                new.append(timing)
        self._known = len(timings)
        self._ceilings.take(new)

    def _relaxed(self, step_s: float) -> Relaxed:
        best, ceilings = {}, self._ceilings.in_step(step_s)
        for uses, places in self._columns.items():
            samples, found = self._most(places, ceilings, step_s)
            if samples:
                best[uses] = (samples, found)
        if not best:
            return Relaxed(step_s, best, MasterProblem(0.0, np.zeros(0), np.zeros(len(self.classes.counts))))
        values = [samples for samples, _ in best.values()]
        return Relaxed(step_s, best, solve_master(list(best), values, self.classes.counts, self.limits))

    def _most(
        self, places: Sequence[int], ceilings: Sequence[float], step_s: float
    ) -> tuple[int, PipelineTiming]:
        """Return the most samples that one of them does in a step, and which; few clocks are asked.

        Of those that do as many the one that promised most, which a clock that was asked before says exactly.
        """
        timings = self._ceilings.timings
        samples, found = 0, timings[places[0]]
        waiting = [(-ceilings[place], place, True) for place in places]
        heapify(waiting)
        while waiting and -waiting[0][0] > samples:
            limit, place, unsure = heappop(waiting)
            if unsure and self._ceilings.was_asked(place):
                heappush(waiting, (-self._ceilings.most(place, step_s), place, False))
                continue
            most = self._ceilings.most(place, step_s) if unsure else int(-limit)
            if most > samples:
                samples, found = most, timings[place]
        return samples, found

    def _whole(self, relaxed: Relaxed) -> list[ClassPipeline]:
        """Choose whole numbers of the columns that are worth most beyond the prices of their devices."""
        columns = [(uses, samples, timing) for uses, (samples, timing) in relaxed.best.items()]
        prices = relaxed.master.prices
        columns.sort(key=lambda column: float(np.dot(prices, column[0])) - column[1])
        del columns[MOST_COLUMNS:]
        found = solve_master(
            [uses for uses, _, _ in columns],
            [float(samples) for _, samples, _ in columns],
            self.classes.counts,
            self.limits,
            integer=True,
            enough=self._batch,
        )
        return [
            ClassPipeline(timing.microbatch_size, samples, self._stages(timing))
            for (_, samples, timing), amount in zip(columns, found.amounts, strict=True)
            for _ in range(round(amount))
        ]

    def _stages(self, timing: PipelineTiming) -> tuple[ColumnStage, ...]:
        return tuple(
            ColumnStage(self._class_index[stage.device.name], stage.start, stage.stop, stage.recompute)
            for stage in timing.stages
        )
