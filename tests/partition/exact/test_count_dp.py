"""The programme over counts of devices against brute force and a MILP; the split against brute force."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pulp
import pytest

from brute_force import BruteForce, small_problem
from cost_model.cluster import Node
from cost_model.dtypes import FLOAT32
from parallel import on_all_cores
from partition.estimates.amounts import Amount
from partition.estimates.class_pipeline import ColumnStage
from partition.estimates.device_classes import equal_devices
from partition.estimates.stage_tables import ProblemTables
from partition.exact.count_dp import CountProgramme
from partition.exact.count_vectors import CountVectors
from partition.problem import Problem

NO_CEILING_S = 1e9


def compare_with_brute_force(seed: int) -> tuple[int, int]:
    """Return (count vectors compared, those that are infeasible).

    Of each, Z is what the recursion of one label gives and no more than any pipeline's, and the stages that
    are traced back are a pipeline that fits, of Z near it.
    """
    problem = small_problem(seed)
    classes = equal_devices(problem.cluster)
    tables, vectors = ProblemTables(problem, classes), CountVectors(classes.counts)
    size = problem.microbatch_sizes[seed % len(problem.microbatch_sizes)]
    amounts = sorted({1, size, problem.global_batch_size, 3 * size + size // 2})
    made = [(size, Amount.exact(amount, size)) for amount in amounts]
    programme = CountProgramme(tables, vectors, made, NO_CEILING_S)
    least = programme.least_s()
    infeasible = 0
    for which, amount in enumerate(amounts):
        brute = BruteForce(problem, size, amount)
        for vector in range(1, vectors.size):
            counts = [int(digit) for digit in vectors.digits[vector]]
            expected, optimum = brute.merged_s(counts), brute.least_s(counts)
            assert least[which, vector] == pytest.approx(expected, rel=2e-5), (seed, amount, vector)
            assert least[which, vector] <= optimum
            stages = programme.stages(which, vector)
            assert bool(stages) == math.isfinite(optimum)
            if stages:
                used = [sum(stage.class_index == entry for stage in stages) for entry in range(len(counts))]
                assert used == counts
                assert optimum * (1 - 1e-9) <= brute.z_s(stages) <= 1.5 * optimum, (seed, amount, vector)
            infeasible += math.isinf(optimum)
    compare_kernels(tables, vectors, made, float(np.min(least)))
    return len(amounts) * (vectors.size - 1), infeasible


def compare_kernels(
    tables: ProblemTables, vectors: CountVectors, made: Sequence[tuple[int, Amount]], least_s: float
) -> None:
    """Hold NumPy's loop and the compiled one against each other, with a ceiling and without."""
    size = made[0][0]
    amounts = [*made, (size, Amount(0, 1, size, 1.0)), (size, Amount(3, 1, size, 2.0, below=2))]
    for ceiling_s in (NO_CEILING_S, 1.5 * least_s):
        one, other = (
            CountProgramme(tables, vectors, amounts, ceiling_s, compiled=compiled).least_s()
            for compiled in (False, True)
        )
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.slow
def test_programme_equals_brute_force() -> None:
    compared, infeasible = zip(*(compare_with_brute_force(seed) for seed in range(20)), strict=True)
    assert sum(compared) > 200 and sum(infeasible) > 25


@pytest.mark.slow
@pytest.mark.exhaustive
def test_programme_equals_brute_force_on_hundreds_of_problems() -> None:
    on_all_cores(compare_with_brute_force, (*range(20, 40), *range(1000, 1400)))


