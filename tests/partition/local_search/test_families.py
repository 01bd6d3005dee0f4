"""Families of pipelines: where they win by hand, what they never make worse, and when they are not asked."""

import math
import random
from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any

import pytest

from cost_model.cluster import Link, NodeLink
from hetpipe.simulation.prediction import evaluator
from node_problems import problem_of_nodes, random_sync_problem
from partition.auto import auto
from partition.estimates.effort import effort_for
from partition.estimates.family_effort import NEAR, NEARER, FamilyEffort
from partition.local_search import family_moves
from partition.local_search.families import Family, FamilySet, FamilySpace, Layout, Outline
from partition.local_search.family_cuts import FamilyCutter, card_messages_s
from partition.local_search.family_floors import FamilyFloors
from partition.local_search.family_moves import FamilyClimb
from partition.local_search.family_search import best_families, families_may_win
from partition.local_search.family_starts import FamilyStarts
from partition.local_search.moves import PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan
from partition.problem import Problem


def two_nodes() -> Problem:
    """Two nodes of four equal devices, 1 kB/s between them, 8 layers of 10 kB, a batch of 32."""
    return problem_of_nodes({"kind": 1.0}, [("kind", 4)] * 2, network=Link(0.0, 1e3), batch=32)


def families_of(problem: Problem) -> list[PipelineSet]:
    evaluate = evaluator(problem.profile, problem.cluster)
    return best_families(PipelineSearch(problem), lambda plan: evaluate(plan).step_s, math.inf)


def planned(problem: Problem, *, families: bool) -> tuple[Plan, float]:
    """Return the plan of `auto` and its step; without families the gate is shut whatever the step."""
    evaluate = evaluator(problem.profile, problem.cluster)
    with pytest.MonkeyPatch.context() as patch:
        if not families:
            patch.setattr("partition.auto.families_may_win", lambda *_: False)
        plan = auto(problem, evaluate)
    return plan, evaluate(plan).step_s


def test_a_grouped_family_sums_inside_nodes() -> None:
    # Four copies of two stages of four layers, the first stages on one node, the second ones on the other:
    # no sum crosses the network. A microbatch takes 4 * 3 s a stage, 8 of them in each copy take 108 s, which
    # is (8 + 1) * 12, and the norm 14 rounds of 16 bytes at 1 kB/s. Data parallelism computes 32 * 24 / 8 =
    # 96 s and sums 2 rounds of 80 kB / 2 between the nodes: 80 s. Two pipelines inside nodes take
    # (16 + 3) * 6 = 114 s and sum all 80 kB.
    problem = two_nodes()
    found = families_of(problem)
    assert found[0].step_s == pytest.approx(108 + 0.224, rel=1e-6)
    assert [tuple(d.node for d in pipeline.devices) for pipeline in found[0].timed] == [("n0", "n1")] * 4
    assert {pipeline.stages[0].stop for pipeline in found[0].timed} == {4}


def test_grouped_and_nested_lay_out_the_same_chain() -> None:
    space = FamilySpace(PipelineSearch(two_nodes()))
    grouped = space.layout(Outline((0, 0), 4, 1, run=1), (0,))
    nested = space.layout(Outline((0, 0), 4, 1, run=2), (0,))
    assert [device.name for device in grouped.rows[1]] == ["n0/1", "n1/1"]
    assert [device.name for device in nested.rows[1]] == ["n0/2", "n0/3"]
    assert (grouped.most_at_once, nested.most_at_once) == (4, 1)
    assert (grouped.spread([0]), nested.spread([0])) == (False, True)
    later = space.layout(Outline((0,), 2, 1, run=1), (6,))
    assert [row[0].name for row in later.rows] == ["n1/2", "n1/3"]


def test_runs_of_places_share_a_node() -> None:
    # two copies of four places, two in a row on a node: node 0 has the first halves, node 1 the second ones
    space = FamilySpace(PipelineSearch(two_nodes()))
    halves = space.layout(Outline((0,) * 4, 2, 1, run=2), (0,))
    assert [[device.name for device in row] for row in halves.rows] == [
        ["n0/0", "n0/1", "n1/0", "n1/1"],
        ["n0/2", "n0/3", "n1/2", "n1/3"],
    ]
    assert halves.most_at_once == 2
    uneven = space.layout(Outline((0,) * 3, 2, 1, run=2), (0,))
    assert [[device.name for device in row] for row in uneven.rows] == [
        ["n0/0", "n0/1", "n1/0"],
        ["n0/2", "n0/3", "n1/1"],
    ]


