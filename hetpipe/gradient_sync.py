"""Sums of gradients over the owners of each bucket."""

from collections.abc import Mapping

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
        self._under_way: dict[int, tuple[dist.Work, Tensor]] = {}

    def start(self, bucket: int) -> None:
        """Begin to sum the bucket's gradients over its owners."""
        members = self._members[bucket]
        for value in members:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        gradients = [value.grad for value in members if value.grad is not None]
        if len(gradients) == 1:
            whole = gradients[0].contiguous()
        else:
            # layers without trained parameters sum a zero, so that all owners still meet here
            whole = torch.cat([g.reshape(-1) for g in gradients]) if gradients else torch.zeros(1)
        work = dist.all_reduce(whole, group=self._groups[bucket], async_op=True)
        assert work is not None
        self._under_way[bucket] = (work, whole)

    def finish(self) -> list[int]:
        """Wait for all that were started; gives their buckets."""
        done = list(self._under_way)
        for bucket in done:
            work, whole = self._under_way.pop(bucket)
            work.wait()
            members = self._members[bucket]
            sizes = [value.numel() for value in members]
            parts = torch.split(whole, sizes) if len(members) > 1 else (whole,) * len(members)
            for value, part in zip(members, parts, strict=True):
                if value.grad is not None and value.grad.data_ptr() != part.data_ptr():
                    value.grad.copy_(part.view_as(value))
        return done


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
