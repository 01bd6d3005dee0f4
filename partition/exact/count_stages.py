"""The stages that a type-count programme may put together, in tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partition.estimates.stage_tables import Amount, ProblemTables
from partition.exact.count_vectors import Places

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a class that some amount allows, in the order of their starts.

    start, stop: by stage; the others by [amount, recompute, stage], total_s inf where one is not allowed.
    share: of the round trip that Little's law asks for. warm_s, cool_s: round trips that take no longer leave
    no gap in the warmup, in the cooldown.
    """

    start: Places
    stop: Places
    total_s: Floats
    before_s: Floats
    busy_s: Floats
    share: Floats
    warm_s: Floats
    cool_s: Floats

    @property
    def _numbers(self) -> tuple[Floats, ...]:
        return (self.total_s, self.before_s, self.busy_s, self.share, self.warm_s, self.cool_s)

    def only(self, which: npt.NDArray[np.bool_]) -> "Stages":
        """Some of the stages."""
        if which.all():
            return self
        tables = (np.compress(which, table, axis=-1) for table in self._numbers)
        return Stages(self.start[which], self.stop[which], *tables)

    def by_start(self, num_layers: int) -> tuple[Floats, Places]:
        """Numbers by [amount, recompute, start, stop, number]; the last stop allowed, 0 if none, by start."""
        shape = (*self.total_s.shape[:2], num_layers, num_layers + 1)
        numbers = np.zeros((*shape, len(self._numbers)), self.total_s.dtype)
        numbers[..., 0] = np.inf
        numbers[:, :, self.start, self.stop] = np.stack(self._numbers, axis=-1)
        stops = np.arange(num_layers + 1)
        return numbers, np.where(np.isfinite(numbers[..., 0]), stops, 0).max(axis=-1)


@dataclass(frozen=True, slots=True)
class StageTables:
    """Stages of each class, and links for several amounts of samples, each in microbatches of its own size.

    recompute: whether stages may or may not. ceiling_s: of no use is a stage that is busy for longer.
    """

    tables: ProblemTables
    amounts: Sequence[tuple[int, Amount]]
    recompute: tuple[bool, ...]
    ceiling_s: float
    kind: type[np.floating]

    def links(self) -> tuple[Floats, Floats]:
        """What a link adds to the makespan, to the round trip, [amount, class, next class, layer]."""
        link = [self.tables.at(size).amount(amount).link_s for size, amount in self.amounts]
        hop = [
            np.add(*self.tables.at(size).transfer_s) if amount.full else one
            for (size, amount), one in zip(self.amounts, link, strict=True)
        ]
        return np.stack(link).astype(self.kind), np.stack(hop).astype(self.kind)

    def stages(self) -> Iterator[Stages]:
        """Of each class."""
        count = len(self.recompute)
        made = [self.tables.at(size).amount(amount) for size, amount in self.amounts]
        total = np.stack([np.stack([one.total_s, one.again_total_s][:count]) for one in made])
        before = np.stack([np.stack([one.before_s, one.again_before_s][:count]) for one in made])
        busy = np.stack([self._busy(*asked, all_s) for asked, all_s in zip(self.amounts, total, strict=True)])
        caps = np.stack(
            [np.stack([self._cap(*asked, flag) for flag in self.recompute]) for asked in self.amounts]
        )
        full = np.array([max(1.0, amount.passes) for _, amount in self.amounts])
        share = full[:, None, None, None, None] / np.maximum(caps, 1e-9)
        gaps = [
            self.tables.at(asked[0]).gaps(asked[1], *tables)
            for *tables, asked in zip(busy, caps, self.amounts, strict=True)
        ]
        warm, cool = (np.stack(gap) for gap in zip(*gaps, strict=True))
        allowed = (caps >= 1) & (total <= self.ceiling_s)
        total[~allowed] = np.inf
        for entry in range(len(self.tables.classes.members)):
            start, stop = np.nonzero(allowed[:, :, entry].any(axis=(0, 1)))
            numbers = (
                np.ascontiguousarray(table[:, :, entry, start, stop], self.kind)
                for table in (total, before, busy, share, warm, cool)
            )
            yield Stages(start, stop, *numbers)

    def _busy(self, size: int, amount: Amount, total_s: Floats) -> Floats:
        """Seconds of a microbatch, without and with recompute."""
        if not amount.full:
            return total_s - self.tables.optimizer_s
        table = self.tables.at(size)
        return np.stack([table.busy_s, table.busy_s + table.forward_s][: len(self.recompute)])

    def _cap(self, size: int, amount: Amount, recompute: bool) -> Floats:
        """The most in flight of an amount, of a single microbatch at the size that memory takes most of.

        A larger one may need less: its later layers leave more room for a workspace.
        """
        sizes = [size] if amount.full else range(amount.least, amount.most + 1)
        caps = [self.tables.at(one).most_in_flight(amount, recompute=recompute) for one in sizes]
        return np.asarray(np.max(caps, axis=0))
