"""The bytes that a device needs, for the layers that it holds and the microbatches in flight there."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from cost_model.host_memory import saved_bytes_beside_host
from cost_model.profile import ModelProfile


class StageShape(NamedTuple):
    """What memory needs to know of one stage: layers [start, stop) and what is in flight there.

    num_microbatches: of the pipeline in a step; None for more than are in flight. All are in flight below
        the first trained layer, where no gradient says that an output has arrived.
    segment_layers: with recompute, layers whose forward is run again at once; 0: all of the stage.
    in_flight_before: in flight in the stage before, whose gradients wait here; None: no more than here.
    saved_on_host: whether blocks keep on the host what they save.
    """

    start: int
    stop: int
    in_flight: int
    microbatch_size: int
    recompute: bool = False
    num_microbatches: int | None = None
    segment_layers: int = 0
    in_flight_before: int | None = None
    saved_on_host: bool = False

    @property
    def segmented(self) -> bool:
        """Whether several segments of the stage are recomputed one after the other, if it has a backward."""
        return self.recompute and 0 < self.segment_layers < self.stop - self.start


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device at its peak, term by term; parameters with their lowered copies, if any."""

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
    """Return parameter bytes with a gradient, of a set of layers on one device; a tied pair counts once."""
    return sum(_own_bytes(profile, set(layers), unreached=False))


def held_bytes(profile: ModelProfile, layers: Iterable[int]) -> float:
    """Return the bytes of all parameters of layers on one device, with their lowered copies."""
    held = set(layers)
    lowered = sum(profile.layers[layer].lowered_bytes for layer in held)
    return sum(_own_bytes(profile, held, unreached=True)) + lowered


def trained_bytes_by_layer(profile: ModelProfile, layers: Iterable[int]) -> dict[int, float]:
    """Return the same by layer, rising; a tied pair counts with its home where that is here, too."""
    held = set(layers)
    return dict(sorted(zip(held, _own_bytes(profile, held, unreached=False), strict=True)))


def state_home_bytes(profile: ModelProfile, layers: Iterable[int]) -> float:
    """Return trained parameter bytes of layers with states kept once: tied ones count with their home."""
    return sum(profile.layers[layer].trained_bytes - profile.tied_bytes(layer) for layer in layers)


def checkpoint_bytes(profile: ModelProfile, *, frozen: bool = True) -> float:
    """Return the bytes of a checkpoint: parameters and the optimizer states of the trained ones, once.

    frozen: whether it holds parameters that are not trained, too, as they were given.
    """
    layers = set(range(profile.num_layers))
    states = profile.optimizer_bytes_per_parameter_byte * trained_bytes(profile, layers)
    rounded = sum(layer.rounded_bytes for layer in profile.layers) if frozen else 0.0
    return sum(_own_bytes(profile, layers, unreached=frozen)) + rounded + states


def _own_bytes(profile: ModelProfile, layers: set[int], *, unreached: bool) -> Iterable[float]:
    if not profile.shares_weights:
        held = profile.layers
        if unreached:
            return [held[index].parameter_bytes for index in layers]
        return [held[index].trained_bytes for index in layers]
    return _own_bytes_of_sharing(profile, layers, unreached=unreached)


def _own_bytes_of_sharing(profile: ModelProfile, layers: set[int], *, unreached: bool) -> Iterator[float]:
    for index in layers:
        held = profile.layers[index]
        shared = profile.shared_weight_bytes(index, trained=None if unreached else True)
        once = sum(num_bytes for before, num_bytes in shared if not layers.isdisjoint(before))
        yield (held.parameter_bytes if unreached else held.trained_bytes) - once


def segments(start: int, stop: int, segment_layers: int) -> tuple[tuple[int, int], ...]:
    """Return the layers [first, last) of each segment that is recomputed at once; the last may be shorter.

    >>> segments(2, 7, 2), segments(2, 7, 0)
    (((2, 4), (4, 6), (6, 7)), ((2, 7),))
    """
    firsts = range(start, stop, segment_layers or stop - start)
    return tuple((first, min(first + firsts.step, stop)) for first in firsts)


def segment_choices(num_layers: int) -> tuple[int, ...]:
    """Return the `segment_layers` of stages of so many layers: 0, all at once, then powers of two, falling.

    >>> segment_choices(1), segment_choices(5)
    ((0,), (0, 4, 2, 1))
    """
    powers = takewhile(lambda power: power < num_layers, (1 << exponent for exponent in count()))
    return (0, *reversed(tuple(powers)))


def leanest_segments(profile: ModelProfile, stage: StageShape, *, whole: bool = True) -> int:
    """Return the `segment_layers` with which a stage that recomputes needs least; of equals the largest.

    All take the same time: each layer's forward once more. whole: all of the stage at once may be chosen
    though there are others.
    """
    choices = segment_choices(stage.stop - stage.start)
    shapes = [stage._replace(segment_layers=each) for each in choices[0 if whole else 1 :] or choices]
    return min(shapes, key=lambda shape: device_memory(profile, [shape]).total_bytes).segment_layers


