"""The split of a cluster into pipelines against brute force: how many samples, and the least step."""

import math
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from brute_force import small_problem
from cluster_split_oracle import compare_with_brute_force, most_samples
from parallel import on_all_cores
from partition.estimates.device_classes import equal_devices
from partition.estimates.stage_tables import ProblemTables
from partition.exact.cluster_split import MOST_LAYERS, ClusterSplit, families
from random_problems import random_problem, random_profile


def test_tables_of_more_layers_than_memory_has_room_for_are_not_made() -> None:
    problem = random_problem(1)
    for num_layers, works in ((MOST_LAYERS, True), (MOST_LAYERS + 1, False)):
        many = replace(problem, profile=random_profile(Random(1), num_layers))
        tables = ProblemTables(many, equal_devices(many.cluster))
        assert math.isfinite(ClusterSplit.work(tables)) == works


@pytest.mark.slow
def test_bound_equals_the_best_split() -> None:
    gaps = [gap for gap in map(compare_with_brute_force, range(30)) if not math.isnan(gap)]
    assert len(gaps) > 12 and max(gaps) < 1e-3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_bound_equals_the_best_split_in_hundreds_of_problems() -> None:
    on_all_cores(compare_with_brute_force, range(3000, 3200))


def test_split_is_the_best_way_to_part_the_devices() -> None:
    for seed in range(40):
        problem = small_problem(seed)
        tables = ProblemTables(problem, equal_devices(problem.cluster))
        split = ClusterSplit(tables, 1e3)
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
