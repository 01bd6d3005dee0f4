"""What of a layer is held once where several devices hold the layer (ZeRO; Rajbhandari et al., SC 2020)."""

from enum import IntEnum


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
