"""Gradients and weights that only their owner keeps: summed, and fetched, layer by layer in a step."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_model.sharding import Sharding
from hetpipe.models.chain import ChainModel
from hetpipe.program.collective_parts import Group, Part, broadcast_part, sum_parts
from hetpipe.program.instructions import Broadcast, Bucket, Gather, Program, Reduce, Round
from hetpipe.program.layer_rounds import buckets_by_layer, is_fetched
from hetpipe.runtime.bucket_parameters import bucket_names, bucket_parts, bucket_range, check_shared
from hetpipe.runtime.collectives import OnHost, begin, open_groups
from hetpipe.runtime.cuda_events import wait_for_gpu
from hetpipe.runtime.held_weights import Held, Piece
from hetpipe.runtime.host_staging import Staging, room_on_host
from hetpipe.runtime.peer_errors import PeerTimeout
from hetpipe.runtime.served_weights import ServedWeights


@dataclass(slots=True)
class _UnderWay:
    """A collective: how to wait for it, since when, its buffer, what moves: that, or a copy on the host."""

    wait: Callable[[], object]
    since_s: float
    buffer: Tensor
    moved: Tensor


_View = tuple[int, torch.Size, tuple[int, ...], int]
"""A view of a bucket's weights: its index; size, strides and offset."""