def stage_activation_bytes(profile: ModelProfile, stage: StageShape) -> tuple[float, float]:
    """Return (saved, boundary) bytes of a stage with all its microbatches in flight.

    Saved: in_flight microbatches of what autograd keeps, their inputs among it; with recompute, in_flight
    inputs of each segment and one microbatch of the largest (`segment_bytes`). Boundary: inputs that wait
    (`_waiting_inputs`), outputs of all in flight and the gradient of one. Without a backward: what one
    microbatch keeps while it runs, the inputs of it and of the next, and all outputs (docs/planning.md,
    "Memory").
    """
    samples = stage.microbatch_size
    input_bytes, output_bytes = _message_bytes(profile, stage)
    if stage.stop <= profile.first_trained:
        one = samples * passing_bytes_per_sample(profile, stage.start, stage.stop)
        return one, 2 * input_bytes + (stage.num_microbatches or stage.in_flight) * output_bytes
    boundary = _waiting_inputs(profile, stage) * input_bytes + (stage.in_flight + 1) * output_bytes
    if stage.saved_on_host:
        return saved_bytes_beside_host(profile, (stage.start, stage.stop), samples, stage.in_flight), boundary
    if stage.segmented:
        inputs, most = segment_bytes(profile, stage)
        return stage.in_flight * inputs + most, boundary
    saved = samples * saved_bytes_per_sample(profile, stage.start, stage.stop)
    if stage.recompute:
        return stage.in_flight * input_bytes + saved, boundary
    return stage.in_flight * saved, boundary


def _message_bytes(profile: ModelProfile, stage: StageShape) -> tuple[float, float]:
    """Return the bytes of a microbatch that enter a stage, and that leave it; 0 at the ends of the model."""
    last = stage.stop == profile.num_layers
    leaving = 0.0 if last else profile.layers[stage.stop - 1].output_bytes_per_sample
    entering = input_bytes_per_sample(profile, stage.start)
    return stage.microbatch_size * entering, stage.microbatch_size * leaving


def _waiting_inputs(profile: ModelProfile, stage: StageShape) -> int:
    """Return how many messages as large as an input a stage with a backward holds beside what is saved.

    1F1B with k in flight here and p in the stage before, p >= k:

        before: ... F5   B0 F6   B1 F7      p = 6
        here:   F0 B0 F1 B1 ... F5 B5 F6    k = 1: gradients of B0 to B4 wait while B5 works

    The stage before takes a gradient when it comes to that backward, p - k forwards after it was made here. A
    send is let go of once a later message of the taker shows that it has come: the next forward, which comes
    right after that backward. So p - k gradients wait; and the next input, whose receive is posted one
    computation ahead, or received beside that one between GPUs. Of outputs k are held, each until its
    backward, and the gradient of one.
    """
    ahead = (stage.in_flight_before or 0) - stage.in_flight if stage.start > profile.first_trained else 0
    return 1 + max(0, ahead)


def passing_bytes_per_sample(profile: ModelProfile, start: int, stop: int) -> float:
    """Return what a forward through layers [start, stop) keeps at its worst moment if nothing is saved.

    That is what one of them hands to the next; and what layer 0 makes for all.
    """
    layers = profile.layers[start:stop]
    handed = max((layer.output_bytes_per_sample for layer in layers[:-1]), default=0.0)
    return handed + saved_bytes_per_sample(profile, start, stop)


def saved_bytes_per_sample(profile: ModelProfile, start: int, stop: int) -> float:
    """Return what autograd keeps of a forward through layers [start, stop), which are run at once."""
    prefix = profile.layers[start].prefix_bytes_per_sample
    return prefix + sum(layer.saved_bytes_per_sample for layer in profile.layers[start:stop])


def input_bytes_per_sample(profile: ModelProfile, layer: int) -> float:
    """Return the bytes of a sample that enter a layer from the one before it."""
    return profile.layers[layer - 1].output_bytes_per_sample if layer else 0.0


def segment_bytes(profile: ModelProfile, stage: StageShape) -> tuple[float, float]:
    """Return the bytes of a microbatch's segment inputs, and what its backward needs beyond them at most.

    Segments are recomputed from the last to the first: while one is, its saved bytes, its workspace, its
    output and the gradient of that are there, and the inputs of the later ones are not any more. The output
    of the last one is of the stage's boundary.
    """
    samples, inputs, most = stage.microbatch_size, 0.0, 0.0
    for first, last in reversed(segments(stage.start, stage.stop, stage.segment_layers)):
        saved = samples * saved_bytes_per_sample(profile, first, last)
        need = saved + working_bytes(profile, first, samples, last)[-1]
        if last < stage.stop:
            need += 2 * samples * input_bytes_per_sample(profile, last)
        most = max(most, need - inputs)
        inputs += samples * input_bytes_per_sample(profile, first)
    return inputs, most


