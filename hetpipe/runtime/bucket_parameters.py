"""Which parameters a bucket has, and which of their numbers where several devices own a range of a layer."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from cost_model.errors import InputError
from cost_model.sharding import Sharding
from hetpipe.models.chain import ChainModel
from hetpipe.program.instructions import Program

_KEY = re.compile(r"(.+)\[(\d+):(\d+)\]")


@dataclass(frozen=True, slots=True)
class Part:
    """The numbers [start, stop) of a parameter, which are stepped by themselves.

    An optimizer has them as a parameter, under the name `key`.
    """

    name: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a parameter, or of what has its shape: in a column, of as many dimensions.

        So vectors stay vectors, and matrices matrices, to an optimizer that asks. A view.
        """
        return shaped_like(whole.detach().view(-1)[self.start : self.stop], whole.dim())


def shaped_like(numbers: Tensor, num_dimensions: int) -> Tensor:
    """Return numbers in a row as a column of so many dimensions; of none, as the number that it is."""
    return numbers.view(-1, *[1] * (num_dimensions - 1)) if num_dimensions else numbers.view(())


def part_of(key: str) -> Part | None:
    """Return the part of which a name is the key, None for that of a whole parameter.

    >>> part_of("wte.weight[0:96]")
    Part(name='wte.weight', start=0, stop=96)
    """
    found = _KEY.fullmatch(key)
    return None if found is None else Part(found[1], int(found[2]), int(found[3]))


def bucket_names(program: Program, bucket: int, chain: ChainModel) -> list[str]:
    """Return the names of a bucket's trained parameters, in the same order on every rank."""
    held = program.buckets[bucket]
    if held.tied:
        later = {info.name for layer in held.layers[1:] for info in chain.parameters(layer)}
        return [info.name for info in chain.parameters(held.layers[0]) if info.tied and info.name in later]
    infos = [info for layer in held.layers for info in chain.parameters(layer)]
    return [info.name for info in infos if info.reached and not info.tied]


def bucket_range(program: Program, bucket: int, chain: ChainModel) -> tuple[int, int]:
    """Return which of its parameters' numbers, laid end to end, a bucket has: [start, stop)."""
    total = sum(_sizes(program, bucket, chain).values())
    start, stop = (round(end * total) for end in program.buckets[bucket].part)
    return start, stop


def bucket_parts(program: Program, bucket: int, chain: ChainModel) -> list[Part]:
    """Return the parts of parameters that a bucket has; those without numbers are left out."""
    start, stop = bucket_range(program, bucket, chain)
    found, before = [], 0
    for name, size in _sizes(program, bucket, chain).items():
        low, high = max(start - before, 0), min(stop - before, size)
        if low < high:
            found.append(Part(name, low, high))
        before += size
    return found


def _sizes(program: Program, bucket: int, chain: ChainModel) -> dict[str, int]:
    layers = program.buckets[bucket].layers
    shapes = {info.name: info.shape for layer in layers for info in chain.parameters(layer)}
    return {name: math.prod(shapes[name]) for name in bucket_names(program, bucket, chain)}


def parts_of(program: Program, rank: int, chain: ChainModel) -> list[Part]:
    """Return the parts of parameters that a rank owns, in the order of the buckets."""
    return [
        part
        for index, bucket in enumerate(program.buckets)
        if bucket.is_part and bucket.state_owner == rank
        for part in bucket_parts(program, index, chain)
    ]


def owned_parts(
    program: Program, rank: int, chain: ChainModel, parameters: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Return the parts that a rank owns, as parameters in the memory of the whole ones, by `Part.key`.

    The whole ones are laid out row by row for it, whatever the layout that they were made with.
    """
    parts = parts_of(program, rank, chain)
    for name in {part.name for part in parts}:
        parameters[name].data = parameters[name].detach().contiguous()
    return {part.key: nn.Parameter(part.of(parameters[part.name])) for part in parts}


def parts_in(keys: Iterable[str]) -> dict[str, Part]:
    """Return those of some names that are keys of parts, with these."""
    found = ((key, part_of(key)) for key in keys)
    return {key: part for key, part in found if part is not None}


def absent_names(program: Program, rank: int, chain: ChainModel) -> frozenset[str]:
    """Return the names of the parameters of layers of a rank whose weights only other ranks keep."""
    owned, others = (
        {
            name
            for index, bucket in enumerate(program.buckets)
            if rank in bucket.ranks
            and (rank == bucket.state_owner) is mine
            and program.sharding_of(index) is Sharding.WEIGHTS
            for name in bucket_names(program, index, chain)
        }
        for mine in (True, False)
    )
    return frozenset(others - owned)


def parted_names(program: Program, rank: int, chain: ChainModel) -> frozenset[str]:
    """Return the names of the parameters of a rank's layers of whose weights it keeps a part at most."""
    return frozenset(
        name
        for index, bucket in enumerate(program.buckets)
        if bucket.is_part and rank in bucket.ranks and program.sharding_of(index) is Sharding.WEIGHTS
        for name in bucket_names(program, index, chain)
    )


def check_shared(program: Program, rank: int, chain: ChainModel, parameters: Collection[str]) -> None:
    """Check that each parameter that other ranks have too is summed by a bucket.

    Raises: InputError naming one that is not.
    """
    summed = {
        name
        for index, bucket in enumerate(program.buckets)
        if rank in bucket.ranks
        for name in bucket_names(program, index, chain)
    }
    for other, device in enumerate(program.device_names):
        held = {info.name for layer in program.plan.layers_of(device) for info in chain.parameters(layer)}
        if other != rank and (missed := sorted(held & set(parameters) - summed)):
            raise InputError(
                f"{missed[0]!r} is in layers of {program.device_names[rank]!r} and of {device!r}, which the "
                "profile does not say (tied_to); profile this model again"
            )


def counted_names(program: Program, rank: int, chain: ChainModel) -> set[str]:
    """Return the names of the parameters that count in this rank's norm, and keys of parts.

    They are those whose states it has, where states are sharded, else those whose lowest owner it is.
    """
    owners: dict[str, int] = {}
    if program.plan.state_owners is not None:
        ranks = {name: owner for owner, name in enumerate(program.device_names)}
        for layer in reversed(range(chain.num_layers)):  # a tied parameter goes with its home, the first
            state_owner = ranks[program.plan.state_owners[layer]]
            owners.update({info.name: state_owner for info in chain.parameters(layer)})
        indexed = enumerate(program.buckets)
        cut = {
            name for index, each in indexed if each.is_part for name in bucket_names(program, index, chain)
        }
        whole = {name for name, owner in owners.items() if owner == rank and name not in cut}
        return whole | {part.key for part in parts_of(program, rank, chain)}
    for owner in reversed(range(len(program.ranks))):
        for layer in program.plan.layers_of(program.device_names[owner]):
            owners.update({info.name: owner for info in chain.parameters(layer)})
    return {name for name, owner in owners.items() if owner == rank}
