"""What one layer of a model holds, and how long it takes on one kind of device."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from cost_model.errors import InputError
from cost_model.interpolation import interpolate
from cost_model.strict_files import STRICT

SHORTEST_LAYER_S, LONGEST_LAYER_S = 1e-15, 3600.0


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What a layer holds and keeps, whatever the device.

    saved_bytes_per_sample: what autograd keeps from forward to backward, the layer's input included, its
        output not; output_bytes_per_sample: what travels to the next layer.
    workspace_bytes: the most that is alive beyond that, within one forward or backward of any microbatch.
    workspace_by_size: the same as (microbatch size, bytes), rising, where it was measured by size; see
        `workspace_at`. One of the two is given.
    tied_to: the layer that this one shares tied_bytes of its parameters with (None: with none).
    parameter_bytes: weights as they are held between steps, each in its own dtype, frozen ones too.
    unreached_bytes: those of them that are frozen or that the loss does not reach (no gradient, no optimizer
        state, no sync); the others are trained, in the dtype of gradients and master weights.
    frozen_with: the earlier layer that this one shares frozen_with_bytes of its unreached_bytes with.
    lowered_bytes: copies of trained weights in the dtype that multiplies, which a step keeps (autocast).
    num_parameters: frozen ones too; None where all have the width of the profile's dtype.
    dequantized_bytes: copies of weights in 4 or 8 bits, each made for the time of one operation: forward and
        backward write and read them, and the workspace holds one.
    attention_flops_per_sample, attention_backward_flops_per_sample: of activations that multiply each other
        (scores, and what they weigh), in a forward and in a backward; of use to estimates.
    prefix_bytes_per_sample: what a stage that begins with this block keeps, beyond what its layers save, of
        what the model makes before its blocks: masks, rotary tables.
    rounded_bytes: how much more a checkpoint, which holds frozen weights as they were given, has of those
        that are kept in fewer bits; of shared ones with the first layer that holds them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    parameter_bytes: float
    output_bytes_per_sample: float
    saved_bytes_per_sample: float
    workspace_bytes: float = 0.0
    tied_to: str | None = None
    tied_bytes: float = 0.0
    unreached_bytes: float = 0.0
    workspace_by_size: tuple[tuple[int, float], ...] = ()
    lowered_bytes: float = 0.0
    num_parameters: int | None = None
    frozen_with: str | None = None
    frozen_with_bytes: float = 0.0
    dequantized_bytes: float = 0.0
    attention_flops_per_sample: float = 0.0
    attention_backward_flops_per_sample: float = 0.0
    rounded_bytes: float = 0.0
    prefix_bytes_per_sample: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and value < 0:
                raise InputError(f"{field.name} of layer {self.name!r} is {value}; give zero or more")
        if self.workspace_by_size:
            self._check_workspace()
        if self.unreached_bytes > self.parameter_bytes:
            raise InputError(
                f"unreached_bytes of layer {self.name!r} is {self.unreached_bytes:,.0f}, more than its "
                f"parameter_bytes {self.parameter_bytes:,.0f}, of which they are a part"
            )

    @property
    def trained_bytes(self) -> float:
        """Return the bytes of the weights that have a gradient."""
        return self.parameter_bytes - self.unreached_bytes

    def _check_workspace(self) -> None:
        if self.workspace_bytes:
            raise InputError(
                f"layer {self.name!r} has both workspace_bytes and workspace_by_size; leave one of them out"
            )
        last = (0, 0.0)
        for size, num_bytes in self.workspace_by_size:
            if size <= last[0] or num_bytes < last[1]:
                raise InputError(
                    f"workspace_by_size of layer {self.name!r} has {num_bytes} bytes at {size} after "
                    f"{last[1]} at {last[0]}; sizes rise from 1 up, bytes from zero up never fall"
                )
            last = (size, num_bytes)

    def workspace_at(self, samples: float) -> float:
        """Return workspace bytes for a microbatch of `samples`, interpolated and extended as times are."""
        if not self.workspace_by_size:
            return self.workspace_bytes
        sizes, values = zip(*self.workspace_by_size, strict=True)
        return interpolate(sizes, values, samples)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The seconds of one layer on one kind, at each microbatch size of the kind."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            for value in values:
                if value < 0:
                    raise InputError(f"{name} holds {value}; give zero or more seconds")
                if 0 < value < SHORTEST_LAYER_S:
                    raise InputError(f"{name} holds {value} s for one layer; no device is as fast, give 0")
                if value > LONGEST_LAYER_S:
                    raise InputError(f"{name} holds {value} s for one layer; is it in milliseconds?")
