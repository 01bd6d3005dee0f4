"""Families of pipelines: copies of one chain of device classes with one set of cuts; which and where.

Gradient sync loads the network card of a node with all layers that its devices hold, and the busiest card
decides. Pipelines that are all alike, laid out so that a node holds few layers, sync little; but every set on
the way there, one pipeline at a time, is slower. So families are made, ranked and changed whole.

Legend:
    m_c     devices of class c in one copy of the chain; S = sum of m_c stages
    k       copies
    r_c     samples a second of one device of class c that does the whole model
    L, B    layers of the model; samples of a step
    W       bytes of the model's gradients
    a       seconds for which a byte that is summed over many nodes occupies a card: 2 / bandwidth
    b       mean bytes of a boundary between layers, per sample
    grouped stage by stage over the nodes: a node holds few layers, activations cross the network
    nested  copy by copy over the nodes: activations stay inside, a node holds all layers of its copies
    runs    between them: so many places in a row are nested, and runs of copies side by side fill the nodes
"""

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise, permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_model.cluster import Device, Node
from partition.estimates.device_classes import ClassOrder
from partition.estimates.gradient_sync import PACE_BYTES
from partition.local_search.starts import SearchSpace

Counts = tuple[int, ...]
"""How many devices of each class."""
Cut = tuple[int, int, bool]
"""A stage's first layer, the layer after its last one, and whether it recomputes."""
TOGETHER = 3  # exponent: messages queue at a card the more, the more of the time it is busy
FEW_COPIES = 4  # of which one less is looked at
FASTER_INSIDE = 4
"""Times as fast as cards, from which on the links of nodes make it worth it to sum inside of them first."""
FEW_CLASSES = 3  # of a chain, up to which it is tried in all orders of its classes


class Outline(NamedTuple):
    """Copies of a chain of device classes, first stage first, that are not cut yet.

    run: places of a class in a row that are laid out together; with 1 the copies are grouped, with all of a
    class nested.
    """

    chain: ClassOrder
    copies: int
    microbatch_size: int
    run: int


class Family(NamedTuple):
    """Copies of one pipeline: the same classes with the same cuts, each copy on devices of its own."""

    outline: Outline
    cuts: tuple[Cut, ...]

    def uses(self, num_classes: int) -> Counts:
        """Return the devices of each class that it takes."""
        chain = self.outline.chain
        return tuple(self.outline.copies * chain.count(c) for c in range(num_classes))


