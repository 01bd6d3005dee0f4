"""The memory of a stage alone on a device, and its optimizer step: nothing of it depends on a link."""

import math
from dataclasses import dataclass

from cost_model.cluster import Device
from cost_model.layer_costs import Prices
from cost_model.memory import (
    DeviceMemory,
    StageShape,
    held_bytes,
    leanest_segments,
    segment_bytes,
    segment_choices,
    stage_activation_bytes,
    trained_bytes,
    working_bytes,
)

MANY = 10**6  # a cap on in_flight: memory takes as many as there are


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The bytes of a stage, by segments: with one microbatch in flight, and of each further one.

    gradient: of one more that waits for the stage before.
    """

    by_segments: tuple[tuple[float, float], ...]
    gradient: float

    def waiting(self, usable_bytes: float, in_flight: int) -> int:
        """Return how many gradients memory takes that wait until the stage before is ready for them.

        So many more than here may be in flight there (`cost_model.memory.stage_activation_bytes`). in_flight:
        at most `StageNeeds.cap`.
        """
        need = min([one + (in_flight - 1) * more for one, more in self.by_segments])
        return max(0, _most(usable_bytes - need, self.gradient) - 1)


class StageNeeds:
    """What stages of one profile need; remembers what it was asked."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        profile, first = prices.profile, dict[int, str]()
        # by kind the first one on which layers have the same bytes
        self._first_alike = {
            kind: first.setdefault(id(profile.on(kind).layers), kind) for kind in profile.kinds
        }
        self._stage_bytes: dict[tuple[int, int, int, bool, str], StageBytes] = {}
        self._parameters: dict[tuple[str, int, int], tuple[float, float]] = {}  # held, trained
        self._working: dict[tuple[str, int, int], tuple[float, ...]] = {}  # by [stop - start]
        self._caps: dict[tuple[int, int, int, bool, str, float], int] = {}
        self._segment_layers: dict[tuple[int, int, int, int, str], int] = {}
        self._trained: dict[tuple[int, int], float] = {}
        self._optimizer_s: dict[tuple[str, float, int, int], float] = {}

    def optimizer_s(self, device: Device, start: int, stop: int) -> float:
        """Return the seconds of the optimizer step of a stage."""
        key = (device.kind, device.speed, start, stop)
        if key not in self._optimizer_s:
            if (start, stop) not in self._trained:
                self._trained[start, stop] = trained_bytes(self._prices.profile, range(start, stop))
            self._optimizer_s[key] = self._prices.update_s(device, self._trained[start, stop])
        return self._optimizer_s[key]

    def cap(self, device: Device, start: int, stop: int, samples: int, recompute: bool = False) -> int:
        """Return the most microbatches in flight that memory takes, however many there are; 0 if none.

        With no more in flight in the stage before; see `StageBytes.waiting`. A stage without a backward needs
        them all.
        """
        usable = device.usable_bytes
        key = (start, stop, samples, recompute, self._first_alike.get(device.kind, device.kind), usable)
        found = self._caps.get(key)
        if found is None:
            by_segments = self.of(device.kind, start, stop, samples, recompute=recompute).by_segments
            found = self._caps[key] = max(_most(usable - one, more) for one, more in by_segments)
        return found

    def of(self, kind: str, start: int, stop: int, samples: int, *, recompute: bool) -> StageBytes:
        """Return the bytes of a stage on a kind of device; samples: of a microbatch."""
        key = (start, stop, samples, recompute, self._first_alike.get(kind, kind))
        found = self._stage_bytes.get(key)
        if found is None:
            shape = StageShape(start, stop, 1, samples, recompute)
            found = self._stage_bytes[key] = self._count(shape, key[-1])
        return found

    def memory(self, shape: StageShape, kind: str) -> DeviceMemory:
        """Return `cost_model.memory.device_memory` of a stage alone: neither by segments nor on a host.

        Of more microbatches than are in flight. What other stages need as well is counted once.
        """
        profile, layers = self._prices.profile.on(kind), (shape.start, shape.stop)
        parameters = (kind, *layers)
        if parameters not in self._parameters:
            all_layers = range(*layers)
            self._parameters[parameters] = held_bytes(profile, all_layers), trained_bytes(profile, all_layers)
        held, trained = self._parameters[parameters]
        row = (kind, shape.start, shape.microbatch_size)
        if row not in self._working:
            self._working[row] = working_bytes(profile, shape.start, shape.microbatch_size)
        saved, boundary = stage_activation_bytes(profile, shape)
        states = trained * profile.optimizer_bytes_per_parameter_byte
        working = self._working[row][shape.stop - shape.start]
        return DeviceMemory(held, trained, states, saved, boundary, working)

    def _count(self, shape: StageShape, kind: str) -> StageBytes:
        profile, memory = self._prices.profile.on(kind), self.memory(shape, kind)
        start, stop, samples, again = shape.start, shape.stop, shape.microbatch_size, shape.recompute
        saved, boundary = stage_activation_bytes(profile, StageShape(start, stop, 2, samples, again))
        outputs = boundary - memory.boundary_bytes
        pairs = [(memory.total_bytes, saved - memory.saved_bytes + outputs)]
        states = memory.total_bytes - memory.saved_bytes - memory.workspace_bytes
        segmented = again and stop > self._prices.first_trained
        for each in segment_choices(stop - start)[1:] if segmented else ():
            inputs, most = segment_bytes(profile, shape._replace(segment_layers=each))
            pairs.append((states + inputs + most, outputs + inputs))
        two_before = StageShape(start, stop, 1, samples, again, in_flight_before=2)
        _, waiting = stage_activation_bytes(profile, two_before)
        return StageBytes(tuple(pairs), waiting - memory.boundary_bytes)

    def segment_layers(self, shape: StageShape, kind: str) -> int:
        """Return the `segment_layers` with which recompute of a stage on a kind needs least memory."""
        key = (shape.start, shape.stop, shape.microbatch_size, shape.in_flight, kind)
        if key not in self._segment_layers:
            self._segment_layers[key] = leanest_segments(self._prices.profile.on(kind), shape)
        return self._segment_layers[key]


def _most(spare: float, more: float) -> int:
    """Return the most in flight for what is left with one, and what each further one takes."""
    if spare < 0:
        return 0
    return 1 + min(MANY, math.floor(spare / more)) if more > 0 else MANY
