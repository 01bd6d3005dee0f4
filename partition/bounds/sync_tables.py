"""Tables of stages for a bound that counts gradient sync: every layer is on two nodes or more.

Then all gradients of a stage pass its node's card, in each direction at least once, those of a layer after
its last backward there (docs/bounds.md has the proof). Beside these sums the backwards of the
layers and of the stages before it go on: whichever takes longer counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.measured_links import MeasuredLink
from cost_model.network import Network
from partition.estimates.amounts import Amount
from partition.estimates.arrays import Floats
from partition.estimates.layer_bytes import between
from partition.estimates.stage_tables import AmountTables, ProblemTables, SizeTables
from partition.problem import Problem

SAFETY = 1e-9  # relative: of sums of many messages, for rounding


class SyncTables(ProblemTables):
    """The tables of a problem in which a stage ends with its sums or the backwards before it.

    What a stage adds to the stages behind it is its forward alone, since the way back is in `end_s` already.
    """

    def _tables_at(self, samples: int) -> SizeTables:
        return _SyncSizeTables(self, samples)

    @cached_property
    def sums_s(self) -> Floats:
        """The least seconds for which the sums of a stage hold its node's card: [class, start, stop]."""
        per_byte = [card_s_per_byte(self.problem.cluster, self.network, g) for g in self.classes.members]
        summed = np.maximum(summed_bytes(self.problem), 0.0)
        return np.array(per_byte)[:, None, None] * summed * (1 - SAFETY)

    def left_over_s(self, size: int, least: int, most: int) -> tuple[Floats, Floats]:
        """Return `left_over_s` of the stages without and with recompute, whatever the last microbatch has.

        size: of the others; least to most: samples of the last one.
        """
        key = (size, least, most)
        if key not in self._left_over:
            longest = [self._longest_s(samples) for samples in {size, *range(least, most + 1)}]
            forward_s, backward_s = np.max(longest, axis=0)
            # with recompute by segments forwards may come between, too
            found = [left_over_s(self.sums_s, each) for each in (backward_s, backward_s + forward_s)]
            self._left_over[key] = (found[0], found[1])
        return self._left_over[key]

    @cached_property
    def _left_over(self) -> dict[tuple[int, int, int], tuple[Floats, Floats]]:
        return {}

    def _longest_s(self, samples: int) -> Floats:
        """Return the most seconds of the forward of a layer and of its backward: [pass, class, layer]."""
        layers = range(self.num_layers)
        return np.array(
            [
                [
                    [max(stage_s(device, at, at + 1, samples) for device in devices) for at in layers]
                    for devices in self.unlike
                ]
                for stage_s in (self.prices.forward_s, self.prices.backward_s)
            ]
        )


class _SyncSizeTables(SizeTables):
    """The arrays for one microbatch size."""

    tables: SyncTables

    def amount(self, amount: Amount) -> AmountTables:
        """Return what an amount of samples takes in microbatches of this size."""
        made = super().amount(amount)
        lasts = [self.tables.at(samples) for samples in range(amount.least, amount.most + 1)]
        first = self if amount.full else None
        forward_s = first.forward_s if first else np.min([last.forward_s for last in lasts], axis=0)
        link_s = first.transfer_s[0] if first else np.min([last.transfer_s[0] for last in lasts], axis=0)
        way_s = _way_back_s(lasts)[:, :, None]
        left_s, again_left_s = self.tables.left_over_s(self.samples, amount.least, amount.most)
        end_s, again_end_s = np.maximum(left_s, way_s), np.maximum(again_left_s, way_s)
        return replace(
            made,
            total_s=made.total_s + end_s,
            again_total_s=made.again_total_s + again_end_s,
            before_s=forward_s,
            again_before_s=forward_s,
            link_s=link_s,
            end_s=made.end_s + end_s,
            again_end_s=made.again_end_s + again_end_s,
        )