FamilySet = tuple[Family, ...]
"""Families that share no device: the first takes its devices first."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The devices of the copies of a chain.

    held: places of the chain that a node holds, by its name. crossings: messages between nodes, as (place in
    front of them, one of their pairs of devices) with how many there are. most_at_once: devices of a node
    that send to other nodes side by side, or receive; at least 1.
    """

    rows: tuple[tuple[Device, ...], ...]
    held: Mapping[str, frozenset[int]]
    crossings: tuple[tuple[int, Device, Device, int], ...]
    most_at_once: int

    @classmethod
    def of(cls, rows: Sequence[Sequence[Device]]) -> "Layout":
        """Return the layout of rows of devices by [copy, place]."""
        held: dict[str, set[int]] = {}
        crossings: dict[tuple[int, str, str], tuple[Device, Device]] = {}
        counts: Counter[tuple[int, str, str]] = Counter()
        for row in rows:
            for place, device in enumerate(row):
                held.setdefault(device.node, set()).add(place)
            for place, (one, other) in enumerate(pairwise(row)):
                if one.node != other.node:
                    key = (place, one.node, other.node)
                    crossings.setdefault(key, (one, other))
                    counts[key] += 1
        out: Counter[str] = Counter()
        into: Counter[str] = Counter()
        for (_, one_node, other_node), count in counts.items():
            out[one_node] += count
            into[other_node] += count
        return cls(
            tuple(map(tuple, rows)),
            {node: frozenset(places) for node, places in held.items()},
            tuple((key[0], *pair, counts[key]) for key, pair in crossings.items()),
            max([1, *out.values(), *into.values()]),
        )

    @property
    def row(self) -> tuple[Device, ...]:
        """The copy that stands for all."""
        return self.rows[len(self.rows) // 2]

    def spread(self, places: Sequence[int]) -> bool:
        """Return whether one of these places of the chain is on several nodes."""
        return any(sum(place in held for held in self.held.values()) > 1 for place in places)


class FamilySpace:
    """The devices of a problem as families take them, and closed forms of what families take.

    Devices of one kind, speed and memory are one class, whatever links their nodes have: `members`, node by
    node, nodes with most of them first.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.problem = space.problem
        class_of = space.classes.class_indices()
        self.members = tuple(_by_node(group) for group in space.classes.merged().members)
        self.counts = tuple(map(len, self.members))
        firsts = [class_of[group[0].name] for group in self.members]
        trained = np.maximum(space.tables.bytes.trained, 0.0)
        summed = trained * self.problem.gradient_share  # as they travel
        self.model_bytes = float(summed[0, -1])
        self.layer_bytes = [float(summed[layer, layer + 1]) for layer in range(len(summed) - 1)]
        sizes = self.problem.microbatch_sizes
        self.rates = tuple(
            max(size / max(float(space.tables.at(size).busy_s[c, 0, -1]), 1e-300) for size in sizes)
            for c in firsts
        )
        self.on_node = tuple(max(Counter(d.node for d in group).values()) for group in self.members)
        self.card_s_per_byte = _card_s_per_byte(space)
        self.class_s_per_byte = tuple(
            max(self.card_s_per_byte[device.node] for device in group) for group in self.members
        )
        inside = max((_inside_s_per_byte(space, node) for node in self.problem.cluster.nodes), default=0.0)
        self.inside_first = FASTER_INSIDE * inside <= min(self.card_s_per_byte.values()) / 2
        profile = self.problem.profile
        inner = profile.layers[1:-1] or profile.layers
        self._boundary_bytes = sum(layer.output_bytes_per_sample for layer in inner) / len(inner)
        weights = float(space.tables.bytes.weights[..., 0, -1].min())
        self._least_bytes = weights + self.model_bytes * (1 + profile.optimizer_bytes_per_parameter_byte)
        self._layouts: dict[object, Layout] = {}
        self._vectors: dict[tuple[int, int], list[Counts]] = {}
        self._places = {node.name: place for place, node in enumerate(self.problem.cluster.nodes)}
        self._nodes: dict[int, tuple[Layout, npt.NDArray[np.int64]]] = {}

    def vectors(self, counts: Sequence[int], most_stages: int, most_vectors: int) -> Iterator[Counts]:
        """Give devices of each class for a chain, as far as memory may hold the model; short chains first."""
        key = (most_stages, most_vectors)
        if key not in self._vectors:
            self._vectors[key] = list(self._find_vectors(*key))
        for vector in self._vectors[key]:
            if all(map(operator.le, vector, counts)):
                yield vector

    def _find_vectors(self, most_stages: int, most_vectors: int) -> Iterator[Counts]:
        """Give `vectors` of all devices."""
        num_classes, given = len(self.counts), 0
        for length in range(1, min(most_stages, self.problem.profile.num_layers) + 1):
            given += math.comb(num_classes + length - 1, length)
            if given > most_vectors:
                return
            for chosen in combinations_with_replacement(range(num_classes), length):
                vector = tuple(map(chosen.count, range(num_classes)))
                if all(map(operator.le, vector, self.counts)) and self._holds(vector):
                    yield vector

    def _holds(self, vector: Counts) -> bool:
        """Return whether the memory of a chain is not too little for parameters and states."""
        pairs = zip(vector, self.members, strict=True)
        return sum(m * group[0].usable_bytes for m, group in pairs) >= self._least_bytes

    def rate(self, vector: Sequence[int]) -> float:
        """Return the samples a second of so many devices of each class, were all always busy."""
        return sum(m * rate for m, rate in zip(vector, self.rates, strict=True))

    def room(self, vector: Counts, counts: Sequence[int], others: Sequence[Family] = ()) -> int:
        """Return the most copies of a chain on so many devices of each class, beside other families.

        No more than are wished for.
        """
        forced, most = self.problem.forced, self.problem.global_batch_size
        if forced.num_pipelines is not None:
            most = forced.num_pipelines - sum(other.outline.copies for other in others)
        if forced.max_devices is not None:
            taken = sum(other.outline.copies * len(other.outline.chain) for other in others)
            most = min(most, (forced.max_devices - taken) // sum(vector))
        return max(0, min(most, *(count // m for count, m in zip(counts, vector, strict=True) if m)))

    def copies(self, vector: Counts, most: int, parts: Sequence[float] = ()) -> set[int]:
        """Return the numbers of copies of a chain that are looked at, where there is room for `most`.

        All, half of them, one less of few, for others beside them, and the most of which stages fill nodes:
        of others a node holds layers of one stage more, and sums these, too. And as many as a node has
        devices, which need not sum over the network. And parts of the most.
        """
        widths = {self.on_node[index] for index, m in enumerate(vector) if m}
        filling = {
            next(copies for copies in range(most, 0, -1) if copies % width == 0 or width % copies == 0)
            for width in widths
        }
        filling |= {width for width in widths if width < most}
        shares = {max(1, round(part * most)) for part in parts}
        return {most, max(1, most // 2), *filling, *shares, *([most - 1] if 1 < most <= FEW_COPIES else [])}

    def as_many_as_wished(self, families: Sequence[Family]) -> bool:
        """Return whether families have as many copies as pipelines are wished for, if any number is."""
        number = self.problem.forced.num_pipelines
        return number is None or number == sum(family.outline.copies for family in families)

    def orders(self, vector: Counts) -> list[ClassOrder]:
        """Return chains of so many devices of each class: each class in one run, few orders of many."""
        used = [c for c, m in enumerate(vector) if m]
        used.sort(key=lambda c: -self.members[c][0].usable_bytes)
        if len(used) <= FEW_CLASSES:
            orders = list(permutations(used))
        else:
            by_rate = tuple(sorted(used, key=lambda c: self.rates[c]))
            orders = [tuple(used), tuple(used[::-1]), by_rate, by_rate[::-1]]
        return list(dict.fromkeys(tuple(c for c in order for _ in range(vector[c])) for order in orders))

    def quick_s(self, vector: Counts, copies: int, others: float = 0.0, sums_s: float = 0.0) -> float:
        """Return a closed form of the step of a family, laid out as suits it best.

            compute = B / rate * (1 + (S - 1) * size / (B / k) + (S - 1) / (2 L)),  rate = k * sum m_c r_c
            load    = devices of a node * b * samples of a copy * a / 2 * (2 if S > 2 t else 1) / t
            sync    = a * W * max((n_c - 1) / n_c * r_c) / sum m_c r_c * run
            step    = (compute^3 + load^3)^(1/3) + sync

        Filling and uneven cuts are in compute. t: stages of a copy in a row on a node: its run, or more of
        few copies. n_c: nodes with copies of a stage, or copies, where these are not summed inside a node
        first; beside other pipelines very many. others: samples a second that these do; sums_s: what their
        sums take at least.
        """
        return min(self._ways_s(vector, copies, others, sums_s).values())

    def runs(self, vector: Counts, copies: int) -> list[int]:
        """Return the runs in which a family is laid out: grouped, nested, and best by the closed form."""
        ways_s = self._ways_s(vector, copies, 0.0)
        return list(dict.fromkeys([1, max(vector), min(ways_s, key=lambda run: ways_s[run])]))

    def sums_s(self, vector: Counts, copies: int, run: int, *, others: bool) -> float:
        """Return the seconds of `quick_s` for sums, in a run. others: whether there are other pipelines."""
        used = [c for c, m in enumerate(vector) if m]
        on_node = max(min(vector[c], self.on_node[c], run) for c in used)
        largest = max(self.rates[c] * self._summed(copies, min(run, vector[c]), c, others) for c in used)
        return max(self.class_s_per_byte) * self.model_bytes * on_node * largest / self.rate(vector)

    def _summed(self, copies: int, run: int, c: int, others: bool) -> float:
        """Return the share of a stage's bytes that passes the card of each of its nodes: (n - 1) / n of n."""
        if others:
            return 1.0
        if copies == 1 or self.on_node[c] % (copies * run) == 0:  # one node has all copies
            return 0.0
        nodes = max(2, -(-copies * run // self.on_node[c]))
        members = min(copies, nodes) if self.inside_first else copies
        return (members - 1) / members

    def _ways_s(
        self, vector: Counts, copies: int, others: float, others_sums_s: float = 0.0
    ) -> dict[int, float]:
        """Return the closed form of `quick_s` by run; that of all a node has, too, is by its longest."""
        used, num_stages = [c for c, m in enumerate(vector) if m], sum(vector)
        batch, rate = self.problem.global_batch_size, copies * self.rate(vector)
        each = batch * rate / (rate + others) / copies
        filling = (num_stages - 1) * min(self.problem.microbatch_sizes) / max(each, 1.0)
        uneven = (num_stages - 1) / (2 * self.problem.profile.num_layers)
        compute_s = batch / (rate + others) * (1 + filling + uneven)

        def sums_s(run: int) -> float:
            return max(others_sums_s, self.sums_s(vector, copies, run, others=others > 0))

        if num_stages == 1:
            return {1: compute_s + sums_s(1)}
        longest = max(vector)
        width = max(self.on_node[c] for c in used)
        load_s = width * each * self._boundary_bytes * max(self.class_s_per_byte) / 2
        ways = {}
        for run in dict.fromkeys([*(2**power for power in range(longest.bit_length())), longest]):
            on_node = max(min(vector[c], self.on_node[c], run) for c in used)
            in_row = min(longest, on_node * max(1, width // (copies * run)))
            ways_out = min(2, -(-num_stages // in_row) - 1)  # of a node in the middle, and of one of two
            crossing_s = ways_out * load_s / in_row
            ways[run] = together_s(compute_s, crossing_s, sums_s(run))
        return ways

    def layout(self, outline: Outline, taken: Sequence[int]) -> Layout:
        """Return the devices of copies. taken: devices of each class that earlier families have."""
        key = (outline.chain, outline.copies, outline.run, tuple(taken))
        if key not in self._layouts:
            self._layouts[key] = Layout.of(self._rows(outline, taken))
        return self._layouts[key]

    def nodes_of(self, layout: Layout) -> npt.NDArray[np.int64]:
        """Return the nodes of a layout's devices as places in the cluster, by [copy, place]."""
        if id(layout) not in self._nodes:
            nodes = [[self._places[device.node] for device in row] for row in layout.rows]
            self._nodes[id(layout)] = layout, np.array(nodes)
        return self._nodes[id(layout)][1]

    def layouts(self, families: FamilySet) -> list[Layout]:
        """Return the devices of each family of a set."""
        taken, found = (0,) * len(self.counts), []
        for family in families:
            found.append(self.layout(family.outline, taken))
            taken = self.after(taken, family)
        return found

    def pipelines(self, families: FamilySet) -> object:
        """Return what sets share whose pipelines differ in their order, or in devices of one node, alone."""
        return frozenset(
            (
                family.outline.chain,
                family.outline.microbatch_size,
                family.cuts,
                self.nodes_of(layout).tobytes(),
            )
            for family, layout in zip(families, self.layouts(families), strict=True)
        )

    def after(self, taken: Sequence[int], family: Family) -> Counts:
        """Return the devices of each class that are taken once a family has its own."""
        return tuple(t + used for t, used in zip(taken, family.uses(len(self.counts)), strict=True))

    def _rows(self, outline: Outline, taken: Sequence[int]) -> list[list[Device]]:
        """Return devices by [copy, place]."""
        chain, copies = outline.chain, outline.copies
        places = {c: [place for place, other in enumerate(chain) if other == c] for c in set(chain)}

        def device(copy: int, place: int) -> Device:
            c = chain[place]
            at, width = places[c].index(place), len(places[c])
            first = at // outline.run * outline.run  # of its run
            index = first * copies + copy * min(outline.run, width - first) + at - first
            return self.members[c][taken[c] + index]

        return [[device(copy, place) for place in range(len(chain))] for copy in range(copies)]


def together_s(clock_s: float, load_s: float, sync_s: float) -> float:
    """Return the seconds of a step whose busiest card carries messages for load_s and sums for sync_s."""
    return float((clock_s**TOGETHER + load_s**TOGETHER) ** (1 / TOGETHER) + sync_s)


def _by_node(group: Sequence[Device]) -> tuple[Device, ...]:
    nodes: dict[str, list[Device]] = {}
    for device in group:
        nodes.setdefault(device.node, []).append(device)
    return tuple(device for devices in sorted(nodes.values(), key=lambda ds: -len(ds)) for device in devices)


def _inside_s_per_byte(space: SearchSpace, node: Node) -> float:
    """Return what a byte occupies the link between two devices of a node; 0 of a lone device."""
    if len(node.devices) < 2:
        return 0.0
    link = space.costs.network.route(node.devices[0].name, node.devices[1].name).link
    return link.occupancy_s(PACE_BYTES) / PACE_BYTES


def _card_s_per_byte(space: SearchSpace) -> dict[str, float]:
    """Return what a byte that is summed over many nodes occupies each node's card: twice its slowest link."""
    cluster, route = space.problem.cluster, space.costs.network.route
    firsts = {node.name: node.devices[0] for node in cluster.nodes if node.devices}
    of_kinds: dict[str, list[Device]] = {}
    for device in firsts.values():
        of_kinds.setdefault(device.kind, []).append(device)
    usual = [device for devices in of_kinds.values() for device in devices[:2]]
    named: dict[str, list[Device]] = {}
    for link in cluster.links:
        for one, other in (link.nodes, link.nodes[::-1]):
            if one in firsts and other in firsts:
                named.setdefault(one, []).append(firsts[other])
    paces = {}
    for node, device in firsts.items():
        others = [other for other in (*usual, *named.get(node, [])) if other.node != node]
        links = (route(device.name, other.name).link for other in others)
        paces[node] = 2 * max((link.occupancy_s(PACE_BYTES) / PACE_BYTES for link in links), default=0.0)
    return paces
