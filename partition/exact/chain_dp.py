"""Exact dynamic programme for one pipeline: which devices, in which order, cut where, how much in flight.

Solved for a microbatch size and several periods side by side, from the last stage backwards.
State: (order of classes that the suffix of stages runs on, its first layer, period). Orders share their
suffixes; devices of one class may be exchanged and count once.
Label: (makespan Z, window W, longest optimizer step) of `partition.estimates.closed_forms`; the labels that
no other one beats in all three are kept, up to a number that the caller gives.
Transition: a stage in front. It is allowed if neither it nor its link is busy for longer than the period, and
its memory takes the in_flight that its window asks for.
Source: the recurrence over layers of PipeDream (Narayanan et al., SOSP 2019, section 3.1), with Z in place of
the bottleneck and devices in any order.
Complexity: O(orders * periods * labels * layers^2) time, O(orders * periods * labels * layers) memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_model.profile import ModelProfile
from partition.estimates.arrays import Floats
from partition.estimates.closed_forms import TOLERANCE
from partition.estimates.device_classes import ClassOrder, DeviceClasses
from partition.estimates.layer_bytes import LayerBytes
from partition.estimates.pipeline_costs import Layout, PipelineCosts
from partition.estimates.stage_tables import working_table

Indices = npt.NDArray[np.int64]
FOREVER_S = 1e18  # as a period: one microbatch in flight is enough everywhere


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The bytes of layers [start, stop) by [stop, start], as `device_memory` counts them without recompute.

    Of one microbatch size, on which the workspace depends.

    fixed: whatever is in flight; per_sample: for each sample in flight; trained: parameters with a gradient.
    """

    fixed: Floats
    per_sample: Floats
    trained: Floats

    @classmethod
    def of(cls, profile: ModelProfile, samples: int) -> "StageBytes":
        held = LayerBytes.of(profile)
        states = held.weights + held.trained * (1 + profile.optimizer_bytes_per_parameter_byte)
        fixed = states + working_table(profile, samples) + samples * (held.inputs + held.outputs)
        each = held.saved + held.outputs
        until = profile.first_trained + 1  # no backward: see `SizeTables.caps`
        fixed[:, :until] += samples * (held.passing + held.inputs - held.outputs)[:, :until]
        each[:, :until] = held.outputs[:, :until]
        return cls(fixed.T, each.T, held.trained.T)


def _between(prefix: Sequence[float] | Floats) -> Floats:
    """Return sums over [start, stop) by [stop, start] from running sums."""
    values = np.asarray(prefix, dtype=np.float64)
    return np.asarray(values[:, None] - values[None, :])


@dataclass(frozen=True, slots=True)
class Labels:
    """Pareto-optimal suffixes of stages by [period, label, start layer]; inf where there is none.

    stop, follower: where the first stage ends, and the label there of the stages after it.
    """

    makespan_s: Floats
    window_s: Floats
    optimizer_s: Floats
    stop: Indices
    follower: Indices


@dataclass(frozen=True, slots=True)
class Root:
    """A whole pipeline found by the programme; objective_s = Z + tied sync + norm + longest optimizer step.

    period: index of the period it was found for.
    """

    objective_s: float
    order: ClassOrder
    period: int
    layout: Layout


