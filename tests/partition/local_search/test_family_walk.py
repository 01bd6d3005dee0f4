"""Cuts of families at the same layers, and walks among families by their estimates."""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from cost_model.cluster import Link
from hetpipe.simulation.prediction import evaluator
from node_problems import problem_of_nodes, random_sync_problem
from partition.estimates.effort import effort_for
from partition.estimates.family_effort import FAMILY_WALKS, FamilyWalk
from partition.local_search.families import Family, FamilySet, FamilySpace, Outline
from partition.local_search.family_alignment import MOST_APART, aligned, cuts_near, with_aligned_cuts
from partition.local_search.family_cuts import EstimatedSet, FamilyCutter
from partition.local_search.family_moves import MORE_MOVES, MOST_FAMILIES, FamilyClimb
from partition.local_search.family_search import best_families
from partition.local_search.family_starts import FamilyStarts
from partition.local_search.family_walk import unlike, walked
from partition.local_search.pipeline_search import PipelineSearch
from partition.problem import Problem

SEEDS = 2, 7
WALK = FamilyWalk(threshold=0.1, tries=60, starts=2, more_moves=True)


def pair(first: int, second: int) -> FamilySet:
    """Two pipelines of two stages of eight layers, each cut once."""
    outline = Outline((0, 0), 1, 1, run=1)
    return tuple(Family(outline, ((0, cut, False), (cut, 8, False))) for cut in (first, second))


def cutter_of(search: PipelineSearch) -> FamilyCutter:
    return FamilyCutter(search, FamilySpace(search))


def climb_of(search: PipelineSearch) -> FamilyClimb:
    return FamilyClimb(cutter_of(search), lambda *_: math.inf, search.effort.families)


def two_stage_nodes() -> Problem:
    return problem_of_nodes({"kind": 1.0}, [("kind", 4)], network=Link(0.0, 1e3), batch=8, num_layers=60)


def step_s(search: PipelineSearch, families: FamilySet) -> float:
    """Return the simulated step of families, all of which are plans."""
    timed = cutter_of(search).timed(families)
    plan = search.plan("families", timed or [])
    assert plan is not None
    return evaluator(search.problem.profile, search.problem.cluster)(plan).step_s


def test_sums_on_either_side_of_the_same_cut_wait_for_no_other() -> None:
    # Four nodes of a device, eight layers of 10 kB. Cut at the same layer, two pairs of nodes sum 40 kB each
    # side by side. With a layer between the cuts one node sums with both others: first its later layers,
    # then that one, and only then may the other pair begin with the earlier ones.
    problem = problem_of_nodes({"kind": 1.0}, [("kind", 1)] * 4, network=Link(0.0, 1e3), batch=8)
    search = PipelineSearch(problem)
    search.starts()
    apart, same = step_s(search, pair(4, 3)), step_s(search, pair(4, 4))
    assert apart > same + 20
    estimate_s = partial(cutter_of(search).estimate_s, shared=False)
    begin = EstimatedSet(estimate_s(pair(4, 3)), pair(4, 3))
    assert with_aligned_cuts(begin, estimate_s) == EstimatedSet(estimate_s(pair(4, 4)), pair(4, 4))


def test_a_cut_moves_to_where_another_family_has_one() -> None:
    chain, one = Outline((0,) * 3, 1, 1, run=1), Outline((0, 0), 1, 1, run=1)
    families = (
        Family(chain, ((0, 2, False), (2, 6, True), (6, 8, False))),
        Family(one, ((0, 4, False), (4, 8, False))),
    )
    assert [family.cuts for family in aligned(families, 0)] == [
        ((0, 4, False), (4, 6, True), (6, 8, False)),
        ((0, 2, False), (2, 4, True), (4, 8, False)),
    ]
    assert [family.cuts[0][1] for family in aligned(families, 1)] == [2, 6]
    assert list(aligned(families[:1], 0)) == []
    assert list(aligned((families[1], families[1]), 0)) == []


def even(*starts: int) -> Family:
    """A pipeline of 60 layers, cut at these."""
    bounds = [0, *starts, 60]
    cuts = tuple((start, stop, False) for start, stop in pairwise(bounds))
    return Family(Outline((0,) * len(cuts), 1, 1, run=1), cuts)


@pytest.mark.parametrize(
    ("starts", "most", "number"),
    [
        ((30,), 100, 2 * MOST_APART),
        ((3,), 100, MOST_APART + 2),  # no stage is empty
        ((20, 40), 100, 9**2 - 1),
        (tuple(range(5, 60, 5)), 100, 2 * 11 + 4 * 55),  # of eleven cuts one or two move, by a layer
        ((), 100, 0),
    ],
)
def test_cuts_near_are_all_that_are_as_near(starts: tuple[int, ...], most: int, number: int) -> None:
    family = even(*starts)
    near = [other.cuts for other in cuts_near(family, most)]
    assert len(near) == len(set(near)) == number and family.cuts not in near
    assert all(start < stop for cuts in near for start, stop, _ in cuts)


