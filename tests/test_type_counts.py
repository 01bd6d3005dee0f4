"""The programme over counts of devices against brute force and a MILP; the split against brute force."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pulp
import pytest

from cost_model.cluster import Node
from cost_model.memory import StageShape, device_memory
from parallel import on_all_cores
from partition.classes import equal_devices
from partition.column_dp import ColumnStage
from partition.count_vectors import CountVectors
from partition.problem import Problem
from partition.tables import Amount, ProblemTables
from partition.type_counts import TypeCountProgramme
from random_plans import tight_case
from random_problems import random_problem

NO_CEILING_S = 1e9
MOST = 40  # in flight that brute force tries


def small_problem(seed: int) -> Problem:
    """At most three devices and five layers."""
    while True:
        problem = random_problem(seed) if seed % 2 else tight_case(seed, num_plans=4)[0]
        if len(problem.cluster.devices) <= 3 and problem.profile.num_layers <= 5:
            return problem
        seed += 10_000


class BruteForce:
    """Z of every pipeline over classes of devices, from the prices and bytes of single stages.

    Z = max over stages of (the way of the first forward there and of the last backward back, and then all
    samples of the stage with its optimizer step and the time it must wait, or full microbatches * round trip
    / most in flight).
    """

    def __init__(self, problem: Problem, size: int, num_samples: int) -> None:
        self.problem, self.size = problem, size
        self.tables = ProblemTables(problem, equal_devices(problem.cluster))
        self.full, self.rest = divmod(num_samples, size)
        self.last = self.rest or size
        self.first = size if self.full else self.last
        self.num_microbatches = self.full + (self.rest > 0)
        self.seconds, self.cap, self.hop = (cache(f) for f in (self._seconds, self._cap, self._hop))

    def _seconds(self, stage: ColumnStage, samples: int) -> tuple[float, float]:
        device, prices = self.tables.classes.members[stage.entry][0], self.tables.prices
        layers = stage.start, stage.stop
        return (
            prices.forward_s(device, *layers, samples),
            prices.backward_s(device, *layers, samples, recompute=stage.recompute),
        )

    def _cap(self, stage: ColumnStage) -> int:
        """The most in flight that memory takes; all may fit where as many would not."""
        usable = self.tables.classes.members[stage.entry][0].usable_bytes

        def fits(in_flight: int, num_microbatches: int | None) -> bool:
            shape = StageShape(
                stage.start, stage.stop, in_flight, self.first, stage.recompute, num_microbatches
            )
            return device_memory(self.problem.profile, [shape]).total_bytes <= usable * (1 + 1e-9)

        most = max((flight for flight in range(1, MOST) if fits(flight, None)), default=0)
        return max(most, self.num_microbatches if fits(self.num_microbatches, self.num_microbatches) else 0)

    def _hop(self, one: int, other: int, layer: int, there: int, back: int) -> float:
        """Of the best channel each way; inf where there is none."""
        num_bytes = [self.tables.prices.boundary_bytes(layer, samples) for samples in (there, back)]
        pairs, route = self.tables.classes.channels(one, other), self.tables.network.route
        out = (route(a.name, b.name).link.transfer_s(num_bytes[0]) for a, b in pairs)
        home = (route(b.name, a.name).link.transfer_s(num_bytes[1]) for a, b in pairs)
        return min(out, default=math.inf) + min(home, default=math.inf)

    def z_s(self, stages: Sequence[ColumnStage]) -> float:
        z = trip = 0.0
        for index in reversed(range(len(stages))):
            stage, after = stages[index], stages[index + 1 :][:1]
            if self.cap(stage) < 1:
                return math.inf
            first, last = self.seconds(stage, self.first), self.seconds(stage, self.last)
            total = self.full * sum(first) + (sum(last) if self.rest else 0.0)
            total += float(self.tables.optimizer_s[stage.entry, stage.start, stage.stop])
            link = [self.hop(stage.entry, s.entry, s.start, self.first, self.last) for s in after]
            hop = [self.hop(stage.entry, s.entry, s.start, self.first, self.first) for s in after]
            trip += sum(first) + sum(hop)
            passes = max(1, self.full) * trip / self.cap(stage)
            stall = sum(max(0.0, trip - least) for least in self.gaps(stage))
            z = max(total + stall, passes, first[0] + last[1] + sum(link) + z)
        return z

    def gaps(self, stage: ColumnStage) -> list[float]:
        """Round trips from which on a stage waits: for its first backward; if all are full, for its last."""
        first, last, count = (
            self.seconds(stage, self.first),
            self.seconds(stage, self.last),
            self.num_microbatches,
        )
        if count == 1:
            return [sum(first)]
        warm = first[1] + min(self.cap(stage), count) * max(first[0], last[0])
        cool = first[0] + self.cap(stage) * first[1]
        return [warm, cool] if self.cap(stage) < count and not self.rest else [warm]

    def pipelines(self, counts: Sequence[int]) -> Iterator[tuple[ColumnStage, ...]]:
        """All pipelines on exactly so many devices of each class."""
        entries = [entry for entry, count in enumerate(counts) for _ in range(count)]
        layers = self.tables.num_layers
        if not 0 < len(entries) <= layers:
            return
        for order in set(permutations(entries)):
            for cuts in combinations(range(1, layers), len(order) - 1):
                spans = list(pairwise((0, *cuts, layers)))
                for flags in product((False, True), repeat=len(order)):
                    stages = zip(order, spans, flags, strict=True)
                    yield tuple(ColumnStage(entry, *span, flag) for entry, span, flag in stages)

    def least_s(self, counts: Sequence[int]) -> float:
        return min(map(self.z_s, self.pipelines(counts)), default=math.inf)


def compare_with_brute_force(seed: int) -> tuple[int, int]:
    """(count vectors compared, those that are infeasible); also that merged labels stay below."""
    problem = small_problem(seed)
    classes = equal_devices(problem.cluster)
    tables, vectors = ProblemTables(problem, classes), CountVectors(classes.counts)
    size = problem.microbatch_sizes[seed % len(problem.microbatch_sizes)]
    amounts = sorted({1, size, problem.global_batch_size, 3 * size + size // 2})
    made = [Amount.exact(amount, size) for amount in amounts]
    programmes = {
        labels: TypeCountProgramme(
            tables, vectors, [(size, amount) for amount in made], NO_CEILING_S, max_labels=labels
        )
        for labels in (None, 1, 2)
    }
    least = {labels: programme.least_s() for labels, programme in programmes.items()}
    infeasible = 0
    for which, amount in enumerate(amounts):
        brute = BruteForce(problem, size, amount)
        for vector in range(1, vectors.size):
            expected = brute.least_s([int(digit) for digit in vectors.digits[vector]])
            assert least[None][which, vector] == pytest.approx(expected, rel=1e-9), (seed, amount, vector)
            stages = programmes[None].stages(which, vector)
            assert bool(stages) == math.isfinite(expected)
            if stages:
                assert brute.z_s(stages) == pytest.approx(expected, rel=1e-9), (seed, amount, vector)
            infeasible += math.isinf(expected)
    for labels in (1, 2):
        assert (least[labels] <= least[None] * (1 + 1e-12)).all(), (seed, labels)
    compiled = [
        TypeCountProgramme(
            tables,
            vectors,
            [(size, amount) for amount in [*made, Amount(0, 1, size, 1.0), Amount(3, 1, size, 2.0, below=2)]],
            ceiling_s,
            max_labels=1,
            compiled=compiled,
        ).least_s()
        for compiled in (False, True)
        for ceiling_s in (NO_CEILING_S, 1.5 * float(np.min(least[1])))
    ]
    for one, other in zip(compiled[:2], compiled[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    return len(amounts) * (vectors.size - 1), infeasible


def test_programme_equals_brute_force() -> None:
    compared, infeasible = zip(*(compare_with_brute_force(seed) for seed in range(40)), strict=True)
    assert sum(compared) > 400 and sum(infeasible) > 50


@pytest.mark.slow
def test_programme_equals_brute_force_on_hundreds_of_problems() -> None:
    on_all_cores(compare_with_brute_force, range(1000, 1400))


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
    full = max(1, brute.full)
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
            total += float(brute.tables.optimizer_s[s.entry, s.start, s.stop])
            programme += z[place] >= total * use
            share = full / brute.cap(s)
            programme += z[place] >= share * trip[place] - share * longest * (1 - use)
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
        held = [u for row in uses for u, s in zip(row, stages, strict=True) if s.entry == entry]
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


def compare_with_milp(seed: int) -> bool:
    """Whether there is a pipeline on all devices at all."""
    problem = with_one_link(small_problem(seed))
    classes = equal_devices(problem.cluster)
    vectors, size = CountVectors(classes.counts), problem.microbatch_sizes[-1]
    tables, samples = ProblemTables(problem, classes), problem.global_batch_size
    brute = BruteForce(problem, size, samples)
    programme = TypeCountProgramme(
        tables, vectors, [(size, Amount.exact(samples, size))], NO_CEILING_S, max_labels=None
    )
    expected = float(programme.least_s()[0, -1])
    counts = classes.counts
    if sum(counts) > tables.num_layers:
        assert math.isinf(expected)
        return False
    found, stages = milp_s(brute, counts)
    assert found == pytest.approx(expected, rel=1e-5), seed
    if stages:
        assert brute.z_s(stages) == pytest.approx(expected, rel=1e-5), seed
    return bool(stages)


def test_programme_equals_a_milp() -> None:
    assert sum(compare_with_milp(seed) for seed in range(500, 560)) >= 30


@pytest.mark.slow
def test_programme_equals_a_milp_on_hundreds_of_problems() -> None:
    on_all_cores(compare_with_milp, range(2000, 2300))
