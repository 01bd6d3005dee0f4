"""Measures a model layer by layer on this host's devices."""

import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cost_model.cluster import CPU, EMULATED
from cost_model.errors import InputError
from cost_model.profile import KindProfile, LayerProfile, LayerTimes, ModelProfile
from hetpipe.dropout import PREFIX, KeyedDropout
from hetpipe.emulation import ByteCounter
from hetpipe.launch import Emit
from hetpipe.optimizer import Optimizer
from hetpipe.run_folder import RunFolder
from hetpipe.settings import Settings, read_settings
from hetpipe.skeleton import LayerModel
from hetpipe.splitting import ChainModel
from hetpipe.task import TaskFactory, TrainingTask

MIN_ROUNDS = 3
MAX_ROUNDS = 40


@dataclass(slots=True)
class _Samples:
    """Measurements of one layer, by microbatch size."""

    forward_s: dict[int, list[float]] = field(default_factory=dict)
    backward_s: dict[int, list[float]] = field(default_factory=dict)
    saved_bytes: dict[int, float] = field(default_factory=dict)
    workspace_bytes: float = 0.0


def profile_rank(
    folder: str,
    kinds: Sequence[str],
    microbatch_sizes: Sequence[int],
    budget_s: float,
    make_task: TaskFactory,
    *,
    rank: int,
    emit: Emit,
) -> None:
    """Profile the task of a run folder on this rank's kind of device and emit it as JSON data.

    Each kind of device is measured by a rank of its own, one after the other.
    """
    settings = read_settings(RunFolder(Path(folder)).config)
    task = make_task(RunFolder(Path(folder)), settings)
    device = torch.device("cpu") if kinds[rank] in (CPU, EMULATED) else torch.device("cuda", 0)

    def progress(done: float, what: str) -> None:
        emit({"event": "progress", "done": done, "what": f"{kinds[rank]}: {what}"})

    profile = profile_task(
        task, settings, kinds[rank], microbatch_sizes, budget_s, device=device, progress=progress
    )
    emit({"event": "profile", "profile": profile.to_json()})


def profile_task(
    task: TrainingTask,
    settings: Settings,
    kind: str,
    microbatch_sizes: Sequence[int],
    budget_s: float,
    *,
    device: torch.device,
    progress: Callable[[float, str], None] = lambda done, what: None,
) -> ModelProfile:
    """Forward and backward seconds, kept and temporary bytes of every layer on the device.

    Layers alike (same class, same parameter shapes) are measured on two of them and share the median.
    Rounds over all sizes go on until the budget is spent, at least MIN_ROUNDS.
    """
    chain = task.chain
    groups = _groups_of_alike(chain)
    chosen = sorted({layer for group in groups for layer in (group[0], group[-1])})
    model = chain.materialise(chosen, settings.seed, getattr(torch, settings.dtype), device)
    model.train()
    for layer in chosen:
        for info in chain.parameters(layer):
            model.parameters_of(layer)[info.name].requires_grad_(info.reached)
    bench = _Bench(task, settings, model, device, {layer: _Samples() for layer in chosen})
    sizes = _sizes_that_fit(bench, sorted(microbatch_sizes))
    begin = time.monotonic()
    rounds = 0
    while rounds < MAX_ROUNDS:
        for size in sizes:
            bench.time(size)
        rounds += 1
        spent = time.monotonic() - begin
        progress(min(1.0, max(spent / budget_s, rounds / MAX_ROUNDS)), f"round {rounds}")
        if rounds >= MIN_ROUNDS and spent * (rounds + 1) / rounds > budget_s:
            break
    optimizer_s_per_byte = _optimizer_s_per_byte(chain, model, chosen, settings)
    progress(1.0, f"{rounds} rounds")
    by_layer = {layer: (group[0], group[-1]) for group in groups for layer in group}
    return ModelProfile(
        model=settings.model,
        sequence_length=settings.sequence_length,
        dtype=settings.dtype,
        layers=tuple(_layer_profile(bench, layer, by_layer[layer]) for layer in range(chain.num_layers)),
        kinds={
            kind: KindProfile(
                source="measured",
                microbatch_sizes=tuple(sizes),
                layers=tuple(bench.times(by_layer[layer], sizes) for layer in range(chain.num_layers)),
                optimizer_s_per_byte=optimizer_s_per_byte,
            )
        },
    )


def _groups_of_alike(chain: ChainModel) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    last = chain.num_layers - 1
    for layer in range(chain.num_layers):
        inner = chain.structure is not None and 0 < layer < last
        shapes = tuple((info.shape, info.tied, info.reached) for info in chain.parameters(layer))
        groups.setdefault(shapes if inner else layer, []).append(layer)
    return list(groups.values())