def test_several_cuts_move_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # any cut that moves by a layer makes it longer, and the one that is shortest is four moves away
    search = PipelineSearch(two_stage_nodes())
    begin, best = (even(30, 40),), (even(28, 42),)

    def evaluate(families: FamilySet, _: float) -> float:
        return {begin: 1.0, best: 0.9}.get(families, 2.0)

    climb = FamilyClimb(cutter_of(search), evaluate, search.effort.families)
    monkeypatch.setattr(FamilyClimb, "estimate_s", lambda _, one, within_s=0: 1.0 if one != best else 0.99)
    assert climb.improve(begin, lambda: True) == begin
    assert climb.cut_anew(begin, lambda: True) == best
    assert climb.cut_anew(begin, lambda: False) == begin


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_takes_what_is_worse_by_less_than_its_threshold(seed: int) -> None:
    search = PipelineSearch(random_sync_problem(seed))
    begun = [next(FamilyStarts(search, search.effort.families).likely())]
    climb = climb_of(search)
    begin_s = climb.estimate_s(begun[0])
    steady = walked(climb, begun, replace(WALK, threshold=0.0))
    assert max(steady.values()) <= begin_s
    free = walked(climb, begun, WALK)
    assert begin_s < max(free.values()) < begin_s * 1.1**WALK.tries
    assert all(seconds == climb.estimate_s(families) for families, seconds in free.items())
    assert free == walked(climb_of(search), begun, WALK)


def test_families_of_a_walk_share_no_device_and_are_at_most_three() -> None:
    search = PipelineSearch(random_sync_problem(10))
    climb, cutter = climb_of(search), cutter_of(search)
    families = next(FamilyStarts(search, search.effort.families).likely())
    rng, numbers = random.Random(0), set()
    for _ in range(400):
        families = climb.at_random(families, rng, MORE_MOVES) or families
        layouts = cutter.space.layouts(families)
        names = [device.name for layout in layouts for row in layout.rows for device in row]
        assert len(names) == len(set(names))
        for family in families:
            assert len(family.cuts) == len(family.outline.chain)
            assert (family.cuts[0][0], family.cuts[-1][1]) == (0, search.problem.profile.num_layers)
            assert all(start < stop for start, stop, _ in family.cuts)
        numbers.add(len(families))
    assert numbers == set(range(1, MOST_FAMILIES + 1))


@pytest.mark.parametrize(
    ("move", "chain", "copies"),
    [("double", (0, 0, 1, 1), 2), ("reverse", (1, 0), 4), ("halve", (0, 1), 4), ("without", (0, 1), 4)],
)
def test_moves_of_walks(move: str, chain: tuple[int, ...], copies: int) -> None:
    problem = problem_of_nodes({"a": 1.0, "b": 0.5}, [("a", 4), ("b", 4)], network=Link(0.0, 1e6), batch=32)
    search = PipelineSearch(problem)
    cutter = cutter_of(search)
    cut = cutter.cut(Outline((0, 1), 4, 1, run=1), (0, 0), shared=False)
    long = cutter.cut(Outline((0, 0, 1, 1), 2, 1, run=1), (0, 0), shared=False)
    assert cut is not None and long is not None
    begin = {"halve": long.families, "without": (*cut.families, *cut.families)}.get(move, cut.families)
    changed = climb_of(search).at_random(begin, random.Random(0), (move,))
    assert changed is not None
    assert [(family.outline.chain, family.outline.copies) for family in changed] == [(chain, copies)]
    assert climb_of(search).at_random(cut.families, random.Random(0), ("beside",)) is None  # none is left
    assert climb_of(search).at_random(cut.families, random.Random(0), ("without",)) is None


def test_another_family_is_put_on_devices_that_are_left() -> None:
    problem = problem_of_nodes({"a": 1.0, "b": 0.5}, [("a", 4), ("b", 4)], network=Link(0.0, 1e6), batch=32)
    search = PipelineSearch(problem)
    cut = cutter_of(search).cut(Outline((0, 0), 2, 1, run=1), (0, 0), shared=False)
    assert cut is not None
    changed = climb_of(search).at_random(cut.families, random.Random(0), ("beside",))
    assert changed is not None and changed[0] == cut.families[0]
    assert set(changed[1].outline.chain) == {1}


def test_unlike_families_have_other_chains_or_copies() -> None:
    more = tuple(one._replace(outline=one.outline._replace(copies=2)) for one in pair(4, 4))
    assert list(unlike([pair(4, 4), pair(4, 3), more])) == [pair(4, 4), more]


def test_walks_find_what_changes_one_by_one_do_not() -> None:
    def best_s(walks: tuple[FamilyWalk, ...], seed: int) -> float:
        search = PipelineSearch(random_sync_problem(seed))
        search.search(lambda _, seconds: seconds)
        search.effort = replace(search.effort, families=replace(search.effort.families, walks=walks))
        simulate = evaluator(search.problem.profile, search.problem.cluster)
        return best_families(search, lambda plan: simulate(plan).step_s, math.inf)[0].step_s

    without, walking = ([best_s(walks, seed) for seed in SEEDS] for walks in ((), FAMILY_WALKS))
    assert all(after <= before for before, after in zip(without, walking, strict=True))
    assert min(after / before for before, after in zip(without, walking, strict=True)) < 0.995


def test_longer_walks_are_for_thorough_searches_and_none_for_usual_ones() -> None:
    usual, thorough = effort_for(64).families, effort_for(64, thorough=True).families
    assert usual.walks == () and [later.walks for later in usual.then] == [FAMILY_WALKS] * 2
    assert [walk.tries for walk in thorough.then[-1].walks] == [4 * walk.tries for walk in FAMILY_WALKS]
