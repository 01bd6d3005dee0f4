"""Estimates of what gradient sync adds to a step: for the search; the simulator decides."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cost_model.collective_choice import most_parts
from cost_model.memory import trained_bytes
from cost_model.ring_estimates import all_reduce_estimate_s, sum_estimate_s
from cost_model.sum_times import LARGE_RING
from partition.estimates.arrays import Floats
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.sync_tail import Copies, Tail, lengths_of, parts_of
from partition.estimates.timed_pipeline import TimedPipeline
from partition.plan import Plan

PACE_BYTES = 2**20
"""A message whose seconds per byte stand for all: links may differ by size."""
FEW_CHAINS = 2  # pipelines up to which rings are looked at one by one
LEAST_SUM = 0.01
"""Of the compute of a step on all devices: where a sum of all layers takes less, sums are in one part."""


class SyncCosts:
    """Estimates for sets of pipelines of one problem; remembers the bytes of ranges of layers.

    Layers with the same owners are summed together; tied weights, over the owners of both layers, are one
    more sum. Sums of different devices go side by side, but for the network cards that they share.
    """

    def __init__(self, costs: PipelineCosts) -> None:
        self._costs, self._profile = costs, costs.problem.profile
        self._share = costs.problem.gradient_share
        self._bytes: dict[tuple[int, ...], float] = {}
        bytes_of = self._profile.tied_bytes
        self._tied = [(group, self._share * max(map(bytes_of, group))) for group in self._profile.tied_groups]
        self._large: _LargeRings | None = None
        measured = costs.network.as_in_file is not costs.network or costs.network.sums_inside
        self._most_chains = LARGE_RING if measured else FEW_CHAINS
        self._in_parts = self._sum_is_long()

    def _sum_is_long(self) -> bool:
        """Return whether to sum all layers between nodes takes a share of a step that counts."""
        problem, num_layers = self._costs.problem, self._profile.num_layers
        size = min(problem.microbatch_sizes)
        devices = {(device.kind, device.speed): device for device in problem.cluster.devices}
        sample_s = {
            key: self._costs.busy_s(device, 0, num_layers, size) / size for key, device in devices.items()
        }
        rate = sum(1 / max(sample_s[d.kind, d.speed], 1e-300) for d in problem.cluster.devices)
        sum_s = problem.cluster.network.occupancy_s(self._wire_bytes(tuple(range(num_layers))))
        return sum_s > LEAST_SUM * problem.global_batch_size / rate

    def exposed_s(self, timed: Sequence[TimedPipeline]) -> float:
        """Return the seconds for which sums go on after the last backwards: see `sync_tail`."""
        if len(timed) == 1 and not self._tied:
            return 0.0
        cuts = sorted({0} | {stage.stop for pipeline in timed for stage in pipeline.stages})
        place, index = {cut: at for at, cut in enumerate(cuts)}, self._rings.index
        owners = np.empty((len(cuts) - 1, len(timed)), dtype=np.int64)
        alike: dict[int, list[int]] = {}
        for column, pipeline in enumerate(timed):
            alike.setdefault(id(pipeline.timing), []).append(column)
        groups = []
        for columns in alike.values():
            first = timed[columns[0]]
            devices = np.array([[index[device.name] for device in timed[at].devices] for at in columns])
            for at, stage in enumerate(first.stages):
                owners[place[stage.start] : place[stage.stop], columns] = devices[:, at]
            stops = tuple(stage.stop for stage in first.stages)
            groups.append(Copies(self._rings.node[devices], stops, first.timing.full))
        num_bytes = np.array([self._wire_bytes(tuple(range(*pair))) for pair in pairwise(cuts)])
        parts = parts_of(lengths_of(cuts), num_bytes) if self._in_parts else np.ones_like(num_bytes)
        sums_s = np.where(num_bytes > 0, self._rows_s(owners, num_bytes, parts), 0.0)
        exposed_s = Tail.of(groups, cuts).exposed_s(sums_s, num_bytes, cuts, self._rings.num_nodes)
        return exposed_s + self._tied_s(cuts, owners)

    def _rows_s(self, owners: npt.NDArray[np.int64], num_bytes: Floats, parts: Floats) -> Floats:
        """Return the seconds of the sum of each row of owners, as if it were alone, in so many parts."""
        count = owners.shape[1]
        if count == 1:
            return np.zeros(len(owners))
        if count > self._most_chains:
            return self._rings.sums(owners, num_bytes, parts)
        names = [device.name for device in self._costs.problem.cluster.devices]
        rows = zip(num_bytes.tolist(), owners.tolist(), parts.tolist(), strict=True)
        return np.array([self._sum_s(size, [names[at] for at in row], int(cut)) for size, row, cut in rows])

    def of_plan_s(self, plan: Plan) -> dict[str, float]:
        """Return the seconds that each device of a plan spends in sums with others, cards not counted."""
        holders: list[list[str]] = [[] for _ in self._profile.layers]
        for name in plan.device_names:
            for layer in plan.layers_of(name):
                holders[layer].append(name)
        return self._by_device(self._sums(holders))

    def ring_s(self, num_bytes: float, names: Sequence[str]) -> float:
        """Return about the seconds of an all-reduce between devices (names)."""
        if len(names) <= LARGE_RING:
            return all_reduce_estimate_s(self._costs.network, num_bytes, names)
        owners = np.array([[self._rings.index[name] for name in names]])
        return float(self._rings.seconds(owners, np.array([num_bytes]))[0])

    def _sum_s(self, num_bytes: float, names: Sequence[str], parts: int = 1) -> float:
        """Return about the seconds of a sum of gradients, in up to so many parts."""
        if len(names) <= LARGE_RING:
            return sum_estimate_s(self._costs.network, num_bytes, names, parts)[0]
        owners = np.array([[self._rings.index[name] for name in names]])
        return float(self._rings.sums(owners, np.array([num_bytes]), np.array([float(parts)]))[0])

    def _sums(self, holders: Sequence[list[str]]) -> list[tuple[tuple[str, ...], float, int]]:
        """Return (owners, bytes, parts) of each sum of several devices; holders: those of each layer."""
        buckets: dict[tuple[str, ...], list[int]] = {}
        for layer, owners in enumerate(holders):
            buckets.setdefault(tuple(owners), []).append(layer)
        sums: list[tuple[tuple[str, ...], float, int]] = []
        for together, layers in buckets.items():
            num_bytes = self._wire_bytes(tuple(layers))
            sums.append((together, num_bytes, most_parts(len(layers), num_bytes) if self._in_parts else 1))
        sums += [(together, num_bytes, 1) for together, num_bytes in self._tied_sums(holders)]
        return [entry for entry in sums if len(entry[0]) > 1]

    def _tied_sums(self, holders: Sequence[list[str]]) -> Iterable[tuple[tuple[str, ...], float]]:
        for group, num_bytes in self._tied:
            owners = tuple(dict.fromkeys(name for layer in group for name in holders[layer]))
            if any(holders[layer] != holders[group[0]] for layer in group):
                yield owners, num_bytes

    def _by_device(self, sums: Iterable[tuple[tuple[str, ...], float, int]]) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for owners, num_bytes, parts in sums:
            spent = self._sum_s(num_bytes, owners, parts)
            for name in owners:
                seconds[name] = seconds.get(name, 0.0) + spent
        return seconds

    @property
    def _rings(self) -> "_LargeRings":
        self._large = self._large or _LargeRings(self._costs)
        return self._large

    def _tied_s(self, cuts: Sequence[int], owners: npt.NDArray[np.int64]) -> float:
        """Return the seconds of the sums of tied weights, one after another."""
        tied_s = 0.0
        for group, num_bytes in self._tied:
            stages = np.searchsorted(cuts, group, side="right") - 1
            held = np.unique(np.concatenate([np.atleast_1d(owners[stage]) for stage in stages]))
            if len(held) > 1:
                tied_s += float(self._rings.sums(held[None], np.array([num_bytes]), np.ones(1))[0])
        return tied_s

    def _wire_bytes(self, layers: tuple[int, ...]) -> float:
        """Return the bytes of gradients of layers that travel."""
        if layers not in self._bytes:
            self._bytes[layers] = self._share * trained_bytes(self._profile, layers)
        return self._bytes[layers]


class _LargeRings:
    """Many rings or large ones, all at once; owns what the devices of a cluster have in common.

    A round lasts as long as the busiest card or link carries its messages, or as long as the mean hop if that
    is longer, since the data go all the way around.
    """

    def __init__(self, costs: PipelineCosts) -> None:
        self._network, cluster = costs.network, costs.problem.cluster
        self._devices = cluster.devices
        self.index = {device.name: place for place, device in enumerate(self._devices)}
        nodes = {node.name: place for place, node in enumerate(cluster.nodes)}
        self.node = np.array([nodes[device.node] for device in self._devices])
        self.num_nodes = len(nodes)
        self._tables = {nodes[node.name]: node.all_reduces for node in cluster.nodes if node.all_reduces}
        self._told = np.isin(np.arange(len(nodes)), list(self._tables))
        measured = self._network.as_in_file is not self._network  # where rings are, nobody measured others
        self._several_on_node = not measured and 1 < len(nodes) < len(cluster.devices)
        inside = {node.name: node.interconnect for node in cluster.nodes}
        # devices of a group have the same links, but for those that nodes have of their own
        groups: dict[object, int] = {}
        own = bool(cluster.links)
        self._group = np.array(
            [
                groups.setdefault((device.kind, device.node if own else inside[device.node]), len(groups))
                for device in self._devices
            ]
        )
        self._num_groups = len(groups)
        # of pairs of groups, each in a node or not, in order: (s per byte, latency)
        self._codes = np.empty(0, dtype=np.int64)
        self._links = np.empty((0, 2))

    def seconds(self, owners: npt.NDArray[np.int64], num_bytes: Floats) -> Floats:
        """Return the seconds of each ring on the idle network.

        owners: devices by [ring, member]. num_bytes: what each member of a ring gives to its sum.
        """
        count = owners.shape[1]
        following = np.roll(owners, -1, axis=1)
        per_byte, latency = self._hops(owners, following)
        across = np.where(self._between(owners), per_byte, 0.0)
        cards = [self._on_nodes(self.node[ends], across).max(axis=1) for ends in (owners, following)]
        chunk = num_bytes / count
        busiest = np.maximum(np.maximum(*cards), per_byte.max(axis=1)) * chunk
        hop = per_byte.mean(axis=1) * chunk + latency.mean(axis=1)
        return np.asarray(2 * (count - 1) * np.maximum(busiest, hop))

    def sums(self, owners: npt.NDArray[np.int64], num_bytes: Floats, parts: Floats) -> Floats:
        """Return `seconds` of sums: in a ring, node by node, or inside nodes first, whichever is sooner.

        parts: into which each may be cut, so that some are inside nodes while others are between them.
        """
        ring_s = self.seconds(owners, num_bytes)
        if not self._several_on_node:
            return ring_s
        order = np.argsort(self.node[owners], axis=1, kind="stable")
        side_by_side = np.take_along_axis(owners, order, axis=1)
        between = self._between(side_by_side)
        nodes = between.sum(axis=1)  # in this order a ring leaves each of several nodes once
        found = (nodes > 1) & (nodes < owners.shape[1])
        if not found.any():
            return ring_s
        if (self._between(owners).sum(axis=1) > nodes).any():
            ring_s = np.minimum(ring_s, self.seconds(side_by_side, num_bytes))
        hierarchical_s = self._hierarchical_s(side_by_side, num_bytes, between, parts)
        return np.where(found, np.minimum(hierarchical_s, ring_s), ring_s)

    def _hierarchical_s(
        self,
        owners: npt.NDArray[np.int64],
        num_bytes: Floats,
        between: npt.NDArray[np.bool_],
        parts: Floats,
    ) -> Floats:
        """Return the seconds of sums that go inside nodes first, in parts.

        owners: devices by [sum, member], those of a node side by side. between: where the next is on another.
        """
        nodes = np.maximum(between.sum(axis=1), 1)
        per_byte, latency = self._hops(owners, np.roll(owners, -1, axis=1))
        inside = np.where(between, 0.0, num_bytes[:, None] * per_byte + latency)
        on_nodes = self._on_nodes(self.node[owners], np.ones_like(per_byte))
        told_s = self._told_s(on_nodes, num_bytes)
        inside_s = np.where(self._told[self.node[owners]], 0.0, inside).max(axis=1)
        most = np.where(self._told, 1.0, on_nodes).max(axis=1)
        across = np.where(between, per_byte, 0.0)
        across_s = (num_bytes / nodes)[:, None] * across
        mean_s = (across_s + np.where(between, latency, 0.0)).sum(axis=1) / nodes
        inside_s = np.maximum(np.ceil(np.log2(most)) * inside_s, told_s)
        between_s = 2 * (nodes - 1) * np.maximum(across_s.max(axis=1), mean_s)
        return np.asarray(2 * inside_s / parts + np.maximum(between_s, inside_s * (1 - 1 / parts)))

    def _told_s(self, on_nodes: Floats, num_bytes: Floats) -> Floats:
        """Return the longest sum inside a node that says how long it takes, by sum; on_nodes: its devices."""
        found = np.zeros(len(num_bytes))
        for node, table in self._tables.items():
            sizes = np.array([entry.num_devices for entry in table])
            place = np.searchsorted(sizes, on_nodes[:, node])
            links = [table[min(int(at), len(table) - 1)].link for at in place]
            seconds = [link.transfer_s(size) for link, size in zip(links, num_bytes.tolist(), strict=True)]
            found = np.maximum(found, np.where(on_nodes[:, node] > 1, seconds, 0.0))
        return found

    def _between(self, owners: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return where the next member of a ring is on another node."""
        node = self.node[owners]
        return np.asarray(node != np.roll(node, -1, axis=1))

    def _on_nodes(self, nodes: npt.NDArray[np.int64], values: Floats) -> Floats:
        """Return the sums of values by [ring, node]; nodes and values: by [ring, member]."""
        rings = len(nodes)
        row = np.arange(rings)[:, None] * self.num_nodes
        summed = np.bincount((row + nodes).ravel(), values.ravel(), minlength=rings * self.num_nodes)
        return np.asarray(summed, dtype=np.float64).reshape(rings, self.num_nodes)

    def _hops(self, owners: npt.NDArray[np.int64], following: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return (s per byte, latency) of each message; those between the same groups are alike."""
        pair = self._group[owners] * self._num_groups + self._group[following]
        pair = 2 * pair + (self.node[owners] == self.node[following])
        at = np.searchsorted(self._codes, pair)
        if self._codes.size == 0 or (self._codes[np.minimum(at, self._codes.size - 1)] != pair).any():
            self._learn(pair, owners, following)
            at = np.searchsorted(self._codes, pair)
        found = self._links[at]
        return found[..., 0], found[..., 1]

    def _learn(
        self,
        pair: npt.NDArray[np.int64],
        owners: npt.NDArray[np.int64],
        following: npt.NDArray[np.int64],
    ) -> None:
        """Keep the links of pairs that were not asked for before."""
        codes, first = np.unique(pair, return_index=True)
        known = dict(zip(self._codes.tolist(), self._links.tolist(), strict=True))
        for code, at in zip(codes.tolist(), first.tolist(), strict=True):
            if code not in known:
                one, other = (self._devices[int(devices.flat[at])] for devices in (owners, following))
                link = self._network.route(one.name, other.name).link
                known[code] = [link.occupancy_s(PACE_BYTES) / PACE_BYTES, link.latency_s]
        self._codes = np.array(sorted(known), dtype=np.int64)
        self._links = np.array([known[code] for code in self._codes.tolist()])
