"""How finely gradients are summed: parts begin inside a backward, or go inside nodes beside others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from cost_model.collective_choice import BUCKET_BYTES, MOST_PARTS
from cost_model.collectives import Collective
from cost_model.layer_costs import Prices
from cost_model.network import Network, idle
from cost_model.profile import ModelProfile
from cost_model.ring_estimates import by_nodes_estimate_s, sum_estimate_s
from cost_model.sum_times import LARGE_RING, reduce_due
from hetpipe.program.instructions import Bucket
from hetpipe.program.sync_starts import after_layer_s
from partition.plan import Plan, Stage

LEAST_GAIN = 0.01
"""Of the seconds of the sum: what finer parts must save over coarser ones."""
FEW_PARTS = 4  # of rings so large that each takes long to simulate

Parts = Sequence[tuple[int, ...]]
"""The layers of each part of a bucket, the last layers first."""


def cut_buckets(
    plan: Plan,
    buckets: Sequence[Bucket],
    profile: ModelProfile,
    network: Network,
    most_bytes: float | None = None,
    prices: Prices | None = None,
) -> list[Bucket]:
    """Return the buckets, cut between layers where the sum of the first parts hides behind the last backward.

    Or where several nodes sum, devices of each in front: while a part is between the nodes, the next one is
    inside of them. Such parts are hierarchical, though alone each may be sooner in a ring.

    A part has at most most_bytes (None: BUCKET_BYTES), as they travel, or more, up to all, where the latency
    of more parts would cost what they gain, by an estimate; a layer is never cut. prices: of the profile, if
    there are some already.
    """
    most_bytes = BUCKET_BYTES if most_bytes is None else most_bytes
    knife = _Knife(plan, prices or Prices(profile), network, most_bytes)
    found: list[Bucket] = []
    for bucket in buckets:
        parts, collective = knife.parts(bucket)
        cut = [bucket] if len(parts) == 1 else [replace(bucket, layers=layers) for layers in parts]
        found += cut if collective is None else [replace(part, collective=collective) for part in cut]
    return sorted(found, key=order_of_layers)


def order_of_layers(bucket: Bucket) -> tuple[int, bool]:
    """Return where a bucket comes in the order in which the backwards of a stage go through its layers."""
    return (-bucket.layers[0], bucket.tied)


class _Knife:
    """Cuts the buckets of one plan; knows what comes of each layer, and when."""

    def __init__(self, plan: Plan, prices: Prices, network: Network, most_bytes: float) -> None:
        self._plan, self._profile, self._network = plan, prices.profile, network
        self._most_bytes, self._prices = most_bytes, prices

    def parts(self, bucket: Bucket) -> tuple[Parts, Collective | None]:
        """Return the parts of a bucket, or all of it, and their collective; None: of each the best alone."""
        whole = [bucket.layers]
        if bucket.tied or len(bucket.layers) == 1:
            return whole, None
        untied, share = self._profile.untied_bytes, self._plan.gradient_share
        sizes = [share * untied[layer] for layer in bucket.layers]  # as they travel
        if sum(sizes) <= self._most_bytes:
            return whole, None
        left_s, groups = self._left_s(bucket), self._groups(bucket)
        if not any(left_s) and not groups:
            return whole, None
        tries = list(self._tries(bucket, sizes))
        alone = self._alone_s(bucket, sizes, left_s)
        least_gain_s = LEAST_GAIN * self._sum_s(bucket, sum(sizes))
        best, best_s = _soonest(tries if any(left_s) else tries[:1], alone, least_gain_s)
        if groups:
            by_nodes, by_nodes_s = _soonest(tries, self._by_nodes_s(sizes, left_s, groups), least_gain_s)
            if by_nodes_s < best_s - least_gain_s:
                return by_nodes, Collective.HIERARCHICAL
        return best, None

    def _tries(self, bucket: Bucket, sizes: Sequence[float]) -> Iterator[Parts]:
        """Yield all of a bucket, and parts of it, finer and finer."""
        yield [bucket.layers]
        cap = sum(sizes) / 2
        most = MOST_PARTS if len(bucket.ranks) <= LARGE_RING else FEW_PARTS
        while cap >= self._most_bytes / 2:
            parts = _of_at_most(max(cap, self._most_bytes), bucket.layers, sizes)
            if len(parts) > most:
                return
            yield parts
            cap /= 2

    def _alone_s(
        self, bucket: Bucket, sizes: Sequence[float], left_s: Sequence[float]
    ) -> Callable[[Parts], float]:
        """Return for how long sums go on after the backward, given parts that come one after another."""
        total = sum(sizes)
        each_s, per_byte = _line(lambda num_bytes: self._sum_s(bucket, num_bytes), total)
        first = bucket.layers[0]

        def exposed_s(parts: Parts) -> float:
            done_s = -left_s[-1]
            for layers in parts:
                size = sum(sizes[layer - first] for layer in layers)
                done_s = max(done_s, -left_s[layers[0] - first]) + each_s + per_byte * size
            return max(0.0, done_s)

        return exposed_s

    def _by_nodes_s(
        self, sizes: Sequence[float], left_s: Sequence[float], groups: Sequence[Sequence[str]]
    ) -> Callable[[Parts], float]:
        """Return the same of parts that all go inside nodes, between them and back.

        groups: the owners (names) by node. Between nodes they come one after another, inside as well.
        """

        def estimate_s(num_bytes: float) -> tuple[float, float]:
            known, key = self._network.by_nodes_s, (num_bytes, tuple(map(tuple, groups)))
            if key not in known:
                known[key] = by_nodes_estimate_s(self._network, num_bytes, groups)
            return known[key]

        total = sum(sizes)
        inside_each_s, inside_per_byte = _line(lambda num_bytes: estimate_s(num_bytes)[0], total)
        each_s, per_byte = _line(lambda num_bytes: estimate_s(num_bytes)[1], total)

        def exposed_s(parts: Parts) -> float:
            at = len(sizes)
            reduced_s = summed_s = -left_s[-1]
            inside_s = 0.0
            for layers in parts:
                at -= len(layers)
                size = sum(sizes[at : at + len(layers)])
                inside_s = inside_each_s + inside_per_byte * size
                reduced_s = max(reduced_s, -left_s[at]) + inside_s
                summed_s = max(summed_s, reduced_s) + each_s + per_byte * size
            return max(0.0, summed_s + inside_s)

        return exposed_s

    def _groups(self, bucket: Bucket) -> list[list[str]]:
        """Return the owners (names) of a bucket by node, where sums by nodes may be sooner; else none."""
        names = [self._plan.device_names[rank] for rank in bucket.ranks]
        if bucket.state_owner is not None or self._network.was_measured(names):
            return []
        groups = self._network.by_node(names)
        return groups if 1 < len(groups) < len(names) else []

    @cached_property
    def _first_backwards(self) -> dict[int, list[tuple[Stage, int]]]:
        """By rank, the first stages of pipelines that have a backward, and samples of the last microbatch.

        They come last, and send nothing that sums could delay.
        """
        ranks = {name: rank for rank, name in enumerate(self._plan.device_names)}
        found: dict[int, list[tuple[Stage, int]]] = {}
        for pipeline in self._plan.pipelines:
            stage = pipeline.stages[pipeline.first_backward(self._profile.first_trained)]
            samples = pipeline.microbatch_samples(pipeline.num_microbatches - 1)
            found.setdefault(ranks[stage.device], []).append((stage, samples))
        return found

    def _left_s(self, bucket: Bucket) -> list[float]:
        """Return the least seconds of a last backward that come after each layer, over the owners."""
        known: set[tuple[object, ...]] = set()
        left_s = [float("inf")] * len(bucket.layers)
        firsts = self._first_backwards
        for stage, samples in (entry for rank in bucket.ranks for entry in firsts.get(rank, ())):
            device = self._network.device(stage.device)
            shape = (stage.layers, stage.recompute, stage.segment_layers)
            if (key := (device.kind, device.speed, samples, shape)) in known:
                continue
            known.add(key)
            for at, layer in enumerate(bucket.layers):
                if stage.start <= layer < stage.stop:
                    seconds = after_layer_s(self._prices, device, stage, samples, layer)
                    left_s[at] = min(left_s[at], seconds)
        return [seconds if seconds < float("inf") else 0.0 for seconds in left_s]

    def _sum_s(self, bucket: Bucket, num_bytes: float) -> float:
        """Return about the seconds of a sum of so many bytes over the owners of a bucket."""
        names = tuple(self._plan.device_names[rank] for rank in bucket.ranks)
        if bucket.state_owner is None:
            known, key = self._network.alone_s, ("estimate", num_bytes, names)
            if key not in known:
                known[key] = sum_estimate_s(self._network, num_bytes, names)[0]
            return known[key]
        root = self._plan.device_names[bucket.state_owner]
        ready_s = dict.fromkeys(names, 0.0)
        return max(reduce_due(idle(), self._network, num_bytes, ready_s, root).values())


def _soonest(
    tries: Sequence[Parts], exposed_s: Callable[[Parts], float], least_gain_s: float
) -> tuple[Parts, float]:
    """Return the parts after which sums are over first, and when; finer ones must gain so much."""
    best, best_s = tries[0], exposed_s(tries[0])
    for parts in tries[1:]:
        if (seconds := exposed_s(parts)) < best_s - least_gain_s:
            best, best_s = parts, seconds
    return best, best_s


def _line(seconds_of: Callable[[float], float], total: float) -> tuple[float, float]:
    """Return (s, s per byte) of sums of few bytes and of all."""
    whole_s, part_s = seconds_of(total), seconds_of(total / MOST_PARTS)
    per_byte = max(0.0, whole_s - part_s) / (total - total / MOST_PARTS)
    return max(0.0, whole_s - per_byte * total), per_byte


def _of_at_most(most_bytes: float, layers: Sequence[int], sizes: Sequence[float]) -> Parts:
    """Return parts of neighbouring layers, from the last one on, of so many bytes or of a single layer."""
    parts: list[list[int]] = []
    held = 0.0
    for layer, size in zip(reversed(layers), reversed(sizes), strict=True):
        if not parts or held + size > most_bytes:
            parts.append([])
            held = 0.0
        parts[-1].insert(0, layer)
        held += size
    return list(map(tuple, parts))
