"""Searches that begin where a first local search ended."""

import random
from collections.abc import Callable, Sequence

from partition.estimates.batch_split import share_out
from partition.estimates.effort import SimulatorEffort, Sweeps
from partition.estimates.timed_pipeline import TimedPipeline
from partition.exact.cut_dp import CutOptimizer
from partition.local_search.moves import GAIN, TOLERANCE, EvaluateSet, LocalSearch, PipelineSet


def threshold_accepting(
    cut_optimizer: CutOptimizer,
    best: PipelineSet,
    evaluate: EvaluateSet,
    effort: Sweeps,
    goes_on: Callable[[], bool] = lambda: True,
    *,
    seed: int = 0,
) -> list[PipelineSet]:
    """Return better sets that random changes lead to, the best last.

    In a sweep a changed set may be slower than the best so far by a threshold that falls to nothing (Dueck,
    Scheuer, Journal of Computational Physics 90, 1990). After every two sweeps that found nothing the next
    begins a few random changes away. goes_on: whether there is time for another try.
    """
    rng, changes = random.Random(seed), LocalSearch(cut_optimizer, evaluate, effort.tries)
    batch = cut_optimizer.problem.global_batch_size
    found, now, now_s, failed = [best], list(best.timed), best.step_s, 0
    clock_s, late = share_out(now, batch, TOLERANCE)[0], 0
    for _ in range(effort.sweeps):
        first = last = found[-1]
        for turn in range(effort.tries):
            if late >= effort.most_late or not goes_on():
                break
            most_s = max(now_s, last.step_s * (1 + effort.threshold * (1 - turn / effort.tries)))
            seconds, trial = changes.tried(rng, now, clock_s, most_s)
            if seconds > most_s:
                continue
            evaluated_s = evaluate(trial, seconds)
            if evaluated_s > most_s:
                late += 1
                continue
            now, now_s, clock_s = trial, evaluated_s, seconds
            if now_s < last.step_s * (1 - GAIN):
                last = PipelineSet(now_s, tuple(now), "walked")
        if last is not first:
            found.append(last)
            failed = 0
            continue
        failed += 1
        if failed == effort.most_failed or late >= effort.most_late:
            break
        if failed % 2 == 0:
            now = perturb(changes, rng, last.timed, clock_s, effort.perturbations)
            clock_s = share_out(now, batch, TOLERANCE)[0]
            now_s = evaluate(now, clock_s)
    return found[1:]


def perturb(
    changes: LocalSearch,
    rng: random.Random,
    timed: Sequence[TimedPipeline],
    step_s: float,
    perturbations: Sequence[int],
) -> list[TimedPipeline]:
    """Return the pipelines after a few random changes, with which they can still do the batch."""
    base, batch = list(timed), changes.cut_optimizer.problem.global_batch_size
    for _ in range(rng.choice(perturbations)):
        changed = changes.change(rng, base, step_s)
        if changed and sum(pipeline.timing.room(batch) for pipeline in changed) >= batch:
            base = changed
    return base


def distinct(found: Sequence[PipelineSet]) -> list[PipelineSet]:
    """Return the sets without those whose pipelines are like an earlier one's, but for names of devices."""
    seen: dict[object, PipelineSet] = {}
    for pipelines in found:
        seen.setdefault(tuple(sorted(id(pipeline.timing) for pipeline in pipelines.timed)), pipelines)
    return list(seen.values())


def improve_with_simulator(
    cut_optimizer: CutOptimizer,
    found: Sequence[PipelineSet],
    simulate: EvaluateSet,
    effort: SimulatorEffort,
) -> list[PipelineSet]:
    """Return better sets by the simulator, best first, where it says more than the clocks of pipelines.

    Messages of pipelines that share network cards wait for each other, and gradient sync hides behind
    backwards, which no estimate knows. Empty where the estimates hold, unless effort has it done `always`.
    found: at least one, least estimates first.
    """
    ticks, batch = 0.0, cut_optimizer.problem.global_batch_size

    def counted(timed: Sequence[TimedPipeline], seconds: float) -> float:
        nonlocal ticks
        ticks += sum(
            batch / len(timed) / pipeline.microbatch_size * len(pipeline.stages) for pipeline in timed
        )
        return simulate(timed, seconds)

    climbed: list[PipelineSet] = []
    starts = _simulated_starts(found, simulate, effort)
    for start_s, start in starts[: effort.climbed]:
        if start_s > effort.hopeless * starts[0][0]:
            break
        climber = LocalSearch(cut_optimizer, counted, effort.climb_tries, seed=1)
        step_s, timed = climber.improve(start.timed)
        climbed.append(PipelineSet(step_s, tuple(timed), "simulated"))
    if not climbed:
        return []
    best = min(climbed, key=lambda pipelines: pipelines.step_s)
    climbed += threshold_accepting(
        cut_optimizer, best, counted, effort.walk, lambda: ticks < effort.most_ticks
    )
    return sorted(climbed, key=lambda pipelines: pipelines.step_s)


def _simulated_starts(
    found: Sequence[PipelineSet], simulate: EvaluateSet, effort: SimulatorEffort
) -> list[tuple[float, PipelineSet]]:
    """Return (simulated seconds, set) of the best sets and of the best of each start, best first.

    Empty where the simulator says what the estimates say, unless effort has it done `always`.
    """
    sets = distinct(found)
    simulated = [(simulate(pipelines.timed, 0.0), pipelines) for pipelines in sets[: effort.probed]]
    if not effort.always and min(step_s for step_s, _ in simulated) <= effort.queues * found[0].step_s:
        return []
    of_starts = {pipelines.start: pipelines for pipelines in reversed(sets[effort.evaluated :])}
    others = [*sets[effort.probed : effort.evaluated], *of_starts.values()]
    simulated += [(simulate(pipelines.timed, 0.0), pipelines) for pipelines in others]
    return sorted(simulated, key=lambda pair: pair[0])
