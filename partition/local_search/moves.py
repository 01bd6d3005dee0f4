"""Small changes of a set of pipelines, kept where the step gets shorter."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_model.cluster import Device
from partition.estimates.batch_split import share_out
from partition.estimates.timed_pipeline import TimedPipeline
from partition.exact.cut_dp import CutOptimizer

MOVES = ("size", "order", "swap", "move", "merge", "split", "add", "drop")
TOLERANCE = 1e-4  # of the seconds of a set
GAIN = 2e-4  # relative: less is not worth a change
Judge = Callable[[Sequence[TimedPipeline], float], float]
"""Seconds of a step of pipelines whose samples are done in the given time; adds what the clock leaves out."""


@dataclass(frozen=True, slots=True)
class Found:
    """Pipelines and the step in which they do the batch, as judged by the search."""

    step_s: float
    timed: tuple[TimedPipeline, ...]
    start: str


@dataclass(slots=True)
class LocalSearch:
    """Hill climbing with a fixed number of tries and a fixed seed, so that machines agree."""

    cut_optimizer: CutOptimizer
    judge: Judge
    tries: int
    seed: int = 0

    def improve(self, timed: Sequence[TimedPipeline]) -> tuple[float, list[TimedPipeline]]:
        """(judged seconds, pipelines), no worse than those given."""
        problem = self.cut_optimizer.tables.problem
        batch, rng = problem.global_batch_size, random.Random(self.seed)
        best = list(timed)
        shared = share_out(best, batch, TOLERANCE)[0]
        step_s = self.judge(best, shared)
        since = 0
        for _ in range(self.tries):
            since += 1
            if since > self.tries // 3 + 10:
                break
            seconds, trial = self.tried(rng, best, shared, step_s)
            if seconds >= step_s:
                continue
            judged = self.judge(trial, seconds)
            if judged < step_s * (1 - GAIN):
                step_s, shared, best, since = judged, seconds, trial, 0
        return step_s, best

    def tried(
        self, rng: random.Random, timed: list[TimedPipeline], step_s: float, within_s: float
    ) -> tuple[float, list[TimedPipeline]]:
        """(seconds, pipelines) after a random move; inf if it leads nowhere, or to a step that is longer."""
        trial = self.change(rng, timed, step_s)
        if trial is None or any(not pipeline.timing.fits for pipeline in trial):
            return math.inf, timed
        batch = self.cut_optimizer.tables.problem.global_batch_size
        return share_out(trial, batch, TOLERANCE, within_s=within_s)[0], trial

    def change(
        self, rng: random.Random, timed: list[TimedPipeline], step_s: float
    ) -> list[TimedPipeline] | None:
        """The pipelines after a random move; None where it leads nowhere."""
        move = rng.choice(MOVES)
        index = rng.randrange(len(timed))
        pipeline = timed[index]
        mine = list(pipeline.devices)
        sizes = self.cut_optimizer.tables.problem.microbatch_sizes
        rest = [other for place, other in enumerate(timed) if place != index]
        if move == "size":
            return self._with(rest, [(mine, rng.choice(sizes))], step_s)
        if move == "order" and len(mine) > 1:
            one, other = rng.sample(range(len(mine)), 2)
            mine[one], mine[other] = mine[other], mine[one]
            return self._with(rest, [(mine, pipeline.microbatch_size)], step_s)
        if move in ("swap", "move", "merge") and len(timed) > 1:
            place = rng.randrange(len(rest))
            partner = rest.pop(place)
            theirs = list(partner.devices)
            one, other = rng.randrange(len(mine)), rng.randrange(len(theirs))
            if move == "swap":
                mine[one], theirs[other] = theirs[other], mine[one]
            elif move == "move":
                theirs.insert(other, mine.pop(one))
            else:
                theirs, mine = theirs + mine, []
            wanted = [(theirs, partner.microbatch_size)]
            if mine:
                wanted.append((mine, pipeline.microbatch_size))
            return self._with(rest, wanted, step_s)
        if move == "split" and len(mine) > 1:
            cut = rng.randrange(1, len(mine))
            rng.shuffle(mine)
            size = pipeline.microbatch_size
            return self._with(rest, [(mine[:cut], size), (mine[cut:], size)], step_s)
        if move == "add":
            used = {device.name for entry in timed for device in entry.devices}
            spare = [d for d in self.cut_optimizer.tables.problem.cluster.devices if d.name not in used]
            if not spare:
                return None
            mine.insert(rng.randrange(len(mine) + 1), rng.choice(spare))
            return self._with(rest, [(mine, pipeline.microbatch_size)], step_s)
        if move == "drop" and len(mine) > 1:
            mine.pop(rng.randrange(len(mine)))
            return self._with(rest, [(mine, pipeline.microbatch_size)], step_s)
        return None

    def _with(
        self, rest: list[TimedPipeline], wanted: list[tuple[list[Device], int]], step_s: float
    ) -> list[TimedPipeline] | None:
        """The other pipelines and new ones on these devices, each cut for about the samples it will get."""
        made = list(rest)
        for devices, size in wanted:
            pipeline = fitted(self.cut_optimizer, devices, size, step_s)
            if pipeline is None:
                return None
            made.append(pipeline)
        return made


def fitted(
    cut_optimizer: CutOptimizer, devices: Sequence[Device], size: int, step_s: float
) -> TimedPipeline | None:
    """A pipeline on these devices in this order, cut for about the samples that it does in a step."""
    busy, entries = cut_optimizer.tables.at(size).busy_s, cut_optimizer.entries(devices)
    period = 1 / sum(1 / max(float(busy[entry, 0, -1]), 1e-300) for entry in entries)
    count = max(1, round(step_s / period - len(devices) + 1))
    most = -(-cut_optimizer.tables.problem.global_batch_size // size)
    return cut_optimizer.recut(devices, size, size * min(most, _rounded(count)))


def _rounded(count: int) -> int:
    """To two digits of a binary number, so that cuts are found again instead of made anew."""
    step = max(1, 1 << max(0, count.bit_length() - 3))
    return max(1, round(count / step) * step)
