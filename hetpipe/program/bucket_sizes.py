"""How finely gradients are summed: buckets are cut where a part of the sum can begin inside the last backward."""

from collections.abc import Sequence
from dataclasses import replace

from cost_model.collective_choice import BUCKET_BYTES, MOST_PARTS
from cost_model.layer_costs import Prices
from cost_model.network import Network, idle
from cost_model.profile import ModelProfile
from cost_model.ring_estimates import sum_estimate_s
from cost_model.sum_times import reduce_due
from hetpipe.program.instructions import Bucket
from hetpipe.program.sync_starts import after_layer_s
from partition.plan import Plan, Stage

LEAST_GAIN = 0.01
"""Of the seconds of the sum: what finer parts must save over coarser ones."""


def cut_buckets(
    plan: Plan,
    buckets: Sequence[Bucket],
    profile: ModelProfile,
    network: Network,
    most_bytes: float | None = None,
) -> list[Bucket]:
    """Return the buckets, cut between layers where the sum of the first parts hides behind the last backward.

    A part has at most most_bytes (None: BUCKET_BYTES), or more, up to all, where the latency of more parts
    would cost what they gain, by an estimate; a layer is never cut.
    """
    most_bytes = BUCKET_BYTES if most_bytes is None else most_bytes
    prices, found = Prices(profile), []
    for bucket in buckets:
        if bucket.tied or len(bucket.layers) == 1 or bucket.num_bytes(profile) <= most_bytes:
            found.append(bucket)
            continue
        parts = _parts(plan, bucket, prices, network, most_bytes)
        found += [replace(bucket, layers=layers) for layers in parts]
    return sorted(found, key=order_of_layers)


def order_of_layers(bucket: Bucket) -> tuple[int, bool]:
    """Return where a bucket comes in the order in which the backwards of a stage go through its layers."""
    return (-bucket.layers[0], bucket.tied)


def _parts(
    plan: Plan, bucket: Bucket, prices: Prices, network: Network, most_bytes: float
) -> Sequence[tuple[int, ...]]:
    """Return the layers of each part, the last layers first."""
    left_s = _left_s(plan, bucket, prices, network)
    whole = [bucket.layers]
    if not any(left_s):
        return whole
    num_bytes = [replace(bucket, layers=(layer,)).num_bytes(prices.profile) for layer in bucket.layers]
    total = sum(num_bytes)
    whole_s, part_s = (_sum_s(plan, bucket, network, size) for size in (total, total / MOST_PARTS))
    per_byte = max(0.0, whole_s - part_s) / (total - total / MOST_PARTS)
    each_s = max(0.0, whole_s - per_byte * total)
    first = bucket.layers[0]

    def exposed_s(parts: Sequence[tuple[int, ...]]) -> float:
        """Return for how long the sums go on after the backward."""
        done_s = -left_s[-1]
        for layers in parts:
            size = sum(num_bytes[layer - first] for layer in layers)
            done_s = max(done_s, -left_s[layers[0] - first]) + each_s + per_byte * size
        return max(0.0, done_s)

    best, best_s, cap = whole, exposed_s(whole), total / 2
    while cap >= most_bytes / 2:
        parts = _of_at_most(max(cap, most_bytes), bucket.layers, num_bytes)
        if len(parts) > MOST_PARTS:
            break
        seconds = exposed_s(parts)
        if seconds < best_s - LEAST_GAIN * whole_s:
            best, best_s = parts, seconds
        cap /= 2
    return best


def _of_at_most(
    most_bytes: float, layers: Sequence[int], num_bytes: Sequence[float]
) -> list[tuple[int, ...]]:
    """Return parts of neighbouring layers, from the last one on, of so many bytes or of a single layer."""
    parts: list[list[int]] = []
    held = 0.0
    for layer, size in zip(reversed(layers), reversed(num_bytes), strict=True):
        if not parts or held + size > most_bytes:
            parts.append([])
            held = 0.0
        parts[-1].insert(0, layer)
        held += size
    return list(map(tuple, parts))


def _left_s(plan: Plan, bucket: Bucket, prices: Prices, network: Network) -> list[float]:
    """Return the least seconds of a last backward that come after each layer of a bucket, over its owners.

    Of those that have the first stage of a pipeline: they come last, and send nothing that sums would hold up.
    """
    found: set[tuple[str, float, int, Stage]] = set()
    left_s = [float("inf")] * len(bucket.layers)
    ranks = set(bucket.ranks)
    for rank, name in enumerate(plan.device_names):
        if rank not in ranks:
            continue
        device = network.device(name)
        for index, place in plan.places[name]:
            pipeline = plan.pipelines[index]
            if place > 0:
                continue
            stage, samples = pipeline.stages[0], pipeline.microbatch_samples(pipeline.num_microbatches - 1)
            key = (device.kind, device.speed, samples, replace(stage, devices=("",), in_flight=1))
            if key in found:
                continue
            found.add(key)
            for position, layer in enumerate(bucket.layers):
                if stage.start <= layer < stage.stop:
                    seconds = after_layer_s(prices, device, stage, samples, layer)
                    left_s[position] = min(left_s[position], seconds)
    return [seconds if seconds < float("inf") else 0.0 for seconds in left_s]


def _sum_s(plan: Plan, bucket: Bucket, network: Network, num_bytes: float) -> float:
    """Return about the seconds of a sum of so many bytes over the owners of a bucket."""
    names = [plan.device_names[rank] for rank in bucket.ranks]
    if bucket.state_owner is None:
        return sum_estimate_s(network, num_bytes, names)[0]
    root = plan.device_names[bucket.state_owner]
    return max(reduce_due(idle(), network, num_bytes, dict.fromkeys(names, 0.0), root).values())
