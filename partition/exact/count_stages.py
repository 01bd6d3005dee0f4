"""The stages that `count_dp` may put together, in tables of single precision."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partition.estimates.amounts import Amount
from partition.estimates.arrays import Floats, Places, Singles
from partition.estimates.stage_tables import AmountTables, ProblemTables

SINGLE = np.float32


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a class that some amount allows, in the order of their starts.

    start, stop: by stage; the others by [amount, recompute, stage], total_s inf where one is not allowed.
    share: round trips that memory asks for one after the other, and beyond_s what comes on top of these.
    warm_s, cool_s: round trips that take no longer leave no gap in the warmup, in the cooldown.
    """

    start: Places
    stop: Places
    total_s: Singles
    before_s: Singles
    busy_s: Singles
    share: Singles
    warm_s: Singles
    cool_s: Singles
    beyond_s: Singles

    @property
    def _numbers(self) -> tuple[Singles, ...]:
        return (
            self.total_s,
            self.before_s,
            self.busy_s,
            self.share,
            self.warm_s,
            self.cool_s,
            self.beyond_s,
        )

    def only(self, which: npt.NDArray[np.bool_]) -> "Stages":
        """Return some of the stages."""
        if which.all():
            return self
        tables = (np.compress(which, table, axis=-1) for table in self._numbers)
        return Stages(self.start[which], self.stop[which], *tables)

    def by_start(self, num_layers: int) -> tuple[Singles, Places]:
        """Return the numbers by [amount, recompute, start, stop, number], and the last stop allowed.

        The last stop is by [amount, recompute, start], 0 where none is allowed.
        """
        shape = (*self.total_s.shape[:2], num_layers, num_layers + 1)
        numbers = np.zeros((*shape, len(self._numbers)), SINGLE)
        numbers[..., 0] = np.inf
        numbers[:, :, self.start, self.stop] = np.stack(self._numbers, axis=-1)
        stops = np.arange(num_layers + 1)
        return numbers, np.where(np.isfinite(numbers[..., 0]), stops, 0).max(axis=-1)


@dataclass(frozen=True, slots=True)
class StageTables:
    """The stages of each class, and links, for several amounts of samples in microbatches of their own sizes.

    ceiling_s: of no use is a stage that is busy for longer.
    """

    tables: ProblemTables
    amounts: Sequence[tuple[int, Amount]]
    ceiling_s: float

    def links(self) -> tuple[Singles, Singles]:
        """Return what a link adds to the makespan, to the round trip: [amount, class, next class, layer]."""
        link_s = [self.tables.at(size).amount(amount).link_s for size, amount in self.amounts]
        round_trip_s = [
            np.add(*self.tables.at(size).transfer_s) if amount.full else one
            for (size, amount), one in zip(self.amounts, link_s, strict=True)
        ]
        return np.stack(link_s).astype(SINGLE), np.stack(round_trip_s).astype(SINGLE)

    def stages(self) -> Iterator[Stages]:
        """Yield the stages of each class; tables are [amount, recompute, class, start, stop] on the way."""
        made = [self.tables.at(size).amount(amount) for size, amount in self.amounts]
        total = np.stack([np.stack([one.total_s, one.again_total_s]) for one in made])
        before = np.stack([np.stack([one.before_s, one.again_before_s]) for one in made])
        busy = np.stack([self._busy(*asked, one) for asked, one in zip(self.amounts, made, strict=True)])
        caps = np.stack(
            [np.stack([self._cap(*asked, flag) for flag in (False, True)]) for asked in self.amounts]
        )
        end = np.stack([np.stack([one.end_s, one.again_end_s]) for one in made])
        for index, (_, amount) in enumerate(self.amounts):
            if amount.behind:
                behind_s = self.tables.at(amount.behind).backward_s[:, 0]  # of a first stage
                total[index, :, :, 0] += behind_s
                before[index, :, :, 0] += behind_s
                end[index, :, :, 0] += behind_s
        trips = [
            self._trips(*asked, *tables) for *tables, asked in zip(caps, busy, self.amounts, strict=True)
        ]
        share, beyond = (np.stack(tables) for tables in zip(*trips, strict=True))
        beyond = beyond + end
        gaps = [
            self.tables.at(asked[0]).gaps(asked[1], *tables)
            for *tables, asked in zip(busy, caps, self.amounts, strict=True)
        ]
        warm, cool = (np.stack(gap) for gap in zip(*gaps, strict=True))
        allowed = (caps >= 1) & (total <= self.ceiling_s)
        total[~allowed] = np.inf
        for class_index in range(len(self.tables.classes.members)):
            start, stop = np.nonzero(allowed[:, :, class_index].any(axis=(0, 1)))
            numbers = (
                np.ascontiguousarray(table[:, :, class_index, start, stop], SINGLE)
                for table in (total, before, busy, share, warm, cool, beyond)
            )
            yield Stages(start, stop, *numbers)

    def _trips(self, size: int, amount: Amount, caps: Floats, busy_s: Floats) -> tuple[Floats, Floats]:
        """Return round trips one after the other, and seconds beside them: [recompute, class, start, stop].

        Of m microbatches of which memory takes n, each n-th one begins when the round trip of another is
        over. Of those behind the last of these each one takes a forward, or a backward, more.
        """
        if not amount.counted:
            share = max(1.0, amount.passes) / np.maximum(caps, 1e-9)
            return share, np.zeros_like(share)
        at_once = np.clip(caps, 1.0, amount.full)
        turns = np.ceil(amount.full / at_once)
        more = amount.full - (turns - 1) * at_once - 1
        forward_s = self.tables.at(size).forward_s
        with np.errstate(invalid="ignore"):
            each_s = np.maximum(forward_s, busy_s - forward_s)
        each_s = np.nan_to_num(each_s, nan=0.0, posinf=0.0)  # where there is no stage
        return turns, more * each_s

    def _busy(self, size: int, amount: Amount, made: AmountTables) -> Floats:
        """Return the seconds of a microbatch, without and with recompute: [recompute, class, start, stop]."""
        if not amount.full:
            return np.stack([made.total_s, made.again_total_s]) - made.end_s
        table = self.tables.at(size)
        return np.stack([table.busy_s, table.busy_s + table.forward_s])

    def _cap(self, size: int, amount: Amount, recompute: bool) -> Floats:
        """Return the most in flight of an amount, of a single microbatch at the size that most fit of.

        A larger one may need less: its later layers leave more room for a workspace.
        """
        sizes = [size] if amount.full else range(amount.least, amount.most + 1)
        caps = [self.tables.at(one).most_in_flight(amount, recompute=recompute) for one in sizes]
        return np.asarray(np.max(caps, axis=0))
