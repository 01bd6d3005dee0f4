"""The measurement of a model, layer by layer, on this host's devices."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from cost_model.cluster import Device
from cost_model.errors import InputError
from cost_model.layer_profile import LayerProfile
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.data.task import TaskFactory, TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import unusable
from hetpipe.models.huggingface_folder import CONFIG_FILE
from hetpipe.models.mixed_precision import kept_casts, lowered_dtype, set_products, weight_dtype
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.weight_bytes import WeightBytes
from hetpipe.profiling.host_rate import host_step_bytes_per_s
from hetpipe.profiling.layer_timer import Bench, Samples, boundary_bytes
from hetpipe.profiling.median_error import TARGET, precision_text
from hetpipe.runs.optimizers import OptimizerKind
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import TaskSettings
from hetpipe.runtime.accelerators import synchronize
from hetpipe.runtime.peer_errors import is_full
from hetpipe.runtime.processes import Emit
from hetpipe.runtime.rank_setup import torch_device
from hetpipe.runtime.torch_optimizer import optimizer_of

MIN_ROUNDS = 3
LARGEST_SIZE = 64
"""Where the search for the largest microbatch that fits ends."""


def profile_rank(
    folder: str,
    settings: TaskSettings,
    device: Device,
    microbatch_sizes: Sequence[int] | None,
    memory_bytes: float,
    budget_s: float,
    make_task: TaskFactory,
    *,
    rank: int,
    emit: Emit,
) -> None:
    """Profile the task of a run folder on a device, for its kind, and emit it as JSON data.

    Where hosts could step for it, how fast this one does is in it too.

    Each kind of device is measured by a rank of its own, one after the other.
    """
    task = make_task(RunFolder(Path(folder)), settings)

    def progress(done: float, what: str) -> None:
        emit({"event": "progress", "done": done, "what": f"{device.kind}: {what}"})

    profile = profile_task(
        task,
        settings,
        device.kind,
        microbatch_sizes,
        budget_s,
        device=torch_device(device),
        memory_bytes=memory_bytes,
        progress=progress,
    )
    if task.make_optimizer is None and settings.run.optimizer is OptimizerKind.ADAMW:
        rate = host_step_bytes_per_s(device.kind, weight_dtype(settings.dtype))
        times = replace(profile.kinds[device.kind], host_step_bytes_per_s=rate)
        profile = replace(profile, kinds={device.kind: times})
    emit({"event": "profile", "profile": profile.to_json()})


def profile_task(
    task: TrainingTask,
    settings: TaskSettings,
    kind: str,
    microbatch_sizes: Sequence[int] | None,
    budget_s: float,
    *,
    device: torch.device,
    memory_bytes: float = float("inf"),
    progress: Callable[[float, str], None] = lambda done, what: None,
) -> ModelProfile:
    """Measure forward and backward seconds, kept and temporary bytes of every layer on the device.

    Layers alike (same class, same parameter shapes) are measured on two of them and share the median.
    Rounds over all sizes go on until every median is known to `median_error.TARGET`, or the budget is spent;
    at least MIN_ROUNDS.

    microbatch_sizes: those of them that fit are measured; None: 1, 2, 4, ... and the largest that fits,
    LARGEST_SIZE at most. memory_bytes: what the activations of a microbatch may take at most.

    Raises: InputError if not even the smallest microbatch fits, or a layer's result would depend on the plan
    (`check_repeatable`).
    """
    chain = task.chain
    groups = groups_of_alike(chain)
    chosen = sorted({layer for group in groups for layer in (group[0], group[-1])})
    lowered = lowered_dtype(settings.dtype)
    set_products(settings.dtype, device)
    model = chain.materialise(
        chosen, settings.seed, weight_dtype(settings.dtype), device, lowered, compiled=settings.compiled
    )
    model.train()
    for layer in chosen:
        for info in chain.parameters(layer):
            model.parameters_of(layer)[info.name].requires_grad_(info.reached)
    bench = Bench(task, settings, model, device, {layer: Samples() for layer in chosen})
    begin = time.monotonic()
    by_group = [{group[0], group[-1]} for group in groups]
    with suppress(torch.OutOfMemoryError), as_configured(settings):  # the first is told below
        bench.check(min(microbatch_sizes or (1,)))
    with kept_casts():
        sizes = _fitting(bench, microbatch_sizes, memory_bytes, budget_s)
        error, where = _measure(bench, sizes, by_group, budget_s, progress, begin)
    optimizer_s_per_byte, states = _optimizer_costs(task, model, chosen, settings)
    progress(1.0, precision_text(error, where))
    by_layer = {layer: (group[0], group[-1]) for group in groups for layer in group}
    return ModelProfile(
        model=settings.model,
        sequence_length=settings.sequence_length,
        dtype=settings.dtype,
        loss_chunks=settings.loss_chunks,
        compiled=settings.compiled,
        layers=tuple(layer_profile(bench, layer, by_layer[layer]) for layer in range(chain.num_layers)),
        optimizer_bytes_per_parameter_byte=states,
        resident_states=settings.run.optimizer.resident_states,
        kinds={
            kind: KindProfile(
                source="measured",
                microbatch_sizes=tuple(sizes),
                layers=tuple(bench.times(by_layer[layer], sizes) for layer in range(chain.num_layers)),
                optimizer_s_per_byte=optimizer_s_per_byte,
                standard_error=error,
                standard_error_of=where or None,
            )
        },
    )


@contextmanager
def as_configured(settings: TaskSettings) -> Iterator[None]:
    """Refuse a folder's model whose own code fails when it is first run as its configuration says.

    Raises: InputError with what it says; what is no fault of the model, as want of memory, goes through.
    """
    try:
        yield
    except Exception as error:
        if settings.model_folder is None or isinstance(error, InputError) or is_full(error):
            raise
        where = Path(settings.model_folder) / CONFIG_FILE
        raise InputError(f"{where}: the model cannot be run so: {unusable(error)}") from error


def groups_of_alike(chain: ChainModel) -> list[list[int]]:
    """Return the layers, those together that cost the same."""
    groups: dict[object, list[int]] = {}
    blocks = {} if chain.structure is None else chain.structure.calls
    for layer in range(chain.num_layers):
        infos = tuple(replace(info, name="") for info in chain.parameters(layer))
        below = layer > chain.first_trained, layer < chain.first_trained  # what the backward comes to
        alike = (infos, below, chain.boundary(layer)) if layer in blocks else layer
        groups.setdefault(alike, []).append(layer)
    return list(groups.values())


def _measure(
    bench: Bench,
    sizes: list[int],
    groups: Sequence[Collection[int]],
    budget_s: float,
    progress: Callable[[float, str], None],
    begin: float,
) -> tuple[float, str]:
    """Time rounds over all sizes; return the worst relative standard error and where it is.

    A size that runs out of memory after all is taken out of `sizes`, and all larger ones with it.
    """
    rounds, look_at = 0, MIN_ROUNDS
    first = time.monotonic()
    while True:
        for size in tuple(sizes):
            try:
                bench.time(size)
            except torch.OutOfMemoryError as error:
                for larger in sizes[sizes.index(size) :]:
                    sizes.remove(larger)
                    bench.forget(larger)
                if not sizes:
                    raise InputError(_too_large(size, error)) from None
                break
        rounds += 1
        now = time.monotonic()
        spent = now - begin
        progress(min(1.0, spent / budget_s if budget_s else 1.0), f"round {rounds}")
        is_last = rounds >= MIN_ROUNDS and spent + (now - first) / rounds > budget_s
        if is_last or rounds >= look_at:
            error_and_where = bench.standard_error(groups, sizes)
            if is_last or error_and_where[0] < TARGET:
                return error_and_where
            look_at = rounds + max(1, rounds // 4)  # looking takes time too


def _fitting(bench: Bench, wanted: Sequence[int] | None, memory_bytes: float, budget_s: float) -> list[int]:
    """Return the sizes that run, rising, and count their bytes by the way.

    The smallest is not held against memory_bytes: a plan may find a place for it in stages of fewer layers
    than are measured together. Without wanted sizes: doubling while it fits and the budget has time for
    MIN_ROUNDS of it, then bisection. The time is that of a second run where the first takes too long: it
    loads and compiles kernels, on a GPU for seconds.
    """
    fitting: list[int] = []

    def fits(size: int) -> bool:
        try:
            bench.count(size, memory_bytes if fitting else float("inf"))
        except torch.OutOfMemoryError as error:
            bench.forget(size)
            if not fitting:
                raise InputError(_too_large(size, error)) from None
            return False
        fitting.append(size)
        return True

    if wanted is not None:
        for size in sorted(set(wanted)):
            if not fits(size):
                break
        return fitting
    most_s = budget_s / (2 * (MIN_ROUNDS + 1))
    size = 1
    while size <= LARGEST_SIZE:
        begin = time.monotonic()
        if not fits(size):
            low, high = fitting[-1], size
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            _keep(bench, fitting, low)
            break
        if time.monotonic() - begin > most_s:
            begin = time.monotonic()
            with suppress(torch.OutOfMemoryError):  # of what just had room: a larger one will tell
                bench.count(size)
            if time.monotonic() - begin > most_s:
                break
        size *= 2
    return fitting


def _keep(bench: Bench, fitting: list[int], largest: int) -> None:
    """Leave the powers of two and the largest."""
    for size in tuple(fitting):
        if size != largest and size & (size - 1):
            fitting.remove(size)
            bench.forget(size)


def _too_large(size: int, error: Exception) -> str:
    return f"a microbatch of {size} does not fit this device ({error})"


def layer_profile(bench: Bench, layer: int, measured: Sequence[int]) -> LayerProfile:
    """Return the bytes of a layer, of which the measured ones are; with none of its times."""
    chain, settings = bench.task.chain, bench.settings
    held = chain.weight_bytes(weight_dtype(settings.dtype), lowered_dtype(settings.dtype))[layer]
    tied_to, tied_bytes = _shared(bench, layer, is_trained=True)
    frozen_with, frozen_with_bytes = _shared(bench, layer, is_trained=False)
    attention = bench.samples[measured[0]].attention_flops
    return LayerProfile(
        name=chain.layer_names[layer],
        parameter_bytes=held.stored,
        output_bytes_per_sample=boundary_bytes(chain, layer + 1, settings),
        saved_bytes_per_sample=_saved_bytes_per_sample(bench, layer, measured),
        workspace_by_size=_workspace_by_size(bench, measured),
        tied_to=tied_to,
        tied_bytes=tied_bytes,
        unreached_bytes=held.stored - held.trained,
        lowered_bytes=held.lowered,
        num_parameters=held.num_parameters,
        frozen_with=frozen_with,
        frozen_with_bytes=frozen_with_bytes,
        dequantized_bytes=held.dequantized,
        attention_flops_per_sample=attention[0],
        attention_backward_flops_per_sample=attention[1],
        prefix_bytes_per_sample=_prefix_bytes_per_sample(bench, layer),
        rounded_bytes=_rounded_bytes(bench, layer),
    )


def _shared(bench: Bench, layer: int, *, is_trained: bool) -> tuple[str | None, float]:
    """Return the earlier layer that a layer shares trained, or other, weights with, and their bytes."""
    chain, dtype = bench.task.chain, bench.settings.dtype
    earlier = reversed(range(layer))  # the first of several is the home, as of the embedding of a decoder
    homes = {info.name: other for other in earlier for info in chain.parameters(other) if info.shared}
    infos = [info for info in chain.parameters(layer) if info.name in homes and info.reached == is_trained]
    if not infos:
        return None, 0.0
    held = WeightBytes.of(infos, weight_dtype(dtype), lowered_dtype(dtype))
    return chain.layer_names[min(homes[info.name] for info in infos)], held.stored


def _rounded_bytes(bench: Bench, layer: int) -> float:
    """Return what frozen weights lack to what they were given in, of those that no earlier layer holds."""
    chain, dtype = bench.task.chain, bench.settings.dtype
    before = {info.name for other in range(layer) for info in chain.parameters(other)}
    infos = [info for info in chain.parameters(layer) if info.name not in before]
    return WeightBytes.of(infos, weight_dtype(dtype), lowered_dtype(dtype)).rounded


def _saved_bytes_per_sample(bench: Bench, layer: int, measured: Sequence[int]) -> float:
    """Return what autograd keeps: nothing where no gradient comes, though the model may hold its input.

    What layer 0 makes for all blocks, such as a mask, may be kept by others.
    """
    if 0 < layer < bench.task.chain.first_trained:
        return 0.0
    return max(value / size for x in measured for size, value in bench.samples[x].saved_bytes.items())


def _prefix_bytes_per_sample(bench: Bench, layer: int) -> float:
    structure = bench.task.chain.structure
    if structure is None or layer not in structure.calls:
        return 0.0
    return max(value / size for size, value in bench.prefix_bytes.items())


def _workspace_by_size(bench: Bench, measured: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Return the largest workspace of the measured layers up to each size; () where there is none."""
    sizes = sorted({size for layer in measured for size in bench.samples[layer].workspace_bytes})
    largest = [
        max(bench.samples[layer].workspace_bytes.get(size, 0.0) for layer in measured) for size in sizes
    ]
    by_size = tuple(zip(sizes, accumulate(largest, max), strict=True))
    return by_size if any(largest) else ()


