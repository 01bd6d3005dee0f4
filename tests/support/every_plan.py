"""The best of all small plans of one or two pipelines, by the simulator. Shared by tests."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

from cost_model.cluster import Device, Link
from hetpipe.simulation.prediction import evaluator
from partition.estimates.device_classes import equal_devices
from partition.estimates.optimizer_sharding import fits
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache
from partition.plan import Plan
from partition.problem import Problem
from random_problems import random_cluster, random_profile

Chains = tuple[tuple[Device, ...], ...]


def small_problem_with_sync(seed: int) -> Problem:
    """Two to four devices, two to six layers, links on which sums and messages take long, or little."""
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(2, 6), tied=rng.random() < 0.2)
    states = 4 * sum(layer.parameter_bytes for layer in profile.layers)
    count = rng.randint(2, 4)
    memory = rng.choice([0.8, 1.2, 2.0, 10.0]) * states / (count if rng.random() < 0.5 else 1) + 6
    cluster = random_cluster(rng, count, memory)
    network = Link(rng.choice([0.0, 0.3]), rng.choice([0.5, 2.0, 5.0, 20.0, 100.0, 1e4]))
    sizes = rng.choice([(1,), (2,), (1, 2), (1, 2, 4)])
    return Problem(profile, replace(cluster, network=network), rng.randint(2, 12), sizes)


def least_step_below(problem: Problem, step_s: float) -> tuple[float, Plan | None]:
    """Return the least step of plans of at most two pipelines, and its plan; step_s and None if none is less.

    Each device serves at most one stage. All orders, cuts, microbatch sizes and ways to share the samples
    out; recompute where a stage does not fit without, and where more would be in flight with it; in_flight as
    the clock of a pipeline has it. Plans whose clock alone, without sums, is no shorter are not simulated.
    """
    evaluate, best = evaluator(problem.profile, problem.cluster), None
    for clock_s, timed, samples in sorted(_sets(problem, step_s), key=lambda entry: entry[0]):
        if clock_s >= step_s:
            break
        pipelines = tuple(one.pipeline(count) for one, count in zip(timed, samples, strict=True))
        plan = Plan("every plan", problem.profile.model, problem.global_batch_size, pipelines)
        if fits(plan, problem.profile, problem.cluster):
            seconds = evaluate(plan).step_s
            if seconds < step_s:
                step_s, best = seconds, plan
    return step_s, best


def _sets(
    problem: Problem, below_s: float
) -> Iterator[tuple[float, tuple[TimedPipeline, ...], tuple[int, ...]]]:
    """Give (clock, pipelines, their samples) of all sets whose clock is below a step."""
    timings, batch = TimingCache(PipelineCosts(problem)), problem.global_batch_size
    for chains in _distinct_chains(problem):
        options = [list(_cut(problem, timings, chain)) for chain in chains]
        if len(chains) == 1:
            for (only,) in product(*options):
                yield only.timing.time_s(batch), (only,), (batch,)
            continue
        for first, second in product(*options):
            for count in range(1, batch):
                seconds = first.timing.time_s(count)
                if seconds >= below_s:
                    break
                seconds = max(seconds, second.timing.time_s(batch - count))
                if seconds < below_s:
                    yield seconds, (first, second), (count, batch - count)


def _distinct_chains(problem: Problem) -> Iterator[Chains]:
    """Give the devices of one or two pipelines; those that differ in names alone once."""
    class_of = equal_devices(problem.cluster).class_indices()
    seen: set[object] = set()
    for chains in _chains(problem.cluster.devices):
        nodes = list(dict.fromkeys(device.node for chain in chains for device in chain))
        keys = [tuple((class_of[d.name], nodes.index(d.node)) for d in chain) for chain in chains]
        if tuple(keys) not in seen:
            seen.add(tuple(keys))
            yield chains


def _chains(devices: Sequence[Device]) -> Iterator[Chains]:
    for count in range(1, len(devices) + 1):
        for order in permutations(devices, count):
            yield (order,)
            for end in range(1, count):
                if order[0].name < order[end].name:
                    yield order[:end], order[end:]


def _cut(problem: Problem, timings: TimingCache, devices: Sequence[Device]) -> Iterator[TimedPipeline]:
    layers = problem.profile.num_layers
    for size in problem.microbatch_sizes:
        for cuts in combinations(range(1, layers), len(devices) - 1):
            spans = list(pairwise((0, *cuts, layers)))
            flags = [
                _flags(timings.costs, device, span, size, len(devices) - place)
                for place, (device, span) in enumerate(zip(devices, spans, strict=True))
            ]
            for again in product(*flags):
                stages = [
                    TimedStage(*each) for each in zip(devices, *zip(*spans, strict=True), again, strict=True)
                ]
                made = timings.pipeline(stages, size)
                if made.timing.fits:
                    yield made


def _flags(
    costs: PipelineCosts, device: Device, span: tuple[int, int], size: int, wanted: int
) -> tuple[bool, ...]:
    """Return whether a stage may recompute: it must if it does not fit, and may if too few are in flight."""
    cap = costs.cap(device, *span, size, recompute=False)
    if cap < 1:
        return (True,)
    return (False, True) if cap < 2 * wanted else (False,)