def milp_s(brute: BruteForce, counts: Sequence[int]) -> tuple[float, tuple[ColumnStage, ...]]:
    """Z and stages of the same problem as a MILP, with links that are the same everywhere.

    uses[place][stage] in {0, 1}: the stage is the place-th of the pipeline. Z of the suffix from a place on
    is at least that of its stage alone, and its way plus Z of the next; round trips by big M.
    """
    layers, entries = brute.tables.num_layers, range(len(counts))
    spans = list(combinations(range(layers + 1), 2))
    stages = [
        ColumnStage(entry, *span, flag) for entry in entries for span in spans for flag in (False, True)
    ]
    stages = [stage for stage in stages if brute.cap(stage) >= 1]
    first_s = {stage: brute.seconds(stage, brute.first) for stage in stages}
    last_s = {stage: brute.seconds(stage, brute.last) for stage in stages}
    pair = next((pair for pair in product(entries, repeat=2) if brute.tables.classes.channels(*pair)), None)
    hop_s = {
        layer: [brute.hop(*pair, layer, brute.first, back) for back in (brute.first, brute.last)]
        if pair and layer < layers
        else [0.0, 0.0]
        for layer in range(1, layers + 1)
    }
    places = range(sum(counts))
    programme = pulp.LpProblem("pipeline", pulp.LpMinimize)
    z = [programme.add_variable(f"z_{place}", 0) for place in range(len(places) + 1)]
    trip = [programme.add_variable(f"trip_{place}", 0) for place in range(len(places) + 1)]
    uses = [
        [programme.add_variable(f"use_{place}_{index}", cat=pulp.LpBinary) for index in range(len(stages))]
        for place in places
    ]
    programme += z[0]
    programme += z[-1] == 0
    programme += trip[-1] == 0
    longest = max((sum(first_s[s]) + hop_s[s.stop][0] for s in stages), default=0.0) * len(places)
    for place in places:
        pairs = list(zip(uses[place], stages, strict=True))
        programme += pulp.lpSum(uses[place]) == 1
        programme += trip[place] == trip[place + 1] + pulp.lpSum(
            use * (sum(first_s[s]) + hop_s[s.stop][0]) for use, s in pairs
        )
        programme += z[place] >= z[place + 1] + pulp.lpSum(
            use * (first_s[s][0] + last_s[s][1] + hop_s[s.stop][1]) for use, s in pairs
        )
        for use, s in pairs:
            total = brute.full * sum(first_s[s]) + (sum(last_s[s]) if brute.rest else 0.0)
            total += float(brute.tables.optimizer_s[s.class_index, s.start, s.stop])
            programme += z[place] >= total * use
            turns, beyond_s = brute.turns(s)
            programme += z[place] >= turns * trip[place] + beyond_s - (turns * longest + beyond_s) * (1 - use)
            gaps = brute.gaps(s)
            for some in (*([gap] for gap in gaps), gaps):
                stall = len(some) * trip[place] - sum(some)
                programme += z[place] >= total + stall - (total + len(some) * longest) * (1 - use)
        for layer in range(layers + 1):
            ends = pulp.lpSum(use for use, s in pairs if s.stop == layer)
            if place == places[-1]:
                programme += ends == (1 if layer == layers else 0)
            else:
                after = zip(uses[place + 1], stages, strict=True)
                programme += ends == pulp.lpSum(use for use, s in after if s.start == layer)
        if place == 0:
            programme += pulp.lpSum(use for use, s in pairs if s.start == 0) == 1
    for entry in entries:
        held = [u for row in uses for u, s in zip(row, stages, strict=True) if s.class_index == entry]
        programme += pulp.lpSum(held) == counts[entry]
    options = {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9}
    status = programme.solve(pulp.HiGHS(msg=False, gapRel=0.0, threads=1, **options))
    if status != pulp.LpStatusOptimal:
        return math.inf, ()
    chosen = [stages[max(range(len(stages)), key=lambda k: row[k].value())] for row in uses]
    return float(programme.objective.value()), tuple(chosen)


def with_one_link(problem: Problem) -> Problem:
    """All devices on one node."""
    devices = tuple(replace(device, node="n") for device in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, nodes=(Node("n", devices),), links=()))


def compare_with_milp(seed: int) -> tuple[bool, bool]:
    """Return whether there is a pipeline on all devices, and whether Z of one label is its least.

    One label a state gives a lower bound, and stages whose own Z is no less than the least.
    """
    problem = with_one_link(small_problem(seed))
    profile = problem.profile.with_kinds(problem.profile.kinds, dict.fromkeys(problem.profile.kinds, FLOAT32))
    problem = replace(problem, profile=profile)  # messages of one size
    classes = equal_devices(problem.cluster)
    vectors, size = CountVectors(classes.counts), problem.microbatch_sizes[-1]
    tables, samples = ProblemTables(problem, classes), problem.global_batch_size
    brute = BruteForce(problem, size, samples)
    programme = CountProgramme(tables, vectors, [(size, Amount.exact(samples, size))], NO_CEILING_S)
    bound = float(programme.least_s()[0, -1])
    counts = classes.counts
    if sum(counts) > tables.num_layers:
        assert math.isinf(bound)
        return False, True
    found, stages = milp_s(brute, counts)
    assert math.isinf(bound) == math.isinf(found), seed
    if not stages:
        return False, True
    assert bound <= found * (1 + 3e-5) and bound >= found / 1.05, seed
    assert brute.z_s(stages) == pytest.approx(found, rel=3e-5), seed
    own = programme.stages(0, vectors.size - 1)
    assert found * (1 - 3e-5) <= brute.z_s(own) <= 1.5 * found, seed
    return True, bound == pytest.approx(found, rel=3e-5)


@pytest.mark.slow
def test_programme_equals_a_milp() -> None:
    assert sum(there for there, _ in map(compare_with_milp, range(500, 530))) >= 15


@pytest.mark.slow
@pytest.mark.exhaustive
def test_programme_equals_a_milp_on_hundreds_of_problems() -> None:
    there, exact = zip(*on_all_cores(compare_with_milp, (*range(530, 560), *range(2000, 2300))), strict=True)
    assert sum(there) >= 150 and sum(exact) >= 0.98 * len(exact)