def left_over_s(sums_s: Floats, layer_s: Floats) -> Floats:
    """Return for how long sums go on at least after the last backward of a stage: [class, start, stop].

    The gradients of layers [start, q] are summed after the backward of layer q, behind which that of layers
    [start, q) comes: what their sums take beyond that, for the q for which it is most.

    sums_s: of layers [start, stop); layer_s: no less than a backward takes, by [class, layer].
    """
    num_layers = layer_s.shape[1]
    way_s = np.concatenate([np.zeros((len(layer_s), 1)), np.cumsum(layer_s, axis=1)], axis=1)
    found = np.full_like(sums_s, -np.inf)
    for last in range(num_layers):
        behind_s = way_s[:, last, None] - way_s[:, : last + 1]  # by start, up to the last layer
        beyond_s = sums_s[:, : last + 1, last + 1] - behind_s * (1 + SAFETY)
        found[:, : last + 1, last + 1] = np.maximum(found[:, : last + 1, last], beyond_s)
    return np.maximum(found, 0.0)


def _way_back_s(lasts: list[SizeTables]) -> Floats:
    """Return the least seconds from a stage's last backward to the first stage's: [class, start]."""
    num_layers = lasts[0].tables.num_layers
    layers = np.arange(num_layers)
    each_s = np.min([last.backward_s[:, layers, layers + 1].min(axis=0) for last in lasts], axis=0)
    link_s = np.min([last.transfer_s[1].min(axis=0) for last in lasts], axis=0)  # [class, layer]
    way_s = np.concatenate([[0.0], np.cumsum(each_s)])
    return np.asarray(way_s + np.where(np.isfinite(link_s), link_s, 0.0))


def summed_bytes(problem: Problem) -> Floats:
    """Return bytes of gradients that a stage of layers [start, stop) sums with others, by [start, stop].

    As the buckets have them: what several layers share is summed once, in a bucket of its own.
    """
    profile, share = problem.profile, problem.gradient_share
    summed = between(own_bytes(problem))
    for members in profile.tied_groups:
        held = between(np.array([float(layer in members) for layer in range(profile.num_layers)])) > 0
        summed = summed + share * max(map(profile.tied_bytes, members)) * held
    return np.asarray(summed)


def own_bytes(problem: Problem) -> Floats:
    """Return bytes of gradients, as they travel, of each layer that it shares with no other."""
    profile = problem.profile
    own = np.array([layer.trained_bytes for layer in profile.layers], dtype=np.float64)
    for home, *tied in profile.tied_groups:
        for layer in tied:
            own[layer] -= profile.tied_bytes(layer)
        own[home] -= max(map(profile.tied_bytes, tied))
    return np.asarray(np.maximum(own, 0.0) * problem.gradient_share)


def ring_bytes(problem: Problem, network: Network) -> Floats:
    """Return the own bytes of each layer for which no way of summing does with little on some card: or 0.

    A ring over n nodes sends 2 (n - 1) / n times its bytes out of each of them, or more; so does a tree over
    up to four, none of which it sends more than twice, but for 2 (n - 1) times in all. Of more nodes the
    root of a tree sends more, and others less. There a layer counts whose tree takes longer than a ring, so
    that the cheaper one is no tree: 2 * 3 times the bytes pass the root one after the other, while each
    round of a ring, of any order that is chosen, is over in a latency and a chunk on the slowest link.
    """
    own, cluster, profile = own_bytes(problem), problem.cluster, problem.profile
    if len(cluster.nodes) <= 4:
        return own
    inside = [node.interconnect or cluster.network for node in cluster.nodes]
    links = [cluster.network, *inside]
    measured = profile.all_reduces or any(isinstance(link, MeasuredLink) for link in links)
    if cluster.links or profile.links or measured or network.sums_inside:
        return np.zeros_like(own)
    slowest = max(1 / link.bandwidth_bytes_per_s for link in links)
    latency_s = max(link.latency_s for link in links)
    longer_s = own * (3 / cluster.network.bandwidth_bytes_per_s - slowest)
    return np.where(longer_s >= (len(cluster.devices) - 1) * latency_s, own, 0.0)


