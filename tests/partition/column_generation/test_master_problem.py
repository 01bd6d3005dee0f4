"""The integer programme over pipelines: whole pipelines within the devices, also where it ends early."""

import random

import pytest

from partition.column_generation import master_problem
from partition.column_generation.master_problem import NO_LIMITS, Limits, MasterProgramme, solve_master


def hard_programme(seed: int) -> tuple[list[list[int]], list[float], list[float]]:
    """Many columns on six classes, each worth nearly what its devices are: (uses, values, counts)."""
    rng = random.Random(seed)
    worth = [8.0 ** -rng.random() for _ in range(6)]
    uses = [[rng.choice((0, 0, 0, 1, 2, 3)) for _ in worth] for _ in range(200)]
    uses = [use if any(use) else [1] * len(worth) for use in uses]
    values = [
        float(int(rng.uniform(80, 100) * sum(n * w for n, w in zip(use, worth, strict=True)))) for use in uses
    ]
    return uses, values, [float(rng.randint(5, 15)) for _ in worth]


def test_a_programme_that_ends_early_gives_whole_pipelines_on_the_devices_there_are(
    monkeypatch: pytest.MonkeyPatch,
):
    earlier = 0
    for seed in range(6):
        uses, values, counts = hard_programme(seed)
        best = solve_master(uses, values, counts, integer=True)
        with monkeypatch.context() as patch:
            patch.setattr(master_problem, "MOST_NODES", 0)
            early = solve_master(uses, values, counts, integer=True)
        relaxed = solve_master(uses, values, counts)
        assert early.samples <= best.samples * (1 + 1e-3) <= relaxed.samples * (1 + 2e-3)
        earlier += early.samples < best.samples
        amounts = [round(amount) for amount in early.amounts]
        assert list(early.amounts) == pytest.approx(amounts, abs=1e-6)
        used = [sum(n * use[place] for n, use in zip(amounts, uses, strict=True)) for place in range(6)]
        assert all(n <= count for n, count in zip(used, counts, strict=True))
    assert earlier > 0


@pytest.mark.parametrize("limits", [NO_LIMITS, Limits(12, 2, 20, (1,))])
def test_an_answer_does_not_depend_on_what_a_programme_was_asked_before(limits: Limits):
    uses, values, counts = hard_programme(7)
    rng, programme = random.Random(7), MasterProgramme(uses, counts, limits)
    for _ in range(5):
        others = [float(int(value * rng.uniform(0, 1.5))) for value in values]
        again, alone = programme.solve(others), solve_master(uses, others, counts, limits)
        assert again.amounts.tolist() == alone.amounts.tolist()
        assert again.prices.tolist() == alone.prices.tolist()
        assert (again.samples, again.each, again.met) == (alone.samples, alone.each, alone.met)