def test_equal_nodes_are_one_class_even_where_links_name_them() -> None:
    problem = two_nodes()
    named = replace(problem.cluster, links=(NodeLink(("n0", "n1"), Link(0.0, 500.0)),))
    search = PipelineSearch(replace(problem, cluster=named))
    space = FamilySpace(search)
    assert len(search.classes.members) == 2
    assert space.counts == (8,)
    assert space.card_s_per_byte == {"n0": 2 / 500, "n1": 2 / 500}


def test_the_estimate_counts_each_layer_of_a_node_once() -> None:
    # nested: each node holds all 80 kB of both copies, of which (2 - 1) / 2 crosses twice: four sums of 20 s,
    # one after another, of which the first begins when the other three stages have 4 s of backward to go
    search = PipelineSearch(two_nodes())
    cutter = FamilyCutter(search, FamilySpace(search))
    cuts = ((0, 2, False), (2, 4, False), (4, 6, False), (6, 8, False))
    nested = Family(Outline((0,) * 4, 2, 1, run=4), cuts)
    assert cutter.estimate_s((nested,), shared=False) == pytest.approx(114 - 12 + 80, rel=1e-3)
    grouped = Family(Outline((0,) * 4, 2, 1, run=1), cuts)
    assert cutter.estimate_s((grouped,), shared=False) == pytest.approx(114, rel=1e-3)


def test_the_estimate_counts_nodes_where_sums_go_inside_of_them_first() -> None:
    # Four copies, two on each node: 108 s, and two times 40 kB that pass each card once each way, 40 s; the
    # first sum begins 8 s before the end. Where links inside nodes are no faster than the network, a ring of
    # four passes 2 * 3 / 4 of them: 60 s.
    problem = two_nodes()
    nodes = tuple(replace(node, interconnect=None) for node in problem.cluster.nodes)
    slow = replace(problem, cluster=replace(problem.cluster, nodes=nodes))
    family = Family(Outline((0, 0), 4, 1, run=2), ((0, 4, False), (4, 8, False)))
    for each, sums_s in ((problem, 72.0), (slow, 112.0)):
        search = PipelineSearch(each)
        cutter = FamilyCutter(search, FamilySpace(search))
        assert cutter.estimate_s((family,), shared=False) == pytest.approx(108 + sums_s, rel=1e-3)
        timed = cutter.timed((family,))
        plan = search.plan("families", timed)
        step_s = evaluator(each.profile, each.cluster)(plan).step_s
        assert step_s == pytest.approx(108 + sums_s, rel=0.2)


def test_cuts_as_if_sums_took_no_time_are_a_choice_of_more() -> None:
    # Charged with its sums a stage of heavy layers is to be short, though these hide behind those of others
    better = 0
    for seed in range(12):
        problem, rng = random_sync_problem(seed), random.Random(seed)
        layers = tuple(
            replace(layer, parameter_bytes=layer.parameter_bytes * rng.choice((0.2, 1, 4)))
            for layer in problem.profile.layers
        )
        search = PipelineSearch(replace(problem, profile=replace(problem.profile, layers=layers)))
        plain, more = (FamilyCutter(search, FamilySpace(search)) for _ in range(2))
        more.also_uncharged()
        for chain, copies, run in product(((0, 0), (0, 0, 1), (1, 0, 0)), (3, 4), (1, 2)):
            outline = Outline(chain, copies, 1, run)
            before, now = (cutter.cut(outline, (0, 0), shared=False) for cutter in (plain, more))
            assert (before is None) == (now is None)
            if before is not None and now is not None:
                assert now.step_s <= before.step_s
                better += now.step_s < before.step_s * (1 - 1e-3)
    assert better


