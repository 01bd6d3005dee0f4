"""What of a layer is held once where several devices hold the layer (ZeRO; Rajbhandari et al., SC 2020)."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby, pairwise
from typing import ClassVar

from pydantic import ConfigDict

from cost_model.errors import InputError
from cost_model.strict_files import STRICT

GATHERS_AHEAD = 1
"""So many gathers of weights of a device may be under way when another begins."""


class Sharding(IntEnum):
    """The stages of ZeRO: what only the owner of a layer keeps, each stage with what those before it shard.

    NONE: nothing. STATES: the optimizer's states. GRADIENTS: and its gradients, to which those of each
    microbatch are reduced as a backward has made them. WEIGHTS: and its trained weights, which are fetched
    for each forward and backward of the layer, and dropped after it.
    """

    NONE = 0
    STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3

    @property
    def by_layer(self) -> bool:
        """Whether a step goes layer by layer, with sums of gradients, or weights, between."""
        return self >= Sharding.GRADIENTS

    @property
    def words(self) -> str:
        """What is sharded, in words; "" for nothing."""
        kept = ("optimizer states", "gradients", "weights")[: self.value]
        return " and ".join(filter(None, (", ".join(kept[:-1]), kept[-1]))) if kept else ""


@dataclass(frozen=True, slots=True)
class OwnerRange:
    """What of a layer one of its owners keeps: a range [start, stop) of its trained numbers, in [0, 1].

    The numbers of all its parameters are laid end to end; ends fall on the nearest number.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    layer: int
    device: str
    start: float
    stop: float

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= 1:
            raise InputError(
                f"owner_ranges has [{self.start:g}, {self.stop:g}) of layer {self.layer}; give a range "
                "within [0, 1), of which start comes before stop"
            )

    @property
    def share(self) -> float:
        """How much of the layer it is, in (0, 1]."""
        return self.stop - self.start


def owned_shares(device: str, owners: Sequence[str], ranges: Sequence[OwnerRange]) -> dict[int, float]:
    """Return how much a device owns of each layer of which it owns any, in (0, 1], by layer, rising."""
    cut = {each.layer for each in ranges}
    shares = {layer: 1.0 for layer, owner in enumerate(owners) if owner == device and layer not in cut}
    shares |= {each.layer: each.share for each in ranges if each.device == device}
    return dict(sorted(shares.items()))


def check_levels(levels: Sequence[int], zero: int, num_layers: int) -> None:
    """Check the stages of ZeRO of a plan's layers, of which zero is the highest.

    Raises: InputError if one is missing, out of range, or none is zero itself.
    """
    if len(levels) != num_layers or max(levels) != zero or min(levels) < 1:
        raise InputError(
            f"layer_zero is {list(levels)}, and zero {zero}; give each of the {num_layers} layers a number "
            "from 1 to zero, at least one of them zero itself"
        )


def check_owners(
    owners: Sequence[str], zero: int, num_layers: int, layers_of: Callable[[str], Container[int]]
) -> None:
    """Check the devices that own a plan's layers, of which layers_of gives what each holds.

    Raises: InputError if nothing is sharded, a layer has no owner, or one that does not hold it.
    """
    if not zero:
        raise InputError("state_owners is for sharded states; write zero 1, 2 or 3, or leave it out")
    if len(owners) != num_layers:
        raise InputError(
            f"state_owners names {len(owners)} devices, the plan has {num_layers} layers; name one for each "
            "layer"
        )
    for layer, name in enumerate(owners):
        if layer not in layers_of(name):
            raise InputError(
                f"state_owners[{layer}] is {name!r}, which does not hold that layer; name one that does"
            )


def check_ranges(
    ranges: Sequence[OwnerRange],
    owners: Sequence[str] | None,
    layers_of: Callable[[str], Container[int]],
    *,
    offloads: bool,
) -> None:
    """Check the owners of ranges of layers; owners, layers_of: as for `check_owners`.

    offloads: whether hosts keep anything, which have whole layers.

    Raises: InputError if ranges leave gaps or overlap, or their devices are not owners that hold the layer.
    """
    if owners is None:
        raise InputError("owner_ranges is given, and state_owners is not; give both, or leave both out")
    if offloads:
        raise InputError(
            "owner_ranges is given, and a stage has offload; hosts keep states of whole layers: choose one"
        )
    if list(ranges) != sorted(ranges, key=lambda each: (each.layer, each.start)):
        raise InputError("owner_ranges is not in order; sort it by layer, then by start")
    for layer, each in groupby(ranges, lambda one: one.layer):
        alike = list(each)
        names = [one.device for one in alike]
        gaps = any(before.stop != after.start for before, after in pairwise(alike))
        if gaps or alike[0].start != 0 or alike[-1].stop != 1 or len(alike) < 2:
            found = ", ".join(f"[{one.start:g}, {one.stop:g})" for one in alike)
            raise InputError(
                f"owner_ranges has {found} of layer {layer}; give two or more that cover [0, 1), each from "
                "where the one before stops"
            )
        for name in names:
            if names.count(name) > 1 or layer not in layers_of(name):
                which = "owns two ranges of" if names.count(name) > 1 else "does not hold"
                raise InputError(f"owner_ranges names {name!r}, which {which} layer {layer}; name another")
        if owners[layer] != names[0]:
            raise InputError(
                f"state_owners[{layer}] is {owners[layer]!r}, and {names[0]!r} owns the first range of that "
                "layer; name this one"
            )
