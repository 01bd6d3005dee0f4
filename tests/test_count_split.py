"""The split of a cluster into pipelines against brute force: how many samples, and the least step."""

import math
from functools import cache
from itertools import product

import numpy as np
import pytest

from parallel import on_all_cores
from partition.classes import equal_devices
from partition.count_split import CountSplit, families
from partition.problem import Problem
from partition.tables import ProblemTables
from test_type_counts import BruteForce, small_problem

Counts = tuple[int, ...]


def least_s(problem: Problem) -> dict[Counts, list[float]]:
    """For each vector of counts and each number of samples the least Z of a pipeline, by brute force."""
    batch = problem.global_batch_size
    sizes = problem.microbatch_sizes
    forces = [
        [BruteForce(problem, min(size, samples), samples) for size in {*sizes, *range(samples, max(sizes))}]
        for samples in range(1, batch + 1)
    ]
    counts = equal_devices(problem.cluster).counts
    return {
        vector: [0.0, *(min(force.least_s(vector) for force in entry) for entry in forces)]
        for vector in product(*(range(count + 1) for count in counts))
        if any(vector)
    }


def most_samples(table: dict[Counts, list[float]], step_s: float) -> int:
    """The most samples that disjoint pipelines do in a step, over all ways to part the devices."""
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
    """The least step in which the batch is done; inf if it never is."""
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
    """How far the refined bound is below the least step; nan where there is none.

    exact: whole pipelines.
    """
    problem = tiny_problem(seed)
    table = least_s(problem)
    optimum_s = least_step_s(problem, table)
    ceiling_s = 3 * optimum_s if optimum_s < math.inf else 1e6
    tables = ProblemTables(problem, equal_devices(problem.cluster))
    split = CountSplit(tables, ceiling_s, max_labels=None)
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
            split = CountSplit(coarser, ceiling_s, for_bound=for_bound)
            assert split.bound_s(1e-3 * ceiling_s) <= optimum_s * (1 + 1e-9), (seed, classes, for_bound)
    return 1 - bound_s / optimum_s


def test_bound_equals_the_best_split() -> None:
    gaps = [gap for gap in map(compare_with_brute_force, range(50)) if not math.isnan(gap)]
    assert len(gaps) > 25 and max(gaps) < 1e-3


@pytest.mark.slow
def test_bound_equals_the_best_split_in_hundreds_of_problems() -> None:
    on_all_cores(compare_with_brute_force, range(3000, 3200))


def test_split_is_the_best_way_to_part_the_devices() -> None:
    for seed in range(40):
        problem = small_problem(seed)
        tables = ProblemTables(problem, equal_devices(problem.cluster))
        split = CountSplit(tables, 1e3)
        vectors = [tuple(map(int, digits)) for digits in split.vectors.digits]
        for step_s, upper in product((3.0, 20.0, 60.0), (False, True)):
            one = np.max(list(split._done(step_s, upper=upper).values()), axis=0)
            done = {vector: int(samples) for vector, samples in zip(vectors, one, strict=True) if any(vector)}
            # a table in which so many samples take no time, and more take for ever
            most = max(done.values())
            table = {v: [0.0] * (count + 1) + [math.inf] * (most - count) for v, count in done.items()}
            samples, pipelines = split.split(step_s, upper=upper)
            assert samples == most_samples(table, 1.0)
            assert samples == sum(count for _, _, count in pipelines)
            used = np.sum([split.vectors.digits[vector] for vector, _, _ in pipelines], axis=0)
            assert np.all(used <= split.vectors.counts)


def test_families_cover_all_last_microbatches() -> None:
    for size in range(1, 20):
        ends = [end for _, least, most in families(size) for end in range(least, most + 1)]
        assert sorted(ends) == list(range(1, size + 1))