@pytest.mark.parametrize(("copies", "busy_s"), [(2, 16.0), (3, 30.0)])
def test_messages_of_two_copies_take_turns_at_a_node_that_they_pass(copies: int, busy_s: float) -> None:
    # Four nodes in a row. Into each of the two in the middle come forwards by one link and gradients by the
    # other one, a second each, four microbatches of a copy: 8 s for each copy. Two copies take turns. Three
    # also wait for the node at the other end of a link, which is busy with others for 12 s, half of the time.
    network = Link(0.0, 1e3)
    problem = problem_of_nodes({"kind": 1.0}, [("kind", copies)] * 4, network=network, batch=8)
    rows = [[node.devices[copy] for node in problem.cluster.nodes] for copy in range(copies)]
    parts = [(Layout.of(rows), 4, lambda *_: (1.0, 1.0))]
    assert card_messages_s(parts) == busy_s


def test_a_move_changes_all_copies_and_takes_no_device_twice() -> None:
    search = PipelineSearch(random_sync_problem(0))
    starts = FamilyStarts(search, search.effort.families)
    seen = []

    def evaluate(families: tuple[Family, ...], _: float) -> float:
        seen.append(families)
        timed = starts.cutter.timed(families)
        assert timed is not None
        names = [device.name for pipeline in timed for device in pipeline.devices]
        assert len(names) == len(set(names))
        assert sum(family.outline.copies for family in families) == len(timed)
        return 1 / len(seen)  # every change is a gain, so that moves follow one another

    first = next(starts.likely())
    FamilyClimb(starts.cutter, evaluate, search.effort.families).improve(first, lambda: True)
    assert len(set(seen)) > 20


def test_a_layer_moves_past_stages_that_are_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    # of 4, 3 and 2 layers no single cut that moves makes the busiest stage shorter: 3, 4, 2 and 4, 2, 3
    problem = problem_of_nodes(
        {"kind": 1.0}, [("kind", 3)] * 2, network=Link(0.0, 1e3), batch=32, num_layers=9
    )
    monkeypatch.setattr(family_moves, "MOVES", ("shift",))
    search = PipelineSearch(problem)
    cutter = FamilyCutter(search, FamilySpace(search))

    def most_layers(families: FamilySet, _: float) -> float:
        return max(stop - start for family in families for start, stop, _ in family.cuts)

    begin = (Family(Outline((0, 0, 0), 2, 1, run=3), ((0, 4, False), (4, 7, True), (7, 9, False))),)
    best = FamilyClimb(cutter, most_layers, search.effort.families).improve(begin, lambda: True)
    assert best[0].cuts == ((0, 3, False), (3, 6, True), (6, 9, False))


def test_changes_end_where_no_family_one_change_away_is_better() -> None:
    # From chains (fast, fast, slow) twice, chance alone would have to find the one place, class and cuts
    problem = problem_of_nodes(
        {"fast": 1.0, "slow": 0.5}, [("fast", 4)] * 2 + [("slow", 4)], network=Link(0.0, 1e4), batch=32
    )
    search, simulate = PipelineSearch(problem), evaluator(problem.profile, problem.cluster)
    cutter = FamilyCutter(search, FamilySpace(search))

    def step_s(families: FamilySet, _: float) -> float:
        timed = cutter.timed(families)
        plan = search.plan("families", timed) if timed is not None else None
        return simulate(plan).step_s if plan is not None else math.inf

    effort = replace(search.effort.families, climb_tries=0)  # nothing by chance
    climb = FamilyClimb(cutter, step_s, effort)
    begin = (Family(Outline((0, 0, 1), 2, 1, run=1), ((0, 4, False), (4, 7, False), (7, 8, False))),)
    best = climb.improve(begin, lambda: True)
    assert step_s(best, math.inf) < 0.6 * step_s(begin, math.inf)
    assert climb.improve(best, lambda: True) == best
    # families are left as they are that seem to end behind the best that is known
    begin_s = step_s(begin, math.inf)
    assert climb.settled(begin, set(), lambda: True, begin_s) == best
    assert climb.settled(begin, set(), lambda: True, begin_s / 10) == begin


def test_two_families_share_a_cluster_that_one_does_not_fill() -> None:
    # a chain (fast, fast, slow) twice leaves two slow devices, which are a family of their own
    problem = problem_of_nodes(
        {"fast": 1.0, "slow": 0.5}, [("fast", 4), ("slow", 4)], network=Link(0.0, 1e5), batch=32
    )
    search = PipelineSearch(problem)
    sets = list(FamilyStarts(search, search.effort.families).likely())
    assert any(len(families) == 2 for families in sets)
    assert all(families for families in sets)


