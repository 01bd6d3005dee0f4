"""Seconds of layers [start, stop) on a device."""

from collections.abc import Iterable
from itertools import accumulate

from cost_model.cluster import Device
from cost_model.interpolation import interpolate
from cost_model.memory import trained_bytes
from cost_model.profile import ModelProfile


class Prices:
    """Prices of the layers of one profiled model; remembers the prefix sums of what it was asked for.

    Price = profile[kind] / speed. Times between measured microbatch sizes are interpolated, beyond them
    extended (see `interpolate`).
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile, self.first_trained = profile, profile.first_trained
        self._messages: dict[tuple[int, str, str], float] = {}
        self._prefix: dict[tuple[str, int], tuple[list[float], list[float]]] = {}

    def _sums(self, kind: str, samples: int) -> tuple[list[float], list[float]]:
        key = (kind, samples)
        found = self._prefix.get(key)
        if found is None:
            measured = self.profile.kind(kind)
            sizes = measured.microbatch_sizes
            if samples in sizes:
                at = sizes.index(samples)
                forward = [layer.forward_s[at] for layer in measured.layers]
                backward = [layer.backward_s[at] for layer in measured.layers]
            else:
                forward = [interpolate(sizes, layer.forward_s, samples) for layer in measured.layers]
                backward = [interpolate(sizes, layer.backward_s, samples) for layer in measured.layers]
            backward[: self.first_trained] = [0.0] * self.first_trained
            found = self._prefix[key] = (
                list(accumulate(forward, initial=0.0)),
                list(accumulate(backward, initial=0.0)),
            )
        return found

    def forward_s(self, device: Device, start: int, stop: int, samples: int) -> float:
        """Return seconds of the forward of one microbatch of `samples` through layers [start, stop)."""
        sums = self._sums(device.kind, samples)[0]
        return (sums[stop] - sums[start]) / device.speed

    def backward_s(
        self, device: Device, start: int, stop: int, samples: int, *, recompute: bool = False
    ) -> float:
        """Return seconds of the backward, 0 where there is none; with recompute the forward is run again."""
        return self.pass_s(device, start, stop, samples, recompute=recompute)[1]

    def pass_s(
        self, device: Device, start: int, stop: int, samples: int, *, recompute: bool = False
    ) -> tuple[float, float]:
        """Return `forward_s` and `backward_s`."""
        forward, backward = self._sums(device.kind, samples)
        once_s = forward[stop] - forward[start]
        if stop <= self.first_trained:
            return once_s / device.speed, 0.0
        back_s = backward[stop] - backward[start]
        if recompute:
            back_s += once_s
        return once_s / device.speed, back_s / device.speed

    def optimizer_s(self, device: Device, layers: Iterable[int]) -> float:
        """Return seconds of the optimizer step for a set of layers on one device."""
        return self.update_s(device, trained_bytes(self.profile, layers))

    def update_s(self, device: Device, num_bytes: float) -> float:
        """Return seconds of the optimizer step for so many parameter bytes."""
        return self.profile.kind(device.kind).optimizer_s_per_byte * num_bytes / device.speed

    def boundary_bytes(self, layer: int, samples: int, giver: Device, taker: Device) -> float:
        """Return bytes that travel from layer - 1 on a device to layer on another, and maybe back.

        For one microbatch.
        """
        key = layer, giver.kind, taker.kind
        if key not in self._messages:
            self._messages[key] = self.profile.message_bytes_per_sample(*key)
        return samples * self._messages[key]

    def takes_gradient(self, layer: int) -> bool:
        """Return whether the gradient of what enters a layer is needed by those before it."""
        return layer > self.first_trained
