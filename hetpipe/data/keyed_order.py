"""The order in which an epoch reads samples: a permutation of a seed and the number of the epoch.

Up to `MOST_SORTED` samples their random keys are sorted; of more nothing is held: the sample at a place is
computed from it, by a Feistel network of the smallest 2^n that has room for them (Luby and Rackoff, "How to
construct pseudorandom permutations", SIAM Journal on Computing 1988), walked until it leads to a sample
("cycle walking": Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Less than two
walks are expected, since 2^n is less than twice the samples. Departs from the former in the keyed functions,
which are the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) and keep no secret.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hetpipe.data.kind import IntArray

ORDER_STREAM, MASK_STREAM, GROUP_STREAM = 0, 1, 2
"""First word of a random stream's key: the uses of one seed never share numbers."""

MOST_SORTED = 2**20
"""Samples of an epoch up to which their order is held, in 8 MiB."""

NUM_ROUNDS = 8
"""Of the network; an even number, after which both parts have their sizes again."""

_Words = npt.NDArray[np.uint64]


def draws(count: int, seed: int, stream: int, index: int) -> _Words:
    """Return random words keyed by (seed, stream, index): raw Philox, the part that NumPy keeps stable."""
    generator = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(stream, index)))
    return np.asarray(generator.random_raw(count), np.uint64)


@lru_cache(maxsize=2)  # a batch straddles at most two long epochs
def epoch_order(seed: int, epoch: int, num_samples: int) -> IntArray:
    """Return the samples in the order in which an epoch reads them, each once: [num_samples]."""
    order = np.argsort(draws(num_samples, seed, ORDER_STREAM, epoch), kind="stable")
    order.flags.writeable = False
    return order


def samples_at(places: IntArray, seed: int, epoch: int, num_samples: int) -> IntArray:
    """Return the samples at places of an epoch, in [0, num_samples), without the order of the others."""
    keys = draws(NUM_ROUNDS, seed, ORDER_STREAM, epoch)
    num_bits = max(2, (num_samples - 1).bit_length())
    found = _network(places.astype(np.uint64), keys, num_bits)
    while (outside := found >= num_samples).any():
        found[outside] = _network(found[outside], keys, num_bits)
    return found.astype(np.int64)


def permuted(
    seed: int, num_samples: int, first: int, count: int, *, most_sorted: int = MOST_SORTED
) -> IntArray:
    """Return which of num_samples each position in [first, first + count) reads: [count]."""
    assert first >= 0 and count >= 0, (first, count)
    epochs, places = np.divmod(np.arange(first, first + count), num_samples)
    found = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        if num_samples <= most_sorted:
            found[here] = epoch_order(seed, int(epoch), num_samples)[places[here]]
        else:
            found[here] = samples_at(places[here], seed, int(epoch), num_samples)
    return found


def _network(words: _Words, keys: _Words, num_bits: int) -> _Words:
    """Return a permutation of the words below 2^num_bits; its parts differ by a bit where that is odd."""
    right_bits = num_bits // 2
    left_bits = num_bits - right_bits
    left, right = words >> np.uint64(right_bits), words & _mask(right_bits)
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & _mask(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mask(num_bits: int) -> np.uint64:
    return np.uint64((1 << num_bits) - 1)


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