def test_pairs_are_ranked_by_what_both_do() -> None:
    # With second families for the six alone that use their devices best alone, the best had taken 170.8 s
    problem = problem_of_nodes(
        {"fast": 1.0, "mid": 0.6, "slow": 0.5},
        [("fast", 4)] + [("mid", 4), ("slow", 4)] * 2,
        network=Link(0.0, 2e3),
        batch=64,
        sizes=(1, 2),
    )
    best = families_of(problem)[0]
    assert len({pipeline.stages[0].stop for pipeline in best.timed}) == 2
    assert best.step_s < 161


def test_copies_of_which_stages_fill_nodes_are_looked_at() -> None:
    # five nodes of four: of ten copies of (fast, fast) one node has both stages and sums all layers, and of
    # eight each has one, so that with many bytes two devices of ten are better left idle
    problem = problem_of_nodes(
        {"fast": 1.0}, [("fast", 4)] * 5, network=Link(0.0, 1e3), batch=160, parameter_bytes=15e3
    )
    search, simulate = PipelineSearch(problem), evaluator(problem.profile, problem.cluster)
    space = FamilySpace(search)
    assert space.copies((2,), 10) == {4, 5, 8, 10}
    assert space.copies((1,), 20) == {4, 10, 20}
    assert space.copies((4,), 3) == {1, 2, 3}  # two leave devices for others
    cutter, steps_s = FamilyCutter(search, space), {}
    for copies in (8, 10):
        found = cutter.cut(Outline((0, 0), copies, 1, run=1), (0,), shared=False, within_s=math.inf)
        timed = cutter.timed(found.families) if found is not None else None
        plan = search.plan("families", timed) if timed is not None else None
        steps_s[copies] = simulate(plan).step_s if plan is not None else math.inf
    assert steps_s[8] < 0.95 * steps_s[10]


def test_copies_of_which_one_node_has_all_sum_nothing_in_the_closed_form() -> None:
    # Two nodes of four. Four copies of two stages compute 96 s, an eighth more to fill and a sixteenth for
    # uneven cuts. Grouped, a node has all copies of its stage. Nested, each node has two copies of both, and
    # 80 kB pass its card both ways by half; beside others none is spared, and the larger sums count once.
    space = FamilySpace(PipelineSearch(two_nodes()))
    assert space.sums_s((2,), 4, 1, others=False) == 0
    assert space.sums_s((2,), 4, 2, others=False) == pytest.approx(80)
    assert space.sums_s((2,), 4, 1, others=True) == pytest.approx(80)
    assert space.sums_s((8,), 1, 4, others=False) == 0  # a single copy
    assert space.quick_s((2,), 4) == pytest.approx(114)
    assert space.quick_s((1,), 4, others=4 / 24, sums_s=100) == pytest.approx(96 + 160)
    assert space.quick_s((1,), 4, others=4 / 24, sums_s=200) == pytest.approx(96 + 200)


@pytest.mark.parametrize("changed", [{"microbatch_size": 1}, {"chain": (1, 0)}])
def test_cuts_are_kept_for_other_sizes_and_orders(changed: dict[str, Any]) -> None:
    # new cuts are even for every size and order; that uneven ones are faster the estimate need not know
    problem = problem_of_nodes(
        {"fast": 1.0, "slow": 0.99},
        [("fast", 4), ("slow", 4)],
        network=Link(0.0, 1e9),
        batch=256,
        sizes=(1, 2),
    )
    search = PipelineSearch(problem)
    cuts, outline = ((0, 6, False), (6, 8, False)), Outline((0, 1), 4, 2, run=1)
    wanted = (Family(outline._replace(**changed), cuts),)
    climb = FamilyClimb(
        FamilyCutter(search, FamilySpace(search)),
        lambda families, _: 1.0 if families == wanted else 2.0,
        replace(search.effort.families, climb_tries=0),
    )
    assert climb.improve((Family(outline, cuts),), lambda: True) == wanted


