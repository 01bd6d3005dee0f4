"""Closed-form costs of one pipeline on named devices; they guide the search, the simulator decides."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from cost_model.layer_costs import Prices
from cost_model.memory import (
    StageShape,
    device_memory,
    leanest_segments,
    segment_bytes,
    segment_choices,
    stage_activation_bytes,
)
from cost_model.network import NORM_BYTES, Network
from cost_model.profile import ModelProfile
from cost_model.sum_times import all_reduce_s
from partition.estimates.clocks import Clocks
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem

MANY = 10**6  # a cap on in_flight: memory takes as many as there are
Layout = tuple[tuple[Device, int, int], ...]
"""Stages of one pipeline as (device, start, stop), from first to last."""


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """The bytes of a stage, by segments: with one microbatch in flight, and of each further one.

    gradient: of one more that waits for the stage before.
    """

    by_segments: tuple[tuple[float, float], ...]
    gradient: float


class PipelineCosts:
    """The prices, links and memory of a problem, for one pipeline whose devices serve one stage each.

    clocks: those of another problem in the same search; None: new ones.
    """

    def __init__(self, problem: Problem, clocks: Clocks | None = None) -> None:
        self.problem, self.clocks = problem, clocks or Clocks()
        self.prices = Prices(problem.profile)
        self.network = Network(problem.cluster, problem.profile.links, problem.profile.all_reduces)
        profile, first = problem.profile, dict[int, str]()
        # by kind the first one on which layers have the same bytes
        self._first_alike = {
            kind: first.setdefault(id(profile.on(kind).layers), kind) for kind in profile.kinds
        }
        self._stage_bytes: dict[tuple[int, int, int, bool, str], _StageBytes] = {}
        self._caps: dict[tuple[int, int, int, bool, str, float], int] = {}
        self._segment_layers: dict[tuple[int, int, int, int, str], int] = {}
        self._optimizer_s: dict[tuple[str, float, int, int], float] = {}
        self._sync: dict[tuple[tuple[str, ...], float], float] = {}

    def num_microbatches(self, samples: int) -> int:
        return -(-self.problem.global_batch_size // samples)

    def busy_s(self, device: Device, start: int, stop: int, samples: int) -> float:
        """Return the seconds of forward and backward of one microbatch."""
        forward = self.prices.forward_s(device, start, stop, samples)
        return forward + self.prices.backward_s(device, start, stop, samples)

    def total_s(self, device: Device, start: int, stop: int, samples: int, num_samples: int) -> float:
        """Return the seconds of forward and backward of num_samples; the last microbatch may be smaller."""
        whole, rest = divmod(num_samples, samples)
        seconds = whole * self.busy_s(device, start, stop, samples)
        return seconds + (self.busy_s(device, start, stop, rest) if rest else 0.0)

    def hop_s(self, source: Device, destination: Device, layer: int, samples: int) -> float:
        """Return the seconds of one microbatch on the link in front of a layer, both ways, with latency."""
        num_bytes = self.prices.boundary_bytes(layer, samples, source, destination)
        forward_s = self.network.route(source.name, destination.name).link.transfer_s(num_bytes)
        if not self.prices.takes_gradient(layer):
            return forward_s
        return forward_s + self.network.route(destination.name, source.name).link.transfer_s(num_bytes)

    def link_s(self, source: Device, destination: Device, layer: int, samples: int) -> float:
        """Return the seconds for which one microbatch occupies the link, in the slower direction."""
        return max(self.message_s(source, destination, layer, samples)[:2])

    def optimizer_s(self, device: Device, start: int, stop: int) -> float:
        """Return the seconds of the optimizer step of a stage."""
        key = (device.kind, device.speed, start, stop)
        if key not in self._optimizer_s:
            self._optimizer_s[key] = self.prices.optimizer_s(device, range(start, stop))
        return self._optimizer_s[key]

    def tied_sync_s(self, layout: Layout) -> float:
        """Return the seconds to sum gradients of tied weights whose layers are on different devices."""
        profile, share = self.problem.profile, self.problem.gradient_share
        seconds = 0.0
        for group in profile.tied_groups:
            owners = list(dict.fromkeys(owner(layout, layer) for layer in group))
            seconds += self.all_reduce_s(owners, share * max(map(profile.tied_bytes, group)))
        return seconds

    def norm_s(self, devices: Iterable[Device]) -> float:
        """Return the seconds of the all-reduce of the norm between the devices of a plan, in its order."""
        return self.all_reduce_s(devices, NORM_BYTES)

    def all_reduce_s(self, devices: Iterable[Device], num_bytes: float) -> float:
        """Return the seconds of an all-reduce on the idle network; nothing for a single device."""
        key = (tuple(dict.fromkeys(device.name for device in devices)), num_bytes)
        if key not in self._sync:
            self._sync[key] = all_reduce_s(self.network, num_bytes, key[0]) if len(key[0]) > 1 else 0.0
        return self._sync[key]

    def cap(self, device: Device, start: int, stop: int, samples: int, recompute: bool = False) -> int:
        """Return the most microbatches in flight that memory takes, however many there are; 0 if none.

        With no more in flight in the stage before; see `waiting`. A stage without a backward needs them all.
        """
        kind, usable = self._first_alike.get(device.kind, device.kind), device.usable_bytes
        stage = (start, stop, samples, recompute, kind)
        key = (*stage, usable)
        if key not in self._caps:
            by_segments = self._bytes_of(stage).by_segments
            self._caps[key] = max(_most(usable - one, more) for one, more in by_segments)
        return self._caps[key]

    def waiting(
        self, device: Device, layers: tuple[int, int], samples: int, in_flight: int, *, recompute: bool
    ) -> int:
        """Return how many gradients memory takes that wait until the stage before is ready for them.

        So many more than here may be in flight there (`cost_model.memory.stage_activation_bytes`). in_flight:
        at most `cap`.
        """
        held = self._bytes_of((*layers, samples, recompute, device.kind))
        need = min(one + (in_flight - 1) * more for one, more in held.by_segments)
        return max(0, _most(device.usable_bytes - need, held.gradient) - 1)

    def gradient_bytes(self, device: Device, start: int, stop: int, samples: int) -> float:
        """Return the bytes of a gradient that waits for the stage before; 0 where none goes there."""
        return self._bytes_of((start, stop, samples, False, device.kind)).gradient

    def _bytes_of(self, stage: tuple[int, int, int, bool, str]) -> "_StageBytes":
        """Return the bytes of a stage: start, stop, samples of a microbatch, recompute, kind of device."""
        start, stop, samples, recompute, kind = stage
        stage = (start, stop, samples, recompute, self._first_alike.get(kind, kind))
        if stage not in self._stage_bytes:
            shape = StageShape(start, stop, 1, samples, recompute)
            self._stage_bytes[stage] = self._count_bytes(shape, self.problem.profile.on(kind))
        return self._stage_bytes[stage]

    def _count_bytes(self, shape: StageShape, profile: ModelProfile) -> "_StageBytes":
        memory = device_memory(profile, [shape])
        start, stop, samples, again = shape.start, shape.stop, shape.microbatch_size, shape.recompute
        saved, boundary = stage_activation_bytes(profile, StageShape(start, stop, 2, samples, again))
        outputs = boundary - memory.boundary_bytes
        pairs = [(memory.total_bytes, saved - memory.saved_bytes + outputs)]
        states = memory.total_bytes - memory.saved_bytes - memory.workspace_bytes
        segmented = again and stop > self.prices.first_trained
        for each in segment_choices(stop - start)[1:] if segmented else ():
            inputs, most = segment_bytes(profile, replace(shape, segment_layers=each))
            pairs.append((states + inputs + most, outputs + inputs))
        two_before = StageShape(start, stop, 1, samples, again, in_flight_before=2)
        _, waiting = stage_activation_bytes(profile, two_before)
        return _StageBytes(tuple(pairs), waiting - memory.boundary_bytes)

    def segment_layers(self, shape: StageShape, kind: str) -> int:
        """Return the `segment_layers` with which recompute of a stage on a kind needs least memory."""
        key = (shape.start, shape.stop, shape.microbatch_size, shape.in_flight, kind)
        if key not in self._segment_layers:
            self._segment_layers[key] = leanest_segments(self.problem.profile.on(kind), shape)
        return self._segment_layers[key]

    def message_s(
        self, source: Device, destination: Device, layer: int, samples: int
    ) -> tuple[float, float, float, float]:
        """Return (forward, backward, latency forward, latency backward) of the link in front of a layer.

        Forward and backward are the seconds for which one microbatch's message occupies its direction; within
        a device it takes none, nor backward where nothing before it is trained.
        """
        if source.name == destination.name:
            return (0.0, 0.0, 0.0, 0.0)
        num_bytes = self.prices.boundary_bytes(layer, samples, source, destination)
        forward = self.network.route(source.name, destination.name).link
        if not self.prices.takes_gradient(layer):
            return (forward.occupancy_s(num_bytes), 0.0, forward.latency_s, 0.0)
        backward = self.network.route(destination.name, source.name).link
        occupied_s = forward.occupancy_s(num_bytes), backward.occupancy_s(num_bytes)
        return (*occupied_s, forward.latency_s, backward.latency_s)

    def layout(self, pipeline: Pipeline) -> Layout:
        return tuple((self.problem.cluster.device(stage.device), *stage.layers) for stage in pipeline.stages)

    def plan(self, strategy: str, layout: Layout, samples: int, in_flight: Sequence[int]) -> Plan:
        """Return the plan of one pipeline; each in_flight must be at least 1.

        All are in flight where there is no backward.
        """
        batch, first_trained = self.problem.global_batch_size, self.prices.first_trained
        every = self.num_microbatches(samples)
        stages = tuple(
            Stage((device.name,), (start, stop), flight if stop > first_trained else max(flight, every))
            for (device, start, stop), flight in zip(layout, in_flight, strict=True)
        )
        pipeline = Pipeline(microbatch_size=samples, num_samples=batch, stages=stages)
        return self.problem.plan(strategy, (pipeline,))

    def shortfall(self, layout: Layout, samples: int) -> InfeasibleError | None:
        """Return the largest lack of memory with one microbatch in flight; None where all stages fit.

        All are where there is no backward.
        """
        profile, first_trained = self.problem.profile, self.prices.first_trained
        flights = [1 if stop > first_trained else self.num_microbatches(samples) for _, _, stop in layout]
        shapes = [
            StageShape(start, stop, flight, samples)
            for (_, start, stop), flight in zip(layout, flights, strict=True)
        ]
        needs = [
            device_memory(profile.on(device.kind), [shape]).total_bytes
            for shape, (device, _, _) in zip(shapes, layout, strict=True)
        ]
        missing, index = max(
            (need - device.usable_bytes, -index)
            for index, (need, (device, _, _)) in enumerate(zip(needs, layout, strict=True))
        )
        if missing <= 0:
            return None
        return missing_error(*layout[-index], needs[-index])


def _most(spare: float, more: float) -> int:
    """Return the most in flight for what is left with one, and what each further one takes."""
    if spare < 0:
        return 0
    return 1 + min(MANY, math.floor(spare / more)) if more > 0 else MANY


def missing_error(device: Device, start: int, stop: int, need_bytes: float) -> InfeasibleError:
    """Return the error that names what a device lacks for layers [start, stop) of so many bytes."""
    missing = need_bytes - device.usable_bytes
    return InfeasibleError(
        f"layers [{start}, {stop}) need {math.ceil(need_bytes):,} bytes on {device.name!r}, which has "
        f"{device.usable_words}; {math.ceil(missing):,} bytes are missing",
        device=device.name,
        missing_bytes=missing,
    )


def owner(layout: Layout, layer: int) -> Device:
    """Return the device that holds a layer."""
    return next(device for device, start, stop in layout if start <= layer < stop)
