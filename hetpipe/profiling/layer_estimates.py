"""The profile of a model for devices that are not at hand: bytes counted without room, times by the roofline.

A model of 70 billion weights is run layer by layer on tensors that have shapes and no memory (torch's
FakeTensorMode), and its bytes are counted there as on a device that is measured. The seconds are those of
`cost_model.roofline` itself, where `estimate_kind` scales measured ones: known in proportion between devices
better than in themselves.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cost_model.catalogue import Accelerator, accelerator
from cost_model.dtypes import check_estimable, multiplied_in
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from cost_model.roofline import FITTED, Work
from hetpipe.data.task import TrainingTask, check_length
from hetpipe.models.adapters import task_spec
from hetpipe.models.block_structure import ParameterInfo
from hetpipe.models.chain import ChainModel
from hetpipe.models.frozen_weights import Use
from hetpipe.models.huggingface import ModelSpec
from hetpipe.models.loss import loss_sum
from hetpipe.models.mixed_precision import kept_casts, lowered_dtype, weight_dtype
from hetpipe.profiling.layer_profiler import as_configured, groups_of_alike, layer_profile
from hetpipe.profiling.layer_timer import Bench, Samples
from hetpipe.runs.settings import TaskSettings

SIZES = (1, 2, 4)
STEPPED_PASSES = 8
"""Times that a byte of a trained weight, or of what belongs to it, is read or written in a step by AdamW: the
gradient for its norm; weight, gradient and two states; weight and states written."""


def estimated_profile(
    settings: TaskSettings,
    kinds: Collection[str],
    sizes: Sequence[int] = SIZES,
    *,
    allow_slow: bool = False,
) -> ModelProfile:
    """Return a profile of which nothing was measured, and for which nothing is loaded.

    Weights that are not there yet count in the dtype that their configuration names.
    allow_slow: price kinds that have no units for the dtype at their float32 rate.

    Raises: InputError if a kind is not in the catalogue or has no units for the dtype, or there is no such
        model.
    """
    devices = {kind: accelerator(kind) for kind in kinds}
    check_estimable({} if allow_slow else dict.fromkeys(kinds, settings.dtype))
    spec = task_spec(settings)
    check_length(spec, settings.sequence_length)
    chain = _as_configured(ChainModel.from_spec(spec), spec)
    layers = _counted_layers(chain, spec, settings, sizes)
    works = [LayerWork.of(chain, index, layer, settings) for index, layer in enumerate(layers)]
    return ModelProfile(
        model=settings.model,
        sequence_length=settings.sequence_length,
        dtype=settings.dtype,
        loss_chunks=settings.loss_chunks,
        compiled=settings.compiled,
        layers=layers,
        optimizer_bytes_per_parameter_byte=settings.run.states_per_parameter,
        resident_states=settings.run.optimizer.resident_states,
        kinds={kind: _kind_profile(works, device, sizes) for kind, device in devices.items()},
    )


def _as_configured(chain: ChainModel, spec: ModelSpec) -> ChainModel:
    """Return the chain with frozen weights in the dtype of config.json, where the weights are yet to come."""
    if spec.folder is None or chain.weights is not None:
        return chain
    named = spec.folder.config.get("dtype") or spec.folder.config.get("torch_dtype")
    dtype = getattr(torch, str(named).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        return chain
    layers = (
        tuple(info if info.reached else replace(info, given=dtype) for info in infos)
        for infos in chain.layer_parameters
    )
    return replace(chain, layer_parameters=tuple(layers))


def _counted_layers(
    chain: ChainModel, spec: ModelSpec, settings: TaskSettings, sizes: Sequence[int]
) -> tuple[LayerProfile, ...]:
    """Return the layers with their bytes; of layers alike, two stand for all."""
    groups = groups_of_alike(chain)
    chosen = sorted({layer for group in groups for layer in (group[0], group[-1])})
    device, lowered = torch.device("cpu"), lowered_dtype(settings.dtype)
    chain.boundary(1, settings.sequence_length)  # found out with tensors that have values
    with FakeTensorMode(allow_non_fake_inputs=True), kept_casts():
        # a folder's weights are not read: they count by what is known of them, as if they were yet to come
        empty = replace(chain, weights=None)
        model = empty.materialise(chosen, settings.seed, weight_dtype(settings.dtype), device, lowered)
        model.train()
        task = contentless_task(chain, spec, settings.sequence_length)
        bench = Bench(task, settings, model, device, {layer: Samples() for layer in chosen})
        with as_configured(settings):
            for size in sizes:
                bench.count(size)
    by_layer = {layer: (group[0], group[-1]) for group in groups for layer in group}
    return tuple(layer_profile(bench, layer, by_layer[layer]) for layer in range(chain.num_layers))


def contentless_task(chain: ChainModel, spec: ModelSpec, sequence_length: int) -> TrainingTask:
    """Return a task whose samples have a length and no content."""

    def batch(_: int, num_samples: int) -> tuple[Mapping[str, Tensor], Tensor]:
        ids = torch.zeros(num_samples, sequence_length, dtype=torch.long)
        return spec.inputs.inputs(ids), spec.inputs.labels(ids, len(spec.labels))

    return TrainingTask(
        chain, partial(loss_sum, spec.task), batch, lambda count: count * sequence_length, predicts=spec.task
    )


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What a layer multiplies and moves for each sample.

    forward_flops, backward_flops: of a sample, attention included; no backward where nothing is trained at or
    below the layer.
    weight_bytes: of what is multiplied, as it is multiplied; frozen_bytes: those of it that have no gradient.
    cast_bytes: read and written in each pass to make that of what is held in other bytes, 4 bits included.
    """

    forward_flops: float
    backward_flops: float
    weight_bytes: float
    frozen_bytes: float
    cast_bytes: float
    activation_bytes: float
    dtype: str
    has_backward: bool

    @classmethod
    def of(cls, chain: ChainModel, layer: int, counted: LayerProfile, settings: TaskSettings) -> "LayerWork":
        """Return the work of a layer: each weight multiplies each token; a trained one's gradient again.

        Attention adds its own (`AttentionCounter`); scores that it keeps are among the bytes of activations.
        With a loss in chunks the backward of the last layer projects once more.
        """
        weights = [info for info in chain.parameters(layer) if Use.MULTIPLIED in info.uses]
        trained = [info for info in weights if info.reached]
        token_flops = 2.0 * settings.sequence_length
        dtype, lowered = weight_dtype(settings.dtype), lowered_dtype(settings.dtype)
        width = (lowered or dtype).itemsize
        again = settings.loss_chunks is not None and layer == chain.num_layers - 1
        cast = [
            info
            for info in weights
            if not info.reached
            and (info.packing is not None or info.kept_dtype(dtype, lowered).itemsize != width)
        ]
        return cls(
            forward_flops=token_flops * _count(weights) + counted.attention_flops_per_sample,
            backward_flops=token_flops * (_count(weights) * (1 + again) + _count(trained))
            + counted.attention_backward_flops_per_sample,
            weight_bytes=float(width * _count(weights)),
            frozen_bytes=float(width * (_count(weights) - _count(trained))),
            cast_bytes=float(sum(info.kept_bytes(dtype, lowered) for info in cast) + width * _count(cast)),
            activation_bytes=counted.saved_bytes_per_sample + counted.output_bytes_per_sample,
            dtype=multiplied_in(settings.dtype),
            has_backward=layer >= chain.first_trained,
        )

    def seconds(self, samples: int, device: Accelerator, *, backward: bool) -> float:
        """Return the seconds of a forward or backward of so many samples."""
        if backward and not self.has_backward:
            return 0.0
        work = Work(
            flops=samples * (self.backward_flops if backward else self.forward_flops),
            weight_bytes=self.weight_bytes,
            activation_bytes=(2 if backward else 1) * samples * self.activation_bytes + self.cast_bytes,
            dtype=self.dtype,
            backward=backward,
            frozen_bytes=self.frozen_bytes,
        )
        return FITTED.seconds(work, device)


def _count(infos: Collection[ParameterInfo]) -> int:
    return sum(math.prod(info.shape) for info in infos)


def _kind_profile(works: Sequence[LayerWork], device: Accelerator, sizes: Sequence[int]) -> KindProfile:
    known: dict[LayerWork, LayerTimes] = {}
    for work in works:
        if work not in known:
            known[work] = LayerTimes(
                *(
                    tuple(work.seconds(size, device, backward=backward) for size in sizes)
                    for backward in (False, True)
                )
            )
    bandwidth = device.memory_bandwidth_bytes_per_s * FITTED.bandwidth_efficiency
    return KindProfile(
        source="estimated",
        microbatch_sizes=tuple(sizes),
        layers=tuple(known[work] for work in works),
        optimizer_s_per_byte=STEPPED_PASSES / bandwidth,
    )
