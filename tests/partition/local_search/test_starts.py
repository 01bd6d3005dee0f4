"""Starts of a search: which numbers of pipelines are worth dealing devices out to."""

import pytest

from partition.local_search.starts import SearchSpace, dealt_sets, least_dealt_s
from partition.problem import Problem
from shared_plans import layers_of


def four_devices(num_samples: int) -> Problem:
    """Four equal devices and six layers, of which one device takes 18 s for a sample."""
    return Problem(*layers_of(*[3.0] * 6), num_samples, (1,))


@pytest.mark.parametrize("number", [1, 2, 4])
def test_equal_stages_are_filled_and_emptied(number: int) -> None:
    # pipelines of 4 / number stages, a microbatch every 18 * number / 4 s, each 8 / number of them
    stages, period_s = 4 // number, 18 * number / 4
    space = SearchSpace(four_devices(8))
    assert least_dealt_s(space, number, 1) == pytest.approx((8 // number + stages - 1) * period_s)
    for _, timed in dealt_sets(space, number, (1,)):
        assert space.clock_s(timed) >= least_dealt_s(space, number, 1) * (1 - 1e-9)
