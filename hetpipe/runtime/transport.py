"""The transport of tensors that cross from stage to stage."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cost_model.errors import InputError
from hetpipe.program.instructions import Compute, Direction, Message, Pass, Program, Transfer, incoming
from hetpipe.runtime.accelerators import has_streams
from hetpipe.runtime.cuda_events import SideStream, wait_for_gpu
from hetpipe.runtime.host_staging import Staging
from hetpipe.runtime.message_times import MessageTimes
from hetpipe.runtime.peer_errors import PeerTimeout, peer_error


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One tensor of a boundary, whole microbatch: shape [samples, ...] and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def sent_in(self, wire: torch.dtype | None) -> "TensorShape":
        """Return it in another dtype if it is floating; None: as it is."""
        return replace(self, dtype=wire) if wire is not None and self.dtype.is_floating_point else self

    def filled(self, device: torch.device) -> Tensor:
        """Return such a tensor of numbers from -1 to 1, of zeros if they are integers; none is drawn."""
        if not self.dtype.is_floating_point:
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        numbers = torch.linspace(-1.0, 1.0, math.prod(self.shape), device=device)
        return numbers.to(self.dtype).view(self.shape)


class Transport(Protocol):
    """The executor's port to its peers: post sends and receives, collect what was received."""

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None: ...
    def post_receive(self, transfer: Transfer, shapes: Sequence[TensorShape]) -> None: ...
    def receive(self, transfer: Transfer) -> tuple[Tensor, ...]: ...
    def release(self, transfer: Transfer) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _UnderWay:
    """One message: its other end, torch's handles and the tensors, and when it was posted."""

    peer: int
    works: list[dist.Work]
    tensors: list[Tensor]
    since_s: float


class DistributedTransport:
    """Asynchronous isend and irecv of torch.distributed; owns the messages that are under way.

    Each directed edge has a communicator of its own. NCCL ignores tags and relies on the order that the
    verifier proved; gloo matches by tag, but its thread that moves the data spins while a call on the same
    connection holds the lock. A send is never waited for where it is posted: gloo gives no completion before
    the receiver has come. `release` waits for it once that is proven to be over.

    Between GPUs too, the host waits for a message where it is needed, so that one that does not come is named
    in time; not for the computation before it, behind which the next one is handed in. Messages are received
    beside that computation (`SideStream`), and sent as soon as what is sent is computed.

    A message between a GPU and a CPU is copied to or from the host's memory at the GPU's end: from it, beside
    the computations; to it, when what is sent is computed, for which the host waits. staging: None if no rank
    is on a GPU.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        device: torch.device,
        timeout_s: float,
        staging: Staging | None = None,
        times: MessageTimes | None = None,
    ) -> None:
        self._times = times or MessageTimes()
        staging = staging or Staging((False,) * len(program.ranks))
        self._program = program
        self._rank = rank
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._sends: dict[Transfer, _UnderWay] = {}
        self._receives: dict[Transfer, _UnderWay] = {}
        slots = sorted({transfer.message for transfer in _transfers(program)})
        self._tags = {message: index * MAX_TENSORS for index, message in enumerate(slots)}
        self._groups = _edge_groups(program, staging, self._timeout) if dist.is_initialized() else {}
        peers = range(len(program.ranks))
        self._staged = [staging.copies(rank, (rank, peer)) for peer in peers]
        self._side = SideStream(device) if has_streams(device) else None
        self._between_gpus = [self._side is not None and not staged for staged in self._staged]
        self._channels: dict[Transfer, _Channel] = {}
        if self._side is not None and self._groups:
            self._side.open()
        for edge, edge_group in self._groups.items():
            self._warm_up(edge, edge_group)

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        peer, group, member, tag = self._channel(transfer)
        message = self._sends[transfer] = _UnderWay(peer, [], [], time.monotonic())
        for index, tensor in enumerate(tensors):
            data = tensor.detach().contiguous()
            if self._staged[peer]:
                data = data.cpu()
            if index == 0 and transfer.message in self._times.watched:
                self._times.sent[transfer.message] = time.monotonic()
            with self._peer_timeout(transfer, message):
                work = dist.isend(data, group=group, tag=tag + index, group_dst=member)
            assert work is not None
            message.works.append(work)
            message.tensors.append(data)

    def post_receive(self, transfer: Transfer, shapes: Sequence[TensorShape]) -> None:
        if len(shapes) > MAX_TENSORS:
            raise InputError(
                f"{len(shapes)} tensors cross at {transfer}; {MAX_TENSORS} are the most that may"
            )
        peer, group, member, tag = self._channel(transfer)
        message = self._receives[transfer] = _UnderWay(peer, [], [], time.monotonic())
        place = "cpu" if self._staged[peer] else self._device
        with self._side.beside() if self._side and self._between_gpus[peer] else nullcontext():
            for index, expected in enumerate(shapes):
                buffer = torch.empty(expected.shape, dtype=expected.dtype, device=place)
                with self._peer_timeout(transfer, message):
                    work = dist.irecv(buffer, group=group, tag=tag + index, group_src=member)
                assert work is not None
                message.works.append(work)
                message.tensors.append(buffer)

    def receive(self, transfer: Transfer) -> tuple[Tensor, ...]:
        """Wait for the tensors of a posted receive.

        Raises: PeerError if they do not come in time, or the peer is gone.
        """
        message, began_s = self._receives.pop(transfer), time.monotonic()
        self._wait(transfer, message)
        self._times.has_come(transfer.message, message.since_s, began_s, time.monotonic())
        if self._side is None:
            return tuple(tensor.to(self._device) for tensor in message.tensors)
        if self._between_gpus[message.peer]:
            return self._side.give(message.tensors)
        with self._side.beside():
            copies = [tensor.to(self._device) for tensor in message.tensors]
        return self._side.give(copies)

    def release(self, transfer: Transfer) -> None:
        """Let go of a send that is proven to have arrived."""
        self._wait(transfer, self._sends.pop(transfer))

    def finish(self) -> None:
        """Let go of all sends; every receiver has passed the step's NORM."""
        for transfer in tuple(self._sends):
            self.release(transfer)

    def close(self) -> None:
        """Give back the communicators; all ranks must have finished their last step."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
        self._channels.clear()

    def _channel(self, transfer: Transfer) -> "_Channel":
        """Return how a message travels, looked up once: a step has many, all steps the same."""
        channel = self._channels.get(transfer)
        if channel is None:
            peer = self._program.rank_of(transfer.pipeline, transfer.peer_stage)
            sending = transfer.direction is Direction.SEND
            group = self._groups.get((self._rank, peer) if sending else (peer, self._rank))
            member = peer if group is None else int(peer > self._rank)
            channel = self._channels[transfer] = (peer, group, member, self._tags[transfer.message])
        return channel

    def _wait(self, transfer: Transfer, message: _UnderWay) -> None:
        with self._peer_timeout(transfer, message):
            for work in message.works:
                self._wait_for(work, message.peer)

    def _wait_for(self, work: dist.Work, peer: int) -> None:
        if self._between_gpus[peer]:
            wait_for_gpu(work, self._timeout.total_seconds())
        else:
            work.wait(self._timeout)

    def _warm_up(self, edge: tuple[int, int], group: dist.ProcessGroup) -> None:
        """Send a first message over an edge, so that it is open before the first step.

        NCCL opens a connection at its first message, for which both ends must be there: in a step each of two
        ranks could wait for the other on another edge.
        """
        if self._rank not in edge:
            return
        sender, receiver = edge
        sending = self._rank == sender
        peer = receiver if sending else sender
        place = "cpu" if self._staged[peer] else self._device
        nothing, member = torch.zeros(1, device=place), int(peer > self._rank)
        since_s = time.monotonic()
        try:
            if sending:
                work = dist.isend(nothing, group=group, group_dst=member)
            else:
                work = dist.irecv(nothing, group=group, group_src=member)
            assert work is not None
            self._wait_for(work, peer)
        except RuntimeError as error:
            waited = f"rank {self._rank} waited for rank {peer} to open the way from {sender} to {receiver}"
            raise peer_error(waited, since_s, error) from error

    def _peer_timeout(self, transfer: Transfer, message: _UnderWay) -> AbstractContextManager[None]:
        return PeerTimeout(self._program, self._rank, transfer, (message.peer,), message.since_s)


_Channel = tuple[int, dist.ProcessGroup | None, int, int]
"""Peer, the group of the edge and the peer's rank in it, first tag; no group: the default one."""

