"""The curves that the benchmark lays through times by batch size."""

from itertools import pairwise
from types import ModuleType

import pytest

from places import load_benchmark

SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("batch_curves/main.py")


def test_all_curves_pass_their_knots_and_follow_a_line(benchmark):
    for method in benchmark.METHODS.values():
        values = (1.0, 1.2, 2.5, 9.0)
        assert [method(SIZES, values, size) for size in SIZES] == pytest.approx(values)
        line = [2.0 + 3.0 * size for size in SIZES]
        assert [method(SIZES, line, size) for size in (1.5, 3, 5, 7)] == pytest.approx([6.5, 11, 17, 23])


def test_a_monotone_cubic_by_hand(benchmark):
    # slopes 0 and 1: flat in the middle and at the start; (5 x 1 - 2 x 0) / 3 at the end
    assert benchmark.monotone_cubic((1, 2, 4), (1.0, 1.0, 3.0), 1.5) == 1.0
    assert benchmark.monotone_cubic((1, 2, 4), (1.0, 1.0, 3.0), 3) == pytest.approx(2 - 2 * 5 / 3 / 8)


def test_a_natural_spline_by_hand(benchmark):
    # at 2: 4 m = 6 (9 - 0), m = 13.5; at 1.5: (1 + 1) / 2 - m / 16
    assert benchmark.natural_spline((1, 2, 3), (1.0, 1.0, 10.0), 1.5) == pytest.approx(1 - 13.5 / 16)


def test_where_times_rise_only_the_spline_falls(benchmark):
    grid = [1 + step / 10 for step in range(71)]
    falls = {
        name: any(b < a for a, b in pairwise(method(SIZES, (1.0, 1.0, 10.0, 11.0), at) for at in grid))
        for name, method in benchmark.METHODS.items()
    }
    assert falls == {"linear": False, "natural spline": True, "monotone cubic": False}
    curve = benchmark.Curve("one", SIZES, (1.0, 1.0, 10.0, 11.0))
    rows = list(benchmark.rows("one", [curve], leave_one_out=True))
    assert [row.split("|")[-2].strip() for row in rows] == ["0", "2", "0"]


def test_sizes_between_knots_are_held_out(benchmark):
    curve = benchmark.Curve("one", (1, 2, 3, 4, 5), (1.0, 2.0, 3.3, 4.0, 5.0))
    assert curve.split((1, 2, 4, 8)) == ([1, 2, 4], [1.0, 2.0, 4.0], [(3, 3.3)])
