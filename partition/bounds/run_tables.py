"""The arrays of runs of layers on nodes that `run_kernel` looks at, made once."""

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
    _needed: "OrderedDict[object, Singles]" = field(default_factory=OrderedDict)
    _num_bytes: int = 0
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

    def needed(self, kinds: Sequence[RunKind], amounts: PipelineAmounts) -> Singles:
        """Return `run_kernel.needed_s` of the fewest samples by [kind, ...]."""
        key = (tuple(kinds), amounts.size, amounts.least, amounts.most, amounts.first)
        found = self._needed.get(key)
        if found is not None:
            self._needed.move_to_end(key)
            return found
        found = np.stack([self.needed_by(kind, amounts) for kind in kinds])
        self._num_bytes += found.nbytes
        while self._needed and self._num_bytes > MOST_BYTES:
            self._num_bytes -= self._needed.popitem(last=False)[1].nbytes
        self._needed[key] = found
        return found

    def needed_by(self, kind: RunKind, amounts: PipelineAmounts) -> Singles:
        """Return the same of one kind; it is not kept."""
        from partition.bounds.run_kernel import needed_s  # loads a compiler

        if kind not in self._kept_sums:
            self._kept_sums[kind] = self.sums_s([kind])[0], self.inside_s([kind])[0]
        sums_s, inside_s = self._kept_sums[kind]
        times = self.times(kind.shape, amounts)
        last, _, _, forward, backward, optimizer = times.rows
        ways = np.array([last, forward, backward, optimizer, times.ends_s[0]])
        stages_s = times.stages_s(amounts.first, amounts.size)
        arrivals_s = times.arrivals_s(amounts.first, amounts.size)
        different = sums_s if sums_s.any() else sums_s[: int(inside_s.any())]  # else all rows are the same
        width, widest = self.shapes[kind.shape].width, max(shape.width for shape in self.shapes)
        found: Singles = needed_s(ways, stages_s, arrivals_s, different, inside_s, width, widest)
        if (rows := len(different)) < len(sums_s):
            same = found[rows : rows + 1].repeat(len(sums_s) - rows, axis=0)
            found = np.concatenate([found[: rows + 1], same, found[rows + 1 :]])
        return found

    def late_s(self, kinds: Sequence[RunKind], amounts: PipelineAmounts, left_s: float) -> Singles:
        """Return `run_kernel.late_s` of the fewest samples by [kind, ...]."""
        from partition.bounds.run_kernel import late_s  # loads a compiler

        need, found = self.needed(kinds, amounts), []
        for index, kind in enumerate(kinds):
            times = self.times(kind.shape, amounts)
            last, _, _, forward, backward, optimizer = times.rows
            ways = np.array([last, forward, backward, optimizer])
            stages_s, width = times.stages_s(amounts.first, amounts.size), self.shapes[kind.shape].width
            found.append(late_s(ways, stages_s, need[index, 0], width, left_s))
        return np.stack(found)

    def times(self, shape: int, amounts: PipelineAmounts) -> LayerTimes:
        """Return the times of a shape of node."""
        key = (shape, amounts.size, amounts.least, amounts.most)
        if key not in self._times:
            lasts = range(amounts.least, amounts.most + 1)
            self._times[key] = layer_times(self.tables, self.shapes[shape].classes, amounts.size, lasts)
        return self._times[key]
