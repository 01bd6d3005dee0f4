"""The best way to part a cluster, in whole pipelines and in parts of them."""

import math

import numpy as np
import pulp
import pytest

from cluster_split_oracle import compare_with_brute_force
from partition.exact import cluster_split
from partition.exact.cluster_split_lp import CompiledVectors, MixedVectors, WholeVectors, num_parts
from partition.exact.count_vectors import CountVectors


def random_samples(seed: int) -> tuple[CountVectors, np.ndarray]:
    rng = np.random.default_rng(seed)
    vectors = CountVectors(rng.integers(1, 4, rng.integers(1, 4)))
    one = rng.integers(0, 50, vectors.size) * vectors.totals
    one[rng.random(vectors.size) < 0.3] = 0
    one[0] = 0
    return vectors, one


def brute_force(vectors: CountVectors, one: np.ndarray) -> int:
    best = np.zeros(vectors.size, dtype=int)
    for vector in range(vectors.size):
        for part in range(1, vector + 1):
            if (vectors.digits[part] <= vectors.digits[vector]).all():
                best[vector] = max(best[vector], one[part] + best[vector - part])
    return int(best[-1])


def brute_force_of_few(vectors: CountVectors, one: np.ndarray, most_pipelines: int) -> int:
    best = np.zeros(vectors.size, dtype=int)
    below = [vectors.below(vector) for vector in range(vectors.size)]
    for _ in range(most_pipelines):
        best = np.array([(one[parts] + best[vector - parts]).max() for vector, parts in enumerate(below)])
    return int(best[-1])


def relaxed(vectors: CountVectors, one: np.ndarray) -> float:
    programme = pulp.LpProblem("mixture", pulp.LpMaximize)
    amounts = [programme.add_variable(f"x{vector}", lowBound=0) for vector in range(1, vectors.size)]
    programme += pulp.lpSum(int(one[index + 1]) * amount for index, amount in enumerate(amounts))
    for entry, count in enumerate(vectors.counts):
        used = (int(vectors.digits[index + 1, entry]) * amount for index, amount in enumerate(amounts))
        programme += pulp.lpSum(used) <= int(count)
    programme.solve(pulp.HiGHS(msg=False))
    return float(programme.objective.value() or 0.0)


@pytest.mark.parametrize("whole", [WholeVectors, CompiledVectors])
@pytest.mark.parametrize("seed", range(40))
def test_whole_vectors_are_parted_as_well_as_can_be(seed, whole):
    vectors, one = random_samples(seed)
    done, used = whole(vectors).best(one)
    assert done == brute_force(vectors, one) == sum(one[vector] for vector in used)
    if used:
        assert (vectors.digits[used].sum(axis=0) <= np.array(vectors.counts)).all()


@pytest.mark.parametrize("whole", [WholeVectors, CompiledVectors])
@pytest.mark.parametrize("seed", range(60))
def test_few_pipelines_are_parted_as_well_as_can_be(seed, whole):
    vectors, one = random_samples(seed)
    for most in range(1, 9):
        done, used = whole(vectors, most).best(one)
        assert done == brute_force_of_few(vectors, one, most) == sum(one[vector] for vector in used)
        assert len(used) <= most
        assert (vectors.digits[used].sum(axis=0) <= np.array(vectors.counts)).all()
        mixed, _ = MixedVectors(vectors, most).best(one)
        assert done * (1 - 1e-9) <= mixed <= MixedVectors(vectors).best(one)[0] * (1 + 1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_mixed_vectors_are_a_linear_programme(seed):
    vectors, one = random_samples(seed)
    expected = relaxed(vectors, one)
    mixed = MixedVectors(vectors)
    for scale in (1, 3):  # what it knows of one programme helps with the next
        done, used = mixed.best(scale * one)
        assert done >= scale * expected * (1 - 1e-9)
        assert done == pytest.approx(scale * expected, rel=1e-5, abs=1e-6)
        assert all(one[vector] for vector in used)


def test_parts_are_counted():
    vectors = CountVectors((2, 3, 1))
    below = [vectors.below(vector) for vector in range(vectors.size)]
    assert sum(map(len, below)) == num_parts((2, 3, 1)) == 6 * 10 * 3
    for vector, parts in enumerate(below):
        expected = np.flatnonzero((vectors.digits <= vectors.digits[vector]).all(axis=1))
        assert sorted(parts) == list(expected)


@pytest.mark.slow
def test_bounds_hold_with_parts_of_pipelines(monkeypatch):
    monkeypatch.setattr(cluster_split, "MOST_COMPILED", 0)
    gaps = [compare_with_brute_force(seed, exact=False) for seed in range(25)]
    assert sum(not math.isnan(gap) for gap in gaps) > 10
