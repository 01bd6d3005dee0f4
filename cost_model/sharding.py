"""What of a layer is held once where several devices hold the layer (ZeRO; Rajbhandari et al., SC 2020)."""

from collections.abc import Callable, Container, Sequence
from enum import IntEnum

from cost_model.errors import InputError


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
