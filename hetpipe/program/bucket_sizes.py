"""How finely gradients are summed: buckets are cut where parts can begin inside a backward."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from cost_model.collective_choice import BUCKET_BYTES, MOST_PARTS
from cost_model.layer_costs import Prices
from cost_model.network import Network, idle
from cost_model.profile import ModelProfile
from cost_model.ring_estimates import sum_estimate_s
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

    A part has at most most_bytes (None: BUCKET_BYTES), as they travel, or more, up to all, where the latency
    of more parts would cost what they gain, by an estimate; a layer is never cut. prices: of the profile, if
    there are some already.
    """
    most_bytes = BUCKET_BYTES if most_bytes is None else most_bytes
    knife = _Knife(plan, prices or Prices(profile), network, most_bytes)
    found: list[Bucket] = []
    for bucket in buckets:
        parts = knife.parts(bucket)
        found += [bucket] if len(parts) == 1 else [replace(bucket, layers=layers) for layers in parts]
    return sorted(found, key=order_of_layers)


def order_of_layers(bucket: Bucket) -> tuple[int, bool]:
    """Return where a bucket comes in the order in which the backwards of a stage go through its layers."""
    return (-bucket.layers[0], bucket.tied)


class _Knife:
    """Cuts the buckets of one plan; knows what comes of each layer, and when."""

    def __init__(self, plan: Plan, prices: Prices, network: Network, most_bytes: float) -> None:
        self._plan, self._profile, self._network = plan, prices.profile, network
        self._most_bytes, self._prices = most_bytes, prices

    def parts(self, bucket: Bucket) -> Parts:
        """Return the parts of a bucket, or all of it."""
        whole = [bucket.layers]
        if bucket.tied or len(bucket.layers) == 1:
            return whole
        untied, share = self._profile.untied_bytes, self._plan.gradient_share
        sizes = [share * untied[layer] for layer in bucket.layers]  # as they travel
        total = sum(sizes)
        if total <= self._most_bytes or not any(left_s := self._left_s(bucket)):
            return whole
        whole_s, part_s = self._sum_s(bucket, total), self._sum_s(bucket, total / MOST_PARTS)
        per_byte = max(0.0, whole_s - part_s) / (total - total / MOST_PARTS)
        each_s, first = max(0.0, whole_s - per_byte * total), bucket.layers[0]

        def exposed_s(parts: Parts) -> float:
            """Return for how long the sums go on after the backward."""
            done_s = -left_s[-1]
            for layers in parts:
                size = sum(sizes[layer - first] for layer in layers)
                done_s = max(done_s, -left_s[layers[0] - first]) + each_s + per_byte * size
            return max(0.0, done_s)

        best: Parts = whole
        best_s, cap = exposed_s(whole), total / 2
        most = MOST_PARTS if len(bucket.ranks) <= LARGE_RING else FEW_PARTS
        while cap >= self._most_bytes / 2:
            parts = _of_at_most(max(cap, self._most_bytes), bucket.layers, sizes)
            if len(parts) > most:
                break
            seconds = exposed_s(parts)
            if seconds < best_s - LEAST_GAIN * whole_s:
                best, best_s = parts, seconds
            cap /= 2
        return best

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