def test_a_family_gets_the_second_one_that_uses_what_it_leaves() -> None:
    # beside (fast, fast) six times, closed forms rank shorter chains before the one over all that is left
    problem = problem_of_nodes(
        {"fast": 1.0, "mid": 0.3, "slow": 0.2},
        [("fast", 4)] * 3 + [("mid", 4), ("slow", 4)],
        network=Link(0.0, 1e4),
        batch=96,
    )
    search = PipelineSearch(problem)

    def pairs(filled: int) -> set[object]:
        starts = FamilyStarts(search, replace(search.effort.families, pairs=1, filled=filled))
        outlines = [[family.outline for family in families] for families in starts.likely()]
        return {tuple((one.chain, one.copies) for one in pair) for pair in outlines if len(pair) == 2}

    more = pairs(6) - pairs(0)
    assert more and all(
        sum(len(chain) * copies for chain, copies in pair) >= len(problem.cluster.devices) - 4
        for pair in more
    )


def test_starts_that_are_changed_share_no_copies_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[FamilySet] = []

    def noted(_: FamilyClimb, families: FamilySet, *__: object) -> tuple[FamilySet, set[FamilySet]]:
        begun.append(families)
        return families, set()

    monkeypatch.setattr(FamilyClimb, "changed", noted)
    search = PipelineSearch(random_sync_problem(1))
    found_with(search, replace(search.effort.families, then=()))
    assert len(begun) == 5
    for one, other in combinations(begun, 2):
        chains = [
            {(each.outline.chain, each.outline.copies) for each in families} for families in (one, other)
        ]
        assert len(one) != len(other) or not chains[0] & chains[1]


def found_with(
    search: PipelineSearch, effort: FamilyEffort, known_s: float = math.inf
) -> dict[object, float]:
    problem = search.problem
    evaluate = evaluator(problem.profile, problem.cluster)
    search.effort = replace(search.effort, families=effort)
    sets = best_families(search, lambda plan: evaluate(plan).step_s, known_s)
    return {tuple((each.stages, each.microbatch_size) for each in one.timed): one.step_s for one in sets}


LITTLE = FamilyEffort(kept=2, kept_with_rest=0, second=0, smoothed=0, climbed=1)
MORE = FamilyEffort(rounds=2, parts_of_room=(0.5, 0.25))


def test_what_is_looked_for_later_begins_with_what_is_known() -> None:
    search = PipelineSearch(random_sync_problem(8))
    first, then = found_with(search, LITTLE), found_with(search, replace(LITTLE, then=(MORE,)))
    assert set(first) < set(then)
    assert min(then.values()) < min(first.values())


def test_more_is_looked_for_only_where_the_best_step_is_far_above_the_relaxed_one() -> None:
    search = PipelineSearch(random_sync_problem(8))
    search.search(lambda _, seconds: seconds)
    first = found_with(search, LITTLE)
    assert search.columns is not None
    above = min(first.values()) / search.relaxed_s
    assert above > 1
    near, far = (
        found_with(search, replace(LITTLE, then=(replace(MORE, far=ratio * above),)))
        for ratio in (1.001, 0.999)
    )
    assert set(near) == set(first) < set(far)


def test_less_is_looked_for_where_the_step_that_is_known_is_near_the_relaxed_one() -> None:
    search = PipelineSearch(random_sync_problem(8))
    search.search(lambda _, seconds: seconds)
    known_s = min(found_with(search, LITTLE).values())

    def found(ratio: float, effort: FamilyEffort) -> set[object]:
        search.relaxed_s = known_s / ratio
        return set(found_with(search, effort, known_s))

    both = replace(MORE, where_near=LITTLE)
    little, more = found(1.0, LITTLE), found(1.0, MORE)
    assert little != more
    assert (found(0.999 * NEARER, both), found(1.001 * NEAR, both)) == (little, more)
    for ratio in (1.001 * NEARER, 0.999 * NEAR):  # the few are not near enough
        assert little < found(ratio, both)


def test_how_much_is_looked_for_goes_by_the_number_of_devices() -> None:
    efforts = [effort_for(count).families for count in (8, 9, 15, 16, 17, 128, 129, 1024, 1025)]
    assert [len(effort.then) for effort in efforts] == [0, 2, 2, 2, 2, 2, 1, 1, 0]
    uncharged = [any(again.uncharged for again in effort.then) for effort in efforts]
    assert uncharged == [False] + [True] * 7 + [False]
    assert [effort.where_near is not None for effort in efforts] == [False] * 3 + [True] * 3 + [False] * 3
    small, larger = (effort.then[0] for effort in efforts[3:5])
    assert (small.kept, larger.kept) == (efforts[3].kept, 4 * efforts[4].kept)


