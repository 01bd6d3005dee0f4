"""How many bytes a device needs."""

from collections.abc import Iterable
from dataclasses import dataclass

from cost_model.profile import ModelProfile


@dataclass(frozen=True, slots=True)
class StageShape:
    """What memory needs to know of one stage: layers [start, stop) and what is in flight there."""

    start: int
    stop: int
    in_flight: int
    microbatch_size: int
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device at its peak, term by term."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    saved_bytes: float
    boundary_bytes: float
    workspace_bytes: float

    @property
    def total_bytes(self) -> float:
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.saved_bytes
            + self.boundary_bytes
            + self.workspace_bytes
        )


def trained_bytes(profile: ModelProfile, layers: Iterable[int]) -> float:
    """Parameter bytes that have a gradient, of a set of layers on one device; a tied pair counts once."""
    return sum(_own_bytes(profile, set(layers), unreached=False))


def _own_bytes(profile: ModelProfile, layers: set[int], *, unreached: bool) -> Iterable[float]:
    for layer in layers:
        entry = profile.layers[layer]
        shared = profile.tied_bytes(layer) if profile.tied_home(layer) in layers - {layer} else 0.0
        yield entry.parameter_bytes - shared - (0.0 if unreached else entry.unreached_bytes)


def stage_activation_bytes(profile: ModelProfile, stage: StageShape) -> tuple[float, float]:
    """(saved, boundary) bytes of a stage with all its microbatches in flight (DESIGN section 5).

    Saved: in_flight microbatches of what autograd keeps; with recompute, in_flight stage inputs and one
    microbatch of the whole. Boundary: in_flight inputs and outputs.
    """
    samples = stage.microbatch_size
    saved = samples * sum(layer.saved_bytes_per_sample for layer in profile.layers[stage.start : stage.stop])
    input_bytes = samples * profile.layers[stage.start - 1].output_bytes_per_sample if stage.start else 0.0
    last = stage.stop == profile.num_layers
    output_bytes = 0.0 if last else samples * profile.layers[stage.stop - 1].output_bytes_per_sample
    boundary = stage.in_flight * (input_bytes + output_bytes)
    if stage.recompute:
        return stage.in_flight * input_bytes + saved, boundary
    return stage.in_flight * saved, boundary


def device_memory(profile: ModelProfile, stages: Iterable[StageShape]) -> DeviceMemory:
    """Bytes of a device that holds these stages: the union of their layers once, activations of each.

    The workspace is the largest of its layers, since one operation runs at a time.
    """
    stages = tuple(stages)
    layers = {layer for stage in stages for layer in range(stage.start, stage.stop)}
    trained = trained_bytes(profile, layers)
    activations = [stage_activation_bytes(profile, stage) for stage in stages]
    return DeviceMemory(
        parameter_bytes=sum(_own_bytes(profile, layers, unreached=True)),
        gradient_bytes=trained,
        optimizer_bytes=trained * profile.optimizer_bytes_per_parameter_byte,
        saved_bytes=sum(saved for saved, _ in activations),
        boundary_bytes=sum(boundary for _, boundary in activations),
        workspace_bytes=max((profile.layers[layer].workspace_bytes for layer in layers), default=0.0),
    )
