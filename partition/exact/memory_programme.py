"""Pipelines that memory takes, whatever the order of their devices: an exact programme.

For memory so tight that the search, which tries some orders, finds nothing. A stage needs least with one
microbatch in flight; then its bytes depend on its layers alone (where kinds compute in several precisions, on
the kind, too), and who has them on usable bytes alone.

state: how many devices of each class (of usable bytes, and of kinds that need the same) the stages after a
    cut use, as one number of mixed radix. Pinned devices are in no class: the cut says which of them come
    after it. Of several pipelines each pinned device is a class of its own.
label: the layers at which such stages can begin, as bits: layer k is bit k % 64 of word k // 64. All of them,
    not the first alone, since a shorter stage may need more, where a boundary is wide.
transition: a device of class c more in front, from each layer of the label to all from which c holds the
    layers up to it: a union, looked up for each byte of the label. Whoever comes to the end of a pinned
    device's layers is at their start too.
dominance: a label loses the layers that fewer devices reach, or ones with less memory that need no less: the
    rest can do more.
order: by number of devices, so that what is found has the fewest stages.
complexity: states, product of (count + 1) over the classes, times classes. Beyond MOST_WORDS words of labels
    near memories count as the least of them: what is found is a pipeline, that there is none is not proven.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby, islice, pairwise

import numpy as np
import numpy.typing as npt

from cost_model.cluster import Device
from cost_model.memory import StageShape, device_memory, leanest_segments
from cost_model.profile import ModelProfile
from partition.estimates.arrays import Floats
from partition.estimates.stage_tables import leanest_table
from partition.problem import Problem

MOST_WORDS, MOST_SEVERAL = 2**21, 2**17  # of several pipelines all states are gone through
WORD, BYTES = 64, 8

Bools = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.uint64]
States = npt.NDArray[np.int64]
Cut = tuple[int, int, int]
"""A stage as (index of the members, start, stop)."""


def stage_needs(
    profile: ModelProfile, plain: StageShape, segment_layers: int | None = None
) -> tuple[float, float]:
    """Return bytes of a stage of which one microbatch is in flight, without and with recompute.

    Recompute of a whole stage saves nothing then; segment_layers: those that need least, if they are known. A
    single microbatch needs less: gradients and activations do not peak together. Then the gradients of tied
    weights whose other layer is elsewhere are there from the start (`Plan.memory`).
    """
    start, stop, summed = plain.start, plain.stop, 0.0
    for group in profile.tied_groups if plain.num_microbatches == 1 else ():
        inside = [start <= layer < stop for layer in group]
        if any(inside) and not all(inside):
            summed += max(map(profile.tied_bytes, group))
    again = plain._replace(recompute=True)
    if segment_layers is None:
        segment_layers = leanest_segments(profile, again, whole=False)
    shapes = plain, again._replace(segment_layers=segment_layers)
    plain_bytes, again_bytes = (
        device_memory(profile, [shape], summed_bytes=summed).total_bytes for shape in shapes
    )
    return plain_bytes, again_bytes


class MemoryProgramme:
    """Owns what the stages of one microbatch size need, and the classes of the devices.

    members: devices of each class, then each pinned one. proven: what is not found does not exist.
    several: for pipelines beside others, of which each may have some of the pinned devices.
    """

    def __init__(self, problem: Problem, samples: int, *, several: bool = False) -> None:
        self.problem, self.samples = problem, samples
        self.ends = problem.profile.num_layers + 1
        self.words = -(-self.ends // WORD)
        self._needs: dict[str, Floats] = {}
        forced, devices = problem.forced, problem.cluster.devices
        pins = sorted(forced.pins, key=lambda pin: pin.start)
        pinned = [problem.cluster.device(pin.device) for pin in pins]
        limit = min(len(devices), forced.max_devices or len(devices)) - len(pinned)
        # free devices; of those that need the same those with most memory do what others do
        self.most = limit if several else min(self.ends - 1, limit)
        self.several, most_words = several, MOST_SEVERAL >> len(pins) if several else MOST_WORDS
        free = [device for device in devices if device not in pinned]
        groups = self._classes(free, most_words // self.words)
        self.members = [*groups, *([device] for device in pinned)]
        self.pins, self.own = ([], pins) if several else (pins, [])
        self.num_free = len(groups)
        self.counts = [len(group) for group in (self.members if several else groups)]
        radix = [1, *np.cumprod([count + 1 for count in self.counts], dtype=np.int64).tolist()]
        self.strides, self.num_states = radix[:-1], int(radix[-1])

    def _classes(self, devices: Sequence[Device], most: int) -> list[list[Device]]:
        """Return devices by usable bytes, most first; near memories together where states are too many."""
        ranked = sorted(devices, key=lambda device: (self._bytes_as(device), -device.usable_bytes))
        groups = [
            list(alike)
            for _, same in groupby(ranked, key=self._bytes_as)
            for _, alike in groupby(list(same)[: self.most], key=lambda device: device.usable_bytes)
        ]
        self.proven = True
        while len(groups) > 1 and math.prod(len(group) + 1 for group in groups) > most:
            lost = [
                (not self._alike(one, other), one[0].usable_bytes - other[-1].usable_bytes)
                for one, other in pairwise(groups)
            ]
            at = lost.index(min(lost))
            groups[at : at + 2] = [groups[at] + groups[at + 1]]
            self.proven = False
        return groups

    def _bytes_as(self, device: Device) -> str:
        """Return the first kind on which layers have the bytes that they have on a device."""
        profile = self.problem.profile
        held = profile.on(device.kind).layers
        return next(d.kind for d in self.problem.cluster.devices if profile.on(d.kind).layers == held)

    def _alike(self, one: Sequence[Device], other: Sequence[Device]) -> bool:
        """Return whether all of two classes need the same bytes."""
        return len(set(map(self._bytes_as, (*one, *other)))) == 1

    @cached_property
    def lacking(self) -> Floats:
        """Return bytes that a class lacks, inf where it may not have the layers: [class, start, stop]."""
        # the least of a class counts for all of it, and the most that any needs
        tables = np.array(
            [
                np.max([self._needs_on(kind) for kind in {*map(self._bytes_as, group)}], axis=0)
                - min(device.usable_bytes for device in group)
                for group in self.members
            ]
        )
        for pin in self.pins:
            tables[: len(self.counts), : pin.stop, pin.start + 1 :] = np.inf
        for place, pin in enumerate(self.own, self.num_free):
            least = tables[place, pin.start, pin.stop]
            tables[place] = np.inf
            tables[place, pin.start, pin.stop] = least
        return tables

    def _needs_on(self, kind: str) -> Floats:
        """Return the least bytes of each stage on a kind: [start, stop]."""
        if kind not in self._needs:
            needs = np.full((self.ends, self.ends), np.inf)
            again = leanest_table(self.problem.profile.on(kind), self.samples)
            for start in range(self.ends):
                for stop in range(start + 1, self.ends):
                    each = int(again[start, stop])
                    needs[start, stop] = min(self.stage_needs(start, stop, kind, each))
            self._needs[kind] = needs
        return self._needs[kind]

    def stage_needs(
        self, start: int, stop: int, kind: str, segment_layers: int | None = None
    ) -> tuple[float, float]:
        """Return bytes of a stage on a kind, one microbatch in flight, without and with recompute.

        Where several pipelines sum their gradients, a single microbatch needs no less.
        """
        count = None if self.several else -(-self.problem.global_batch_size // self.samples)
        stage = StageShape(start, stop, 1, self.samples, num_microbatches=count)
        return stage_needs(self.problem.profile.on(kind), stage, segment_layers)

    @cached_property
    def _pinned_lacking(self) -> list[float]:
        """Return bytes that each pinned device lacks; inf where its layers are another's too."""
        clash = any(one.stop > other.start for one, other in pairwise(self.pins))
        tables = self.lacking[len(self.counts) :]
        pairs = zip(tables, self.pins, strict=True)
        return [math.inf if clash else float(table[pin.start, pin.stop]) for table, pin in pairs]

    def leanest(self, below: float) -> list[list[Cut]]:
        """Return the pipelines whose fullest device lacks least; none where all lack so much or more."""
        free = self.lacking[: len(self.counts)].ravel()
        values = np.unique(np.concatenate([free, self._pinned_lacking]))
        values = values[(values > 0) & (values < min(below, math.inf))]
        best = self.solve(float(values[-1])) if len(values) else []
        low, high = -1, len(values) - 1
        while best and high - low > 1:
            middle = (low + high) // 2
            if found := self.solve(float(values[middle])):
                best, high = found, middle
            else:
                low = middle
        return best

    def solve(self, missing_bytes: float) -> list[list[Cut]]:
        """Return the pipeline of fewest stages whose devices lack no more than that; none if none does."""
        return [cuts for _, cuts in islice(self.pipelines(missing_bytes), 1)]

    def pipelines(self, missing_bytes: float) -> Iterator[tuple[tuple[int, ...], list[Cut]]]:
        """Give (devices of each class, stages) of pipelines whose devices lack no more than that.

        Short ones first; none that does without one of its devices or, if it is alone, with a lesser one.
        """
        fits = self.lacking[: len(self.counts)] <= missing_bytes
        unions = [self._unions(self._with_pins(table, missing_bytes)) for table in fits]
        labels = np.zeros((self.num_states, self.words), dtype="<u8")  # [state, word]
        labels[0] = _bits(self._with_pins(np.arange(self.ends) == self.ends - 1, missing_bytes))
        live: States = np.zeros(1, dtype=np.int64)
        for _ in range(min(self.ends - 1, self.most + len(self.own)) + 1):
            for place in np.flatnonzero(labels[live, 0] & np.uint64(1)):
                uses = [int(self._digit(live, part)[place]) for part in range(len(self.counts))]
                yield tuple(uses), list(self._back(fits, labels, int(live[place])))
            live = self._step(labels, live, unions)

    def _with_pins(self, layers: Bools, missing_bytes: float) -> Bools:
        """Return layers, along the first axis, with those that pinned stages in front of them begin at."""
        reached = layers.copy()
        for pin, lacking in zip(self.pins[::-1], self._pinned_lacking[::-1], strict=True):
            if lacking <= missing_bytes:
                reached[pin.start] |= reached[pin.stop]
        return reached

    def _step(self, labels: Labels, live: States, unions: Sequence[Labels]) -> States:
        """Return the states of one device more, their labels noted."""
        parts, reached = labels[live].view(np.uint8), [live[:0]]
        for place, count in enumerate(self.counts):
            able = self._digit(live, place) < count
            target = live[able] + self.strides[place]
            bits = parts[able]
            for byte in range(self.words * BYTES):
                labels[target] |= unions[place][byte, bits[:, byte]]
            reached.append(target)
        found = np.unique(np.concatenate(reached))
        labels[found] &= ~self._dominated(labels, found)
        return np.asarray(found[labels[found].any(axis=1)])

    def _dominated(self, labels: Labels, states: States) -> Labels:
        """Return the layers that fewer devices reach, or ones with less memory."""
        layers = np.zeros_like(labels[states])
        for place in range(self.num_free):
            used = np.flatnonzero(self._digit(states, place) > 0)
            without = states[used] - self.strides[place]
            layers[used] |= labels[without]
            if place + 1 < self.num_free and self._is_lesser[place + 1]:
                spare = self._digit(without, place + 1) < self.counts[place + 1]
                layers[used[spare]] |= labels[without[spare] + self.strides[place + 1]]
        return layers

    @cached_property
    def _is_lesser(self) -> list[bool]:
        """Return whether each class of free devices can do no more than the one before it.

        Not so of several pipelines: others may need the lesser ones.
        """
        free = self.members[: self.num_free]
        lesser = [not self.several and self._alike(one, other) for one, other in pairwise(free)]
        return [False, *lesser]

    def _digit(self, states: States, place: int) -> States:
        """Return how many devices of a class the states use."""
        return np.asarray(states // self.strides[place] % (self.counts[place] + 1))

    def _unions(self, fits: Bools) -> Labels:
        """Return the layers at which a stage in front can begin: [byte of a label, its value, word]."""
        columns = np.zeros((self.words * WORD, self.words), dtype="<u8")
        columns[: self.ends] = [_bits(fits[:, stop]) for stop in range(self.ends)]
        table = np.zeros((self.words * BYTES, 256, self.words), dtype="<u8")
        for bit in range(8):
            table[:, np.arange(256) >> bit & 1 == 1] |= columns[bit::8, None]
        return table

    def _back(self, fits: Bools, labels: Labels, state: int) -> Iterator[Cut]:
        """Yield the stages of a state that begins at layer 0."""
        pins = {pin.start: (place, pin.stop) for place, pin in enumerate(self.pins, len(self.counts))}
        start = 0
        while start < self.ends - 1:
            if pinned := pins.get(start):
                place, stop = pinned
            else:
                place, stop = next(
                    (place, int(stop))
                    for place, stride in enumerate(self.strides)
                    if state // stride % (self.counts[place] + 1)
                    for stop in np.flatnonzero(
                        fits[place, start] & _layers(labels[state - stride], self.ends)
                    )
                )
                state -= self.strides[place]
            yield place, start, stop
            start = stop


def _bits(layers: Bools) -> Labels:
    """Return a label of the layers that are set."""
    padded = np.zeros(-(-len(layers) // WORD) * WORD, dtype=bool)
    padded[: len(layers)] = layers
    return np.packbits(padded, bitorder="little").view("<u8")


def _layers(label: Labels, ends: int) -> Bools:
    """Return which layers are set in a label."""
    return np.unpackbits(label.view(np.uint8), bitorder="little", count=ends).astype(bool)
