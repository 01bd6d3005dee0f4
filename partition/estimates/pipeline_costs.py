"""Closed-form costs of one pipeline on named devices; they guide the search, the simulator decides."""

import math
from collections.abc import Iterable, Sequence

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from cost_model.layer_costs import Prices
from cost_model.memory import StageShape, device_memory
from cost_model.network import NORM_BYTES, Network
from cost_model.sum_times import all_reduce_s
from partition.estimates.clocks import Clocks
from partition.estimates.stage_needs import StageBytes, StageNeeds
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem

Layout = tuple[tuple[Device, int, int], ...]
"""Stages of one pipeline as (device, start, stop), from first to last."""


class PipelineCosts:
    """The prices, links and memory of a problem, for one pipeline whose devices serve one stage each.

    like: those of another problem of the same profile, in the same search: its clocks are shared, and all
    that depends on no link.
    """

    def __init__(self, problem: Problem, like: "PipelineCosts | None" = None) -> None:
        self.problem = problem
        self.network = Network(problem.cluster, problem.profile.links, problem.profile.all_reduces)
        self.clocks: Clocks = like.clocks if like else Clocks()
        self.prices: Prices = like.prices if like else Prices(problem.profile)
        self._stages: StageNeeds = like._stages if like else StageNeeds(self.prices)
        self._sync: dict[tuple[tuple[str, ...], float], float] = {}
        self._channels: dict[tuple[str, str, str, str], int] = {}
        self._numbers: dict[object, int] = {}
        self._messages: dict[tuple[int, int, int], tuple[float, float, float, float]] = {}

    def num_microbatches(self, samples: int) -> int:
        return -(-self.problem.global_batch_size // samples)

    def busy_s(self, device: Device, start: int, stop: int, samples: int) -> float:
        """Return the seconds of forward and backward of one microbatch."""
        return sum(self.prices.pass_s(device, start, stop, samples))

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
        return self._stages.optimizer_s(device, start, stop)

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
        """Return `StageNeeds.cap`."""
        return self._stages.cap(device, start, stop, samples, recompute)

    def stage_bytes(
        self, device: Device, start: int, stop: int, samples: int, *, recompute: bool
    ) -> StageBytes:
        """Return `StageNeeds.of` on the device's kind."""
        return self._stages.of(device.kind, start, stop, samples, recompute=recompute)

    def gradient_bytes(self, device: Device, start: int, stop: int, samples: int) -> float:
        """Return the bytes of a gradient that waits for the stage before; 0 where none goes there."""
        return self.stage_bytes(device, start, stop, samples, recompute=False).gradient

    def segment_layers(self, shape: StageShape, kind: str) -> int:
        """Return the `segment_layers` with which recompute of a stage on a kind needs least memory."""
        return self._stages.segment_layers(shape, kind)

    def message_s(
        self, source: Device, destination: Device, layer: int, samples: int
    ) -> tuple[float, float, float, float]:
        """Return (forward, backward, latency forward, latency backward) of the link in front of a layer.

        Forward and backward are the seconds for which one microbatch's message occupies its direction; within
        a device it takes none, nor backward where nothing before it is trained.
        """
        key = (self.channel(source, destination), layer, samples)
        found = self._messages.get(key)
        if found is None:
            found = self._messages[key] = self._find_message_s(source, destination, layer, samples)
        return found

    def channel(self, source: Device, destination: Device) -> int:
        """Return a number that pairs of devices share whose messages take as long both ways; 0 in a device.

        Links are those of two nodes, or of two kinds where they were measured.
        """
        if source.name == destination.name:
            return 0
        key = (source.node, source.kind, destination.node, destination.kind)
        found = self._channels.get(key)
        if found is None:
            route = self.network.route
            links = route(source.name, destination.name).link, route(destination.name, source.name).link
            alike = (*links, source.kind, destination.kind)
            found = self._channels[key] = self._numbers.setdefault(alike, len(self._numbers) + 1)
        return found

    def _find_message_s(
        self, source: Device, destination: Device, layer: int, samples: int
    ) -> tuple[float, float, float, float]:
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
