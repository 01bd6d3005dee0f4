"""Sums over ranks as rounds of messages (source, destination, bytes): R7 of docs/clock.md."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

Rank = TypeVar("Rank", int, str)


class Collective(StrEnum):
    """How gradients are summed over the owners of a bucket.

    RING: an all-reduce, from neighbour to neighbour. TREE: reduced to the first owner, which broadcasts.
    """

    RING = "ring"
    TREE = "tree"


def ring_all_reduce(num_bytes: float, ranks: Sequence[Rank]) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a ring all-reduce.

    2 (n - 1) rounds in which each rank sends num_bytes / n to its neighbour (Patarasuk and Yuan, JPDC
    2009, section 3).
    """
    num_ranks = len(ranks)
    chunk = num_bytes / num_ranks
    ring = [(ranks[i], ranks[(i + 1) % num_ranks], chunk) for i in range(num_ranks)]
    return [ring] * (2 * (num_ranks - 1))


def tree_reduce(num_bytes: float, groups: Sequence[Sequence[Rank]]) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a reduction to the first rank.

    A binomial tree (Thakur, Rabenseifner and Gropp, IJHPCA 2005, section 4) in each group, the ranks of a
    node, then one over the first ranks of the groups.

    >>> tree_reduce(4.0, [[0, 1], [2]])
    [[(1, 0, 4.0)], [(2, 0, 4.0)]]
    """
    rounds: list[list[tuple[Rank, Rank, float]]] = []
    for ranks_of in (groups, [[group[0] for group in groups]]):
        stride = 1
        while stride < max(map(len, ranks_of)):
            rounds.append(
                [
                    (ranks[index + stride], ranks[index], num_bytes)
                    for ranks in ranks_of
                    for index in range(0, len(ranks) - stride, 2 * stride)
                ]
            )
            stride *= 2
    return rounds


def tree_broadcast(
    num_bytes: float, groups: Sequence[Sequence[Rank]]
) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a broadcast from the first rank: those of `tree_reduce` backwards."""
    rounds = reversed(tree_reduce(num_bytes, groups))
    return [[(owner, giver, size) for giver, owner, size in messages] for messages in rounds]


def tree_all_reduce(
    num_bytes: float, groups: Sequence[Sequence[Rank]]
) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a reduction to the first rank and of the broadcast from it.

    >>> tree_all_reduce(4.0, [[0, 1], [2]])
    [[(1, 0, 4.0)], [(2, 0, 4.0)], [(0, 2, 4.0)], [(0, 1, 4.0)]]
    """
    return tree_reduce(num_bytes, groups) + tree_broadcast(num_bytes, groups)
