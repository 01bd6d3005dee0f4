"""The sums of families against those of any pipelines, and estimates that end early against all of them."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from node_problems import random_sync_problem
from partition.estimates.pipeline_clock import Seconds
from partition.estimates.sync_tail import Copies, Tail
from partition.estimates.timed_pipeline import PipelineTiming, TimedStage
from partition.local_search.families import Family, FamilySet, FamilySpace, Layout, Outline
from partition.local_search.family_cuts import FamilyCutter
from partition.local_search.family_sums import FamilySums
from partition.local_search.pipeline_search import PipelineSearch


def random_families(space: FamilySpace, rng: random.Random) -> FamilySet:
    """One or two families, each on devices that the others leave."""
    num_layers, families = space.problem.profile.num_layers, list[Family]()
    left = list(space.counts)
    for _ in range(rng.choice([1, 2])):
        chain = tuple(rng.randrange(len(left)) for _ in range(rng.randint(1, min(5, num_layers))))
        room = space.room(tuple(map(chain.count, range(len(left)))), left)
        if room:
            outline = Outline(chain, rng.randint(1, room), 1, rng.choice([1, 2, 4]))
            stops = [*sorted(rng.sample(range(1, num_layers), len(chain) - 1)), num_layers]
            families.append(Family(outline, tuple((a, b, False) for a, b in pairwise([0, *stops]))))
            left = [n - used for n, used in zip(left, families[-1].uses(len(left)), strict=True)]
    return tuple(families)


def timings_of(search: PipelineSearch, families: FamilySet, layouts: list[Layout]) -> list[PipelineTiming]:
    rows = (
        [TimedStage(device, *cut) for device, cut in zip(layout.row, family.cuts, strict=True)]
        for family, layout in zip(families, layouts, strict=True)
    )
    return [search.timings.pipeline(stages, 1).timing for stages in rows]


def tail_s(space: FamilySpace, families: FamilySet, layouts: list[Layout], fulls: list[Seconds]) -> float:
    """The same by the tail of all their pipelines, node by node."""
    cuts = sorted({0} | {stop for family in families for _, stop, _ in family.cuts})
    groups = [
        Copies(space.nodes_of(layout), tuple(stop for _, stop, _ in family.cuts), full)
        for family, layout, full in zip(families, layouts, fulls, strict=True)
    ]
    tail, copies = Tail.of(groups, cuts), sum(family.outline.copies for family in families)
    names = [node.name for node in space.problem.cluster.nodes]
    num_bytes, sums_s = [], []
    for row, (start, stop) in enumerate(pairwise(cuts)):
        nodes = set(tail.node[row].tolist())
        members = min(copies, len(nodes)) if space.inside_first else copies
        num_bytes.append(sum(space.layer_bytes[start:stop]))
        pace = max(space.card_s_per_byte[names[node]] for node in nodes)
        late_s = 2 * (members - 1) * space.problem.cluster.network.latency_s
        sum_s = num_bytes[-1] * ((members - 1) / members * pace) + late_s
        sums_s.append(sum_s if len(nodes) > 1 and num_bytes[-1] else 0.0)
    return tail.exposed_s(np.array(sums_s), np.array(num_bytes), cuts, len(names))


@pytest.mark.parametrize("seed", range(6))
def test_kinds_of_copies_are_summed_as_all_copies_are(seed: int) -> None:
    search, rng = PipelineSearch(random_sync_problem(seed)), random.Random(seed)
    space = FamilySpace(search)
    sums, exposed = FamilySums(space), 0
    for _ in range(60):
        if families := random_families(space, rng):
            layouts = space.layouts(families)
            fulls = [timing.full for timing in timings_of(search, families, layouts)]
            found_s = sums.exposed_s(families, layouts, fulls)
            assert found_s == pytest.approx(tail_s(space, families, layouts, fulls), rel=1e-12)
            exposed += found_s > 0
    assert exposed


@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_within_a_step_is_the_whole_one_or_above_it(seed: int) -> None:
    search, rng = PipelineSearch(random_sync_problem(seed)), random.Random(seed)
    space, seen = FamilySpace(search), set[bool]()
    for _ in range(40):
        if families := random_families(space, rng):
            step_s = FamilyCutter(search, space).estimate_s(families, shared=False)
            within_s = step_s * rng.uniform(0.5, 1.5) if math.isfinite(step_s) else 1.0
            found_s = FamilyCutter(search, space).estimate_s(families, shared=False, within_s=within_s)
            assert found_s == step_s or (found_s == math.inf and step_s > within_s)
            seen.add(found_s == step_s)
    assert seen == {True, False}


@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_is_the_same_whatever_was_asked_before(seed: int) -> None:
    search, rng = PipelineSearch(random_sync_problem(seed)), random.Random(seed)
    space, again, above = FamilySpace(search), 0, 0
    cutter = FamilyCutter(search, space)
    asked = [families for _ in range(12) if (families := random_families(space, rng))]
    for families in rng.choices(asked, k=8 * len(asked)):
        shared = rng.random() < 0.5
        step_s = FamilyCutter(search, space).estimate_s(families, shared=shared)
        within_s = step_s * rng.choice([0.5, 0.9, 1.1, math.inf]) if math.isfinite(step_s) else math.inf
        found_s = cutter.estimate_s(families, shared=shared, within_s=within_s)
        assert found_s == step_s or (found_s == math.inf and step_s > within_s)
        again, above = again + (found_s == step_s), above + (found_s != step_s)
    assert again and above
