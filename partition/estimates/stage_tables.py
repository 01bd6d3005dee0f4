"""Arrays of what every stage of one microbatch size takes on every class of devices.

Tables are indexed [class, start, stop] for layers [start, stop); empty stages are inf where they cost and
0 where they count.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_model.cluster import Device
from cost_model.layer_costs import Prices
from cost_model.memory import (
    first_backward_bytes,
    segment_choices,
    working_bytes,
)
from cost_model.network import Network
from cost_model.profile import ModelProfile
from partition.estimates.amounts import Amount
from partition.estimates.arrays import Bools, Floats, Places
from partition.estimates.device_classes import DeviceClasses
from partition.estimates.layer_bytes import LayerBytes
from partition.estimates.segment_tables import segment_tables
from partition.problem import Problem

ALL = 1e6  # as a cap: memory takes as many in flight as there are
FAR_S = 1e30  # longer than any round trip
MEMORY_SLACK = 1e-9  # relative: a stage that just fits, but for rounding, fits


def working_table(profile: ModelProfile, samples: int) -> Floats:
    """Return `cost_model.memory.working_bytes` of layers [start, stop) by [start, stop]."""
    return _table_of(profile, samples, working_bytes)


def leanest_table(profile: ModelProfile, samples: int) -> Places:
    """Return the `cost_model.memory.leanest_segments` of one microbatch in flight, by [start, stop].

    All of a stage at once is not among them, but for a stage of one layer.
    """
    held, layers = LayerBytes.of(profile), profile.num_layers
    alone = samples * held.saved + working_table(profile, samples)
    needs = [samples * kept + most for kept, most in segment_tables(held.inputs, samples, alone)]
    choices, ends = segment_choices(layers), np.arange(layers + 1)
    lengths = ends[None, :] - ends[:, None]
    pairs = zip(choices[1:], needs, strict=True)
    table = [
        np.where(lengths > 1, np.inf, 0.0),
        *(np.where(lengths > each, need, np.inf) for each, need in pairs),
    ]
    return np.asarray(np.array(choices)[np.argmin(table, axis=0)])


def _table_of(
    profile: ModelProfile, samples: int, rows: Callable[[ModelProfile, int, int], tuple[float, ...]]
) -> Floats:
    table = np.zeros((profile.num_layers + 1, profile.num_layers + 1))
    for start in range(profile.num_layers):
        table[start, start:] = rows(profile, start, samples)
    return table


@dataclass(frozen=True, slots=True)
class AmountTables:
    """The seconds for an amount of samples, by [class, start, stop], with the optimizer step in total_s.

    total_s: all microbatches; before_s: what a stage adds to the path of the first forward and of the last
    backward; again_*: the same with recompute. link_s: both directions of the link in front of a layer, by
    [class, next class, layer]. end_s: what of total_s comes after the last backward.
    """

    total_s: Floats
    again_total_s: Floats
    before_s: Floats
    again_before_s: Floats
    link_s: Floats
    end_s: Floats
    again_end_s: Floats


class ProblemTables:
    """The arrays of a problem; `at` gives those of a microbatch size, made once."""

    def __init__(self, problem: Problem, classes: DeviceClasses) -> None:
        self.problem, self.classes = problem, classes
        self.num_layers = problem.profile.num_layers
        self.prices = Prices(problem.profile)
        self.network = Network(problem.cluster, problem.profile.links, problem.profile.all_reduces)
        self.kinds = [{device.kind for device in devices} for devices in classes.members]
        self.bytes = LayerBytes.by_class(problem.profile, self.kinds)
        self._sizes: dict[int, SizeTables] = {}

    def at(self, samples: int) -> "SizeTables":
        if samples not in self._sizes:
            self._sizes[samples] = self._tables_at(samples)
        return self._sizes[samples]

    def _tables_at(self, samples: int) -> "SizeTables":
        return SizeTables(self, samples)

    @cached_property
    def without_backward(self) -> Bools:
        """A mask of the [start, stop) with no trained layer in them nor before them."""
        return np.asarray(
            np.tile(np.arange(self.num_layers + 1) <= self.prices.first_trained, (self.num_layers + 1, 1))
        )

    @cached_property
    def optimizer_s(self) -> Floats:
        """The seconds of the optimizer step."""
        profile = self.problem.profile
        per_byte = [
            min(profile.kind(device.kind).optimizer_s_per_byte / device.speed for device in devices)
            for devices in self.unlike
        ]
        return np.array(per_byte)[:, None, None] * np.maximum(self.bytes.trained, 0.0)

    def by_class(self, table_of: Callable[[ModelProfile], Floats]) -> Floats:
        """Return a table of bytes by [start, stop], or by class in front if they differ, as `bytes` do."""
        profile = self.problem.profile
        if self.bytes.weights.ndim == 2:
            return table_of(profile.on(next(iter(self.kinds[0]))))
        tables = {kind: table_of(profile.on(kind)) for kind in set().union(*self.kinds)}
        return np.stack([np.min([tables[kind] for kind in kinds], axis=0) for kinds in self.kinds])

    @cached_property
    def usable_bytes(self) -> Floats:
        return np.array([max(device.usable_bytes for device in devices) for devices in self.unlike])

    @cached_property
    def unlike(self) -> list[list[Device]]:
        """The devices of each class that differ in kind, speed or memory: mostly one; the best counts."""
        alike = [
            {(device.kind, device.speed, device.usable_bytes): device for device in group}
            for group in self.classes.members
        ]
        return [list(devices.values()) for devices in alike]

    @cached_property
    def stages(self) -> Bools:
        """A mask of the [start, stop) that are a stage of at least one layer."""
        ends = np.arange(self.num_layers + 1)
        return np.asarray(ends[:, None] < ends[None, :])

    @cached_property
    def allowed(self) -> Bools:
        """A mask of the stages that some device of a class may have: [class, start, stop].

        A pinned device of a class of its own may have its layers and no others.
        """
        mask = np.repeat(self.stages[None], len(self.classes.members), axis=0)
        pins = {pin.device: pin for pin in self.problem.forced.pins}
        for class_index, group in enumerate(self.classes.members):
            if all(device.name in self.classes.pinned for device in group):
                mask[class_index] = False
                for device in group:
                    mask[class_index, pins[device.name].start, pins[device.name].stop] = True
        return np.asarray(mask)


class SizeTables:
    """The arrays for one microbatch size; the tables that they are of keep them, and not the other way."""

    def __init__(self, tables: ProblemTables, samples: int) -> None:
        self.tables: ProblemTables = weakref.proxy(tables)
        self.samples = samples
        self._caps: dict[tuple[bool, int], Floats] = {}

    @cached_property
    def forward_s(self) -> Floats:
        return self._seconds(0)

    @cached_property
    def backward_s(self) -> Floats:
        """The seconds without recompute; with it the forward comes on top."""
        return self._seconds(1)

    def _seconds(self, which: int) -> Floats:
        prices, ends = self.tables.prices, range(self.tables.num_layers + 1)
        stage_s = (prices.forward_s, prices.backward_s)[which]
        rows = []
        for devices in self.tables.unlike:
            prefix = np.array(
                [[stage_s(device, 0, stop, self.samples) for stop in ends] for device in devices]
            )
            rows.append((prefix[:, None, :] - prefix[:, :, None]).min(axis=0))
        return np.where(self.tables.stages, np.stack(rows), np.inf)

    def amount(self, amount: Amount) -> AmountTables:
        """Return what an amount of samples takes in microbatches of this size."""
        lasts = [self.tables.at(samples) for samples in range(amount.least, amount.most + 1)]
        forward = np.min([last.forward_s for last in lasts], axis=0)
        backward = np.min([last.backward_s for last in lasts], axis=0)
        forward_transfer = np.min([last.transfer_s[0] for last in lasts], axis=0)
        backward_transfer = np.min([last.transfer_s[1] for last in lasts], axis=0)
        total = amount.full * self.busy_s if amount.full else forward + backward
        redone = amount.full * self.forward_s if amount.full else forward
        if amount.rest:
            total, redone = total + forward + backward, redone + forward
        elif amount.below is not None and amount.full and amount.least < self.samples:
            total = self._in_proportion(amount, self.busy_s, [last.busy_s for last in lasts])
            redone = self._in_proportion(amount, self.forward_s, [last.forward_s for last in lasts])
        total = total + self.tables.optimizer_s
        before = (self.forward_s if amount.full else forward) + backward
        link = (self.transfer_s[0] if amount.full else forward_transfer) + backward_transfer
        end = self.tables.optimizer_s
        return AmountTables(total, total + redone, before, before + forward, link, end, end)

    def _in_proportion(self, amount: Amount, full_s: Floats, last_s: list[Floats]) -> Floats:
        """Return seconds of all full microbatches at the least rate of the amounts for which they stand.

        A smaller last microbatch may take less for a sample than a full one.
        """
        since = max(1, amount.below or 0)
        rate = full_s
        for samples, seconds in enumerate(last_s, amount.least):
            rate = np.minimum(rate, (since * full_s + seconds) / (since + samples / self.samples))
        return amount.full * rate

    @cached_property
    def busy_s(self) -> Floats:
        return self.forward_s + self.backward_s

    @cached_property
    def workspace_bytes(self) -> Floats:
        """The `working_bytes` by [start, stop], or by class as `LayerBytes`."""
        return self.tables.by_class(lambda profile: working_table(profile, self.samples))

    @cached_property
    def first_backward_bytes(self) -> Floats:
        """The `cost_model.memory.first_backward_bytes` by [start, stop], with no gradient there before."""
        return self.tables.by_class(lambda profile: _table_of(profile, self.samples, first_backward_bytes))

    @property
    def _usable_bytes(self) -> Floats:
        return self.tables.usable_bytes[:, None, None] * (1 + MEMORY_SLACK)

    def caps(self, *, recompute: bool, more_before: int = 0) -> Floats:
        """Return the most microbatches in flight that memory takes; 0 where not even one, at most ALL.

        more_before: that are in flight in the stage before, whose gradients wait here. Of a stage without a
        backward they are all of the pipeline's (`caps_for`).
        """
        key = recompute, more_before
        if key not in self._caps:
            self._caps[key] = self._count_caps(recompute, more_before)
        return self._caps[key]

    def caps_for(self, num_microbatches: float, *, recompute: bool) -> Floats:
        """Return `caps`, where there is no backward ALL or, if so many do not fit, 0."""
        caps, all_there = self.caps(recompute=recompute), self.tables.without_backward
        return np.where(all_there, np.where(caps >= max(1.0, num_microbatches), ALL, 0.0), caps)

    def _count_caps(self, recompute: bool, more_before: int) -> Floats:
        held, samples = self.tables.bytes, self.samples
        optimizer = self.tables.problem.profile.optimizer_bytes_per_parameter_byte
        states = held.weights + held.trained * (1 + optimizer)
        here = states + samples * (held.inputs + held.outputs)  # see `stage_activation_bytes`
        if more_before:
            starts = np.arange(self.tables.num_layers + 1)[:, None]
            returned = starts > self.tables.prices.first_trained
            here = here + more_before * samples * np.where(returned, held.inputs, 0.0)
        # without a backward the inputs of two microbatches are there, and what one saves while it runs
        ahead = self._caps_of(
            states + self.workspace_bytes + samples * (held.passing + 2 * held.inputs), held.outputs
        )
        if not recompute:
            caps = self._caps_of(here + self.workspace_bytes, held.outputs + held.saved)
            return np.where(self.tables.without_backward, ahead, caps)
        each = held.outputs + held.inputs
        caps = self._caps_of(here + self.workspace_bytes + samples * held.saved, each)
        alone = samples * held.saved + self.workspace_bytes
        for inputs, most in segment_tables(held.inputs, samples, alone):
            caps = np.maximum(caps, self._caps_of(here + most, held.outputs + inputs))
        return np.where(self.tables.without_backward, ahead, caps)

    def _caps_of(self, fixed: Floats, one: Floats) -> Floats:
        """Return the caps for bytes whatever is in flight, and for each sample that is."""
        usable, which = self._usable_bytes, np.arange(len(self.tables.classes.members))
        if fixed.ndim == 2:
            distinct, which = np.unique(usable, return_inverse=True)
            usable = distinct[:, None, None]
        spare = usable - fixed
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            caps = np.floor(spare / (self.samples * one))
        caps = np.where(spare >= 0, np.fmin(caps, ALL), 0.0)[which.ravel()]
        return np.asarray(np.where(self.tables.allowed, caps, 0.0))

    def most_in_flight(self, amount: Amount, *, recompute: bool) -> Floats:
        """Return `caps`, and one more where a pipeline of this amount has no more microbatches than that.

        Where all are in flight gradients and activations do not peak together, and one more may fit (see
        `cost_model.memory.device_memory`).
        """
        fewest, most = amount.num_microbatches(self.samples)
        caps = self.caps_for(fewest, recompute=recompute)
        near = (caps >= fewest - 1) & (caps < most) & ~self.tables.without_backward
        if not near.any():
            return caps
        return np.where(near & self._fits_all(caps + 1, recompute=recompute), caps + 1, caps)

    def _fits_all(self, in_flight: Floats, *, recompute: bool) -> Bools:
        """Return where memory takes all microbatches of a pipeline that has so many."""
        held, samples = self.tables.bytes, self.samples
        optimizer = self.tables.problem.profile.optimizer_bytes_per_parameter_byte
        saved, boundary = samples * held.saved, samples * (held.inputs + (in_flight + 1) * held.outputs)
        before, after = in_flight * saved, (in_flight - 1) * saved
        first = np.maximum(self.first_backward_bytes - self.workspace_bytes, 0.0)
        if recompute:
            before, after = (
                np.where(flight > 0, flight * samples * held.inputs + saved, 0.0)
                for flight in (in_flight, in_flight - 1)
            )
            first = np.where(in_flight > 1, 0.0, first)
        peak = np.maximum(before, held.trained + after + first) + boundary
        need = held.weights + held.trained * optimizer + self.workspace_bytes + peak
        return np.asarray(self.tables.allowed & (need <= self._usable_bytes))

    def gaps(self, amount: Amount, busy_s: Floats, caps: Floats) -> tuple[Floats, Floats]:
        """Return the round trips from which on a stage waits in its warmup, and in its cooldown.

        By [recompute, class, start, stop]. busy_s: of a microbatch; caps: the most in flight. What is
        computed must not grow faster than in proportion to the microbatches of an amount: so the most of them
        count in the warmup, and for the cooldown all of them must be more than memory takes in flight. A
        smaller microbatch at the end may be back at once.
        """
        if not amount.full:
            return busy_s, np.full_like(busy_s, FAR_S)
        fewest, most = amount.num_microbatches(self.samples)
        longest = self.forward_s
        if amount.least < self.samples:
            lasts = [self.tables.at(samples).forward_s for samples in range(amount.least, amount.most + 1)]
            longest = np.maximum(longest, np.max(lasts, axis=0))
        with np.errstate(invalid="ignore"):
            warm = busy_s + np.minimum(caps, most) * longest - self.forward_s
            cool = busy_s + (caps - 1) * (busy_s - self.forward_s)
        whole = (caps < fewest) & (amount.least == self.samples)
        return warm, np.where(whole, cool, FAR_S)

    @cached_property
    def transfer_s(self) -> tuple[Floats, Floats]:
        """The seconds of a message forward and of one backward, [first class, second class, layer after it].

        Over the best channel that the classes have between them; inf at the ends and where there is none.
        Nothing goes back to layers before which nothing is trained.
        """
        classes, ends = self.tables.classes, self.tables.num_layers
        count = len(classes.members)
        forward_s = np.full((count, count, ends + 1), np.inf)  # [first class, second class, layer]
        backward_s = forward_s.copy()
        inner = range(1, ends)
        prices = self.tables.prices
        sizes: dict[tuple[str, str], list[float]] = {}
        for first in range(count):
            for second in range(count):
                for one, other in classes.channels(first, second):
                    kinds = one.kind, other.kind
                    if kinds not in sizes:
                        sizes[kinds] = [prices.boundary_bytes(at, self.samples, one, other) for at in inner]
                    forward = self.tables.network.route(one.name, other.name).link
                    backward = self.tables.network.route(other.name, one.name).link
                    for table, link in ((forward_s, forward), (backward_s, backward)):
                        row = [link.transfer_s(size) for size in sizes[kinds]]
                        table[first, second, 1:ends] = np.minimum(table[first, second, 1:ends], row)
        until = self.tables.prices.first_trained + 1
        backward_s[..., 1:until] = np.where(np.isfinite(forward_s[..., 1:until]), 0.0, np.inf)
        return forward_s, backward_s
