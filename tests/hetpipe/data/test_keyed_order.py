"""The order of samples: a permutation in every epoch, computed place by place where there are many."""

import sys

import numpy as np
import pytest

from hetpipe.data import keyed_order
from hetpipe.data.keyed_order import MOST_SORTED, epoch_order, permuted, samples_at


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 31, 64, 65, 1000, 4097])
def test_each_epoch_has_each_sample_once(count):
    orders = [samples_at(np.arange(count), 7, epoch, count) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(count))
    if count > 30:
        assert len({tuple(order) for order in orders}) == 3


def test_a_part_of_an_order_is_that_part_of_the_whole():
    whole = permuted(3, 1000, 0, 2500, most_sorted=0)
    for first, count in ((0, 1), (990, 20), (1999, 501)):
        assert (permuted(3, 1000, first, count, most_sorted=0) == whole[first : first + count]).all()
    assert sorted(whole[:1000]) == sorted(whole[1000:2000]) == list(range(1000))


def test_both_ways_are_taken_by_the_number_of_samples():
    few = permuted(1, 100, 0, 100)
    assert (few == epoch_order(1, 0, 100)).all()
    many = permuted(1, MOST_SORTED + 1, 5, 10)
    assert (many == samples_at(np.arange(5, 15), 1, 0, MOST_SORTED + 1)).all()


def test_a_billion_samples_need_no_memory_of_their_number():
    epoch_order.cache_clear()
    found = permuted(0, 10**9, 999_999_990, 20)
    assert len(set(found[:10])) == 10 and found.max() < 10**9
    assert epoch_order.cache_info().currsize == 0 and sys.getsizeof(found) < 1000


def test_samples_are_spread_evenly_and_neighbours_are_independent():
    """Chi-squared over 64 bins, and the share of neighbours that rise: both within 4 deviations."""
    count = 1_000_003
    places = np.arange(0, count, 10)
    found = samples_at(places, 11, 2, count)
    bins = np.bincount(found * 64 // count, minlength=64)
    expected = len(places) / 64
    chi = float(((bins - expected) ** 2 / expected).sum())
    assert abs(chi - 63) < 4 * np.sqrt(2 * 63)
    rising = float((np.diff(samples_at(np.arange(100_000), 11, 2, count)) > 0).mean())
    assert abs(rising - 0.5) < 4 * np.sqrt(1 / 12 / 100_000)
    assert abs(np.corrcoef(places, found)[0, 1]) < 4 / np.sqrt(len(places))


def test_the_order_of_a_seed_stays_as_it_is():
    """Checkpoints of large data depend on it."""
    assert samples_at(np.arange(6), 0, 0, 1 << 21).tolist() == [
        1343328,
        24554,
        1481628,
        296351,
        1051710,
        990445,
    ]
    assert keyed_order.NUM_ROUNDS % 2 == 0