MAX_TENSORS = 16
"""The most tensors that one boundary may carry."""


def _transfers(program: Program) -> list[Transfer]:
    return [
        instruction
        for instructions in program.ranks
        for instruction in instructions
        if isinstance(instruction, Transfer)
    ]


def _edge_groups(
    program: Program, staging: Staging, timeout: timedelta
) -> dict[tuple[int, int], dist.ProcessGroup]:
    edges = {
        (
            program.rank_of(transfer.pipeline, transfer.stage),
            program.rank_of(transfer.pipeline, transfer.peer_stage),
        )
        for transfer in _transfers(program)
        if transfer.direction is Direction.SEND
    }
    return {edge: staging.new_group(sorted(edge), timeout, urgent=True) for edge in sorted(edges)}


def release_points(program: Program, rank: int) -> dict[int, tuple[Transfer, ...]]:
    """Return which of a rank's sends are proven to have arrived after which of its computations (by index).

    A send to a peer is over once this rank has received something that the peer sent after the computation
    that consumed it. What no receive proves, the NORM does.
    """
    mine = program.ranks[rank]
    sent_at, consumed_at = _peer_positions(program)
    waiting: dict[int, list[tuple[int, Transfer]]] = defaultdict(list)
    points: dict[int, tuple[Transfer, ...]] = {}
    for index, instruction in enumerate(mine):
        if isinstance(instruction, Transfer) and instruction.direction is Direction.SEND:
            peer = program.rank_of(instruction.pipeline, instruction.peer_stage)
            waiting[peer].append((consumed_at[instruction.message], instruction))
        elif isinstance(instruction, Compute):
            message = incoming(instruction, program.pipeline(instruction).stages)
            if message is None or message[1:3] in program.local_boundaries:
                continue
            stage = instruction.stage - 1 if instruction.op is Pass.FORWARD else instruction.stage + 1
            peer = program.rank_of(instruction.pipeline, stage)
            over = [send for consumed, send in waiting[peer] if consumed < sent_at[message]]
            if over:
                points[index] = tuple(over)
                waiting[peer] = [pair for pair in waiting[peer] if pair[1] not in over]
    return points


def _peer_positions(program: Program) -> tuple[dict[Message, int], dict[Message, int]]:
    """Return, for each message, the places of its send and of its consumer in the lists of their ranks."""
    sent_at: dict[Message, int] = {}
    consumed_at: dict[Message, int] = {}
    for instructions in program.ranks:
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Transfer) and instruction.direction is Direction.SEND:
                sent_at[instruction.message] = index
            elif isinstance(instruction, Compute):
                message = incoming(instruction, program.pipeline(instruction).stages)
                if message is not None:
                    consumed_at[message] = index
    return sent_at, consumed_at
