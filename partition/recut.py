"""The best cuts of a pipeline whose devices and their order are given."""

import itertools
from collections.abc import Sequence

import numpy as np

from cost_model.cluster import Device
from partition.tables import Floats, ProblemTables
from partition.worker import Worker, WorkerStage, Workshop

CLOSE = 0.02  # a period this near the one that the cuts were made for will do
LONGER = 1.5


class Recutter:
    """Cuts pipelines anew for their own devices and links; remembers what it did."""

    def __init__(self, tables: ProblemTables, workshop: Workshop) -> None:
        self.tables, self.workshop = tables, workshop
        self._entry = {
            device.name: entry for entry, group in enumerate(tables.classes.members) for device in group
        }
        self._hops: dict[object, Floats] = {}
        self._done: dict[object, tuple[WorkerStage, ...] | None] = {}

    def entries(self, devices: Sequence[Device]) -> tuple[int, ...]:
        """The class of each device."""
        return tuple(self._entry[device.name] for device in devices)

    def recut(
        self, devices: Sequence[Device], microbatch_size: int, num_samples: int, *, recompute: bool = True
    ) -> Worker | None:
        """The pipeline with the cuts of least makespan bound Z; None where memory takes no cuts.

        A dynamic programme over layers from the last stage backwards; each stage's in_flight, by the window
        recursion for a period, must fit. The period is guessed, then taken from the cuts.
        """
        if len(devices) > self.tables.num_layers:
            return None
        route = self.workshop.costs.network.route
        entries = self.entries(devices)
        links = tuple(
            (route(a.name, b.name).link, route(b.name, a.name).link) for a, b in itertools.pairwise(devices)
        )
        key = (entries, links, microbatch_size, num_samples, recompute)
        if key not in self._done:
            self._done[key] = self._cut(devices, entries, microbatch_size, num_samples, recompute)
        found = self._done[key]
        if found is None:
            return None
        stages = tuple(
            WorkerStage(device, stage.start, stage.stop, stage.recompute)
            for device, stage in zip(devices, found, strict=True)
        )
        return self.workshop.worker(stages, microbatch_size)

    def _cut(
        self,
        devices: Sequence[Device],
        entries: Sequence[int],
        microbatch_size: int,
        num_samples: int,
        recompute: bool,
    ) -> tuple[WorkerStage, ...] | None:
        size = self.tables.at(microbatch_size)
        whole = size.busy_s[list(entries), 0, -1]
        period = float(1 / (1 / np.maximum(whole, 1e-300)).sum())
        best: tuple[float, tuple[WorkerStage, ...]] | None = None
        for _ in range(8):
            stages = self._cut_for(devices, entries, microbatch_size, num_samples, period, recompute)
            if stages is None:
                if best is not None:
                    break
                period *= LONGER
                continue
            worker = self.workshop.worker(stages, microbatch_size)
            if not worker.timing.fits:
                period *= LONGER
                continue
            seconds = worker.timing.quick_s(max(1, num_samples // microbatch_size))
            if best is None or seconds < best[0]:
                best = (seconds, stages)
            own = worker.timing.period_s
            if abs(own / period - 1) < CLOSE or (best is not None and seconds > best[0]):
                break
            period = own
        return best[1] if best else None

    def _hop(self, one: Device, other: Device, microbatch_size: int) -> tuple[Floats, Floats]:
        """([layer]: both ways with latency; the slower way's occupation), 0 at the end of the model."""
        route = self.workshop.costs.network.route
        key = (route(one.name, other.name).link, route(other.name, one.name).link, microbatch_size)
        if key not in self._hops:
            rows = [
                self.workshop.costs.message_s(one, other, layer, microbatch_size)
                for layer in range(1, self.tables.num_layers)
            ]
            table = np.full((2, self.tables.num_layers + 1), np.inf)
            for layer, row in enumerate(rows, 1):
                table[:, layer] = sum(row), max(row[:2])
            self._hops[key] = table
        return self._hops[key][0], self._hops[key][1]

    def _cut_for(
        self,
        devices: Sequence[Device],
        entries: Sequence[int],
        microbatch_size: int,
        num_samples: int,
        period: float,
        recompute: bool,
    ) -> tuple[WorkerStage, ...] | None:
        size, count = self.tables.at(microbatch_size), num_samples / microbatch_size
        flags = (False, True) if recompute else (False,)
        ends = self.tables.num_layers
        makespan, window = np.full(ends + 1, np.inf), np.zeros(ends + 1)
        makespan[ends] = 0.0
        back = []
        with np.errstate(invalid="ignore", over="ignore"):
            for place in range(len(entries) - 1, -1, -1):
                entry = entries[place]
                hop, link = np.zeros(ends + 1), np.zeros(ends + 1)
                if place + 1 < len(entries):
                    hop, link = self._hop(devices[place], devices[place + 1], microbatch_size)
                values, trips = [], []
                for flag in flags:
                    busy = size.busy_s[entry] + (size.forward_s[entry] if flag else 0.0)
                    trip = busy + hop + window
                    needed = np.maximum(np.ceil(trip / period - 1e-6), 1.0)
                    total = max(count, 1.0) * busy + self.tables.optimizer_s[entry]
                    value = np.maximum(total, busy + hop + np.maximum(makespan, (count - 1) * link))
                    caps = size.caps(recompute=flag)[entry]
                    values.append(
                        np.where(np.minimum(needed, max(1.0, np.ceil(count))) <= caps, value, np.inf)
                    )
                    trips.append(np.maximum(trip, (needed - 1) * period + busy))
                stacked = np.stack(values, axis=1).reshape(ends + 1, -1)
                pick = stacked.argmin(axis=1)
                flag, stop = np.divmod(pick, ends + 1)
                rows = np.arange(ends + 1)
                makespan = stacked[rows, pick]
                window = np.where(np.isfinite(makespan), np.stack(trips)[flag, rows, stop], 0.0)
                back.append((stop, flag))
        if not np.isfinite(makespan[0]):
            return None
        start, stages = 0, []
        for device, (stop, flag) in zip(devices, reversed(back), strict=True):
            end = int(stop[start])
            stages.append(WorkerStage(device, start, end, bool(flag[start])))
            start = end
        return tuple(stages)