class LayerSync:
    """The rounds of one rank; owns the process groups, and the memory of shared weights and their gradients.

    The owner's gradients are there from the start of a step, and the sum of a round is added to them. All
    others make room for those of a layer right before its backward, and have none after the REDUCE. fetches:
    whether weights are sharded, too.
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
        """Open the groups, on all ranks together, and put the weights of each bucket into one piece.

        staging: None if no rank is on a GPU.
        """
        self._staging = staging or Staging((False,) * len(program.ranks))
        self._program, self._rank, self._timeout_s = program, rank, timeout_s
        self.fetches = program.plan.sharding is Sharding.WEIGHTS
        check_shared(program, rank, chain, parameters)
        self._groups = open_groups(
            [self._group(bucket) for bucket in program.buckets],
            rank,
            len(program.ranks),
            self._staging,
            timedelta(seconds=timeout_s),
        )
        self._served = (
            ServedWeights(program, rank, timeout_s, self._staging) if program.plan.fetches_apart else None
        )
        self._of_layer = buckets_by_layer(program, rank)
        self._held = _held_by_bucket(program, rank, chain, parameters)
        for index, held in self._each():
            held.settle(is_sharded=self._is_sharded(index))
        self._under_way: dict[Round | Broadcast, _UnderWay] = {}
        self._storages: dict[int, int] = {}  # of fetched weights, their buckets
        self._warm_up()

    def _group(self, bucket: Bucket) -> Group:
        return Group(bucket.ranks, not self._staging.in_streams(bucket.ranks))

    def _each(self) -> Iterator[tuple[int, Held]]:
        """Yield what this rank holds with others, each once, with a bucket of it."""
        return ((index, held) for index, held in self._held.items() if index == min(held.pieces))

    def _is_sharded(self, bucket: int) -> bool:
        return self._program.sharding_of(bucket) is Sharding.WEIGHTS

    def _warm_up(self) -> None:
        """Sum a first number in each group, so that it is open before the first step."""
        for group in dict.fromkeys(self._group(self._program.buckets[index]) for index in self._held):
            place = "cpu" if group.on_host else next(iter(self._held.values())).empty().device
            nothing, since_s = torch.zeros(1, device=place), time.monotonic()
            with PeerTimeout(self._program, self._rank, Reduce(0, 0), group.ranks, since_s):
                work = dist.all_reduce(nothing, group=self._groups[group], async_op=True)
                assert work is not None
                self._wait_of(work, nothing)()

    def _wait_of(self, work: dist.Work, moved: Tensor) -> Callable[[], object]:
        return partial(wait_for_gpu, work, self._timeout_s) if not moved.is_cpu else work.wait

    def buffers(self) -> list[Tensor]:
        """Return what is there for the whole step: owned gradients, and owned ranges of sharded weights."""
        return [tensor for _, held in self._each() for tensor in held.resident()]

    def attach(self) -> None:
        """Set the owned gradients to zero before a step."""
        for _, held in self._each():
            held.attach()

    def make_room(self, layer: int) -> None:
        """Make room for the gradients of a layer whose backward comes now."""
        for index in self._of_layer[layer]:
            if self._held[index].gradients is None:
                self._held[index].make_gradients()

    def serve(self, fetches: Mapping[int, Iterable[int]]) -> None:
        """Hand in the weights that this rank owns for fetches that come: of buckets, by rank.

        Nothing where all ranks of a bucket fetch together.
        """
        if self._served is not None:
            owned = {index: weights for _, held in self._each() for index, weights in held.owned().items()}
            self._served.serve(owned, fetches)

    def start(self, entry: Round) -> None:
        """Begin a round; nothing of it may be used before it is `over`."""
        held = self._held[entry.bucket]
        self._begin(entry, held.to_sum(entry.bucket) if isinstance(entry, Reduce) else held.to_fetch(entry))

    def start_broadcast(self, bucket: int) -> None:
        """Begin to spread a bucket's new weights from its owner, into those of the others."""
        held = self._held[bucket]
        assert held.weights is not None
        self._begin(Broadcast(bucket), held.pieces[bucket].of(held.weights) if held.is_cut else held.weights)

    def _begin(self, entry: Round | Broadcast, buffer: Tensor) -> None:
        bucket, since_s = self._program.buckets[entry.bucket], time.monotonic()
        apart = self._served if isinstance(entry, Gather) else None
        moved = buffer
        if apart.copies if apart else self._staging.copies(self._rank, bucket.ranks):
            moved = room_on_host(buffer)
            if not apart:
                moved.copy_(buffer)
        on_host = self._group(bucket).on_host
        (summed,), spread = (
            sum_parts(entry.bucket, bucket, on_host=on_host),
            broadcast_part(entry.bucket, bucket, on_host=on_host),
        )
        part = summed if isinstance(entry, Reduce) else spread
        with self._peer_timeout(entry, since_s):
            wait = self._handed_in(entry.bucket, part, moved, apart)
        self._under_way[entry] = _UnderWay(wait, since_s, buffer, moved)

    def _handed_in(
        self, bucket: int, part: Part, moved: Tensor, apart: ServedWeights | None
    ) -> Callable[[], object]:
        """Begin what moves a buffer; return how to wait for it."""
        if apart:
            return partial(apart.wait, apart.fetch(bucket, moved))
        if moved.is_cpu:
            return OnHost(part, moved, self._groups).wait
        return self._wait_of(begin(part, moved, self._groups), moved)

    @torch.no_grad()
    def finish(self, entry: Round | Broadcast) -> None:
        """Wait until a round is over on this rank; fetched weights are in the parameters then.

        Raises: PeerError if it does not end in time, or another rank is gone.
        """
        found = self._under_way.pop(entry, None)
        if found is None:
            return
        with self._peer_timeout(entry, found.since_s):
            found.wait()
        held = self._held[entry.bucket]
        is_owner = held.pieces[entry.bucket].is_owner
        if is_owner is isinstance(entry, Reduce) and found.moved is not found.buffer:
            found.buffer.copy_(found.moved)
        if isinstance(entry, Gather) and (whole := held.have(entry, found.buffer)) is not None:
            self._storages[whole.untyped_storage()._cdata] = entry.bucket

    def finish_broadcasts(self) -> list[int]:
        """Wait for all broadcasts that were started, and let go of what was fetched; return their buckets."""
        if self._served is not None:
            self._served.finish()
        done = [entry for entry in self._under_way if isinstance(entry, Broadcast)]
        for entry in done:
            self.finish(entry)
        return [entry.bucket for entry in done]

    def drop(self, bucket: int) -> None:
        """Let go of the weights of a bucket, unless this rank owns them."""
        held = self._held[bucket]
        if self._is_sharded(bucket) and held.may_drop(bucket):
            if held.weights is not None:
                self._storages.pop(held.weights.untyped_storage()._cdata, None)
            held.let_go()

    def saving(self) -> AbstractContextManager[object]:
        """Return a context of forwards whose backwards look for fetched weights anew, and keep none."""
        if not self.fetches:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._put_down, self._taken_up)

    def _put_down(self, tensor: Tensor) -> Tensor | _View:
        bucket = self._storages.get(tensor.untyped_storage()._cdata)
        if bucket is None:
            return tensor.detach()  # an operation that kept its own output would never be freed
        return bucket, tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def _taken_up(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        bucket, size, strides, offset = kept
        weights = self._held[bucket].weights
        assert weights is not None, "a backward comes after the GATHER of its weights"
        return weights.as_strided(size, strides, offset)

    @contextmanager
    def fetched(self, layer: int) -> Iterator[None]:
        """Have a layer's weights, outside of a step; on all ranks together."""
        gathers = [
            Gather(index, 0)
            for index in self._of_layer[layer]
            if is_fetched(self._program, index, self._rank)
        ]
        for entry in gathers:
            self.start(entry)
            self.finish(entry)
        try:
            yield
        finally:
            for entry in gathers:
                self.drop(entry.bucket)

    @contextmanager
    def at_hand(self, layer: int) -> Iterator[None]:
        """Have a layer's weights, and room for its gradients, outside of a step; on all ranks together."""
        with self.fetched(layer):
            self.make_room(layer)
            try:
                yield
            finally:
                for index in self._of_layer[layer]:
                    if not self._held[index].is_owner:
                        self._held[index].drop_gradients()

    def close(self) -> None:
        """Give back the process groups; all ranks must have finished their last step."""
        if self._served is not None:
            self._served.close()
        for group in self._groups.values():  # in the same order on all ranks: NCCL's are closed together
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _peer_timeout(self, entry: Round | Broadcast, since_s: float) -> AbstractContextManager[None]:
        bucket = self._program.buckets[entry.bucket]
        apart = self._served is not None and isinstance(entry, Gather)
        peers = (bucket.root,) if apart else bucket.ranks
        return PeerTimeout(self._program, self._rank, entry, peers, since_s)


def _held_by_bucket(
    program: Program, rank: int, chain: ChainModel, parameters: Mapping[str, nn.Parameter]
) -> dict[int, Held]:
    """Return what a rank holds with others, by bucket; buckets that are ranges of a layer have the same.

    parameters: whole ones by name, parts that the rank owns by `Part.key`.
    """
    groups: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for index, bucket in enumerate(program.buckets):
        if rank in bucket.ranks:
            groups.setdefault((bucket.layers, bucket.tied), []).append(index)
    found: dict[int, Held] = {}
    for indices in groups.values():
        members = [parameters[name] for name in bucket_names(program, indices[0], chain)]
        pieces = {}
        for index in indices:
            bucket = program.buckets[index]
            start, stop = bucket_range(program, index, chain)
            owned = (
                bucket_parts(program, index, chain) if bucket.state_owner == rank and bucket.is_part else ()
            )
            parts = [(parameters[part.key], parameters[part.name].dim()) for part in owned]
            pieces[index] = Piece(start, stop, bucket.state_owner == rank, parts)
        found |= dict.fromkeys(indices, Held(members, [value.shape for value in members], pieces))
    return found
