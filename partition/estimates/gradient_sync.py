"""Estimates of what gradient sync adds to a step: for the search; the simulator decides."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cost_model.collective_choice import BUCKET_BYTES, MOST_PARTS
from cost_model.memory import trained_bytes
from cost_model.ring_estimates import all_reduce_estimate_s, sum_estimate_s
from cost_model.sum_times import LARGE_RING
from partition.estimates.arrays import Floats
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline
from partition.plan import Plan

PACE_BYTES = 2**20
"""A message whose seconds per byte stand for all: links may differ by size."""
FEW_CHAINS = 2  # pipelines up to which rings are looked at one by one
_Chain = Sequence[tuple[str, int]]
"""A pipeline's stages as (device, stop layer)."""
_Cards = tuple[Floats, Floats]
"""Seconds a byte of a round on the cards of nodes, by [ring, node]: outwards and inwards."""


class SyncCosts:
    """Estimates for sets of pipelines of one problem; remembers the bytes of ranges of layers.

    Layers with the same owners are summed together; tied weights, over the owners of both layers, are one
    more sum. Sums of different devices go side by side, but for the network cards that they share.
    """

    def __init__(self, costs: PipelineCosts) -> None:
        self._costs, self._profile = costs, costs.problem.profile
        self._bytes: dict[tuple[int, ...], float] = {}
        layers = range(self._profile.num_layers)
        self._tied = [layer for layer in layers if self._profile.tied_home(layer) != layer]
        self._large: _LargeRings | None = None
        measured = costs.network.as_in_file is not costs.network or costs.network.sums_inside
        self._most_chains = LARGE_RING if measured else FEW_CHAINS

    def exposed_s(self, timed: Sequence[TimedPipeline]) -> float:
        """Return the seconds that the busiest device or card spends in sums after the last backwards.

        What comes after the backwards of other stages counts in full.
        """
        chains = [[(stage.device.name, stage.stop) for stage in pipeline.stages] for pipeline in timed]
        return self.after_backwards_s(self.spent_s(chains), timed)

    def after_backwards_s(self, seconds: float, timed: Iterable[TimedPipeline]) -> float:
        """Return what is left of sums that begin inside the last backwards of the first stages.

        Of a stage that sums n buckets there is the first one after an n-th of its backward, and the last one
        is not summed before its end. The pipeline counts in which least is hidden.
        """
        hidden_s, left = float("inf"), 0.0
        for pipeline in timed:
            stop = pipeline.stages[0].stop
            parts = min(stop, MOST_PARTS, int(self._trained(tuple(range(stop))) / BUCKET_BYTES))
            if parts < 2:
                return seconds
            left = max(left, 1 / parts)
            hidden_s = min(hidden_s, pipeline.timing.full.backward_s[0] * (1 - 1 / parts))
        return max(seconds * left, seconds - hidden_s)

    def spent_of_plan_s(self, plan: Plan) -> float:
        """Return `spent_s` of a plan, whose pipelines may share devices."""
        if sum(len(pipeline.stages) for pipeline in plan.pipelines) > len(plan.device_names):
            return max(self.of_plan_s(plan).values(), default=0.0)
        return self.spent_s(
            [[(stage.device, stage.stop) for stage in pipeline.stages] for pipeline in plan.pipelines]
        )

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
        return float(self._rings.seconds(owners, np.array([num_bytes]))[0][0])

    def _sum_s(self, num_bytes: float, names: Sequence[str]) -> tuple[float, Sequence[str]]:
        """Return about the seconds of a sum of gradients, and the members of its ring."""
        if len(names) <= LARGE_RING:
            return sum_estimate_s(self._costs.network, num_bytes, names)
        owners = np.array([[self._rings.index[name] for name in names]])
        return float(self._rings.sums(owners, np.array([num_bytes]))[0][0]), names

    def spent_s(self, chains: Sequence[_Chain]) -> float:
        """Return the seconds that the busiest device or card spends in sums; chains share no device."""
        if len(chains) > self._most_chains:
            return self._large_s(chains)
        holders: list[list[str]] = [[] for _ in self._profile.layers]
        for chain in chains:
            start = 0
            for name, stop in chain:
                for layer in range(start, stop):
                    holders[layer].append(name)
                start = stop
        sums = self._sums(holders)
        return max([*self._by_device(sums).values(), *self._by_card(sums).values()], default=0.0)

    def _sums(self, holders: Sequence[list[str]]) -> list[tuple[tuple[str, ...], float]]:
        """Return (owners, bytes) of each sum of several devices; holders: those of each layer."""
        buckets: dict[tuple[str, ...], list[int]] = {}
        for layer, owners in enumerate(holders):
            buckets.setdefault(tuple(owners), []).append(layer)
        sums = [(owners, self._trained(tuple(layers))) for owners, layers in buckets.items()]
        sums += self._tied_sums(holders)
        return [(owners, num_bytes) for owners, num_bytes in sums if len(owners) > 1]

    def _tied_sums(self, holders: Sequence[list[str]]) -> Iterable[tuple[tuple[str, ...], float]]:
        for layer in self._tied:
            home = holders[self._profile.tied_home(layer)]
            if home != holders[layer]:
                owners = tuple(dict.fromkeys((*home, *holders[layer])))
                yield owners, self._profile.tied_bytes(layer)

    def _by_device(self, sums: Iterable[tuple[tuple[str, ...], float]]) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for owners, num_bytes in sums:
            spent = self._sum_s(num_bytes, owners)[0]
            for name in owners:
                seconds[name] = seconds.get(name, 0.0) + spent
        return seconds

    def _by_card(self, sums: Iterable[tuple[tuple[str, ...], float]]) -> dict[int, float]:
        """Return the seconds for which each resource of the network carries the messages of all rings.

        Messages inside nodes of sums that go there first are with their devices, and so are sums of which
        their node says how long they take.
        """
        loads: dict[int, float] = {}
        for owners, num_bytes in sums:
            if self._costs.network.inside_s(num_bytes, owners) is not None:
                continue
            ring = owners if len(owners) < 3 else self._sum_s(num_bytes, owners)[1]
            rounds, chunk = 2 * (len(ring) - 1), num_bytes / len(ring)
            for one, other in pairwise((*ring, ring[0])):
                route = self._costs.network.route(one, other)
                seconds = rounds * route.link.occupancy_s(chunk)
                for resource in route.resources:
                    loads[resource] = loads.get(resource, 0.0) + seconds
        return loads

    @property
    def _rings(self) -> "_LargeRings":
        self._large = self._large or _LargeRings(self._costs)
        return self._large

    def _large_s(self, chains: Sequence[_Chain]) -> float:
        """Return `spent_s`, all rings at once, one of the owners of each range of layers between cuts."""
        cuts = sorted({0} | {stop for chain in chains for _, stop in chain})
        place = {cut: index for index, cut in enumerate(cuts)}
        index = self._rings.index
        owners = np.empty((len(cuts) - 1, len(chains)), dtype=np.int64)
        for column, chain in enumerate(chains):
            start = 0
            for name, stop in chain:
                owners[start : place[stop], column] = index[name]
                start = place[stop]
        num_bytes = np.array([self._trained(tuple(range(*pair))) for pair in pairwise(cuts)])
        seconds, cards_s = self._rings.sums(owners, num_bytes)
        before = [0.0, *np.cumsum(seconds)]
        most = max(
            before[place[stop]] - before[place[start]]
            for chain in chains
            for start, stop in pairwise([0, *(stop for _, stop in chain)])
        )
        tied_s = 0.0
        for layer in self._tied:
            home = owners[np.searchsorted(cuts, self._profile.tied_home(layer), side="right") - 1]
            both = np.unique(np.append(home, owners[np.searchsorted(cuts, layer, side="right") - 1]))
            tied_s += float(self._rings.sums(both[None], np.array([self._profile.tied_bytes(layer)]))[0][0])
        return float(max(most, cards_s)) + tied_s

    def _trained(self, layers: tuple[int, ...]) -> float:
        if layers not in self._bytes:
            self._bytes[layers] = trained_bytes(self._profile, layers)
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
        self._node = np.array([nodes[device.node] for device in self._devices])
        self._num_nodes = len(nodes)
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

    def seconds(self, owners: npt.NDArray[np.int64], num_bytes: Floats) -> tuple[Floats, float]:
        """Return (seconds of each ring on the idle network, seconds of the busiest card for all of them).

        owners: devices by [ring, member]. num_bytes: what each member of a ring gives to its sum.
        """
        ring_s, cards = self._seconds(owners, num_bytes)
        return ring_s, _busiest_s(cards, num_bytes, owners.shape[1])

    def sums(self, owners: npt.NDArray[np.int64], num_bytes: Floats) -> tuple[Floats, float]:
        """Return `seconds` of sums: in a ring, node by node, or inside nodes first, whichever is sooner."""
        if not self._several_on_node:
            return self.seconds(owners, num_bytes)
        count = owners.shape[1]
        order = np.argsort(self._node[owners], axis=1, kind="stable")
        side_by_side = np.take_along_axis(owners, order, axis=1)
        between = self._between(side_by_side)
        nodes = between.sum(axis=1)  # in this order a ring leaves each of several nodes once
        found = (nodes > 1) & (nodes < count)
        if not found.any():
            return self.seconds(owners, num_bytes)
        hierarchical_s, few_cards = self._hierarchical(side_by_side, num_bytes, between)
        ring_s, cards = self._seconds(owners, num_bytes)
        if (self._between(owners).sum(axis=1) > nodes).any():
            other_s, other_cards = self._seconds(side_by_side, num_bytes)
            ring_s, cards = _where(other_s < ring_s, (other_s, other_cards), (ring_s, cards))
        better = found & (hierarchical_s < ring_s)
        if not better.any():
            return ring_s, _busiest_s(cards, num_bytes, count)
        members = np.where(better, nodes, count)
        sent = num_bytes * 2 * (members - 1) / members
        seconds, busy = _where(better, (hierarchical_s, few_cards), (ring_s, cards))
        return seconds, max(float((sent @ card).max()) for card in busy)

    def _hierarchical(
        self, owners: npt.NDArray[np.int64], num_bytes: Floats, between: npt.NDArray[np.bool_]
    ) -> tuple[Floats, _Cards]:
        """Return (seconds of sums that go inside nodes first, s per byte on cards outwards and inwards).

        owners: devices by [sum, member], those of a node side by side. between: where the next is on another.
        """
        nodes = np.maximum(between.sum(axis=1), 1)
        following = np.roll(owners, -1, axis=1)
        per_byte, latency = self._hops(owners, following)
        inside = np.where(between, 0.0, num_bytes[:, None] * per_byte + latency)
        on_nodes = self._on_nodes(self._node[owners], np.ones_like(per_byte))
        told_s = self._told_s(on_nodes, num_bytes)
        inside_s = np.where(self._told[self._node[owners]], 0.0, inside).max(axis=1)
        most = np.where(self._told, 1.0, on_nodes).max(axis=1)
        across = np.where(between, per_byte, 0.0)
        across_s = (num_bytes / nodes)[:, None] * across
        mean_s = (across_s + np.where(between, latency, 0.0)).sum(axis=1) / nodes
        seconds = 2 * np.maximum(np.ceil(np.log2(most)) * inside_s, told_s)
        seconds += 2 * (nodes - 1) * np.maximum(across_s.max(axis=1), mean_s)
        out, home = (self._on_nodes(self._node[card], across) for card in (owners, following))
        return seconds, (out, home)

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
        node = self._node[owners]
        return np.asarray(node != np.roll(node, -1, axis=1))

    def _on_nodes(self, nodes: npt.NDArray[np.int64], values: Floats) -> Floats:
        """Return the sums of values by [ring, node]; nodes and values: by [ring, member]."""
        rings = len(nodes)
        row = np.arange(rings)[:, None] * self._num_nodes
        summed = np.bincount((row + nodes).ravel(), values.ravel(), minlength=rings * self._num_nodes)
        return np.asarray(summed, dtype=np.float64).reshape(rings, self._num_nodes)

    def _seconds(self, owners: npt.NDArray[np.int64], num_bytes: Floats) -> tuple[Floats, _Cards]:
        """Return (seconds of each ring, s per byte of a round on cards outwards and inwards)."""
        count = owners.shape[1]
        following = np.roll(owners, -1, axis=1)
        per_byte, latency = self._hops(owners, following)
        across = np.where(self._between(owners), per_byte, 0.0)
        out = self._on_nodes(self._node[owners], across)
        home = self._on_nodes(self._node[following], across)
        chunk = num_bytes / count
        busiest = np.maximum(np.maximum(out, home).max(axis=1), per_byte.max(axis=1)) * chunk
        hop = per_byte.mean(axis=1) * chunk + latency.mean(axis=1)
        return 2 * (count - 1) * np.maximum(busiest, hop), (out, home)

    def _hops(self, owners: npt.NDArray[np.int64], following: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return (s per byte, latency) of each message; those between the same groups are alike."""
        pair = self._group[owners] * self._num_groups + self._group[following]
        pair = 2 * pair + (self._node[owners] == self._node[following])
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


def _where(
    chosen: npt.NDArray[np.bool_], one: tuple[Floats, _Cards], other: tuple[Floats, _Cards]
) -> tuple[Floats, _Cards]:
    """Return the seconds and cards of one way for the rings chosen, and of another way for the others."""
    out, home = (np.where(chosen[:, None], *pair) for pair in zip(one[1], other[1], strict=True))
    return np.where(chosen, one[0], other[0]), (out, home)


def _busiest_s(cards: Iterable[Floats], num_bytes: Floats, count: int) -> float:
    """Return the seconds that all rings of so many members take at the busiest card.

    cards: s per byte of a round by [ring, node], for each direction.
    """
    chunk = num_bytes / count
    return 2 * (count - 1) * max(float((chunk @ card).max()) for card in cards)
