"""Sums of gradients over the owners of each bucket."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_model.dtypes import GRADIENT_BF16
from hetpipe.models.chain import ChainModel
from hetpipe.program.collective_parts import Group, broadcast_part, sum_parts
from hetpipe.program.instructions import Broadcast, Program, Sync
from hetpipe.runtime.accelerators import following, new_stream
from hetpipe.runtime.bucket_parameters import bucket_names, bucket_parts, bucket_range, check_shared
from hetpipe.runtime.collectives import Begin, begin, begins, in_turn, open_groups
from hetpipe.runtime.cuda_events import wait_for_gpu
from hetpipe.runtime.host_staging import Staging, room_on_host
from hetpipe.runtime.peer_errors import PeerTimeout
from hetpipe.runtime.rounded_buffers import front, round_in_place, widen_in_place
from partition.plan import Stage

T = TypeVar("T", bound=Tensor)


class GradientSync:
    """The collectives of one rank; owns the process groups and the sums that are under way.

    Where GPUs and CPUs sum together they do so on the host: a rank on a GPU copies its part to it and back.

    Gradients that travel in bfloat16 are rounded when their sum begins, and so is each partial sum on its
    way; the sum is float32 again, with the same bits at all owners. Of n owners it is off by at most
    n u / (1 - n u) times the sum of the gradients' magnitudes, u = 2^-8 (Higham, Accuracy and Stability of
    Numerical Algorithms, SIAM 2002, section 4.2). Parameters travel as they are.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        chain: ChainModel,
        parameters: Mapping[str, nn.Parameter],
        timeout_s: float,
        staging: Staging | None = None,
    ) -> None:
        """Open the groups of all buckets, on all ranks together.

        staging: None if no rank is on a GPU.
        """
        staging = staging or Staging((False,) * len(program.ranks))
        check_shared(program, rank, chain, parameters)
        on_host = [not staging.in_streams(bucket.ranks) for bucket in program.buckets]
        self._program, self._rank, self._timeout_s = program, rank, timeout_s
        self._chain, self._parameters = chain, parameters
        self._rounded = torch.bfloat16 if program.plan.gradient_dtype == GRADIENT_BF16 else None
        indexed = list(enumerate(program.buckets))
        sums = [sum_parts(index, bucket, on_host=on_host[index]) for index, bucket in indexed]
        self._broadcasts = [
            broadcast_part(index, bucket, on_host=on_host[index]) for index, bucket in indexed
        ]
        self._groups = open_groups(
            [part.group for parts in sums for part in parts],
            rank,
            len(program.ranks),
            staging,
            timedelta(seconds=timeout_s),
        )
        self._sums = [[part for part in parts if rank in part.group.ranks] for parts in sums]
        self._members = [
            [parameters[name] for name in bucket_names(program, index, chain)] if rank in bucket.ranks else []
            for index, bucket in enumerate(program.buckets)
        ]
        # one buffer for each bucket, of which the gradients are views: nothing is copied to be summed
        self._buffers, self._cut = self._make_buffers()
        # what the collectives move: the buffers, or copies of them on the host
        self._moved = [
            room_on_host(buffer) if rank in bucket.ranks and staging.copies(rank, bucket.ranks) else buffer
            for buffer, bucket in zip(self._buffers, program.buckets, strict=True)
        ]
        self._under_way: dict[Sync | Broadcast, tuple[Callable[[], object], float]] = {}
        self._streams: dict[int, Any] = {}  # of buckets whose sums have several parts
        self._warm_up()

    def _make_buffers(self) -> tuple[list[Tensor], list[tuple[nn.Parameter, Tensor]]]:
        """Return the buffers, and places of gradients: of layers that several own, and of parts owned here.

        Buffers of ranges are parts of one, in which the gradients of whole parameters are.
        """
        buffers, gradients = list[Tensor](), list[tuple[nn.Parameter, Tensor]]()
        wholes: dict[tuple[tuple[int, ...], bool], Tensor] = {}
        for index, (bucket, members) in enumerate(zip(self._program.buckets, self._members, strict=True)):
            if not (bucket.is_part and members):
                buffers.append(_buffer(members))
                continue
            group = bucket.layers, bucket.tied
            if group not in wholes:
                wholes[group] = _buffer(members)
                gradients += _places(members, wholes[group])
            start, stop = bucket_range(self._program, index, self._chain)
            buffers.append(wholes[group][start:stop] if start < stop else wholes[group].new_zeros(1))
            if bucket.state_owner == self._rank:
                parts = bucket_parts(self._program, index, self._chain)
                gradients += _places([self._parameters[part.key] for part in parts], buffers[-1])
        return buffers, gradients

    def _warm_up(self) -> None:
        """Sum a first number in each group, so that it is open before the first step.

        NCCL opens a group at its first sum, for which all members must be there.
        """
        opened: set[Group] = set()
        for bucket, members in enumerate(self._members):
            for part in self._sums[bucket] if members else ():
                if part.group in opened:
                    continue
                opened.add(part.group)
                nothing = torch.zeros(1, device=self._moved[bucket].device)
                with self._peer_timeout(Sync(bucket), time.monotonic()):
                    work: dist.Work | None = dist.all_reduce(
                        nothing, group=self._groups[part.group], async_op=True
                    )
                    assert work is not None
                    self._wait_of(work, nothing)()

    def buffers(self) -> list[Tensor]:
        """Return the memory of the gradients that are summed, one tensor for each bucket of this rank."""
        return [buffer for buffer, members in zip(self._buffers, self._members, strict=True) if members]

    def attach(self) -> None:
        """Set the gradients to zero before a step, in the buckets' buffers."""
        for bucket, buffer in enumerate(self._buffers):
            buffer.zero_()
            if not self._program.buckets[bucket].is_part:
                for value, part in self._parts(bucket):
                    value.grad = part
        for value, part in self._cut:
            value.grad = part

    def may_begin_inside(self, bucket: int) -> bool:
        """Return whether a sum may begin while a backward runs: one that is not copied to the host first."""
        return self._moved[bucket] is self._buffers[bucket]

    def given(self, bucket: int, stage: Stage) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters of a bucket to whose gradients a backward of a stage adds, and how often.

        Once in each run of autograd: what is run again by segments is differentiated one by one.
        """
        held = self._program.buckets[bucket]
        runs = stage.segments if stage.recompute else (stage.layers,)
        used: Counter[str] = Counter()
        for run in runs:
            layers = set(held.layers).intersection(range(*run))
            used.update({info.name for layer in layers for info in self._chain.parameters(layer)})
        names = bucket_names(self._program, bucket, self._chain)
        return [(self._parameters[name], used[name]) for name in names if used[name]]

    def start(self, bucket: int) -> None:
        """Begin to sum the bucket's gradients over its owners, or for the owner of its states only."""
        if self._rounded is not None:
            round_in_place(self._buffers[bucket], self._rounded)
        self._begin(Sync(bucket), self._sum)

    def _begin(
        self, instruction: Sync | Broadcast, collective: Callable[[int], Callable[[], object]]
    ) -> None:
        """Start a collective, and keep how to wait for it."""
        since_s = time.monotonic()
        self._copy(instruction, self._moved, self._buffers)
        with self._peer_timeout(instruction, since_s):
            self._under_way[instruction] = (collective(instruction.bucket), since_s)

    def _sum(self, bucket: int) -> Callable[[], object]:
        buffer = self._travelling(Sync(bucket), self._moved)
        return self._start_in_turn(begins(self._sums[bucket], buffer, self._groups), buffer, bucket)

    def _wait_of(self, work: dist.Work, moved: Tensor) -> Callable[[], object]:
        """Return how the host waits for a collective; NCCL's own wait is for the stream only."""
        return partial(wait_for_gpu, work, self._timeout_s) if not moved.is_cpu else work.wait

    def _start_in_turn(self, parts: Sequence[Begin], buffer: Tensor, bucket: int) -> Callable[[], object]:
        """Begin the first of some collectives on a buffer; each begins when that before it is over.

        Other buckets go on beside them: one is inside of nodes while another one is between them.
        """
        if buffer.is_cpu:
            return in_turn(parts)
        if len(parts) == 1:
            return self._wait_of(parts[0](), buffer)
        if bucket not in self._streams:
            self._streams[bucket] = new_stream(buffer.device)
        with following(self._streams[bucket], buffer.device):
            for part in parts[:-1]:
                part().wait()  # by this stream alone: the host and the computations go on
            return self._wait_of(parts[-1](), buffer)

    @torch.no_grad()
    def start_broadcast(self, bucket: int) -> None:
        """Begin to spread the bucket's new parameters from the owner of its states.

        They travel in the buffer of the gradients, which nobody needs any more.
        """
        if self._program.buckets[bucket].state_owner == self._rank:
            for value, part in self._parts(bucket):
                part.copy_(value)
        self._begin(Broadcast(bucket), self._spread)

    def _spread(self, bucket: int) -> Callable[[], object]:
        buffer = self._moved[bucket]
        return self._wait_of(begin(self._broadcasts[bucket], buffer, self._groups), buffer)

    @torch.no_grad()
    def finish_broadcasts(self) -> list[int]:
        """Wait for all that were started, and take the parameters; return their buckets."""
        done = self.finish()
        for bucket in done:
            if self._program.buckets[bucket].state_owner != self._rank:
                for value, part in self._parts(bucket):
                    value.copy_(part)
        return done

    def _parts(self, bucket: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the bucket's parameters, or its parts of them, each with its place in the buffer."""
        members: Sequence[Tensor] = self._members[bucket]
        if members and self._program.buckets[bucket].is_part:
            parts = bucket_parts(self._program, bucket, self._chain)
            members = [part.of(self._parameters[part.name]) for part in parts]
        return _places(members, self._buffers[bucket])

    def finish(self) -> list[int]:
        """Wait for all that were started; return their buckets.

        Raises: PeerError if one does not end in time, or an owner is gone.
        """
        done = list(self._under_way)
        for instruction in done:
            wait, since_s = self._under_way.pop(instruction)
            with self._peer_timeout(instruction, since_s):
                wait()
            self._copy(instruction, self._buffers, self._moved)
            if self._rounded is not None and isinstance(instruction, Sync):
                widen_in_place(self._buffers[instruction.bucket], self._rounded)
        return [instruction.bucket for instruction in done]

    def _travelling(self, instruction: Sync | Broadcast, buffers: Sequence[Tensor]) -> Tensor:
        """Return what of a bucket's buffer the collective of an instruction moves."""
        buffer = buffers[instruction.bucket]
        if self._rounded is None or isinstance(instruction, Broadcast):
            return buffer
        return front(buffer, self._rounded)

    def _copy(self, instruction: Sync | Broadcast, into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """Copy what travels between a buffer and its twin on the host, where there is one."""
        if into[instruction.bucket] is not source[instruction.bucket]:
            self._travelling(instruction, into).copy_(self._travelling(instruction, source))

    def close(self) -> None:
        """Give back the process groups; all ranks must have finished their last step."""
        for group in self._groups.values():  # in the same order on all ranks: NCCL's are closed together
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _peer_timeout(self, instruction: Sync | Broadcast, since_s: float) -> AbstractContextManager[None]:
        owners = self._program.buckets[instruction.bucket].ranks
        return PeerTimeout(self._program, self._rank, instruction, owners, since_s)


def _places(members: Sequence[T], buffer: Tensor) -> list[tuple[T, Tensor]]:
    """Return tensors that lie one after the other in a buffer, each with its place."""
    if not members:
        return []
    parts = torch.split(buffer, [value.numel() for value in members])
    return [(value, part.view_as(value)) for value, part in zip(members, parts, strict=True)]


def _buffer(members: Sequence[nn.Parameter]) -> Tensor:
    """Return room for the gradients of all members; of layers without any trained, a zero to meet over."""
    if not members:
        return torch.zeros(1)
    first = members[0]
    return torch.zeros(sum(value.numel() for value in members), dtype=first.dtype, device=first.device)
