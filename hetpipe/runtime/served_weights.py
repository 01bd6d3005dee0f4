"""Weights that each rank fetches for itself: owners hand in what will be asked for, and go on."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from hetpipe.program.instructions import Gather, Program
from hetpipe.runtime.host_staging import Staging, room_on_host
from hetpipe.runtime.peer_errors import PeerTimeout


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message to one that fetches, and what it moves."""

    bucket: int
    peer: int
    work: dist.Work
    weights: Tensor


class ServedWeights:
    """The weights that one rank owns, for those who fetch them, and its own fetches; owns their group.

    Before a step an owner hands in a message for each fetch that the step's program has of its weights. gloo
    moves none of them before the receiver has asked for it, and then by a thread of its own, whatever the
    owner computes or waits for: so no order of one pipeline has to suit another's, and none can deadlock.
    Weights stay as they are until the NORM, by which all have come.

    Between GPUs, too, they go through the host's memory: NCCL's messages have places in the owner's order.
    """

    def __init__(self, program: Program, rank: int, timeout_s: float, staging: Staging) -> None:
        """Open the group, on all ranks together."""
        self._program, self._rank = program, rank
        self._timeout = timedelta(seconds=timeout_s)
        everyone = range(len(program.ranks))
        self._group = staging.new_group(everyone, self._timeout, on_host=True)
        self._on_host = staging.on_gpu[rank]
        self._sent: list[_Sent] = []

    def serve(self, weights: Mapping[int, Tensor], fetches: Mapping[int, Iterable[int]]) -> None:
        """Hand in messages for fetches that come, and let go of those handed in before.

        weights: that this rank owns, by bucket. fetches: by rank, buckets of any owner, each as often as it
        is fetched.
        """
        self.finish()  # evaluations come one after the other, and no step between
        moved = {}
        for peer, buckets in fetches.items():
            for bucket in buckets:
                if bucket not in weights:
                    continue
                if bucket not in moved:
                    moved[bucket] = self._to_move(weights[bucket])
                with self._peer_timeout(bucket, peer):
                    work = dist.isend(moved[bucket], dst=peer, group=self._group, tag=bucket)
                assert work is not None
                self._sent.append(_Sent(bucket, peer, work, moved[bucket]))

    def _to_move(self, weights: Tensor) -> Tensor:
        return room_on_host(weights).copy_(weights) if self._on_host else weights

    @property
    def copies(self) -> bool:
        """Return whether what is fetched comes to the host first."""
        return self._on_host

    def fetch(self, bucket: int, room: Tensor) -> dist.Work:
        """Begin to fetch a bucket from its owner into memory of the host, or of a device that is the host."""
        owner = self._program.buckets[bucket].state_owner
        assert owner is not None
        work = dist.irecv(room, src=owner, group=self._group, tag=bucket)
        assert work is not None
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait until a fetch is over."""
        work.wait(self._timeout)

    def finish(self) -> None:
        """Wait until all that was handed in is fetched, and let go of it.

        Others fetch it without this rank: after the NORM all of it has gone; after an evaluation or a
        rehearsal they may still be at it.
        """
        for sent in self._sent:
            with self._peer_timeout(sent.bucket, sent.peer):
                sent.work.wait(self._timeout)
        self._sent.clear()

    def _peer_timeout(self, bucket: int, peer: int) -> PeerTimeout:
        return PeerTimeout(self._program, self._rank, Gather(bucket, 0), (peer,), time.monotonic())

    def close(self) -> None:
        """Give back the group; all ranks must have finished their last step."""
        self.finish()
        dist.destroy_process_group(self._group)
