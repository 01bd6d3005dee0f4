"""A bench that runs layers of a model on one device and reads clock and byte counter between them."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from cost_model.layer_profile import LayerTimes
from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import PREFIX, KeyedDropout
from hetpipe.models.loss import Loss
from hetpipe.models.mixed_precision import boundary_dtype
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.repeat_check import check_repeatable
from hetpipe.profiling.attention_counter import AttentionCounter
from hetpipe.profiling.median_error import standard_error_of_median
from hetpipe.runs.settings import TaskSettings
from hetpipe.runtime.accelerators import (
    Event,
    empty_cache,
    has_events,
    has_peaks,
    memory_figures,
    new_event,
    restart_peaks,
    synchronize,
)
from hetpipe.runtime.byte_counter import ByteCounter

NEGLIGIBLE_SHARE = 0.01


@dataclass(slots=True)
class Samples:
    """The measurements of one layer, by microbatch size.

    attention_flops: of a sample, in a forward and in a backward.
    """

    forward_s: dict[int, list[float]] = field(default_factory=dict)
    backward_s: dict[int, list[float]] = field(default_factory=dict)
    saved_bytes: dict[int, float] = field(default_factory=dict)
    workspace_bytes: dict[int, float] = field(default_factory=dict)
    attention_flops: tuple[float, float] = (0.0, 0.0)

    def forget(self, size: int) -> None:
        self.forward_s.pop(size, None)
        self.backward_s.pop(size, None)
        self.saved_bytes.pop(size, None)
        self.workspace_bytes.pop(size, None)


@dataclass(slots=True)
class Bench:
    """A bench for runs of neighbouring chosen layers; owns their measurements.

    prefix_bytes: by microbatch size, what a stage that begins with a block keeps of what is before them all.

    On CUDA the clock is that of events between the kernels, and bytes are those that torch's allocator gave
    out, in its blocks; what a library keeps for good (cuBLAS) is not in them.
    """

    task: TrainingTask
    settings: TaskSettings
    model: LayerModel
    device: torch.device
    samples: Mapping[int, Samples]
    prefix_bytes: dict[int, float] = field(default_factory=dict)
    dropout: KeyedDropout = field(init=False)
    loss: Loss = field(init=False)

    def __post_init__(self) -> None:
        self.dropout = KeyedDropout(self.settings.seed, self.device)
        self.dropout.traces = self.model.compiles
        self.loss = self.task.loss_of(self.model, self.settings.loss_chunks)

    def runs(self) -> list[tuple[int, int]]:
        """Return the maximal ranges [start, stop) of the chosen layers."""
        ranges: list[tuple[int, int]] = []
        for layer in sorted(self.samples):
            if ranges and ranges[-1][1] == layer:
                ranges[-1] = (ranges[-1][0], layer + 1)
            else:
                ranges.append((layer, layer + 1))
        return ranges

    def time(self, size: int) -> None:
        for start, stop in self.runs():
            marks = self._timed(start, stop, size)
            for layer in range(start, stop):
                sample = self.samples[layer]
                sample.forward_s.setdefault(size, []).append(marks.forward[layer + 1] - marks.forward[layer])
                sample.backward_s.setdefault(size, []).append(
                    marks.backward[layer] - marks.backward[layer + 1]
                )

    def check(self, size: int) -> None:
        """Check of each chosen layer that it may be run again, and apart from the others.

        Raises: InputError if not; see `check_repeatable`.
        """
        inputs, _ = self._batch(size)
        for layer in sorted(self.samples):
            carried = self._carried(layer, size) if layer else ()
            name = self.task.chain.layer_names[layer]
            check_repeatable(self.model, layer, name, inputs, carried, dropout=self.dropout)

    def count(self, size: int, cap_bytes: float = float("inf")) -> None:
        """Count the bytes that each layer keeps and needs for a while; the run also warms up.

        cap_bytes: what the device has for activations, where the host has more.

        Raises: torch.OutOfMemoryError if the microbatch does not fit.
        """
        self.model.forget_arguments()  # what is kept counts for the size that makes it
        for start, stop in self.runs():
            self._count_attention(start, stop, size)  # gradients exist from here on
            counter = ByteCounter()
            for held in self.model.held_tensors():
                counter.add(held)
            for value in self.model.owned_parameters().values():
                if value.grad is not None:
                    counter.add(value.grad)
            if self.model.lowered is not None:
                with counter:  # meets the lowered weights, which are kept and belong to no microbatch
                    self._run(start, stop, size, time.perf_counter)
            counter.cap_bytes = counter.live_bytes + cap_bytes
            peaks: list[float] = []

            def live(counter: ByteCounter = counter, peaks: list[float] = peaks) -> float:
                figures = memory_figures(self.device) if has_peaks(self.device) else None
                if figures is None:
                    peaks.append(counter.restart_peak())
                    return float(counter.live_bytes)
                peaks.append(figures.peak_allocated_bytes)
                restart_peaks(self.device)
                return figures.allocated_bytes

            with self._counted(counter):
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
                sample.workspace_bytes[size] = max(0.0, ahead, behind)
            if start == 0 and stop > 2:
                self.samples[0].saved_bytes[size] = self._kept_of_first(size, counter)
            if self.task.chain.structure is not None and stop == self.task.chain.num_layers:
                self._count_ends(size, counter)

    def _count_attention(self, start: int, stop: int, size: int) -> None:
        """Run a range and note the arithmetic of its attention, which no weight shows."""
        counter, readings = AttentionCounter(), [(0.0, 0.0)]

        def read() -> float:
            readings.append((counter.forward_flops / size, counter.backward_flops / size))
            return float(len(readings) - 1)

        with counter:
            marks = self._run(start, stop, size, read)
        for layer in range(start, stop):
            begin, end = (readings[int(marks.forward[place])] for place in (layer, layer + 1))
            self.samples[layer].attention_flops = (end[0] - begin[0], end[1] - begin[1])

    def _kept_of_first(self, size: int, counter: ByteCounter) -> float:
        """Return what layer 0 keeps once the forward has left its stage, of two layers.

        While a model around blocks runs, it holds what layer 0 made before it was rounded for the boundary.
        """
        both = self._kept_bytes(0, 2, size, counter) - self._bytes(2, size)
        return max(0.0, both - self.samples[1].saved_bytes[size])

    def _count_ends(self, size: int, counter: ByteCounter) -> None:
        """Count what a stage that begins with a block keeps of what is before it, and what the head keeps.

        While a model around blocks runs, it holds what it made before them, and lets go of it in the head.
        """
        block = self.task.chain.num_layers - 2
        one = self._kept_bytes(block, block + 1, size, counter) - self._bytes(block + 1, size)
        both = self._kept_bytes(block, block + 2, size, counter)
        self.prefix_bytes[size] = max(0.0, one - self.samples[block].saved_bytes[size])
        self.samples[block + 1].saved_bytes[size] = max(0.0, both - one)

    def _kept_bytes(self, start: int, stop: int, size: int, counter: ByteCounter) -> float:
        """Return what is there after a forward of a range: its input, its output, and what is saved."""
        inputs, labels = self.task.batch_to_measure(size)
        data = sum(value.nbytes for value in (*inputs.values(), labels))
        marks, before = _Marks(), self._live_bytes(counter)
        with self._counted(counter):
            outputs = self._forward(start, stop, size, partial(self._live_bytes, counter), marks)
        del outputs
        return marks.forward[stop] - before - data

    def _counted(self, counter: ByteCounter) -> AbstractContextManager[object]:
        """Return the counter; nothing where a GPU's allocator counts and the counter would hide a graph."""
        return nullcontext() if self.model.compiles and self.device.type == "cuda" else counter

    def _live_bytes(self, counter: ByteCounter) -> float:
        figures = memory_figures(self.device) if has_peaks(self.device) else None
        return float(counter.live_bytes) if figures is None else figures.allocated_bytes

    def forget(self, size: int) -> None:
        """Drop what was measured of a size that turned out not to fit."""
        self.prefix_bytes.pop(size, None)
        for sample in self.samples.values():
            sample.forget(size)
        for value in self.model.owned_parameters().values():
            value.grad = None
        empty_cache(self.device)

    def times(self, layers: Collection[int], sizes: Sequence[int]) -> LayerTimes:
        """Return the median over the measured layers of a group."""

        def median(values: Mapping[int, Mapping[int, Sequence[float]]], size: int) -> float:
            return statistics.median(seconds for layer in layers for seconds in values[layer][size])

        forward = {layer: self.samples[layer].forward_s for layer in layers}
        backward = {layer: self.samples[layer].backward_s for layer in layers}
        return LayerTimes(
            tuple(median(forward, size) for size in sizes), tuple(median(backward, size) for size in sizes)
        )

    def standard_error(self, groups: Collection[Collection[int]], sizes: Sequence[int]) -> tuple[float, str]:
        """Return the worst relative standard error of the medians of groups, and where it is.

        A layer that takes less than NEGLIGIBLE_SHARE of the slowest counts as taking that: what is too short
        to matter is too short to measure well.
        """
        worst, where = 0.0, ""
        for size in sizes:
            found = []
            for layers in groups:
                for name in ("forward", "backward"):
                    by_layer = [getattr(self.samples[layer], f"{name}_s")[size] for layer in layers]
                    values = [seconds for of_layer in by_layer for seconds in of_layer]
                    found.append((statistics.median(values), values, min(layers), name))
            least_s = NEGLIGIBLE_SHARE * max(median for median, *_ in found)
            for median, values, layer, name in found:
                error = standard_error_of_median(values)
                relative = error / max(median, least_s, 1e-12) if error else 0.0
                if relative > worst:
                    layer_name = self.task.chain.layer_names[layer]
                    worst, where = relative, f"{layer_name} {name}, microbatch {size}"
        return worst, where

    def _bytes(self, layer: int, size: int) -> float:
        """Return the bytes that enter a layer from the one before, for a microbatch of this size."""
        return size * boundary_bytes(self.task.chain, layer, self.settings)

    def _timed(self, start: int, stop: int, size: int) -> "_Marks":
        """Time one forward and backward of a range, in seconds."""
        if not has_events(self.device):
            return self._run(start, stop, size, time.perf_counter)
        events: list[Event] = []

        def record() -> float:
            event = new_event(self.device)
            event.record()
            events.append(event)
            return float(len(events) - 1)

        self._run(start, stop, size, lambda: 0.0)  # so that clocks have risen and the allocator holds enough
        synchronize(self.device)  # a layer whose launches take longer than its work shows it
        marks = self._run(start, stop, size, record)
        synchronize(self.device)
        return marks.read([events[0].elapsed_time(event) / 1e3 for event in events])

    def _run(self, start: int, stop: int, size: int, read: Callable[[], float]) -> "_Marks":
        """Run one forward and backward of a range, reading a meter at every layer boundary."""
        marks = _Marks()
        outputs = self._forward(start, stop, size, read, marks)
        targets = [value for value in outputs if value.requires_grad]
        gradients = (
            None if stop == self.task.chain.num_layers else [torch.ones_like(value) for value in targets]
        )
        del outputs
        marks.backward[stop] = read()
        torch.autograd.backward(targets, gradients)
        for layer in range(stop - 1, start - 1, -1):
            if layer not in marks.backward:  # the backward ended above it
                marks.backward[layer] = read()
        return marks

    def _forward(
        self, start: int, stop: int, size: int, read: Callable[[], float], marks: "_Marks"
    ) -> tuple[Tensor, ...]:
        """Return the outputs of a range, the loss where it ends with the model."""
        chain, model = self.task.chain, self.model
        inputs, labels = self._batch(size)
        carried = self._carried(start, size) if start else ()
        self.dropout.at(0, range(size), range(start, stop))

        def on_layer(layer: int) -> None:
            self.dropout.enter_layer(layer)
            if layer != PREFIX:
                marks.forward[layer] = read()

        def on_boundary(layer: int, tensors: tuple[Tensor, ...]) -> None:
            # a stage that begins here sends gradients back, if anything is trained before it
            for value in tensors:
                value.requires_grad_(value.is_floating_point() and layer > chain.first_trained)
            watched = next((value for value in tensors if value.requires_grad), None)
            if watched is None:
                return

            def on_gradient(_: Tensor) -> None:
                marks.backward[layer] = read()

            watched.register_hook(on_gradient)  # type: ignore[no-untyped-call]  # torch

        model.on_layer, model.on_boundary = on_layer, on_boundary
        with self.dropout:
            outputs = model.run(start, stop, inputs, carried)
        if stop == chain.num_layers:
            outputs = (self.loss(outputs[0], labels),)
        marks.forward[stop] = read()
        return outputs

    def _batch(self, size: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, labels = self.task.batch_to_measure(size)
        return {name: value.to(self.device) for name, value in inputs.items()}, labels.to(self.device)

    def _carried(self, layer: int, size: int) -> tuple[Tensor, ...]:
        dtype = boundary_dtype(self.settings.dtype)
        tensors = []
        for spec in self.task.chain.boundary(layer, self.settings.sequence_length):
            shape = (size, *spec.shape_per_sample)
            if spec.dtype.is_floating_point:
                value = torch.randn(shape, dtype=dtype, device=self.device)
                tensors.append(value.requires_grad_(layer > self.task.chain.first_trained))
            else:
                tensors.append(torch.zeros(shape, dtype=spec.dtype, device=self.device))
        return tuple(tensors)


@dataclass(slots=True)
class _Marks:
    """The readings of layers, forward entering it (stop: after all), backward leaving it (stop: before)."""

    forward: dict[int, float] = field(default_factory=dict)
    backward: dict[int, float] = field(default_factory=dict)

    def read(self, readings: Sequence[float]) -> "_Marks":
        """Return the marks, where so far they only number their readings."""
        return _Marks(
            {layer: readings[int(number)] for layer, number in self.forward.items()},
            {layer: readings[int(number)] for layer, number in self.backward.items()},
        )


def boundary_bytes(chain: ChainModel, layer: int, settings: TaskSettings) -> float:
    """Return the bytes per sample that travel from layer - 1 to layer; 0 at the ends of the chain."""
    if not 0 < layer < chain.num_layers:
        return 0.0
    width = boundary_dtype(settings.dtype).itemsize
    total = 0
    for spec in chain.boundary(layer, settings.sequence_length):
        count = math.prod(spec.shape_per_sample)
        total += count * (width if spec.dtype.is_floating_point else spec.dtype.itemsize)
    return float(total)
