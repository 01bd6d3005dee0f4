"""The collectives of the library that make up a sum of gradients, and the groups of ranks in which they meet.

A library matches the collectives of a group by the order in which its members hand them in. Between GPUs all
parts of a sum are handed in with its SYNC, one after another; what goes back inside nodes has groups apart,
so that the reduction of the next bucket does not wait behind it. On the host a part that comes after another
one of its rank is handed in when that is over, at another moment on each rank: it has a group of its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cost_model.collectives import Collective
from cost_model.errors import InputError
from hetpipe.program.instructions import Broadcast, Bucket, Gather, Program, Reduce, Sync


class Operation(StrEnum):
    """The collectives of the library."""

    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that meet, in the order of the ring, through the host's memory or not.

    part: the (bucket, place) of the only part that meets there; None where all that is handed in with its
    instruction does. back: of what goes back inside a node, between GPUs.
    """

    ranks: tuple[int, ...]
    on_host: bool
    part: tuple[int, int] | None = None
    back: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A collective of the library, one of those that sum a bucket.

    root: the rank that gets the sum of a reduction, or that broadcasts; the first where all get the sum.
    after: whether a member hands it in when its part before it is over, which is no moment of the program.
    """

    bucket: int
    operation: Operation
    group: Group
    root: int
    after: bool = False


Meetings = Mapping[Group, Mapping[int, list[Part]]]
"""What each member of a group hands in there in a step, in its order."""


def sum_parts(index: int, bucket: Bucket, *, on_host: bool) -> tuple[Part, ...]:
    """Return the parts of a bucket's SYNC, in the order in which each rank takes part in its own.

    index: of the bucket. on_host: whether they go through the host's memory.
    """

    def reduced(ranks: tuple[int, ...], root: int) -> Part:
        return Part(index, Operation.REDUCE, Group(ranks, on_host), root)

    def later(operation: Operation, ranks: tuple[int, ...], place: int) -> Part:
        """Return a part that comes after another one on some of its ranks; place: 0 of what all sums have."""
        group = Group(ranks, on_host, (index, place) if on_host else None, back=not on_host and place > 0)
        return Part(index, operation, group, ranks[0], after=on_host)

    if bucket.state_owner is not None:
        return (reduced(bucket.ranks, bucket.state_owner),)
    if bucket.collective is Collective.RING:
        return (Part(index, Operation.ALL_REDUCE, Group(bucket.ranks, on_host), bucket.ranks[0]),)
    if bucket.collective is Collective.TREE:
        return reduced(bucket.ranks, bucket.root), later(Operation.BROADCAST, bucket.ranks, 0)
    several = [node for node in bucket.nodes if len(node) > 1]
    firsts = tuple(node[0] for node in bucket.nodes)
    inside = [reduced(node, node[0]) for node in several]
    between = [later(Operation.ALL_REDUCE, firsts, 0)] if len(firsts) > 1 else []
    back = [later(Operation.BROADCAST, node, place) for place, node in enumerate(several, 1)]
    return (*inside, *between, *back)


def broadcast_part(index: int, bucket: Bucket, *, on_host: bool) -> Part:
    """Return the broadcast of a bucket's new parameters from the owner of its states."""
    return Part(index, Operation.BROADCAST, Group(bucket.ranks, on_host), bucket.root)


def meetings(program: Program, *, on_host: bool) -> Meetings:
    """Return what is handed in to each group in a step, by the instruction lists of the ranks."""
    sums = [sum_parts(*entry, on_host=on_host) for entry in enumerate(program.buckets)]
    back = [broadcast_part(*entry, on_host=on_host) for entry in enumerate(program.buckets)]

    def of_rank(rank: int) -> Iterator[Part]:
        for entry in program.ranks[rank]:
            if isinstance(entry, Sync):
                yield from (part for part in sums[entry.bucket] if rank in part.group.ranks)
            elif isinstance(entry, Reduce):
                yield sums[entry.bucket][0]
            elif isinstance(entry, Broadcast) or (
                isinstance(entry, Gather) and not program.plan.fetches_apart
            ):
                yield back[entry.bucket]

    found: dict[Group, dict[int, list[Part]]] = defaultdict(dict)
    for rank in range(len(program.ranks)):
        for part in of_rank(rank):
            found[part.group].setdefault(rank, []).append(part)
    return found


def check_meetings(handed_in: Meetings) -> None:
    """Check that all members of a group hand in the same collectives in the same order.

    A part that is handed in when another one is over has no place in an order: it must be alone.

    Raises: InputError naming the ranks and what crosses.
    """
    for group, by_rank in handed_in.items():
        first = group.ranks[0]
        expected = by_rank.get(first, [])
        for rank in group.ranks:
            parts = by_rank.get(rank, [])
            if parts != expected:
                raise InputError(
                    f"in their group {list(group.ranks)} rank {first} hands in {_text(expected)}, and rank "
                    f"{rank} {_text(parts)}: they would mix up their messages; lower the plan again"
                )
            if len(parts) > 1 and any(part.after for part in parts):
                raise InputError(
                    f"in the group of {list(group.ranks)} rank {rank} hands in {_text(parts)}, of which some "
                    "wait for others, so that the order is open: they need groups of their own; lower the "
                    "plan again"
                )


def _text(parts: Iterable[Part]) -> str:
    return ", ".join(f"{part.operation} of bucket {part.bucket}" for part in parts) or "nothing"
