"""Gradients of random plans, and weights after their steps, equal those of one process, in float64."""

from typing import Any

import pytest

from hetpipe.runtime.processes import RankGroup, run_ranks
from partition.plan import OFFLOADS
from random_cases import MODULES
from stress_ranks import check_cases

LIMIT = 1e-12
SEEDS = {
    1: [*range(8)],
    2: [*range(20), 30, 33, 42],
    3: [*range(20), 22, 24, 34, 58],
    4: [0, 2, 3, 4, 6, 8, 10, 11, 12, 20, 24, 27, 29, 38],
}
"""By number of ranks, so that everything that a plan may have is in some, and on 4 ranks any two things that
a plan of the first 40 seeds has together. A single one: check(4, [17])."""
SHARDED_ALONE = ("weights fetched apart", "sharded by layer")
"""What only plans have that are made with zero 2 or 3."""
MORE = {1: 16, 2: 50, 3: 80, 4: 120}


def check(
    num_ranks: int,
    seeds: list[int],
    over_nodes: bool = False,
    zero: int | None = None,
    hosts: bool = False,
) -> list[dict[str, Any]]:
    """Run the plans of these seeds, one after another in the same processes; gives what each differs by.

    over_nodes: with sums inside nodes first in most of them. zero: of plans that shard gradients, or weights.
    hosts: of plans that keep states, frozen weights or saved activations on hosts.
    """
    names = tuple(f"n/{rank}" for rank in range(num_ranks))
    group = RankGroup(names, (1,) * num_ranks, preload=MODULES, timeout_s=120.0)
    cases: list[dict[str, Any]] = []
    run_ranks(check_cases, (seeds, num_ranks, over_nodes, zero, hosts), group, cases.append)
    wrong = {case["name"]: case["worst"] for case in cases if not case["worst"] <= LIMIT}
    assert not wrong
    assert len(cases) == len(seeds)
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", SEEDS)
def test_gradients_of_random_plans_equal_one_process(num_ranks):
    cases = check(num_ranks, SEEDS[num_ranks])
    if num_ranks > 1:  # the plans have everything that a plan may have
        impossible = {
            4: {"interleaved"},
            2: {"over nodes, one with several"},
        }  # too few layers, too few ranks
        others = {"event", "name", "worst", *OFFLOADS, *SHARDED_ALONE}
        # a ring of two ranks is seldom cut, and few plans shard states of layers that several devices hold
        few = {"sums cut": 2, "layers in ranges": 1}
        for feature in cases[0].keys() - others - impossible.get(num_ranks, set()):
            least = few.get(feature, 4)
            assert sum(case[feature] for case in cases) >= least, feature


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", MORE)
def test_gradients_of_more_random_plans_equal_one_process(num_ranks):
    check(num_ranks, [seed for seed in range(MORE[num_ranks]) if seed not in SEEDS[num_ranks]])


@pytest.mark.slow
def test_gradients_with_sums_inside_nodes_first_equal_one_process():
    cases = check(4, list(range(10)), over_nodes=True)
    assert sum(case["over nodes, one with several"] for case in cases) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_with_sharded_gradients_or_weights_equal_one_process(num_ranks, zero):
    cases = check(num_ranks, list(range(10)), zero=zero)
    wanted = ["states sharded", "several pipelines", "recompute", "short last microbatch", "sharded by layer"]
    wanted += ["layers in ranges"]
    wanted += ["weights fetched apart"] if zero == 3 and num_ranks > 2 else []
    for feature in wanted:
        assert any(case[feature] for case in cases), feature


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradients_with_something_on_hosts_equal_one_process(num_ranks):
    cases = check(num_ranks, list(range(14)), hosts=True)
    for feature in (*OFFLOADS, "recompute", "short last microbatch", "several pipelines"):
        assert sum(case[feature] for case in cases) >= 3, feature