def device_memory(
    profile: ModelProfile,
    stages: Iterable[StageShape],
    *,
    summed_bytes: float = 0.0,
    stepped_bytes: float | None = None,
) -> DeviceMemory:
    """Return bytes of a device with these stages: the union of their layers once, activations of each.

    The workspace is that of the worst moment of its stages, since one operation runs at a time (see
    `working_bytes`). Where a single stage has all microbatches in flight (GPipe), its activations are fewest
    when its gradients are all there and the other way round; then gradients and activations are those of the
    worse moment. Not so where it is recomputed by segments: its first one needs room when nearly all
    gradients are there. The workspace of those is in the saved bytes.

    summed_bytes: gradients that are there from the start of a step, since they are summed with other devices.
    stepped_bytes: parameters whose optimizer states are here, where states are sharded; None for all trained.
    """
    stages = tuple(stages)
    layers = {layer for stage in stages for layer in range(stage.start, stage.stop)}
    trained = trained_bytes(profile, layers)
    activations = [stage_activation_bytes(profile, stage) for stage in stages]
    backward = [stage for stage in stages if stage.stop > profile.first_trained]
    gradients, saved = trained, sum(saved for saved, _ in activations)
    working = max((_stage_working_bytes(profile, stage) for stage in stages), default=0.0)
    if (
        len(stages) == len(backward) == 1
        and stages[0].num_microbatches == stages[0].in_flight
        and not stages[0].segmented
    ):
        stage = stages[0]
        if stage.saved_on_host:
            saved = saved_bytes_beside_host(
                profile,
                (stage.start, stage.stop),
                stage.microbatch_size,
                stage.in_flight,
                first_of=summed_bytes,
            )
        else:
            later, first = _saved_after_first_backward(profile, stage), working
            if not stage.recompute or stage.in_flight == 1:
                # with recompute and more in flight, `later` counts a whole microbatch in its place
                rows = first_backward_bytes(profile, stage.start, stage.microbatch_size, summed_bytes)
                first = max(working, rows[stage.stop - stage.start])
            gradients, saved, working = max((summed_bytes, saved, working), (trained, later, first), key=sum)
    return DeviceMemory(
        parameter_bytes=held_bytes(profile, layers),
        gradient_bytes=gradients,
        optimizer_bytes=(trained if stepped_bytes is None else stepped_bytes)
        * profile.optimizer_bytes_per_parameter_byte,
        saved_bytes=saved,
        boundary_bytes=sum(boundary for _, boundary in activations),
        workspace_bytes=working,
    )


def working_bytes(
    profile: ModelProfile, start: int, samples: int, stop: int | None = None
) -> tuple[float, ...]:
    """Return what a microbatch needs at its worst moment beyond its saved bytes, by the stage's stop layer.

    While a layer of [start, stop) works, forward or backward, its microbatch keeps nothing of the layers
    after it: their saved bytes leave room for its workspace. But the gradient of weights that a layer
    shares with an earlier one of the stage is kept until the backward comes to that one, and both are added
    into a third tensor. Entry i is of stop = start + i, 0 of no layer, the last one of `stop`.
    """
    most = [0.0]
    if not profile.shares_weights:
        now = 0.0
        for layer in profile.layers[start:stop]:
            now = max(0.0, now - samples * layer.saved_bytes_per_sample, layer.workspace_at(samples))
            most.append(now)
        return tuple(most)
    for index, layer in enumerate(profile.layers[start:stop], start):
        before = most[-1]
        for others, kept in profile.shared_weight_bytes(index, trained=True):
            inside = [other for other in others if other >= start]
            if not inside:
                continue
            first = inside[0]
            saved = sum(other.saved_bytes_per_sample for other in profile.layers[first + 1 : index])
            added = profile.layers[first].workspace_at(samples) - samples * saved + kept
            # what the layers between have made is added up into one
            before = max(before, added) + (kept if len(inside) == 1 else 0.0)
        before -= samples * layer.saved_bytes_per_sample
        most.append(max(0.0, before, layer.workspace_at(samples)))
    return tuple(most)


def _stage_working_bytes(profile: ModelProfile, stage: StageShape) -> float:
    if (stage.segmented or stage.saved_on_host) and stage.stop > profile.first_trained:
        return 0.0
    return working_bytes(profile, stage.start, stage.microbatch_size, stage.stop)[-1]


def first_backward_bytes(
    profile: ModelProfile, start: int, samples: int, summed_bytes: float = 0.0
) -> tuple[float, ...]:
    """Return what a step's first backward needs at its worst beyond all gradients and other microbatches.

    By the stage's stop layer, as `working_bytes`. A layer's backward still has what it and the layers before
    it saved; their gradients are only made by it and after it, but for those that have their room from the
    start.
    """
    most, to_come = [0.0], 0.0
    saved = samples * profile.layers[start].prefix_bytes_per_sample
    for layer in profile.layers[start:]:
        saved += samples * layer.saved_bytes_per_sample
        to_come += layer.trained_bytes
        made = max(0.0, to_come - summed_bytes)
        most.append(max(most[-1], layer.workspace_at(samples) + saved - made))
    return tuple(most)


def _saved_after_first_backward(profile: ModelProfile, stage: StageShape) -> float:
    """Return saved bytes of a stage with all microbatches in flight, once its first backward is over."""
    left = stage.in_flight - 1
    if left == 0:
        return 0.0
    return stage_activation_bytes(profile, stage._replace(in_flight=left))[0]
