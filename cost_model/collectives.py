"""Sums over ranks as rounds of messages (source, destination, bytes): R7 of docs/clock.md."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

Rank = TypeVar("Rank", int, str)


class Collective(StrEnum):
    """How gradients are summed over the owners of a bucket.

    RING: an all-reduce, from neighbour to neighbour. TREE: reduced to the first owner, which broadcasts.
    HIERARCHICAL: reduced to the first owner of each node; a ring of these, which broadcast inside the node.
    """

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


def ring_all_reduce(num_bytes: float, ranks: Sequence[Rank]) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a ring all-reduce.

    2 (n - 1) rounds in which each rank sends num_bytes / n to its neighbour (Patarasuk and Yuan, JPDC
    2009, section 3).
    """
    num_ranks = len(ranks)
    chunk = num_bytes / num_ranks
    ring = [(ranks[i], ranks[(i + 1) % num_ranks], chunk) for i in range(num_ranks)]
    return [ring] * (2 * (num_ranks - 1))


def node_reduce(num_bytes: float, groups: Sequence[Sequence[Rank]]) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a reduction to the first rank of each group, the ranks of a node, side by side.

    A binomial tree in each (Thakur, Rabenseifner and Gropp, IJHPCA 2005, section 4).

    >>> node_reduce(4.0, [[0, 1], [2, 3]])
    [[(1, 0, 4.0), (3, 2, 4.0)]]
    """
    rounds: list[list[tuple[Rank, Rank, float]]] = []
    stride = 1
    while stride < max(map(len, groups)):
        rounds.append(
            [
                (ranks[index + stride], ranks[index], num_bytes)
                for ranks in groups
                for index in range(0, len(ranks) - stride, 2 * stride)
            ]
        )
        stride *= 2
    return rounds


def node_broadcast(
    num_bytes: float, groups: Sequence[Sequence[Rank]]
) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a broadcast from the first rank of each group: `node_reduce` backwards."""
    return _backwards(node_reduce(num_bytes, groups))


def _backwards(rounds: Sequence[list[tuple[Rank, Rank, float]]]) -> list[list[tuple[Rank, Rank, float]]]:
    return [[(owner, giver, size) for giver, owner, size in messages] for messages in reversed(rounds)]


def tree_reduce(num_bytes: float, groups: Sequence[Sequence[Rank]]) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a reduction to the first rank: in each group, then over the first of each.

    >>> tree_reduce(4.0, [[0, 1], [2]])
    [[(1, 0, 4.0)], [(2, 0, 4.0)]]
    """
    return node_reduce(num_bytes, groups) + node_reduce(num_bytes, [[group[0] for group in groups]])


def tree_broadcast(
    num_bytes: float, groups: Sequence[Sequence[Rank]]
) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a broadcast from the first rank: those of `tree_reduce` backwards."""
    return _backwards(tree_reduce(num_bytes, groups))


def tree_all_reduce(
    num_bytes: float, groups: Sequence[Sequence[Rank]]
) -> list[list[tuple[Rank, Rank, float]]]:
    """Return the messages of a reduction to the first rank and of the broadcast from it.

    >>> tree_all_reduce(4.0, [[0, 1], [2]])
    [[(1, 0, 4.0)], [(2, 0, 4.0)], [(0, 2, 4.0)], [(0, 1, 4.0)]]
    """
    return tree_reduce(num_bytes, groups) + tree_broadcast(num_bytes, groups)
