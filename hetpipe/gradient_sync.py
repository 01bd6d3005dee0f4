"""Sums of gradients over the owners of each bucket."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.instructions import Program
from hetpipe.splitting import ChainModel


class GradientSync:
    """The collectives of one rank. Owns the process groups and the sums that are under way."""

    def __init__(
        self, program: Program, rank: int, chain: ChainModel, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        everyone = tuple(range(len(program.ranks)))
        groups = {
            ranks: None if ranks == everyone else dist.new_group(list(ranks))
            for ranks in sorted({bucket.ranks for bucket in program.buckets})
        }
        self._groups = [groups[bucket.ranks] for bucket in program.buckets]
        self._members = [
            [parameters[name] for name in bucket_names(program, index, chain)] if rank in bucket.ranks else []
            for index, bucket in enumerate(program.buckets)
        ]
        # one buffer for each bucket, of which the gradients are views: nothing is copied to be summed
        self._buffers = [_buffer(members) for members in self._members]
        self._under_way: dict[int, dist.Work] = {}

    def buffers(self) -> list[Tensor]:
        """The memory of the gradients that are summed, one tensor for each bucket of this rank."""
        return [buffer for buffer, members in zip(self._buffers, self._members, strict=True) if members]

    def attach(self) -> None:
        """Before a step: gradients of zero, in the buckets' buffers."""
        for buffer, members in zip(self._buffers, self._members, strict=True):
            buffer.zero_()
            parts = torch.split(buffer, [value.numel() for value in members]) if members else ()
            for value, part in zip(members, parts, strict=True):
                value.grad = part.view_as(value)

    def start(self, bucket: int) -> None:
        """Begin to sum the bucket's gradients over its owners."""
        work = dist.all_reduce(self._buffers[bucket], group=self._groups[bucket], async_op=True)
        assert work is not None
        self._under_way[bucket] = work

    def finish(self) -> list[int]:
        """Wait for all that were started; gives their buckets."""
        done = list(self._under_way)
        for bucket in done:
            self._under_way.pop(bucket).wait()
        return done


def _buffer(members: Sequence[nn.Parameter]) -> Tensor:
    """Room for the gradients of all members; of layers without trained parameters, a zero to meet over."""
    if not members:
        return torch.zeros(1)
    first = members[0]
    return torch.zeros(sum(value.numel() for value in members), dtype=first.dtype, device=first.device)


def bucket_names(program: Program, bucket: int, chain: ChainModel) -> list[str]:
    """Names of the parameters of a bucket, the same order on every rank; those without gradient left out."""
    entry = program.buckets[bucket]
    if entry.tied:
        later = {info.name for layer in entry.layers[1:] for info in chain.parameters(layer)}
        return [info.name for info in chain.parameters(entry.layers[0]) if info.tied and info.name in later]
    infos = [info for layer in entry.layers for info in chain.parameters(layer)]
    return [info.name for info in infos if info.reached and not info.tied]


def counted_names(program: Program, rank: int, chain: ChainModel) -> set[str]:
    """Names of the parameters whose lowest owner is this rank."""
    owners: dict[str, int] = {}
    for owner in reversed(range(len(program.ranks))):
        for layer in program.plan.layers_of(program.device_names[owner]):
            owners.update({info.name: owner for info in chain.parameters(layer)})
    return {name for name, owner in owners.items() if owner == rank}