def _sizes_that_fit(bench: "_Bench", sizes: Sequence[int]) -> list[int]:
    """The sizes that run, counting bytes by the way; an out-of-memory ends the list."""
    fitting: list[int] = []
    for size in sizes:
        try:
            bench.count(size)
        except torch.OutOfMemoryError as error:
            if not fitting:
                raise InputError(f"a microbatch of {size} does not fit this device ({error})") from None
            break
        fitting.append(size)
    return fitting


@dataclass(slots=True)
class _Bench:
    """Runs of neighbouring chosen layers; owns their measurements."""

    task: TrainingTask
    settings: Settings
    model: LayerModel
    device: torch.device
    samples: Mapping[int, _Samples]

    def runs(self) -> list[tuple[int, int]]:
        """Maximal ranges [start, stop) of the chosen layers."""
        ranges: list[tuple[int, int]] = []
        for layer in sorted(self.samples):
            if ranges and ranges[-1][1] == layer:
                ranges[-1] = (ranges[-1][0], layer + 1)
            else:
                ranges.append((layer, layer + 1))
        return ranges

    def time(self, size: int) -> None:
        for start, stop in self.runs():
            marks = self._run(start, stop, size, self._now)
            for layer in range(start, stop):
                sample = self.samples[layer]
                sample.forward_s.setdefault(size, []).append(marks.forward[layer + 1] - marks.forward[layer])
                sample.backward_s.setdefault(size, []).append(
                    marks.backward[layer] - marks.backward[layer + 1]
                )

    def count(self, size: int) -> None:
        """Bytes that each layer keeps and needs for a while; the run also warms up."""
        for start, stop in self.runs():
            self._run(start, stop, size, self._now)  # gradients exist from here on
            counter = ByteCounter()
            for value in self.model.owned_parameters().values():
                counter.add(value)
                if value.grad is not None:
                    counter.add(value.grad)
            peaks: list[int] = []

            def live(counter: ByteCounter = counter, peaks: list[int] = peaks) -> float:
                peaks.append(counter.restart_peak())
                return float(counter.live_bytes)

            with counter:
                marks = self._run(start, stop, size, live)
            forward = [marks.forward[layer] for layer in range(start, stop + 1)]
            backward = [marks.backward[layer] for layer in range(start, stop + 1)]
            for index, layer in enumerate(range(start, stop)):
                sample = self.samples[layer]
                entering = self._bytes(layer, size)
                leaving = self._bytes(layer + 1, size)
                kept = forward[index + 1] - forward[index] + entering - leaving
                sample.saved_bytes[size] = max(0.0, kept)
                ahead = peaks[index + 1] - forward[index + 1]
                behind = peaks[len(forward) + (len(forward) - 1 - index)] - backward[index + 1]
                sample.workspace_bytes = max(sample.workspace_bytes, ahead, behind)

    def times(self, layers: Collection[int], sizes: Sequence[int]) -> LayerTimes:
        """Median over the measured layers of a group."""

        def median(values: Mapping[int, Mapping[int, Sequence[float]]], size: int) -> float:
            return statistics.median(entry for layer in layers for entry in values[layer][size])

        forward = {layer: self.samples[layer].forward_s for layer in layers}
        backward = {layer: self.samples[layer].backward_s for layer in layers}
        return LayerTimes(
            tuple(median(forward, size) for size in sizes), tuple(median(backward, size) for size in sizes)
        )

    def _bytes(self, layer: int, size: int) -> float:
        """Bytes that enter a layer from the one before, for a microbatch of this size."""
        return size * boundary_bytes(self.task.chain, layer, self.settings)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _run(self, start: int, stop: int, size: int, read: Callable[[], float]) -> "_Marks":
        """One forward and backward of a range, reading a meter at every layer boundary."""
        chain, model = self.task.chain, self.model
        inputs, labels = self.task.batch(0, size)
        inputs = {name: value.to(self.device) for name, value in inputs.items()}
        marks = _Marks()
        carried = self._carried(start, size) if start else ()
        dropout = KeyedDropout(self.settings.seed)
        dropout.at(0, range(size))

        def on_layer(layer: int) -> None:
            dropout.enter_layer(layer)
            if layer != PREFIX:
                marks.forward[layer] = read()

        def on_boundary(layer: int, tensors: tuple[Tensor, ...]) -> None:
            watched = next((value for value in tensors if value.requires_grad), None)
            if watched is None:  # nothing before this boundary is trained
                return

            def on_gradient(_: Tensor) -> None:
                marks.backward[layer] = read()

            watched.register_hook(on_gradient)  # type: ignore[no-untyped-call]  # torch

        model.on_layer, model.on_boundary = on_layer, on_boundary
        with dropout:
            outputs = model.run(start, stop, inputs, carried)
        if stop == chain.num_layers:
            outputs = (self.task.loss(outputs[0], labels.to(self.device)),)
        marks.forward[stop] = read()
        targets = [value for value in outputs if value.requires_grad]
        gradients = None if stop == chain.num_layers else [torch.ones_like(value) for value in targets]
        del outputs
        marks.backward[stop] = read()
        torch.autograd.backward(targets, gradients)
        for layer in range(stop - 1, start - 1, -1):
            if layer not in marks.backward:  # the backward ended above it
                marks.backward[layer] = read()
        return marks

    def _carried(self, layer: int, size: int) -> tuple[Tensor, ...]:
        dtype = getattr(torch, self.settings.dtype)
        tensors = []
        for spec in self.task.chain.boundary(layer, self.settings.sequence_length):
            shape = (size, *spec.shape_per_sample)
            if spec.dtype.is_floating_point:
                tensors.append(torch.randn(shape, dtype=dtype, device=self.device).requires_grad_())
            else:
                tensors.append(torch.zeros(shape, dtype=spec.dtype, device=self.device))
        return tuple(tensors)


