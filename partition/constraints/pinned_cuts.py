"""Cuts of pipelines in which some devices must hold given layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_model.cluster import Device
from cost_model.memory import StageShape, device_memory
from partition.estimates.arrays import Floats
from partition.estimates.device_classes import DeviceClasses
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.stage_tables import ProblemTables, SizeTables
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage, TimingCache
from partition.exact.cut_dp import CutOptimizer
from partition.problem import Pin, Problem

Order = tuple[int, ...]
"""A pipeline's devices from first to last, as classes."""


class PinnedTables(ProblemTables):
    """The arrays of a problem in which a pinned device is a class of its own, with its one stage."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, _classes(problem))
        self.pins: dict[int, Pin] = {}
        for entry, group in enumerate(self.classes.members):
            for pin in problem.forced.pins:
                if pin.device == group[0].name:
                    self.pins[entry] = pin

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Where a class may have layers [start, stop), by [class, start, stop]."""
        table = np.repeat(self.stages[None], len(self.classes.members), axis=0)
        for entry, pin in self.pins.items():
            table[entry] = False
            table[entry, pin.start, pin.stop] = True
        return np.asarray(table)

    def at(self, samples: int) -> SizeTables:
        if samples not in self._sizes:
            self._sizes[samples] = _PinnedSize(self, samples)
        return self._sizes[samples]


class _PinnedSize(SizeTables):
    def __init__(self, tables: PinnedTables, samples: int) -> None:
        super().__init__(tables, samples)
        self._allowed = tables.allowed

    def caps(self, *, recompute: bool) -> Floats:
        """As without pins, and 0 for the layers that a pinned device may not have."""
        return np.where(self._allowed, super().caps(recompute=recompute), 0.0)


def _classes(problem: Problem) -> DeviceClasses:
    """Devices of one node that are alike, each pinned one alone; which links they have, nobody asks here."""
    pinned = {pin.device for pin in problem.forced.pins}
    return DeviceClasses.by(
        problem.cluster.devices,
        lambda device: (device.device_class, device.name if device.name in pinned else ""),
    )


@dataclass(frozen=True, slots=True)
class LeanCut:
    """The cut of an order that lacks fewest bytes; missing_bytes is at most 0 where it fits, inf where the
    pins allow no cut at all."""

    missing_bytes: float
    stages: tuple[tuple[int, int], ...]


class PinnedCutter:
    """Cuts orders of devices so that each pinned one gets its layers."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = PinnedTables(problem)
        self.costs = PipelineCosts(problem)
        self.timings = TimingCache(self.costs)
        self.cut_optimizer = CutOptimizer(self.tables, self.timings)
        self._lean: dict[Order, LeanCut] = {}
        self._missing: dict[Order, Floats] = {}

    def entries(self, devices: Sequence[Device]) -> Order:
        return self.cut_optimizer.entries(devices)

    @cached_property
    def _lacking(self) -> Floats:
        """Bytes that a class lacks for [start, stop) with one microbatch of the least size in flight."""
        size, layers = min(self.problem.microbatch_sizes), self.tables.num_layers
        needs = np.full((layers + 1, layers + 1), np.inf)
        for start in range(layers):
            for stop in range(start + 1, layers + 1):
                shape = StageShape(start, stop, 1, size)
                needs[start, stop] = device_memory(self.problem.profile, [shape]).total_bytes
        lacking = needs[None] - self.tables.usable_bytes[:, None, None]
        return np.where(self.tables.allowed, lacking, np.inf)

    def lean(self, order: Order) -> LeanCut:
        """The cut in which the fullest device lacks fewest bytes, by dynamic programming over suffixes."""
        if order not in self._lean:
            missing = float(self._suffix(order)[0])
            stages, start = [], 0
            if np.isfinite(missing):
                for place, entry in enumerate(order):
                    row = np.maximum(self._lacking[entry][start], self._suffix(order[place + 1 :]))
                    stop = int(row.argmin())
                    stages.append((start, stop))
                    start = stop
            self._lean[order] = LeanCut(missing, tuple(stages))
        return self._lean[order]

    def _suffix(self, order: Order) -> Floats:
        """Bytes that the fullest device of an order lacks, by the layer that it starts at."""
        if order not in self._missing:
            if not order:
                ends = np.full(self.tables.num_layers + 1, np.inf)
                ends[-1] = -np.inf
                self._missing[order] = ends
            else:
                rest = self._suffix(order[1:])
                self._missing[order] = np.maximum(self._lacking[order[0]], rest[None, :]).min(axis=1)
        return self._missing[order]

    def period_s(self, order: Order, samples: int) -> float:
        """The least seconds of the busiest device for a microbatch, links left out; inf where none fits."""
        size = self.tables.at(samples)
        slowest = np.full(self.tables.num_layers + 1, np.inf)
        slowest[-1] = 0.0
        busy = self._fitting_s(size)
        for entry in reversed(order):
            slowest = np.maximum(busy[entry], slowest[None, :]).min(axis=1)
        return float(slowest[0])

    def _fitting_s(self, size: SizeTables) -> Floats:
        key = size.samples
        if key not in self._busy:
            self._busy[key] = np.where(size.caps(recompute=True) >= 1, size.busy_s, np.inf)
            held = size.caps(recompute=False) >= 1
            self._busy[key] = np.where(held, size.busy_s, self._busy[key] + size.forward_s)
        return self._busy[key]

    @cached_property
    def _busy(self) -> dict[int, Floats]:
        return {}

    def pipeline(self, devices: Sequence[Device], samples: int, num_samples: int) -> TimedPipeline | None:
        """The pipeline cut for num_samples in microbatches of `samples`; with the leanest cut where the best
        one does not fit; None where that does not either."""
        found = self.cut_optimizer.recut(devices, samples, num_samples)
        if found is not None and found.timing.fits:
            return found
        cut = self.lean(self.entries(devices))
        if cut.missing_bytes > 0:
            return None
        pairs = zip(devices, cut.stages, strict=True)
        stages = tuple(TimedStage(device, start, stop) for device, (start, stop) in pairs)
        made = self.timings.pipeline(stages, min(self.problem.microbatch_sizes))
        return made if made.timing.fits else None
