"""The arrays of runs of layers on nodes that `run_kernel` looks at, made once."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from partition.bounds.card_bound import NodeShape, card_bytes, gradient_bytes, output_bytes
from partition.bounds.node_samples import LayerTimes, layer_times
from partition.bounds.pipeline_amounts import PipelineAmounts
from partition.bounds.sync_tables import card_directions_s, summed_bytes
from partition.estimates.arrays import Floats, Singles
from partition.estimates.layer_bytes import between
from partition.estimates.stage_tables import ProblemTables

MOST_BYTES = 150e6  # of tables of runs that are kept
SHARES = 6  # of what sums move between the least and the most
LEAST_MOVED, MOST_MOVED = 1.0, 2.0  # times its bytes that a layer's sums leave a node, of all that count


@dataclass(frozen=True, slots=True)
class RunKind:
    """Nodes of a shape; lone: those that may have layers for themselves; scarce: of which there are few.

    several: where all plans have two pipelines or more, so that each device sums all that it holds; alone:
    and all of them are on the node, so that it does so over the links inside.
    """

    shape: int
    lone: bool = False
    scarce: bool = False
    several: bool = False
    alone: bool = False


def shares_of_sums(width: int, most_pipelines: int, widest: int) -> Floats:
    """Return what runs of a node count of the sums of their layers, by devices from 0 to the widest node.

    No layer is counted more than once by the runs of so many pipelines, which take no more than the node has:
    each counts its share of the devices; or, of few pipelines, of these, and more where it leaves no device
    to some of them.
    """
    devices = np.arange(widest + 1)
    if 2 * most_pipelines <= width:
        return np.maximum(1, most_pipelines - width + devices) / most_pipelines
    return devices / width


@dataclass(slots=True)
class RunTables:
    """Owns what `run_kernel.least_price` is given beside prices and limits.

    own: bytes of each layer that count as `sync_tables.ring_bytes`. cards: whether nodes and their cards
    count; else each device is a node by itself, that sends for nothing. home_s_per_byte: of a card that all
    sums between nodes pass, too.
    """

    tables: ProblemTables
    shapes: Sequence[NodeShape]
    own: Floats
    cards: bool = True
    home_s_per_byte: float = 0.0
    _times: dict[tuple[int, int, int, int], LayerTimes] = field(default_factory=dict)
    _needed: "OrderedDict[object, tuple[Singles, list[Floats]]]" = field(default_factory=OrderedDict)
    _num_bytes: int = 0
    _limit_s: float = math.inf
    _kept_sums: dict[RunKind, tuple[Singles, Singles]] = field(default_factory=dict)

    @property
    def shares(self) -> Floats:
        """How many times its bytes a run's sums move, by [least and most, which]."""
        if not self.own.any():
            return np.array([[LEAST_MOVED], [LEAST_MOVED]])
        ends = np.linspace(LEAST_MOVED, MOST_MOVED, SHARES + 1)
        return np.array([ends[:-1], ends[1:]])

    def sums_s(self, kinds: Sequence[RunKind]) -> Singles:
        """Return the least seconds of the sums of runs on the card, by [kind, share, start, stop]."""
        summed, moved = np.maximum(summed_bytes(self.tables.problem), 0.0), self.shares[0]
        num_bytes = np.maximum(summed, moved[:, None, None] * between(self.own))
        lone = np.array([kind.lone for kind in kinds])[:, None, None, None]
        paces = np.array([self.shapes[kind.shape].s_per_byte for kind in kinds])[:, None, None, None]
        seconds = np.maximum(paces * num_bytes, self.home_s_per_byte * summed)
        return np.asarray(np.where(lone, 0.0, seconds), dtype=np.float32)

    def inside_s(self, kinds: Sequence[RunKind]) -> Singles:
        """Return the least seconds in which the gradients of layers leave a device: [kind, start, stop]."""
        summed = np.maximum(summed_bytes(self.tables.problem), 0.0)
        paces = np.array([self._inside_pace(kind) if kind.lone and kind.several else 0.0 for kind in kinds])
        return np.asarray(paces[:, None, None] * summed, dtype=np.float32)

    def _inside_pace(self, kind: RunKind) -> float:
        """Return the least seconds for which a byte keeps all busy that leads out of a device."""
        shape = self.shapes[kind.shape]
        pace, card_s = shape.device_s_per_byte, min(shape.directions_s)
        if not kind.alone or not 0 < pace < card_s:
            return pace
        return 1 / (1 / pace - 1 / card_s)

    def runs_s(self, kinds: Sequence[RunKind]) -> Floats:
        """Return seconds on the card of runs, by [what, kind, start, stop].

        Of a sample at the ends; of bytes that others sum, too; of those that the node may have for itself.
        """
        paces = np.array([self.shapes[kind.shape].s_per_byte for kind in kinds])[:, None, None]
        lone = np.array([kind.lone for kind in kinds])[:, None, None]
        own_s = paces * between(self.own)
        return np.stack([paces * card_bytes(self.tables), own_s * ~lone, own_s * lone])

    def ways(self, kinds: Sequence[RunKind], amounts: PipelineAmounts) -> Floats:
        """Return forward, backward and forward of the last microbatch, by [kind, what, place]."""
        rows = []
        for kind in kinds:
            _, _, _, forward, backward, _ = (times := self.times(kind.shape, amounts)).rows
            rows.append([forward, backward, times.ends_s[0]])
        return np.array(rows)

    def links_s(self, amounts: PipelineAmounts) -> Floats:
        """Return rows by layer that it begins with, at the least: messages there between nodes, and the rest.

        Forward, backward, forward of the last microbatch, and the last one's way to the end and back.
        """
        cluster, network = self.tables.problem.cluster, self.tables.network
        pace = 0.0  # the next stage may be on the same node
        if self.cards:
            pace = min(min(card_directions_s(cluster, network, node.devices)) for node in cluster.nodes)
        out, back = pace * output_bytes(self.tables), pace * gradient_bytes(self.tables)
        after_s = self.times(0, amounts).ends_s[1]
        return np.array([amounts.size * out, amounts.least * back, amounts.least * out, after_s])

    def within(self, step_s: float) -> None:
        """Know no more of runs from now on than of those that are in time in a step."""
        if step_s > self._limit_s or self._limit_s == math.inf:  # what is kept holds for shorter steps
            self._needed.clear()
            self._num_bytes, self._limit_s = 0, step_s

    def needed(self, kinds: Sequence[RunKind], amounts: PipelineAmounts) -> Singles:
        """Return `run_kernel.fill_needed` of the fewest samples by [kind, ...]."""
        return self._tables(kinds, amounts)[0]

    def _tables(self, kinds: Sequence[RunKind], amounts: PipelineAmounts) -> tuple[Singles, list[Floats]]:
        """Return `needed`, and the least seconds of stages of each kind."""
        key = (tuple(kinds), amounts.size, amounts.least, amounts.most, amounts.first)
        found = self._needed.get(key)
        if found is not None:
            self._needed.move_to_end(key)
            return found
        places, widest = self.tables.num_layers + 1, max(shape.width for shape in self.shapes)
        shape = (len(kinds), places, places, widest + 1, self.shares.shape[1] + 2)
        need = None
        while self._needed and self._num_bytes > MOST_BYTES:
            need = self._needed.popitem(last=False)[1][0]
            self._num_bytes -= need.nbytes
        if need is None or need.shape != shape:  # else its memory serves again
            need = np.empty(shape, np.float32)
        self._num_bytes += need.nbytes
        found = need, [self._fill(one, kind, amounts) for one, kind in zip(need, kinds, strict=True)]
        self._needed[key] = found
        return found

    def needed_by_whole(self, kind: RunKind, amounts: PipelineAmounts) -> Singles:
        """Return the same of all layers on one kind, by [devices, what], for any step; it is not kept."""
        places, width = self.tables.num_layers + 1, self.shapes[kind.shape].width
        need = np.empty((places, places, width + 1, self.shares.shape[1] + 2), np.float32)
        self._fill(need, kind, amounts, starts=1, step_s=math.inf)
        found: Singles = need[0, -1]
        return found

    def _fill(
        self,
        need: Singles,
        kind: RunKind,
        amounts: PipelineAmounts,
        *,
        starts: int | None = None,
        step_s: float | None = None,
    ) -> Floats:
        """Put in what runs of a kind need, from so many first layers on, and return the seconds of stages."""
        from partition.bounds.run_kernel import fill_needed  # loads a compiler

        if kind not in self._kept_sums:
            self._kept_sums[kind] = self.sums_s([kind])[0], self.inside_s([kind])[0]
        sums_s, inside_s = self._kept_sums[kind]
        times = self.times(kind.shape, amounts)
        last, _, _, forward, backward, optimizer = times.rows
        ways = np.array([last, forward, backward, optimizer, times.ends_s[0]])
        stages_s, arrivals_s = times.stage_seconds(amounts.first, amounts.size)
        different = sums_s if sums_s.any() else sums_s[: int(inside_s.any())]  # else all rows are the same
        limits = (
            self.shapes[kind.shape].width,
            self.tables.num_layers if starts is None else starts,
            self._limit_s if step_s is None else step_s,
        )
        fill_needed(need, ways, stages_s, arrivals_s, different, inside_s, limits)
        if (rows := len(different)) < len(sums_s):
            need[..., rows + 1 : -1] = need[..., rows : rows + 1]
        return stages_s

    def late_s(self, kinds: Sequence[RunKind], amounts: PipelineAmounts, left_s: float) -> Singles:
        """Return `run_kernel.late_s` of the fewest samples by [kind, ...]; 0 where no sums are to come."""
        from partition.bounds.run_kernel import late_s  # loads a compiler

        (need, stages_s), found = self._tables(kinds, amounts), []
        if left_s <= 0:  # `needed` says more
            return np.zeros((len(kinds), need.shape[3], need.shape[1]), np.float32)
        for index, kind in enumerate(kinds):
            times = self.times(kind.shape, amounts)
            last, _, _, forward, backward, optimizer = times.rows
            ways = np.array([last, forward, backward, optimizer])
            width = self.shapes[kind.shape].width
            found.append(late_s(ways, stages_s[index], need[index, ..., 0], width, left_s))
        return np.stack(found)

    def times(self, shape: int, amounts: PipelineAmounts) -> LayerTimes:
        """Return the times of a shape of node."""
        key = (shape, amounts.size, amounts.least, amounts.most)
        if key not in self._times:
            lasts = range(amounts.least, amounts.most + 1)
            self._times[key] = layer_times(self.tables, self.shapes[shape].classes, amounts.size, lasts)
        return self._times[key]