def _optimizer_costs(
    task: TrainingTask, model: LayerModel, layers: Sequence[int], settings: TaskSettings
) -> tuple[float, float]:
    """Return seconds, and bytes of states, per parameter byte of norm, clipping, step and lowering weights.

    Measured on the chosen layers.
    """
    reached = {info.name for layer in layers for info in task.chain.parameters(layer) if info.reached}
    parameters = {name: value for name, value in model.owned_parameters().items() if name in reached}
    optimizer = optimizer_of(task, parameters, reached, settings.run)
    for value in parameters.values():
        value.grad = torch.zeros_like(value)
    seconds = []
    for _ in range(MIN_ROUNDS + 2):
        begin = time.perf_counter()
        float(optimizer.square_sum())
        optimizer.step(0.0, 0.5)
        if model.lowered is not None:
            for value in parameters.values():
                value.detach().to(model.lowered)
        for value in list(parameters.values())[:1]:
            synchronize(value.device)
        seconds.append(time.perf_counter() - begin)
    num_bytes = sum(value.numel() * value.element_size() for value in parameters.values())
    if not num_bytes:
        return 0.0, settings.run.states_per_parameter
    held = sum(s.numel() * s.element_size() for s in optimizer.state_tensors() if s.dim())
    return statistics.median(seconds[1:]) / num_bytes, held / num_bytes