def test_layers_move_while_the_estimate_gets_shorter() -> None:
    # cuts six layers from the best ones of two equal stages, which no single change betters by much
    problem = problem_of_nodes({"even": 1.0}, [("even", 4)], network=Link(0.0, 1e9), batch=32, num_layers=16)
    search = PipelineSearch(problem)
    cutter = FamilyCutter(search, FamilySpace(search))
    climb = FamilyClimb(cutter, lambda *_: math.inf, search.effort.families)
    begin = (Family(Outline((0, 0), 2, 1, run=1), ((0, 2, False), (2, 16, False))),)
    smoothed = climb.smoothed(begin)
    assert smoothed[0].cuts == ((0, 8, False), (8, 16, False)) and climb.smoothed(smoothed) == smoothed


def test_runs_that_put_a_chain_on_the_same_nodes_are_one_start() -> None:
    # a node holds all of its kind, so that grouped and nested differ in the names of devices alone
    problem = problem_of_nodes(
        {"fast": 1.0, "slow": 0.5}, [("fast", 4), ("slow", 4)], network=Link(0.0, 1e5), batch=32
    )
    search = PipelineSearch(problem)
    starts = [
        frozenset(
            (family.outline.chain, family.outline.copies, family.outline.microbatch_size, family.cuts)
            for family in families
        )
        for families in FamilyStarts(search, search.effort.families).likely()
    ]
    chains = [chain for families in starts for chain, *_ in families]
    assert any(chain.count(chain[0]) > 1 for chain in chains)
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_cut_would_not_have_been_likely(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search = PipelineSearch(random_sync_problem(seed))
    starts = FamilyStarts(search, search.effort.families)
    likely = list(islice(starts.likely(), 30))
    monkeypatch.setattr(FamilyFloors, "floor_s", lambda *_: 0.0)
    monkeypatch.setattr(FamilyFloors, "clock_s", lambda *_: 0.0)
    for name in ("rough_s", "of_both_s", "of_batch_s"):
        monkeypatch.setattr(FamilyFloors, name, lambda *_: 0.0)
    with_all = FamilyStarts(search, search.effort.families)
    assert list(islice(with_all.likely(), 30)) == likely
    assert len(with_all.cutter.known) > len(starts.cutter.known)


def test_hardly_any_family_far_above_a_known_step_is_cut() -> None:
    search = PipelineSearch(random_sync_problem(0))
    effort = search.effort.families
    starts = FamilyStarts(search, effort)
    first = list(islice(starts.likely(), 5))
    within_s = 1.02 * starts.cutter.estimate_s(first[0], shared=False)
    limited = FamilyStarts(search, effort, within_s)
    assert next(limited.likely()) == first[0]
    assert len(limited.cutter.known) < len(starts.cutter.known)


def test_no_two_families_are_estimated_below_what_each_takes_for_the_whole_batch() -> None:
    search = PipelineSearch(random_sync_problem(0))
    starts, space = FamilyStarts(search, search.effort.families), FamilySpace(search)
    floors, pairs = FamilyFloors(search, space), 0
    for families in filter(lambda families: len(families) == 2, islice(starts.likely(), 20)):
        first, second = families
        chain, copies = second.outline.chain, second.outline.copies
        vector = tuple(map(chain.count, range(len(space.counts))))
        estimate_s = starts.cutter.estimate_s(families, shared=False)
        assert floors.of_batch_s(first.outline, vector, copies) <= estimate_s
        ways = product(space.orders(vector), (1, 2))
        second_s = min(floors.rough_s(order, copies, size) for order, size in ways)
        assert second_s <= floors.most_beside_s(first.outline, estimate_s)
        pairs += 1
    assert pairs


@pytest.mark.parametrize("seed", range(4))
def test_no_cuts_are_estimated_below_their_floor(seed: int) -> None:
    search = PipelineSearch(random_sync_problem(seed))
    space = FamilySpace(search)
    cutter, floors, none = FamilyCutter(search, space), FamilyFloors(search, space), (0,) * len(space.counts)
    near = 0
    for vector in islice(space.vectors(space.counts, 4, 200), 0, None, 3):
        most = space.room(vector, space.counts)
        for order, copies, size, run in product(space.orders(vector), {most, 1}, (1, 2), (1, max(vector))):
            outline = Outline(order, copies, size, run)
            for shared in (True, False):
                cut = cutter.cut(outline, none, shared=shared)
                if cut is not None:
                    assert floors.floor_s(outline, none) <= cut.step_s
                    near += floors.floor_s(outline, none) > 0.9 * cut.step_s
    assert near > 20


def test_no_step_is_shorter_than_its_longest_pipeline_alone() -> None:
    problem = random_sync_problem(0)
    search, evaluate = PipelineSearch(problem), evaluator(problem.profile, problem.cluster)
    starts, near = FamilyStarts(search, search.effort.families), 0
    for families in islice(starts.likely(), 20):
        timed = starts.cutter.timed(families)
        plan = search.plan("families", timed or [])
        assert timed is not None and plan is not None
        least_s = max(
            one.timing.least_s(entry.num_samples) for one, entry in zip(timed, plan.pipelines, strict=True)
        )
        step_s = evaluate(plan).step_s
        assert least_s <= step_s * (1 + 1e-12)
        near += least_s > 0.8 * step_s
    assert near > 5


def test_the_gate_is_shut_where_the_step_is_near_its_clock_and_there_is_not_much_sync() -> None:
    # to sum 80 kB takes 4 s of some 100 s, not 160 s
    problem = two_nodes()
    fast = replace(problem, cluster=replace(problem.cluster, network=Link(0.0, 4e4)))
    search = PipelineSearch(fast)
    assert not families_may_win(search, 100.0)  # nothing is known yet
    search.search(lambda _, seconds: seconds)
    assert search.best is not None
    assert not families_may_win(search, 1.02 * search.best)
    assert families_may_win(search, 1.04 * search.best)
    assert not families_may_win(search, math.inf)
    slow = PipelineSearch(problem)
    slow.search(lambda _, seconds: seconds)
    assert slow.best is not None
    assert families_may_win(slow, 1.02 * slow.best)


def test_the_gate_is_shut_where_messages_wait_but_nothing_is_summed() -> None:
    problem = two_nodes()
    fast = replace(problem, cluster=replace(problem.cluster, network=Link(0.0, 1e12)))
    search = PipelineSearch(fast)
    search.search(lambda _, seconds: seconds)
    assert search.best is not None
    assert not families_may_win(search, 2 * search.best)


def test_without_sync_the_plan_is_the_same_as_without_families() -> None:
    problem = random_sync_problem(1)
    fast = replace(problem, cluster=replace(problem.cluster, network=Link(0.0, 1e12)))
    assert planned(fast, families=True) == planned(fast, families=False)


def test_sets_that_differ_in_devices_of_a_node_alone_are_simulated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = random_sync_problem(0)
    evaluate = evaluator(problem.profile, problem.cluster)

    def num_simulated() -> int:
        simulated = []

        def simulate(plan: Plan) -> float:
            simulated.append(plan.pipelines)
            return evaluate(plan).step_s

        best_families(PipelineSearch(problem), simulate, math.inf)
        return len(simulated)

    once = num_simulated()
    monkeypatch.setattr(FamilySpace, "pipelines", lambda _, families: families)
    assert 10 < once < num_simulated()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, 2, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (3, 4, 9))]
)
def test_families_make_no_plan_worse_and_the_same_input_gives_the_same_plan(seed: int) -> None:
    problem = random_sync_problem(seed)
    plan, step_s = planned(problem, families=True)
    assert step_s <= planned(problem, families=False)[1] * (1 + 1e-9)
    assert planned(problem, families=True) == (plan, step_s)


@pytest.mark.slow
def test_large_clusters_gain_from_families() -> None:
    # no walk runs beyond 128 devices: families and other numbers of pipelines are left where sums decide
    problem = problem_of_nodes(
        {"fast": 1.0, "slow": 0.5},
        [("fast", 8)] * 9 + [("slow", 8)] * 9,
        network=Link(1e-4, 5e2),
        batch=144 * 8,
        num_layers=12,
    )
    assert planned(problem, families=True)[1] < 0.999 * planned(problem, families=False)[1]
