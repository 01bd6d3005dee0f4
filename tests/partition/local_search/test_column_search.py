"""Columns by local search: with them the relaxed programme does what all chains of devices together can."""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from partition.column_generation.pipeline_pool import PipelinePool
from partition.estimates.effort import FAR_WALKS, ColumnEffort
from partition.estimates.timed_pipeline import TimingCache
from partition.exact.cut_dp import CutOptimizer
from partition.local_search.column_search import ColumnSearch
from partition.local_search.moves import fitted
from partition.local_search.pipeline_search import PipelineSearch
from random_problems import random_problem
from searches import worst_starts

EFFORT = FAR_WALKS.columns_first
assert EFFORT is not None


def searches(count: int) -> Iterator[tuple[int, PipelineSearch, float]]:
    """Of random problems where some set does the batch: the search, and the step of its worst start."""
    for seed in range(count):
        search = PipelineSearch(random_problem(seed))
        starts = search.starts()
        if starts:
            yield seed, search, max(start.step_s for start in starts)


def pool_of(cutter: CutOptimizer, search: PipelineSearch) -> PipelinePool:
    return PipelinePool(cutter.timings, search.classes.merged(), search.problem.global_batch_size)


def with_every_chain(search: PipelineSearch, step_s: float) -> float:
    """Return the relaxed step over all orders of classes and sizes of microbatches, cut for about step_s."""
    problem = search.problem
    cutter = CutOptimizer(search.tables, TimingCache(search.costs))
    pool = pool_of(cutter, search)
    counts = pool.classes.counts
    for length in range(1, min(sum(counts), problem.profile.num_layers) + 1):
        for classes in product(range(len(counts)), repeat=length):
            if all(classes.count(c) <= count for c, count in enumerate(counts)):
                devices = [iter(group) for group in pool.classes.members]
                named = [next(devices[c]) for c in classes]
                for size in problem.microbatch_sizes:
                    fitted(cutter, named, size, step_s)
    relaxed = pool.least(step_s)
    return relaxed.step_s if relaxed is not None else math.inf


@pytest.mark.slow
def test_from_one_set_the_relaxed_step_comes_to_that_of_every_chain() -> None:
    reached, shorter = [], 0
    for search, worst in worst_starts(60):
        cutter = CutOptimizer(search.tables, TimingCache(search.costs))
        for pipeline in worst.timed:
            cutter.timings.pipeline(pipeline.stages, pipeline.microbatch_size)
        pool = pool_of(cutter, search)
        ColumnSearch(cutter, pool).search(worst.step_s, EFFORT, 0)
        found = pool.least(worst.step_s)
        assert found is not None
        reached.append(found.step_s / with_every_chain(search, found.step_s))
        shorter += found.step_s < worst.step_s * (1 - 1e-2)
    assert len(reached) > 20 and np.mean(np.array(reached) < 1 + 2e-3) > 0.9
    assert shorter > 3


def test_nothing_is_made_twice_and_nothing_of_more_devices_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[object]()

    def noted(cutter: CutOptimizer, devices: list, size: int, step_s: float) -> object:
        names = [device.name for device in devices]
        assert len(names) == len(set(names)) <= cutter.tables.num_layers
        made.append(([classes[name] for name in names], size))
        return fitted(cutter, devices, size, step_s)

    begun = list(searches(6))
    monkeypatch.setattr("partition.local_search.column_search.fitted", noted)
    for seed, search, step_s in begun:
        made.clear()
        classes = search.classes.merged().class_indices()
        columns = ColumnSearch(search.cut_optimizer, search._pool)
        for again in range(2):
            columns.search(step_s, ColumnEffort(rounds=3, changed=4, most_in_vain=20), again)
        assert made and len(made) == len(set(map(str, made))), seed


def test_without_a_set_that_does_the_batch_there_are_no_prices() -> None:
    for _, search, step_s in searches(4):
        before = len(search.timings.timings)
        ColumnSearch(search.cut_optimizer, search._pool).search(step_s / 1e6, EFFORT, 0)
        assert len(search.timings.timings) == before


def test_the_programme_uses_what_is_worth_its_price_and_nothing_is_worth_more() -> None:
    for seed, search, step_s in searches(12):
        relaxed = search._pool.least(step_s)
        assert relaxed is not None
        ranked = relaxed.ranked()
        assert [worth for worth, _ in ranked] == sorted((worth for worth, _ in ranked), reverse=True)
        assert ranked[0][0] == pytest.approx(1, rel=1e-6), seed
        for (uses, (samples, _)), amount in zip(relaxed.best.items(), relaxed.master.amounts, strict=True):
            if amount > 1e-6:
                assert relaxed.worth(uses, samples) == pytest.approx(1, rel=1e-6), seed