class ChainProgramme:
    """The dynamic programme for one microbatch size; its tables are indexed [stop, start]."""

    def __init__(self, costs: PipelineCosts, classes: DeviceClasses, samples: int) -> None:
        self.costs, self.classes, self.samples = costs, classes, samples
        self.num_layers = costs.problem.profile.num_layers
        self._num_microbatches = costs.num_microbatches(samples)
        self._devices = [group[0] for group in classes.members]
        kinds = dict.fromkeys(device.kind for device in self._devices)
        profile = costs.problem.profile
        self._bytes = {kind: StageBytes.of(profile.on(kind), samples) for kind in kinds}
        self._links: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}

    @cached_property
    def busy_s(self) -> list[Floats]:
        """Return per class the forward and backward of a microbatch; inf where [start, stop) is empty."""
        ends = range(self.num_layers + 1)
        tables = [
            _between([self.costs.busy_s(device, 0, stop, self.samples) for stop in ends])
            for device in self._devices
        ]
        empty = np.triu(np.ones_like(tables[0], dtype=bool))
        return [np.where(empty, np.inf, table) for table in tables]

    @cached_property
    def _total_s(self) -> list[Floats]:
        ends, batch = range(self.num_layers + 1), self.costs.problem.global_batch_size
        return [
            _between([self.costs.total_s(device, 0, stop, self.samples, batch) for stop in ends])
            for device in self._devices
        ]

    @cached_property
    def _optimizer_s(self) -> list[Floats]:
        trained = self._bytes[self._devices[0].kind].trained
        share = trained / trained[-1, 0] if trained[-1, 0] else trained
        every = range(self.num_layers)
        return [share * self.costs.prices.optimizer_s(device, every) for device in self._devices]

    @cached_property
    def _caps(self) -> list[Floats]:
        """Return per class the most in flight by memory: inf where all fit, 0 where not even one does."""
        caps = []
        for device in self._devices:
            held = self._bytes[device.kind]
            one = held.per_sample * self.samples
            spare = device.usable_bytes - held.fixed
            whole = np.floor(np.maximum(spare, 0.0) / np.where(one > 0, one, np.inf))
            caps.append(np.where((self._num_microbatches * one <= spare) & (spare >= 0), np.inf, whole))
        for cap in caps:  # without a backward all are in flight
            until = self.costs.prices.first_trained + 1
            cap[:until] = np.where(np.isinf(cap[:until]), np.inf, 0.0)
        return caps

    def _link(self, first: int, second: int) -> tuple[Floats, Floats, Floats]:
        """Return seconds on a link by the layer after it, inf at the ends.

        They are (both ways with latency; one way without; one way without, all microbatches but one).
        """
        key = (first, second)
        if key not in self._links:
            costs, samples, pair = self.costs, self.samples, self.classes.pair(first, second)
            rest = max(0, costs.problem.global_batch_size - samples)
            inner = range(1, self.num_layers)
            self._links[key] = (
                np.array([np.inf, *(costs.hop_s(*pair, at, samples) for at in inner), np.inf]),
                np.array([np.inf, *(costs.link_s(*pair, at, samples) for at in inner), np.inf]),
                np.array([np.inf, *(costs.link_s(*pair, at, rest) for at in inner), np.inf]),
            )
        return self._links[key]

    def sync_s(self, order: ClassOrder) -> float:
        """Return the seconds of the norm, and of the sync of tied weights between first and last device.

        Exact for a head tied to the first layer, the only tie in the models that we know.
        """
        problem, devices = self.costs.problem, self.classes.devices(order)
        profile, share = problem.profile, problem.gradient_share
        ends = (devices[0], devices[-1])
        tied = [max(map(profile.tied_bytes, group)) for group in profile.tied_groups]
        seconds = sum(self.costs.all_reduce_s(ends, share * num_bytes) for num_bytes in tied)
        return seconds + self.costs.norm_s(devices)

    def _last_stage(self, class_index: int, periods_s: Floats) -> Labels:
        busy, total = self.busy_s[class_index][-1], self._total_s[class_index][-1]
        fits = (busy <= periods_s[:, None]) & (self._caps[class_index][-1] >= 1)
        shape = (len(periods_s), 1, self.num_layers + 1)
        stop = np.full(shape, self.num_layers)
        return Labels(
            makespan_s=np.where(fits, total, np.inf)[:, None, :],
            window_s=np.where(fits, busy, np.inf)[:, None, :],
            optimizer_s=np.broadcast_to(self._optimizer_s[class_index][-1], shape),
            stop=stop,
            follower=np.zeros_like(stop),
        )

    def _prepend(
        self, class_index: int, second: int, after: Labels, periods_s: Floats, max_labels: int | None
    ) -> Labels:
        """Return the labels with a stage of a class in front of those that begin with class `second`.

        Candidates are indexed [period, follower, stop, start].
        """
        link_trip_s, link, rest = (row[:, None] for row in self._link(class_index, second))
        period = periods_s[:, None, None, None]
        busy = self.busy_s[class_index]
        trip = busy + link_trip_s + after.window_s[..., None]
        in_flight = np.maximum(np.ceil(trip / period - TOLERANCE), 1.0)
        fits = (in_flight <= self._caps[class_index]) & (np.maximum(busy, link) <= period)
        beyond = np.maximum(rest, after.makespan_s[..., None])
        makespan = np.maximum(self._total_s[class_index], busy + link_trip_s + beyond)
        makespan = np.where(fits, makespan, np.inf)
        window = np.where(period < FOREVER_S, np.maximum(trip, (in_flight - 1) * period + busy), 0.0)
        optimizer = np.maximum(self._optimizer_s[class_index], after.optimizer_s[..., None])
        flat = (len(periods_s), -1, self.num_layers + 1)
        fronts = (makespan.reshape(flat), window.reshape(flat), optimizer.reshape(flat))
        picks = _pareto(*fronts, max_labels)
        follower, stop = np.divmod(picks, self.num_layers + 1)
        makespan, window, optimizer = (np.take_along_axis(front, picks, axis=1) for front in fronts)
        return Labels(makespan, window, optimizer, stop, follower)

    def roots(
        self, orders: Iterable[ClassOrder], periods_s: Sequence[float], max_labels: int | None
    ) -> Iterator[Root]:
        """Yield for each order and period the pipeline of least objective, where there is one.

        max_labels: labels kept per suffix and start layer; None keeps all of them and is exact.
        """
        periods = np.array(periods_s)
        memo: dict[ClassOrder, Labels] = {}
        with np.errstate(invalid="ignore"):  # inf - inf and the like, where nothing fits
            for order in orders:
                labels = self._labels(order, periods, max_labels, memo)
                whole = labels.makespan_s[..., 0] + labels.optimizer_s[..., 0] + self.sync_s(order)
                for period, label in enumerate(whole.argmin(axis=1)):
                    if np.isfinite(whole[period, label]):
                        layout = self._layout(order, period, int(label), memo)
                        yield Root(float(whole[period, label]), order, period, layout)

    def _labels(
        self, order: ClassOrder, periods_s: Floats, max_labels: int | None, memo: dict[ClassOrder, Labels]
    ) -> Labels:
        if order not in memo:
            if len(order) == 1:
                memo[order] = self._last_stage(order[0], periods_s)
            else:
                after = self._labels(order[1:], periods_s, max_labels, memo)
                memo[order] = self._prepend(order[0], order[1], after, periods_s, max_labels)
        return memo[order]

    def _layout(self, order: ClassOrder, period: int, label: int, memo: dict[ClassOrder, Labels]) -> Layout:
        stages, start = [], 0
        for place, device in enumerate(self.classes.devices(order)):
            labels = memo[order[place:]]
            stop = int(labels.stop[period, label, start])
            label = int(labels.follower[period, label, start])
            stages.append((device, start, stop))
            start = stop
        return tuple(stages)


def _pareto(makespan: Floats, window: Floats, optimizer: Floats, max_labels: int | None) -> Indices:
    """Return the indices on axis 1 of candidates that no other one beats, least makespan + optimizer first.

    Label k + 1 is the least among those that no earlier label is at least as good as in all three.
    """
    key = makespan + optimizer
    picks: list[Indices] = []
    while True:
        pick = key.argmin(axis=1)[:, None]
        if picks and not np.isfinite(np.take_along_axis(key, pick, axis=1)).any():
            break
        picks.append(pick)
        if len(picks) == max_labels:
            break
        better = np.zeros_like(key, dtype=bool)
        for front in (makespan, window, optimizer):
            better |= front < np.take_along_axis(front, pick, axis=1)
        key = np.where(better, key, np.inf)
    return np.concatenate(picks, axis=1)
