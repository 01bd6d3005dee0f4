"""Small changes of a set of pipelines, kept where the step gets shorter."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cost_model.cluster import Device
from partition.constraints.wished_sets import WishedSets
from partition.estimates.batch_split import share_out
from partition.estimates.timed_pipeline import TimedPipeline
from partition.exact.cut_dp import CutOptimizer

MOVES = ("size", "order", "swap", "move", "merge", "split", "add", "drop")
SAME_NUMBER = ("size", "order", "swap", "move", "add", "drop")  # of pipelines
TOLERANCE = 1e-4  # relative: how exactly the samples of a changed set are shared out
GAIN = 2e-4  # relative, above TOLERANCE: less may be rounding, and is not worth a change
EvaluateSet = Callable[[Sequence[TimedPipeline], float], float]
"""Seconds of a step of a set of pipelines, given the seconds that it takes by their clocks."""
_Wanted = tuple[list[Device], int]
"""The devices of a new pipeline, from first to last stage, and its microbatch size."""


@dataclass(frozen=True, slots=True)
class PipelineSet:
    """Pipelines that share no device, and the step in which they do the batch, as the search evaluates it."""

    step_s: float
    timed: tuple[TimedPipeline, ...]
    start: str
    """Where it comes from, as "columns"."""


@dataclass(slots=True)
class LocalSearch:
    """Hill climbing with a fixed number of tries and a fixed seed, so that machines agree."""

    cut_optimizer: CutOptimizer
    evaluate: EvaluateSet
    tries: int
    seed: int = 0
    moves: tuple[str, ...] = field(init=False)
    wishes: WishedSets = field(init=False)

    def __post_init__(self) -> None:
        problem = self.cut_optimizer.problem
        forced, self.wishes = problem.forced, WishedSets(problem)
        self.moves = MOVES if forced.num_pipelines is None else SAME_NUMBER
        if forced.max_devices is not None:
            self.moves += ("replace",)

    def improve(self, timed: Sequence[TimedPipeline]) -> tuple[float, list[TimedPipeline]]:
        """Return (evaluated seconds, pipelines), no worse than those given."""
        problem = self.cut_optimizer.problem
        batch, rng = problem.global_batch_size, random.Random(self.seed)
        best = list(timed)
        clock_s = share_out(best, batch, TOLERANCE)[0]
        step_s = self.evaluate(best, clock_s)
        since = 0
        for _ in range(self.tries):
            since += 1
            if since > self.tries // 3 + 10:
                break
            seconds, trial = self.tried(rng, best, clock_s, step_s)
            if seconds >= step_s:
                continue
            evaluated_s = self.evaluate(trial, seconds)
            if evaluated_s < step_s * (1 - GAIN):
                step_s, clock_s, best, since = evaluated_s, seconds, trial, 0
        return step_s, best

    def tried(
        self, rng: random.Random, timed: list[TimedPipeline], step_s: float, within_s: float
    ) -> tuple[float, list[TimedPipeline]]:
        """Return (seconds, pipelines) after a random move.

        Seconds are inf if the move leads nowhere, or to a step longer than within_s.
        """
        trial = self.change(rng, timed, step_s)
        if trial is None or any(not pipeline.timing.fits for pipeline in trial):
            return math.inf, timed
        batch = self.cut_optimizer.problem.global_batch_size
        return share_out(trial, batch, TOLERANCE, within_s=within_s)[0], trial

    def change(
        self, rng: random.Random, timed: list[TimedPipeline], step_s: float
    ) -> list[TimedPipeline] | None:
        """Return the pipelines after a random move, the new ones last.

        New ones are cut for about the samples that they do in a step of step_s. None where the move leads
        nowhere, or to pipelines that do not respect what is forced.
        """
        move, index = rng.choice(self.moves), rng.randrange(len(timed))
        made = [other for place, other in enumerate(timed) if place != index]
        wanted = self._wanted(rng, move, timed[index], made)
        if wanted is None:
            return None
        for devices, size in wanted:
            pipeline = fitted(self.cut_optimizer, devices, size, step_s)
            if pipeline is None:
                return None
            made.append(pipeline)
        return made if self.wishes.hold(made) else None

    def _wanted(
        self, rng: random.Random, move: str, pipeline: TimedPipeline, others: list[TimedPipeline]
    ) -> list[_Wanted] | None:
        """Return what replaces a pipeline; a partner that is replaced too is taken from the others."""
        mine, size = list(pipeline.devices), pipeline.microbatch_size
        if move == "size":
            return [(mine, rng.choice(self.cut_optimizer.problem.microbatch_sizes))]
        if move == "order" and len(mine) > 1:
            one, other = rng.sample(range(len(mine)), 2)
            mine[one], mine[other] = mine[other], mine[one]
            return [(mine, size)]
        if move in ("swap", "move", "merge") and others:
            partner = others.pop(rng.randrange(len(others)))
            changed = _exchanged(rng, move, mine, list(partner.devices))
            sizes = (partner.microbatch_size, size)
            return [(devices, size) for devices, size in zip(changed, sizes, strict=True) if devices]
        if move == "split" and len(mine) > 1:
            cut = rng.randrange(1, len(mine))
            rng.shuffle(mine)
            return [(mine[:cut], size), (mine[cut:], size)]
        if move == "add":
            spare = self._spare([pipeline, *others])
            if not spare:
                return None
            mine.insert(rng.randrange(len(mine) + 1), rng.choice(spare))
            return [(mine, size)]
        if move == "replace":
            spare = self._spare([pipeline, *others])
            if not spare:
                return None
            mine[rng.randrange(len(mine))] = rng.choice(spare)
            return [(mine, size)]
        if move == "drop" and len(mine) > 1:
            mine.pop(rng.randrange(len(mine)))
            return [(mine, size)]
        return None

    def _spare(self, timed: Sequence[TimedPipeline]) -> list[Device]:
        """Return the devices that no pipeline uses."""
        used = {device.name for pipeline in timed for device in pipeline.devices}
        devices = self.cut_optimizer.problem.cluster.devices
        return [device for device in devices if device.name not in used]


def _exchanged(
    rng: random.Random, move: str, mine: list[Device], theirs: list[Device]
) -> tuple[list[Device], list[Device]]:
    """Return (theirs, mine) after one device has changed sides, two have, or all have."""
    one, other = rng.randrange(len(mine)), rng.randrange(len(theirs))
    if move == "swap":
        mine[one], theirs[other] = theirs[other], mine[one]
    elif move == "move":
        theirs.insert(other, mine.pop(one))
    else:
        theirs, mine = theirs + mine, []
    return theirs, mine


def fitted(
    cut_optimizer: CutOptimizer, devices: Sequence[Device], size: int, step_s: float
) -> TimedPipeline | None:
    """Return a pipeline on these devices, in order, cut for about the samples that it does in a step.

    None where memory takes no cuts.
    """
    busy, classes = cut_optimizer.tables.at(size).busy_s, cut_optimizer.entries(devices)
    period = 1 / sum(1 / max(float(busy[class_index, 0, -1]), 1e-300) for class_index in classes)
    count = max(1, round(step_s / period - len(devices) + 1))
    most = -(-cut_optimizer.problem.global_batch_size // size)
    return cut_optimizer.recut(devices, size, size * min(most, _rounded(count)))


def _rounded(count: int) -> int:
    """Return a count of which only the first three binary digits are kept, so that cuts are found again."""
    step = max(1, 1 << max(0, count.bit_length() - 3))
    return max(1, round(count / step) * step)
