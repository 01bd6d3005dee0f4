"""The parts that a rank runs with: its layers, its device, and the executor around them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

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
from hetpipe.runtime import accelerators
from hetpipe.runtime.bucket_parameters import absent_names, counted_names, owned_parts, parted_names
from hetpipe.runtime.cuda_events import GpuPace
from hetpipe.runtime.emulated_links import Board
from hetpipe.runtime.executor import Boundaries, Executor
from hetpipe.runtime.gpus import before_cuda, gpu_index
from hetpipe.runtime.gradient_sync import GradientSync
from hetpipe.runtime.host_activations import activations_on_host
from hetpipe.runtime.host_staging import Staging
from hetpipe.runtime.host_states import NOTHING, Offloaded
from hetpipe.runtime.host_weights import HostWeights, check_fetched, names_on_host
from hetpipe.runtime.layer_sync import LayerSync
from hetpipe.runtime.message_times import MessageTimes
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import EmulatedPace, Pace, slowdown_of
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from hetpipe.runtime.torch_optimizer import TorchOptimizer
from hetpipe.runtime.transport import DistributedTransport, TensorShape
from hetpipe.runtime.unreached import Unreached
from partition.plan import OPTIMIZER_STEP, Plan


@dataclass(frozen=True, slots=True)
class RankLayers:
    """The layers of a rank, in train mode on its device.

    trained: their parameters that the loss reaches, by name; unreached: those that are not frozen, and that
    it was not seen to reach, behind the first that are trained; counted: names of those that count in this
    rank's norm; stepped: those that it updates, fewer where optimizer states are sharded, and parts of those
    of which it owns a range (`bucket_parameters.Part`). offloaded: those whose states the host keeps.
    host_weights: what brings frozen weights from there. travels: dtype of the floating tensors between
    layers.
    """

    chain: ChainModel
    model: LayerModel
    place: torch.device
    travels: torch.dtype
    trained: dict[str, nn.Parameter]
    counted: set[str]
    stepped: dict[str, nn.Parameter]
    offloaded: Offloaded = NOTHING
    host_weights: HostWeights | None = None
    unreached: Mapping[str, nn.Parameter] = field(default_factory=dict)

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
        *,
        compiled: bool = False,
    ) -> "RankLayers":
        """Materialise the layers of a rank.

        lowered: what autocast computes in, None for no autocast. compiled: whether blocks are compiled.

        Raises: InputError if the model trains layers of which the program has no backward.
        """
        if chain.first_trained < program.first_trained:
            first = chain.first_trained
            raise InputError(
                f"layer {first} ({chain.layer_names[first]!r}) is trained, and the program has backwards "
                f"from layer {program.first_trained} on: less is frozen than was profiled; profile it again"
            )
        layers = program.plan.layers_of(program.device_names[rank])
        counted = counted_names(program, rank, chain)
        absent = absent_names(program, rank, chain)
        away = names_on_host(program.plan, program.device_names[rank], chain)
        model = chain.materialise(
            layers, seed, dtype, place, lowered, compiled=compiled, absent=absent,
            on_host={name for names in away.values() for name in names},
        )  # fmt: skip
        check_fetched(model, away, chain.layer_names)
        model.train()
        reached = {info.name for layer in layers for info in chain.parameters(layer) if info.reached}
        for name, value in model.owned_parameters().items():
            value.requires_grad_(name in reached)
        trained = {name: value for name, value in model.owned_parameters().items() if name in reached}
        watched = {
            info.name
            for layer in layers
            if layer >= chain.first_trained
            for info in chain.parameters(layer)
            if info.unreached
        }
        unreached = {name: value for name, value in model.owned_parameters().items() if name in watched}
        sharded = program.plan.state_owners is not None
        stepped = {name: value for name, value in trained.items() if name in counted or not sharded}
        stepped |= owned_parts(program, rank, chain, trained)
        model.absent |= parted_names(program, rank, chain)
        offloaded = offloaded_names(program.plan, program.device_names[rank], chain, stepped)
        weights = HostWeights(model, away, place) if away else None
        return cls(
            chain, model, place, lowered or dtype, trained, counted, stepped, offloaded, weights, unreached
        )


def offloaded_names(plan: Plan, device: str, chain: ChainModel, stepped: Collection[str]) -> Offloaded:
    """Return the parameters whose states the host keeps; a shared one is its first layer's."""
    home: dict[str, int] = {}
    for layer in plan.layers_of(device):
        for info in chain.parameters(layer):
            home.setdefault(info.name, layer)
    layers = plan.offloaded_layers(device)
    names = tuple(name for name, layer in home.items() if layer in layers and name in stepped)
    return Offloaded(names, bool(plan.offloaded_layers(device, OPTIMIZER_STEP)))


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
    times: MessageTimes | None = None,
) -> Executor:
    """Return the executor of a rank's list; on all ranks together, since it opens their channels."""
    program = costs.program
    staging = Staging.of(costs.devices)
    wide = layers.travels if layers.model.lowered is None else torch.float32
    dropout = KeyedDropout(seed, layers.place)
    dropout.traces = layers.model.compiles
    wires = [lowered_dtype(dtype) or wide for dtype in costs.dtypes]
    stages = StageRunner(program, layers.model, dropout, loss, wires)
    if layers.host_weights is not None:
        stages.saving = layers.host_weights.saving
    stages.on_host = activations_on_host(
        program, rank, layers.model, layers.chain.layer_names, layers.place, layers.host_weights
    )
    return Executor(
        costs,
        rank,
        stages=stages,
        transport=DistributedTransport(program, rank, layers.place, timeout_s, staging, times),
        sync=sync_of(program)(
            program, rank, layers.chain, layers.trained | layers.stepped, timeout_s, staging
        ),
        optimizer=optimizer,
        boundaries=boundaries_of(layers.chain, layers.travels),
        wires=wires,
        pace=pace,
        board=board,
        unreached=Unreached(layers.unreached),
    )


