"""The best of all small plans that respect what is forced, by the simulator. Shared by tests."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product

from cost_model.cluster import Device
from hetpipe.simulation.prediction import evaluator
from partition.estimates.optimizer_sharding import fits
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache
from partition.plan import Plan
from partition.problem import Problem


def least_step_s(problem: Problem) -> float:
    """Return the least step of plans in which each device serves one stage; inf where none is allowed.

    All orders, cuts, microbatch sizes and ways to share the samples out; recompute where a stage does not fit
    without; in_flight as the clock of a pipeline has it.
    """
    evaluate, least = evaluator(problem.profile, problem.cluster), math.inf
    for plan in _plans(problem):
        if problem.forced.allows(plan) and fits(plan, problem.profile, problem.cluster):
            least = min(least, evaluate(plan).step_s)
    return least


def _plans(problem: Problem) -> Iterator[Plan]:
    timings, batch = TimingCache(PipelineCosts(problem)), problem.global_batch_size
    for chains in _partitions(problem.cluster.devices):
        if len(chains) > batch or problem.forced.num_pipelines not in (None, len(chains)):
            continue
        options = [list(_cut(problem, timings, chain)) for chain in chains]
        for timed in product(*options):
            for samples in _shares(batch, len(timed)):
                pipelines = (one.pipeline(count) for one, count in zip(timed, samples, strict=True))
                yield Plan("brute force", problem.profile.model, batch, tuple(pipelines))


def _partitions(devices: Sequence[Device]) -> Iterator[tuple[tuple[Device, ...], ...]]:
    """Give ordered devices of one or several pipelines; pipelines in the order of their first devices."""
    for count in range(1, len(devices) + 1):
        for order in permutations(devices, count):
            for number in range(1, count + 1):
                for ends in combinations(range(1, count), number - 1):
                    chains = tuple(order[a:b] for a, b in pairwise((0, *ends, count)))
                    if [chain[0].name for chain in chains] == sorted(chain[0].name for chain in chains):
                        yield chains


def _cut(problem: Problem, timings: TimingCache, devices: Sequence[Device]) -> Iterator[TimedPipeline]:
    layers = problem.profile.num_layers
    for size in problem.microbatch_sizes:
        for cuts in combinations(range(1, layers), len(devices) - 1):
            stages = []
            for device, (start, stop) in zip(devices, pairwise((0, *cuts, layers)), strict=True):
                again = timings.costs.cap(device, start, stop, size, recompute=False) < 1
                stages.append(TimedStage(device, start, stop, again))
            made = timings.pipeline(stages, size)
            if made.timing.fits:
                yield made


def _shares(batch: int, number: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, batch), number - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *ends, batch)))
