"""Sums of gradients inside nodes, then between them, then inside again; collectives one after another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hetpipe.program.instructions import Bucket
from hetpipe.runtime.host_staging import Staging

Part = Callable[[], dist.Work]
"""How to begin a collective."""


@dataclass(frozen=True, slots=True)
class NodeSum:
    """The groups of one rank for the hierarchical sum of a bucket.

    first: the rank on this node to which the others give, and from which they get the sum. inside, back: the
    owners on this node, None for a single one. between: the first owners of all nodes, None on other ranks.
    """

    first: int
    inside: dist.ProcessGroup | None
    between: dist.ProcessGroup | None
    back: dist.ProcessGroup | None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Return the groups in the order of the collectives."""
        return [group for group in (self.inside, self.between, self.back) if group is not None]

    def parts(self, buffer: Tensor) -> list[Part]:
        """Return the collectives of this rank in their order.

        What a reduction leaves at the others is written over by the broadcast, so that all owners on a node
        end with the bytes of the first; these have the same bytes, as of any all-reduce.
        """
        found: list[Part] = []
        if self.inside is not None:
            found.append(partial(_begun, dist.reduce, buffer, dst=self.first, group=self.inside))
        if self.between is not None:
            found.append(partial(_begun, dist.all_reduce, buffer, group=self.between))
        if self.back is not None:
            found.append(partial(_begun, dist.broadcast, buffer, src=self.first, group=self.back))
        return found


def _begun(collective: Callable[..., dist.Work | None], buffer: Tensor, **where: object) -> dist.Work:
    work = collective(buffer, async_op=True, **where)
    assert work is not None
    return work


def open_sums(
    buckets: Sequence[Bucket], rank: int, staging: Staging, timeout: timedelta
) -> list[NodeSum | None]:
    """Open the groups of all hierarchical sums, on all ranks together; return a rank's, None for no part.

    Gloo matches collectives by their order in a group. Sums inside nodes begin in the order of the buckets,
    what follows them when these are over, in any order: it has groups of its own for each bucket. Between
    GPUs all are handed in at once, and one group of the same ranks does for all.
    """
    opened: dict[object, dist.ProcessGroup] = {}

    def group(ranks: tuple[int, ...], on_host: bool, purpose: object) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        key = (ranks, on_host, purpose if on_host else None)
        if key not in opened:
            opened[key] = staging.new_group(ranks, timeout, on_host=on_host)
        return opened[key] if rank in ranks else None

    found: list[NodeSum | None] = []
    for index, bucket in enumerate(buckets):
        on_host = staging.on_host(bucket.ranks)
        inside = [group(node, on_host, "inside") for node in bucket.nodes]
        firsts = tuple(node[0] for node in bucket.nodes)
        between = group(firsts, on_host, (index, "between")) if firsts else None
        back = [group(node, on_host, (index, "back")) for node in bucket.nodes]
        at = next((place for place, node in enumerate(bucket.nodes) if rank in node), None)
        found.append(None if at is None else NodeSum(firsts[at], inside[at], between, back[at]))
    return found


def in_turn(parts: Sequence[Part]) -> Callable[[], object]:
    """Begin the first of some collectives on the host; return how to wait for all.

    Each of the others begins when that before it is over, on a thread of the library.
    """
    work = parts[0]()
    if len(parts) == 1:
        return work.wait

    def go_on(done: Future[object]) -> Callable[[], object]:
        done.value()  # raises what went wrong
        return in_turn(parts[1:])

    begun: Future[Callable[[], object]] = work.get_future().then(go_on)

    def wait() -> None:
        work.wait()  # raises its own error, which a future wraps into a traceback
        begun.wait()()

    return wait
