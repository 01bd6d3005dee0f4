"""Searches that begin where a first local search ended."""

import math
import random
from collections.abc import Callable, Sequence

from partition.estimates.batch_split import share_out
from partition.estimates.timed_pipeline import TimedPipeline
from partition.exact.cut_dp import CutOptimizer
from partition.local_search.moves import GAIN, TOLERANCE, Found, Judge, LocalSearch

FAILED = 2  # sweeps that found nothing, one after the other, after which no other begins
KICKS = (2, 3, 5, 8)  # random changes before the next sweep then
WORSE = 0.01  # than the best, a set that a sweep goes on from at its beginning
IN_VAIN = 150  # sets that only the judge finds too slow, after which a walk ends: they take longest
SIMULATED = 3  # sets that show whether it pays to climb with the simulator
SETTLED, CLIMBED = 5, 3  # sets that are simulated then, beside the best of each start, and climbed from
CLIMB = SWEEP = 400  # tries of such a climb, and of a sweep of the walk after them
SETTLED_SWEEPS, PATIENT = 40, 12  # and how many may find nothing where it is `always` done
MOST_SIMULATED = 800_000  # microbatches at stages; after them a walk ends
HOPELESS = 2.0  # times the best judged: local search seldom makes up for that
QUEUES = 1.01  # simulated over estimated seconds, from which on that is worth it


def walked(
    cut_optimizer: CutOptimizer,
    best: Found,
    judge: Judge,
    tries: int,
    goes_on: Callable[[], bool] = lambda: True,
    *,
    sweeps: int = 1,
    most_failed: int = FAILED,
    in_vain: float = IN_VAIN,
    seed: int = 0,
) -> list[Found]:
    """Better sets that random changes lead to, the best last.

    Threshold accepting (Dueck, Scheuer, Journal of Computational Physics 90, 1990): in a sweep of so many
    tries a changed set may be slower than the best so far by `WORSE` at first, and by less and less. After
    two that found nothing the next begins a few random changes away. goes_on: whether there is time for
    another try.
    """
    rng, changes = random.Random(seed), LocalSearch(cut_optimizer, judge, tries)
    batch = cut_optimizer.tables.problem.global_batch_size
    found, now, now_s, failed = [best], list(best.timed), best.step_s, 0
    shared_s, late = share_out(now, batch, TOLERANCE)[0], 0
    for _ in range(sweeps):
        first = last = found[-1]
        for turn in range(tries):
            if late >= in_vain or not goes_on():
                break
            most_s = max(now_s, last.step_s * (1 + WORSE * (1 - turn / tries)))
            seconds, trial = changes.tried(rng, now, shared_s, most_s)
            if seconds > most_s:
                continue
            judged_s = judge(trial, seconds)
            if judged_s > most_s:
                late += 1
                continue
            now, now_s, shared_s = trial, judged_s, seconds
            if now_s < last.step_s * (1 - GAIN):
                last = Found(now_s, tuple(now), "walked")
        if last is not first:
            found.append(last)
            failed = 0
            continue
        failed += 1
        if failed == most_failed or late >= in_vain:
            break
        if failed % 2 == 0:
            now = kicked(changes, rng, last.timed, shared_s)
            shared_s = share_out(now, batch, TOLERANCE)[0]
            now_s = judge(now, shared_s)
    return found[1:]


def kicked(
    changes: LocalSearch, rng: random.Random, timed: Sequence[TimedPipeline], step_s: float
) -> list[TimedPipeline]:
    """The pipelines after a few random changes, better or worse, with which they can still do the batch."""
    base = list(timed)
    for _ in range(rng.choice(KICKS)):
        changed = changes.change(rng, base, step_s)
        if changed and any(pipeline.timing.fits for pipeline in changed):
            base = changed
    return base


def distinct(found: Sequence[Found]) -> list[Found]:
    """Without those whose pipelines are like those of an earlier one, but for the names of devices."""
    seen: dict[object, Found] = {}
    for entry in found:
        seen.setdefault(tuple(sorted(id(pipeline.timing) for pipeline in entry.timed)), entry)
    return list(seen.values())


def settled(
    cut_optimizer: CutOptimizer, found: Sequence[Found], simulated: Judge, *, always: bool = False
) -> list[Found]:
    """The best sets by the simulator, climbed on with it where it says more than the clocks of pipelines.

    Messages of pipelines that share network cards wait for each other, and gradient sync hides behind
    backwards, which no estimate knows. Empty where the estimates hold, unless it is to be done `always`.
    found: at least one, least estimates first.
    """
    first = distinct(found)
    judged = [(simulated(entry.timed, 0.0), entry) for entry in first[:SIMULATED]]
    if not always and min(step_s for step_s, _ in judged) <= QUEUES * found[0].step_s:
        return []
    of_kinds = {entry.start: entry for entry in reversed(first[SETTLED:])}
    others = [*first[SIMULATED:SETTLED], *of_kinds.values()]
    judged += [(simulated(entry.timed, 0.0), entry) for entry in others]
    judged.sort(key=lambda pair: pair[0])
    climbs, asked, batch = [], 0.0, cut_optimizer.tables.problem.global_batch_size

    def counted(timed: Sequence[TimedPipeline], seconds: float) -> float:
        nonlocal asked
        asked += sum(
            batch / len(timed) / pipeline.microbatch_size * len(pipeline.stages) for pipeline in timed
        )
        return simulated(timed, seconds)

    for step_s, entry in judged[:CLIMBED]:
        if step_s > HOPELESS * judged[0][0]:
            break
        climber = LocalSearch(cut_optimizer, counted, CLIMB, seed=1)
        step_s, timed = climber.improve(entry.timed)
        climbs.append(Found(step_s, tuple(timed), "settled"))
    best = min(climbs, key=lambda entry: entry.step_s)
    climbs += walked(
        cut_optimizer,
        best,
        counted,
        SWEEP,
        lambda: asked < MOST_SIMULATED,
        sweeps=SETTLED_SWEEPS,
        most_failed=PATIENT if always else FAILED,
        in_vain=math.inf,
    )
    return sorted(climbs, key=lambda entry: entry.step_s)