@dataclass(slots=True)
class _Marks:
    """Readings by layer: entering it forwards (stop: after the last), leaving it backwards (stop: before)."""

    forward: dict[int, float] = field(default_factory=dict)
    backward: dict[int, float] = field(default_factory=dict)


def boundary_bytes(chain: ChainModel, layer: int, settings: Settings) -> float:
    """Bytes per sample that travel from layer - 1 to layer; 0 at the ends of the chain."""
    if not 0 < layer < chain.num_layers:
        return 0.0
    width = getattr(torch, settings.dtype).itemsize
    total = 0
    for spec in chain.boundary(layer, settings.sequence_length):
        count = 1
        for extent in spec.shape_per_sample:
            count *= extent
        total += count * (width if spec.dtype.is_floating_point else spec.dtype.itemsize)
    return float(total)


def _layer_profile(bench: _Bench, layer: int, measured: Sequence[int]) -> LayerProfile:
    chain, settings = bench.task.chain, bench.settings
    width = getattr(torch, settings.dtype).itemsize

    def num_bytes(which: Callable[[str, bool, bool], bool]) -> float:
        total = 0
        for info in chain.parameters(layer):
            if which(info.name, info.tied, info.reached):
                count = 1
                for extent in info.shape:
                    count *= extent
                total += count * width
        return float(total)

    homes = {info.name: other for other in range(layer) for info in chain.parameters(other) if info.tied}
    tied = {info.name for info in chain.parameters(layer) if info.tied and info.name in homes}
    home = min((homes[name] for name in tied), default=None)
    return LayerProfile(
        name=chain.layer_names[layer],
        parameter_bytes=num_bytes(lambda name, tied, reached: True),
        output_bytes_per_sample=boundary_bytes(chain, layer + 1, settings),
        saved_bytes_per_sample=max(
            value / size for x in measured for size, value in bench.samples[x].saved_bytes.items()
        ),
        workspace_bytes=max(bench.samples[x].workspace_bytes for x in measured),
        tied_to=None if home is None else chain.layer_names[home],
        tied_bytes=num_bytes(lambda name, is_tied, reached: name in tied),
        unreached_bytes=num_bytes(lambda name, is_tied, reached: not reached),
    )


def _optimizer_s_per_byte(
    chain: ChainModel, model: LayerModel, layers: Sequence[int], settings: Settings
) -> float:
    """Seconds per parameter byte of norm, clipping and AdamW, on the chosen layers."""
    reached = {info.name for layer in layers for info in chain.parameters(layer) if info.reached}
    parameters = {name: value for name, value in model.owned_parameters().items() if name in reached}
    optimizer = Optimizer(parameters, reached, settings.weight_decay)
    for value in parameters.values():
        value.grad = torch.zeros_like(value)
    seconds = []
    for _ in range(MIN_ROUNDS + 2):
        begin = time.perf_counter()
        float(optimizer.square_sum())
        optimizer.step(0.0, 0.5)
        if any(value.is_cuda for value in parameters.values()):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    num_bytes = sum(value.numel() * value.element_size() for value in parameters.values())
    return statistics.median(seconds[1:]) / num_bytes if num_bytes else 0.0


def threads_for(kind: str, count: int) -> int:
    """CPU threads of a rank of a kind of which `count` share this host."""
    return max(1, (os.cpu_count() or 1) // max(1, count)) if kind == CPU else 1
