"""Hold the split of a cluster into pipelines against brute force."""

import math
from functools import cache
from itertools import product

from brute_force import BruteForce, small_problem
from partition.estimates.device_classes import equal_devices
from partition.estimates.stage_tables import ProblemTables
from partition.exact.cluster_split import ClusterSplit
from partition.problem import Problem

Counts = tuple[int, ...]


def least_s(problem: Problem) -> dict[Counts, list[float]]:
    """Return for each vector of counts and number of samples the least Z of a pipeline, by brute force."""
    batch = problem.global_batch_size
    sizes = problem.microbatch_sizes
    forces = [
        [BruteForce(problem, min(size, samples), samples) for size in {*sizes, *range(samples, max(sizes))}]
        for samples in range(1, batch + 1)
    ]
    counts = equal_devices(problem.cluster).counts
    return {
        vector: [0.0, *(min(force.least_step_s(vector) for force in entry) for entry in forces)]
        for vector in product(*(range(count + 1) for count in counts))
        if any(vector)
    }


def most_samples(table: dict[Counts, list[float]], step_s: float) -> int:
    """Return the most samples that disjoint pipelines do in a step, over all ways to part the devices."""
    one = {
        vector: max(samples for samples, seconds in enumerate(row) if seconds <= step_s * (1 + 1e-12))
        for vector, row in table.items()
    }

    @cache
    def best(left: Counts) -> int:
        parts = [vector for vector in one if all(a <= b for a, b in zip(vector, left, strict=True))]
        return max(
            (one[part] + best(tuple(b - a for a, b in zip(part, left, strict=True))) for part in parts),
            default=0,
        )

    return best(max(table, key=sum))


def least_step_s(problem: Problem, table: dict[Counts, list[float]]) -> float:
    """Return the least step in which the batch is done; inf if it never is."""
    steps = sorted({seconds for row in table.values() for seconds in row if seconds < math.inf})
    batch = problem.global_batch_size
    return next((step_s for step_s in steps if most_samples(table, step_s) >= batch), math.inf)


def tiny_problem(seed: int) -> Problem:
    while True:
        problem = small_problem(seed)
        if problem.profile.num_layers <= 4 and problem.global_batch_size <= 9:
            return problem
        seed += 20_000


def compare_with_brute_force(seed: int, *, exact: bool = True) -> float:
    """Return how far the refined bound is below the least step; nan where there is none.

    exact: whole pipelines.
    """
    problem = tiny_problem(seed)
    table = least_s(problem)
    optimum_s = least_step_s(problem, table)
    ceiling_s = 3 * optimum_s if optimum_s < math.inf else 1e6
    tables = ProblemTables(problem, equal_devices(problem.cluster))
    split = ClusterSplit(tables, ceiling_s)
    for factor in (0.3, 0.7, 1.0, 1.5):
        step_s = factor * ceiling_s / 3
        expected = min(most_samples(table, step_s), problem.global_batch_size)
        assert split.split(step_s, upper=True)[0] >= expected, (seed, factor)
    bound_s = split.bound_s(1e-3 * ceiling_s)
    if optimum_s == math.inf:
        assert not exact or bound_s >= ceiling_s * (1 - 1e-2), seed
        return math.nan
    assert bound_s <= optimum_s * (1 + 1e-9), seed
    for classes in (tables.classes, tables.classes.merged()):
        coarser = ProblemTables(problem, classes)
        for for_bound in (False, True):
            split = ClusterSplit(coarser, ceiling_s, for_bound=for_bound)
            assert split.bound_s(1e-3 * ceiling_s) <= optimum_s * (1 + 1e-9), (seed, classes, for_bound)
    return 1 - bound_s / optimum_s
