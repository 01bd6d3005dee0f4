"""Bounds on fewer classes: what they are made of is the best of any of a class, and so they stay bounds."""

import numpy as np
import pytest

from parallel import on_all_cores
from partition.bounds.column_bound import ColumnBound
from partition.bounds.merged_classes import merged
from partition.estimates.device_classes import equal_devices
from partition.estimates.stage_tables import ProblemTables
from partition.exact.cluster_split import ClusterSplit
from random_plans import tight_case, without_sync_s


def all_merged(seed: int) -> tuple[ProblemTables, list[ProblemTables]]:
    problem, _ = tight_case(seed, num_plans=1)
    tables = ProblemTables(problem, equal_devices(problem.cluster))
    return tables, list(merged(tables, np.inf))


def test_each_time_there_is_one_class_less_of_the_same_devices() -> None:
    for seed in range(20):
        tables, fewer = all_merged(seed)
        names = {device.name for group in tables.classes.members for device in group}
        assert len(fewer) == len(tables.classes.members) - 1
        for count, one in enumerate(reversed(fewer), 1):
            assert len(one.classes.members) == count
            assert {device.name for group in one.classes.members for device in group} == names


def test_a_merged_class_has_the_best_of_all_that_it_has() -> None:
    for seed in range(20):
        tables, fewer = all_merged(seed)
        entries = tables.classes.class_indices()
        for one in fewer:
            for entry, group in enumerate(one.classes.members):
                parts = sorted({entries[device.name] for device in group})
                for size in tables.problem.microbatch_sizes:
                    whole, part = one.at(size), tables.at(size)
                    assert (whole.forward_s[entry] == part.forward_s[parts].min(axis=0)).all()
                    assert (whole.backward_s[entry] == part.backward_s[parts].min(axis=0)).all()
                    caps = part.caps(recompute=True)[parts].max(axis=0)
                    # of unlike bytes a merged class has the least of each, and so may take more than any
                    assert (whole.caps(recompute=True)[entry] >= caps).all()
                    if tables.bytes.weights.ndim == 2:
                        assert (whole.caps(recompute=True)[entry] == caps).all()
                    assert (
                        whole.transfer_s[0][entry].min(axis=0) <= part.transfer_s[0][parts].min(axis=(0, 1))
                    ).all()


def check_on_fewer_classes(seed: int) -> None:
    problem, plans = tight_case(seed)
    best_s = min(without_sync_s(plan, problem) for plan in plans)
    tables = ProblemTables(problem, equal_devices(problem.cluster))
    for one in merged(tables, np.inf):
        for bound_s in (
            ClusterSplit(one, 2 * best_s, for_bound=True).bound_s(1e-3 * best_s),
            ColumnBound(one, seconds=2.0).bound_s(1e-3 * best_s, 2 * best_s),
        ):
            assert bound_s <= best_s * (1 + 1e-9), seed


@pytest.mark.slow
def test_no_plan_beats_the_bounds_on_fewer_classes() -> None:
    on_all_cores(check_on_fewer_classes, range(10))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_plan_of_many_problems_beats_the_bounds_on_fewer_classes() -> None:
    on_all_cores(check_on_fewer_classes, range(10, 110))


def test_joining_ends_where_more_would_be_lost() -> None:
    for seed in range(20):
        tables, fewer = all_merged(seed)
        assert list(merged(tables, -1.0)) == []
        some = list(merged(tables, 0.2))
        assert [one.classes.members for one in some] == [one.classes.members for one in fewer[: len(some)]]