def card_s_per_byte(cluster: Cluster, network: Network, devices: tuple[Device, ...]) -> float:
    """Return the least seconds for which a byte holds the cards of the nodes of devices; 0 of a lone node.

    Sums pass a node in both directions, of which the slower one counts.
    """
    return max(card_directions_s(cluster, network, devices))


def card_directions_s(cluster: Cluster, network: Network, devices: tuple[Device, ...]) -> tuple[float, float]:
    """Return the least seconds for which a byte holds the cards of nodes out of them, and into them."""
    least = [np.inf, np.inf]
    for one, other in _ends(cluster, {device.node for device in devices}):
        for place, (source, to) in enumerate(((one, other), (other, one))):
            links = (known.route(source.name, to.name).link for known in (network, network.as_in_file))
            least[place] = min(least[place], *map(_least_s_per_byte, links))
    return (least[0], least[1]) if max(least) < np.inf else (0.0, 0.0)


def device_s_per_byte(problem: Problem, network: Network, nodes: Sequence[Node]) -> float:
    """Return the least seconds for which a byte of sums keeps a device busy, all its links side by side.

    Each device has a channel to every other one of its node, and the card, either way. 0 where all-reduces
    were measured, which may be faster than these.
    """
    if problem.profile.all_reduces or network.sums_inside:
        return 0.0
    found = [np.inf]
    for node in {(node.interconnect, tuple(d.kind for d in node.devices)): node for node in nodes}.values():
        card_s, slower_s = sorted(card_directions_s(problem.cluster, network, node.devices))
        if card_s == 0 < slower_s:  # free one way
            return 0.0
        for device in node.devices:
            others = (other for other in node.devices if other is not device)
            inside = [min(_inside_s_per_byte(network, device, other)) for other in others]
            if 0 in inside:
                return 0.0
            rates = [1 / each for each in inside]
            rates += [1 / card_s] if card_s > 0 else []
            found.append(1 / sum(rates) if rates else 0.0)
    return min(found)


def _inside_s_per_byte(network: Network, one: Device, other: Device) -> tuple[float, float]:
    """Return the least seconds a byte of messages between two devices, either way."""
    there, back = network.route(one.name, other.name).link, network.route(other.name, one.name).link
    return _least_s_per_byte(there), _least_s_per_byte(back)


def _ends(cluster: Cluster, names: set[str]) -> Iterator[tuple[Device, Device]]:
    """Yield (device of a node named, device of another node), one pair for every kind of link there is."""
    own = {frozenset(link.nodes) for link in cluster.links}
    nodes = {node.name: node for node in cluster.nodes}
    alike: dict[frozenset[str], list[Node]] = {}
    for node in cluster.nodes:
        alike.setdefault(frozenset(device.kind for device in node.devices), []).append(node)
    pairs = [
        next(((one, other) for one in here for other in there if _network_between(one, other, own)), None)
        for here in ([node for node in group if node.name in names] for group in alike.values())
        for there in alike.values()
    ]
    for link in cluster.links:
        pairs += [(nodes[a], nodes[b]) for a, b in (link.nodes, link.nodes[::-1]) if a in names]
    for one, other in filter(None, pairs):
        yield from ((a, b) for a in _of_each_kind(one) for b in _of_each_kind(other))


def _network_between(one: Node, other: Node, own: set[frozenset[str]]) -> bool:
    return one.name != other.name and frozenset((one.name, other.name)) not in own


def _of_each_kind(node: Node) -> list[Device]:
    return list({device.kind: device for device in node.devices}.values())


def _least_s_per_byte(link: Link) -> float:
    """Return the least seconds a byte of any message on a link, latency left out."""
    rates = [1 / link.bandwidth_bytes_per_s]
    if isinstance(link, MeasuredLink):
        rates += [s / size for size, s in zip(link.message_bytes, link.occupied_s, strict=True)]
    return min(rates)
