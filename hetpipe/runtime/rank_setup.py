"""The parts that a rank runs with: its layers, its device, and the executor around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cost_model.cluster import Device, is_emulated
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.loss import Loss
from hetpipe.models.mixed_precision import lowered_dtype, weight_dtype
from hetpipe.models.partial_model import LayerModel
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Program
from hetpipe.runs.settings import Clock
from hetpipe.runtime.cuda_events import GpuPace
from hetpipe.runtime.emulated_links import Board
from hetpipe.runtime.executor import Boundaries, Executor
from hetpipe.runtime.gpus import before_cuda, gpu_index
from hetpipe.runtime.gradient_sync import GradientSync, counted_names
from hetpipe.runtime.host_staging import Staging
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import EmulatedPace, Pace
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from hetpipe.runtime.torch_optimizer import TorchOptimizer
from hetpipe.runtime.transport import DistributedTransport, TensorShape


@dataclass(frozen=True, slots=True)
class RankLayers:
    """The layers of a rank, in train mode on its device.

    trained: their parameters that the loss reaches, by name; counted: names of those that count in this
    rank's norm; stepped: those that it updates, fewer where optimizer states are sharded. travels: dtype of
    the floating tensors between layers.
    """

    chain: ChainModel
    model: LayerModel
    place: torch.device
    travels: torch.dtype
    trained: dict[str, nn.Parameter]
    counted: set[str]
    stepped: dict[str, nn.Parameter]

    @classmethod
    def of(
        cls,
        program: Program,
        rank: int,
        chain: ChainModel,
        seed: int,
        place: torch.device,
        dtype: torch.dtype,
        lowered: torch.dtype | None,
    ) -> "RankLayers":
        """Materialise the layers of a rank.

        lowered: what autocast computes in, None for no autocast.

        Raises: InputError if the model trains layers of which the program has no backward.
        """
        if chain.first_trained < program.first_trained:
            first = chain.first_trained
            raise InputError(
                f"layer {first} ({chain.layer_names[first]!r}) is trained, and the program has backwards "
                f"from layer {program.first_trained} on: less is frozen than was profiled; profile it again"
            )
        layers = program.plan.layers_of(program.device_names[rank])
        model = chain.materialise(layers, seed, dtype, place, lowered)
        model.train()
        reached = {info.name for layer in layers for info in chain.parameters(layer) if info.reached}
        for name, value in model.owned_parameters().items():
            value.requires_grad_(name in reached)
        trained = {name: value for name, value in model.owned_parameters().items() if name in reached}
        counted = counted_names(program, rank, chain)
        sharded = program.plan.state_owners is not None
        stepped = {name: value for name, value in trained.items() if name in counted or not sharded}
        return cls(chain, model, place, lowered or dtype, trained, counted, stepped)


def check_weights(profile: ModelProfile, chain: ChainModel) -> None:
    """Check that the weights of a model at hand take no more, in the dtype of each kind, than was profiled.

    Raises: InputError if they do.
    """
    for kind, dtype in profile.dtypes.items():
        held = chain.weight_bytes(weight_dtype(dtype), lowered_dtype(dtype))
        stored, trained = zip(*((layer.stored, layer.trained) for layer in held), strict=True)
        _check_held(profile.on(kind), stored, trained)


def _check_held(profile: ModelProfile, stored_bytes: Sequence[float], trained_bytes: Sequence[float]) -> None:
    """Check that the weights of a model at hand take no more than was profiled, by layer.

    Of a layer without num_parameters, written by hand, the widths may be others: only what cannot come
    from these is refused.

    Raises: InputError if they do: weights, gradients or states would find no memory planned.
    """
    for layer, stored, trained in zip(profile.layers, stored_bytes, trained_bytes, strict=True):
        is_measured = layer.num_parameters is not None
        more_trained = trained > layer.trained_bytes + 0.5  # less than a byte is rounding
        if more_trained and (is_measured or layer.unreached_bytes > stored - trained + 0.5):
            raise InputError(
                f"layer {layer.name!r} of the profile of {profile.model!r} trains "
                f"{layer.trained_bytes:,.0f} bytes, of the model {trained:,.0f}: less of it is frozen "
                "now; profile it again"
            )
        if stored > layer.parameter_bytes + 0.5 and (is_measured or not more_trained):
            raise InputError(
                f"layer {layer.name!r} of the profile of {profile.model!r} holds "
                f"{layer.parameter_bytes:,.0f} bytes of weights, of the model {stored:,.0f}: they are in "
                "another dtype now; profile it again"
            )


def executor_of(
    costs: ProgramCosts,
    rank: int,
    layers: RankLayers,
    loss: Loss,
    optimizer: Optimizer | TorchOptimizer,
    *,
    seed: int,
    pace: Pace,
    timeout_s: float,
    board: Board | None,
) -> Executor:
    """Return the executor of a rank's list; on all ranks together, since it opens their channels."""
    program = costs.program
    staging = Staging.of(costs.devices)
    wide = layers.travels if layers.model.lowered is None else torch.float32
    wires = [lowered_dtype(dtype) or wide for dtype in costs.dtypes]
    return Executor(
        costs,
        rank,
        stages=StageRunner(program, layers.model, KeyedDropout(seed, layers.place), loss, wires),
        transport=DistributedTransport(program, rank, layers.place, timeout_s, staging),
        sync=GradientSync(program, rank, layers.chain, layers.trained, timeout_s, staging),
        optimizer=optimizer,
        boundaries=boundaries_of(layers.chain, layers.travels),
        wires=wires,
        pace=pace,
        board=board,
    )


def slices(
    program: Program, step: int, inputs: Any, labels: Tensor, weight: float
) -> Callable[[int, int], Microbatch]:
    """Return a function from a microbatch to its samples: consecutive blocks, in the order of the plan."""
    pipelines = program.plan.pipelines
    offsets = [sum(pipeline.num_samples for pipeline in pipelines[:index]) for index in range(len(pipelines))]

    def microbatch(pipeline: int, index: int) -> Microbatch:
        start = offsets[pipeline] + index * pipelines[pipeline].microbatch_size
        stop = start + pipelines[pipeline].microbatch_samples(index)
        chosen = {name: value[start:stop] for name, value in inputs.items()}
        return Microbatch(step, tuple(range(start, stop)), chosen, labels[start:stop], weight)

    return microbatch


def boundaries_of(chain: ChainModel, dtype: torch.dtype) -> Boundaries:
    """Return what travels between the layers of a chain whose floating tensors are of a dtype."""

    def boundaries(layer: int, microbatch: Microbatch) -> tuple[TensorShape, ...]:
        return tuple(
            TensorShape(
                (len(microbatch.samples), *spec.shape_per_sample),
                dtype if spec.dtype.is_floating_point else spec.dtype,
            )
            for spec in chain.boundary_for(layer, microbatch.inputs)
        )

    return boundaries


def torch_device(device: Device) -> torch.device:
    """Return the GPU with the device's index on its node; the CPU for emulated and CPU devices."""
    if not device.is_gpu:
        return torch.device("cpu")
    before_cuda()
    place = torch.device("cuda", gpu_index(device))
    if not torch.cuda.is_available() or place.index >= torch.cuda.device_count():
        raise InputError(f"device {device.name!r} is a {device.kind}, and this host has no GPU {place.index}")
    torch.cuda.set_device(place)
    return place


def pace_of(device: Device, clock: Clock, place: torch.device) -> Pace:
    """Return the pace at which operations start and end on a device."""
    if is_emulated(device.kind):
        return EmulatedPace(device.speed if clock is Clock.CPU else None)
    return GpuPace() if place.type == "cuda" else Pace()