def sync_of(program: Program) -> type[GradientSync] | type[LayerSync]:
    """Return what sums the gradients of a program."""
    return LayerSync if program.plan.sharding.by_layer else GradientSync


Samples = tuple[Mapping[str, Tensor], Tensor]
"""Inputs by name, and labels, each [samples, ...]."""


def first_samples(plan: Plan) -> list[int]:
    """Return the first sample of a step that each pipeline takes: consecutive blocks, in their order."""
    return [0, *accumulate(pipeline.num_samples for pipeline in plan.pipelines)][:-1]


def microbatches(
    program: Program, step: int, samples: Mapping[int, Samples], weight: float
) -> Callable[[int, int], Microbatch]:
    """Return a function from (pipeline, microbatch) to its data; samples: by pipeline, each its own."""
    firsts = first_samples(program.plan)

    def microbatch(pipeline: int, index: int) -> Microbatch:
        shape = program.plan.pipelines[pipeline]
        start = index * shape.microbatch_size
        stop = start + shape.microbatch_samples(index)
        inputs, labels = samples[pipeline]
        places = tuple(range(firsts[pipeline] + start, firsts[pipeline] + stop))
        chosen = {name: value[start:stop] for name, value in inputs.items()}
        return Microbatch(step, places, chosen, labels[start:stop], weight)

    return microbatch


def slices(
    program: Program, step: int, inputs: Mapping[str, Tensor], labels: Tensor, weight: float
) -> Callable[[int, int], Microbatch]:
    """Return the same for the samples of a whole step."""
    cut: dict[int, Samples] = {}
    for index, first in enumerate(first_samples(program.plan)):
        mine = slice(first, first + program.plan.pipelines[index].num_samples)
        cut[index] = {name: value[mine] for name, value in inputs.items()}, labels[mine]
    return microbatches(program, step, cut, weight)


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
    vendor, index = accelerators.vendor_here(), gpu_index(device)
    if vendor is None or index >= len(accelerators.names_here()):
        raise InputError(f"device {device.name!r} is a {device.kind}, and this host has no GPU {index}")
    place = torch.device(vendor.device_type, index)
    accelerators.use(place)
    return place


def pace_of(device: Device, clock: Clock, place: torch.device) -> Pace:
    """Return the pace at which operations start and end on a device."""
    if is_emulated(device.kind):
        cpu_speed = device.speed if clock is Clock.CPU else None
        return EmulatedPace(cpu_speed, slowdown_of(device.name))
    return GpuPace(partial(accelerators.new_event, place)) if accelerators.has_events(place) else Pace()
