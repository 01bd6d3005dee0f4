"""The library's collectives that make up a sum, one after another, and the groups in which they meet."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hetpipe.program.collective_parts import Group, Operation, Part
from hetpipe.runtime.host_staging import Staging

Begin = Callable[[], dist.Work]
"""How to begin a collective."""

Groups = Mapping[Group, dist.ProcessGroup | None]
"""The library's group of each; None is the default one."""


def open_groups(
    groups: Iterable[Group], rank: int, num_ranks: int, staging: Staging, timeout: timedelta
) -> dict[Group, dist.ProcessGroup | None]:
    """Open groups, on all ranks together; return those of a rank.

    On the host all ranks in their order meet in the default group for what is handed in with its instruction.
    """
    default = Group(tuple(range(num_ranks)), on_host=True)
    opened: dict[Group, dist.ProcessGroup | None] = {}
    for group in dict.fromkeys(groups):
        found = None
        if group != default:
            # NOTE: a group that is given no timeout has torch's, half an hour, whatever the default group has
            found = staging.new_group(group.ranks, timeout, on_host=group.on_host)
        if rank in group.ranks:
            opened[group] = found
    return opened


def begin(part: Part, buffer: Tensor, groups: Groups) -> dist.Work:
    """Begin a collective on a buffer, on this rank."""
    group = groups[part.group]
    work: dist.Work | None
    if part.operation is Operation.ALL_REDUCE:
        work = dist.all_reduce(buffer, group=group, async_op=True)
    elif part.operation is Operation.REDUCE:
        work = dist.reduce(buffer, dst=part.root, group=group, async_op=True)
    else:
        work = dist.broadcast(buffer, src=part.root, group=group, async_op=True)
    assert work is not None
    return work


ALONE = 2
"""The references of which sys.getrefcount tells where there is one; the library holds another one."""


class OnHost:
    """A collective of the host, on a buffer; owns the library's half of it until it is over."""

    SOON_S = 1.0  # after which a thread that has not let go of the buffer is not waited for

    def __init__(self, part: Part, buffer: Tensor, groups: Groups) -> None:
        """Begin it."""
        self._handed_in = buffer.detach()  # known to the library and to this object alone
        self._work: dist.Work | None = begin(part, self._handed_in, groups)

    def wait(self) -> None:
        """Wait until it is over, and the buffer is the caller's alone.

        gloo's thread says that a collective is over before it lets go of its buffer: 5 to 20 % of buffers
        outlived a caller's last reference to them. What is dropped then, as whole layers are, is held beside
        the next one, for as long as that thread gets no core.
        """
        assert self._work is not None
        self._work.wait()
        self._work, latest_s = None, time.monotonic() + self.SOON_S
        while sys.getrefcount(self._handed_in) > ALONE and time.monotonic() < latest_s:
            time.sleep(0)  # gloo's thread may wait for the GIL to let go


def begins(parts: Iterable[Part], buffer: Tensor, groups: Groups) -> list[Begin]:
    """Return how to begin each of a rank's parts on a buffer.

    What a reduction leaves at the others is written over by the broadcast after it, so that all owners end
    with the bytes of its root; roots have the same bytes, as of any all-reduce.
    """
    return [partial(begin, part, buffer, groups) for part in parts]


def in_turn(parts: Sequence[Begin]) -> Callable[[], object]:
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
