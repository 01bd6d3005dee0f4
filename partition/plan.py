"""The plan: pipelines of stages, who holds which layers and who gets how many samples."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pydantic import ConfigDict

from cost_model.dtypes import (
    FLOAT32,
    check_gradient_dtype,
    gradient_share,
)
from cost_model.errors import InputError
from cost_model.memory import segments
from cost_model.sharding import OwnerRange, Sharding, check_levels, check_owners, check_ranges, owned_shares
from cost_model.strict_files import STRICT, canonical_sha256

FORMAT = "hetpipe.plan/1"
OPTIMIZER_STATES = "optimizer states"
FROZEN_WEIGHTS = "frozen weights"
SAVED_ACTIVATIONS = "saved activations"
OPTIMIZER_STEP = "optimizer step"
OFFLOADS = (OPTIMIZER_STATES, FROZEN_WEIGHTS, SAVED_ACTIVATIONS, OPTIMIZER_STEP)
"""What of a stage its device's host may keep in its memory, and do: the step of states that it keeps."""
MOST_SAMPLES = 2**20
"""The most samples of a pipeline in a step: beyond it a slip of the pen is likelier than a plan."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers [start, stop) on a device; devices holds one name (several: a later tensor-parallel group).

    in_flight: microbatches from the start of their forward to the end of their backward here; a stage that
    has no backward has all of a step, as outputs that wait.
    recompute: keep stage inputs only, run the forward again before the backward.
    segment_layers: with recompute, keep the input of every so many layers (a power of two), and run the
    forward of so many again at once; 0: of the whole stage.
    offload: what of it is kept in the host's memory and moved to the device where it is needed (`OFFLOADS`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    devices: tuple[str, ...]
    layers: tuple[int, int]
    in_flight: int
    recompute: bool = False
    segment_layers: int = 0
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.devices) != 1:
            raise InputError(f"a stage names {len(self.devices)} devices; give one (groups come later)")
        if not 0 <= self.start < self.stop:
            raise InputError(
                f"layers {list(self.layers)} are not a range [start, stop) of at least one layer"
            )
        if self.in_flight < 1:
            raise InputError(f"in_flight is {self.in_flight}; give at least 1")
        if self.segment_layers and not self.recompute:
            raise InputError(
                f"segment_layers is {self.segment_layers} and recompute is false; set recompute true, or "
                "leave segment_layers out"
            )
        if self.segment_layers < 0 or self.segment_layers.bit_count() > 1:
            raise InputError(
                f"segment_layers is {self.segment_layers}; give 1, 2, 4, 8 or another power of two, or leave "
                "it out for the whole stage"
            )
        for word in self.offload:
            if word not in OFFLOADS:
                raise InputError(f"offload names {word!r}; known: {', '.join(OFFLOADS)}")
        if len(set(self.offload)) < len(self.offload):
            raise InputError(f"offload is {list(self.offload)}; name each once")
        if self.recompute and SAVED_ACTIVATIONS in self.offload:
            raise InputError(
                f"layers {list(self.layers)} are recomputed, and their saved activations are to be on the "
                "host; nothing is saved then: choose one"
            )

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def start(self) -> int:
        return self.layers[0]

    @property
    def stop(self) -> int:
        return self.layers[1]

    @property
    def num_layers(self) -> int:
        return self.stop - self.start

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The layers [start, stop) whose forward is run again at once, with recompute."""
        return segments(self.start, self.stop, self.segment_layers)

    def to_json(self) -> dict[str, Any]:
        """Return the stage as in plan.json; segment_layers and offload only where they say something."""
        silent = {"segment_layers": 0, "offload": ()}
        return {
            key: value for key, value in dataclasses.asdict(self).items() if value != silent.get(key, ...)
        }


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All layers, cut into stages, for num_samples samples of each step (HetPipe: a virtual worker).

    The last microbatch is smaller where microbatch_size does not divide num_samples.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    microbatch_size: int
    num_samples: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if self.microbatch_size < 1 or self.num_samples < 1 or not self.stages:
            raise InputError(
                f"a pipeline has {len(self.stages)} stages, microbatch_size {self.microbatch_size} and "
                f"num_samples {self.num_samples}; each must be at least 1"
            )
        if max(self.microbatch_size, self.num_samples) > MOST_SAMPLES:
            raise InputError(
                f"a pipeline has {self.num_samples} samples in microbatches of {self.microbatch_size}; "
                f"give at most {MOST_SAMPLES:,}"
            )
        stop = 0
        for index, stage in enumerate(self.stages):
            if stage.start != stop:
                raise InputError(
                    f"stages[{index}].layers starts at {stage.start}, the stage before it stops at {stop}; "
                    "stages must cover all layers in order"
                )
            stop = stage.stop
        flights = [min(stage.in_flight, self.num_microbatches) for stage in self.stages]
        for index in range(1, len(flights)):
            if flights[index] > flights[index - 1]:
                raise InputError(
                    f"in_flight rises from {flights[index - 1]} to {flights[index]} at stages[{index}]; that "
                    "deadlocks under 1F1B, it may never rise along a pipeline"
                )

    @property
    def num_microbatches(self) -> int:
        return -(-self.num_samples // self.microbatch_size)

    def microbatch_samples(self, microbatch: int) -> int:
        """Return the samples of one microbatch; the last may be smaller."""
        return min(self.microbatch_size, self.num_samples - microbatch * self.microbatch_size)

    def in_flight(self, stage: int) -> int:
        """Return the in_flight of a stage, clamped to the number of microbatches."""
        return min(self.stages[stage].in_flight, self.num_microbatches)

    def first_backward(self, first_trained: int) -> int:
        """Return the first stage with a backward: that of the first layer of the model that is trained."""
        return next(index for index, stage in enumerate(self.stages) if stage.stop > first_trained)


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What one device is expected to do in a step; busy in [0, 1] is its share of the makespan."""

    memory_bytes: float
    busy: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures derived from a plan, never an input.

    bound_s: no plan of bound_space is faster under this cost model; gap = step_s / bound_s - 1.
    bound_without: nodes and devices of the cluster that the plans of bound_space do not use.
    bubble: idle share of the makespan over the devices used, in [0, 1].
    """

    step_s: float
    samples_per_s: float
    bubble: float
    devices: Mapping[str, DeviceFigures]
    bound_s: float | None = None
    bound_space: str | None = None
    fractional_bound_s: float | None = None
    bound_without: tuple[str, ...] = ()

    @property
    def gap(self) -> float | None:
        return self.step_s / self.bound_s - 1 if self.bound_s else None

    def to_json(self) -> dict[str, Any]:
        rate = self.samples_per_s if self.step_s > 0 else None  # JSON has no infinity
        return {**dataclasses.asdict(self), "samples_per_s": rate, "gap": self.gap}


@dataclass(frozen=True)  # no slots: who holds what is looked up once, plans have thousands of devices
class Plan:
    """An assignment of layers and samples to devices; predicted figures where they are known.

    A device may appear in several pipelines, and at several stages of one; it holds the union of its layers
    once.

    zero: which of a layer's states, gradients and weights are on one device only (`sharding`). state_owners:
    that device by layer; None leaves it open (`partition.estimates.optimizer_sharding`), and then memory
    counts them on all. owner_ranges: of layers that several devices own, each a range; state_owners has that
    of the first.
    layer_zero: the same by layer, from 1 to zero; None where it is zero for all.
    gradient_dtype: in which gradients travel where devices sum them (`GRADIENT_DTYPES`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    strategy: str
    model: str
    global_batch_size: int
    pipelines: tuple[Pipeline, ...]
    zero: int = 0
    state_owners: tuple[str, ...] | None = None
    gradient_dtype: str = FLOAT32
    layer_zero: tuple[int, ...] | None = None
    predicted: Figures | None = None
    profile_sha256: str | None = None
    cluster_sha256: str | None = None
    owner_ranges: tuple[OwnerRange, ...] = ()

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise InputError("the plan has no pipelines; give at least one")
        total = sum(pipeline.num_samples for pipeline in self.pipelines)
        if total != self.global_batch_size:
            raise InputError(
                f"num_samples of the pipelines add up to {total}, global_batch_size is "
                f"{self.global_batch_size}; each sample needs a pipeline"
            )
        if len({pipeline.stages[-1].stop for pipeline in self.pipelines}) > 1:
            raise InputError("the pipelines stop at different layers; each must cover them all")
        check_gradient_dtype(self.gradient_dtype)
        if self.zero not in list(Sharding):
            raise InputError(f"zero is {self.zero}; 0, 1, 2 and 3 are known")
        if self.layer_zero is not None:
            check_levels(self.layer_zero, self.zero, self.num_layers)
        if self.sharding.by_layer:
            self._check_by_layer()
        if self.state_owners is not None:
            check_owners(self.state_owners, self.zero, self.num_layers, self.layers_of)
        if self.owner_ranges:
            check_ranges(self.owner_ranges, self.state_owners, self.layers_of, offloads=self.offloads)

    def _check_by_layer(self) -> None:
        """Check what a step needs that goes layer by layer, in the same order on all devices of a layer."""
        what = f"zero is {self.zero}"
        if self.offloads:
            raise InputError(
                f"{what}, and a stage has offload; hosts keep something beside zero 0 and 1: choose one"
            )
        shared = next((name for name, places in self.places.items() if len(places) > 1), None)
        if shared is not None:
            raise InputError(
                f"{what}, and device {shared!r} serves {len(self.places[shared])} stages; gradients and "
                "weights are sharded where each device serves one: give zero 1, or a stage for each device"
            )
        if self.gradient_dtype != FLOAT32:
            raise InputError(
                f"{what}, and gradient_dtype is {self.gradient_dtype!r}; gradients that are summed in each "
                "microbatch would be rounded each time: give zero 1, or leave gradient_dtype out"
            )
        for pipeline in self.pipelines:
            for stage in pipeline.stages:
                if stage.recompute and any(stop - start > 1 for start, stop in stage.segments):
                    raise InputError(
                        f"{what}, and layers {list(stage.layers)} of {stage.device!r} are recomputed several "
                        "at once; a step goes layer by layer then: give segment_layers 1"
                    )

    @property
    def num_layers(self) -> int:
        return self.pipelines[0].stages[-1].stop

    @property
    def sharding(self) -> Sharding:
        """What of a layer only its owner keeps."""
        return Sharding(self.zero)

    @cached_property
    def breadth_first(self) -> bool:
        """Whether the microbatches in flight pass each layer together, with one fetch and sum for all.

        So it is where a step goes layer by layer, and no pipeline has more than one stage.
        """
        return self.sharding.by_layer and all(len(pipeline.stages) == 1 for pipeline in self.pipelines)

    def sharding_of(self, layer: int) -> Sharding:
        """Return what of one layer only its owner keeps."""
        return Sharding(self.zero if self.layer_zero is None else self.layer_zero[layer])

    @cached_property
    def fetches_apart(self) -> bool:
        """Whether each device fetches weights for itself; else all of a layer do together, in one order."""
        return self.sharding is Sharding.WEIGHTS and any(len(each.stages) > 1 for each in self.pipelines)

    @property
    def gradient_share(self) -> float:
        """Bytes of gradients that travel over those that are made, in [0, 1]."""
        return gradient_share(self.gradient_dtype)

    @cached_property
    def places(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """The stages (pipeline, stage) of each device in use, devices in order of first appearance."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, pipeline in enumerate(self.pipelines):
            for index, stage in enumerate(pipeline.stages):
                found.setdefault(stage.device, []).append((number, index))
        return {name: tuple(stages) for name, stages in found.items()}

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """The devices in use, in order of first appearance; rank r of a run is the r-th of them."""
        return tuple(self.places)

    @cached_property
    def _held(self) -> Mapping[str, tuple[int, ...]]:
        held: dict[str, set[int]] = {}
        for stage in (stage for pipeline in self.pipelines for stage in pipeline.stages):
            held.setdefault(stage.device, set()).update(range(*stage.layers))
        return {name: tuple(sorted(layers)) for name, layers in held.items()}

    @cached_property
    def num_holders(self) -> tuple[int, ...]:
        """The number of devices that hold each layer."""
        counts = Counter(layer for layers in self._held.values() for layer in layers)
        return tuple(counts[layer] for layer in range(self.num_layers))

    def owned_shares(self, device: str) -> Mapping[int, float]:
        """Return how much of each layer's states a device owns, in (0, 1]; all that it holds if all do."""
        if self.state_owners is None:
            return dict.fromkeys(self.layers_of(device), 1.0)
        return owned_shares(device, self.state_owners, self.owner_ranges)

    @cached_property
    def _offloaded(self) -> Mapping[tuple[str, str], frozenset[int]]:
        found: dict[tuple[str, str], set[int]] = {}
        for stage in (stage for pipeline in self.pipelines for stage in pipeline.stages):
            for word in stage.offload:
                found.setdefault((word, stage.device), set()).update(range(*stage.layers))
        return {key: frozenset(layers) for key, layers in found.items()}

    @property
    def offloads(self) -> bool:
        """Whether any device keeps something in its host's memory."""
        return bool(self._offloaded)

    def offloaded_layers(self, device: str, what: str = OPTIMIZER_STATES) -> frozenset[int]:
        """Return the layers of which a device keeps one of `OFFLOADS` in its host's memory, if it has it.

        A layer in several of its stages is one of them if any of these says so.
        """
        return self._offloaded.get((what, device), frozenset())

    def layers_of(self, device: str) -> tuple[int, ...]:
        """Return the union of the layers that a device holds, rising."""
        return self._held.get(device, ())

    def to_json(self) -> dict[str, Any]:
        """Return the plan as in plan.json; derived figures only where they are known."""
        known = {
            "state_owners": self.state_owners,
            "owner_ranges": list(map(dataclasses.asdict, self.owner_ranges)) or None,
            "layer_zero": self.layer_zero,
            "gradient_dtype": None if self.gradient_dtype == FLOAT32 else self.gradient_dtype,
            "predicted": self.predicted and self.predicted.to_json(),
            "profile_sha256": self.profile_sha256,
            "cluster_sha256": self.cluster_sha256,
        }
        return {
            "format": FORMAT,
            "strategy": self.strategy,
            "model": self.model,
            "global_batch_size": self.global_batch_size,
            "zero": self.zero,
            "pipelines": [
                {**dataclasses.asdict(pipeline), "stages": [stage.to_json() for stage in pipeline.stages]}
                for pipeline in self.pipelines
            ],
            **{key: value for key, value in known.items() if value is not None},
        }

    @property
    def sha256(self) -> str:
        """The hash of what the plan decides; derived figures do not count."""
        derived = ("predicted", "profile_sha256", "cluster_sha256")
        return canonical_sha256({key: value for key, value in self.to_json().items() if key not in derived})
