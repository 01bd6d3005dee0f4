"""The buckets of gradients that are summed together, their order and their collectives."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cost_model.collective_choice import ring_and_collective, ring_or_tree
from cost_model.collectives import Collective
from cost_model.layer_costs import Prices
from cost_model.network import Network
from cost_model.profile import ModelProfile
from hetpipe.program.bucket_sizes import cut_buckets, order_of_layers
from hetpipe.program.instructions import Bucket
from partition.plan import Plan


def gradient_buckets(plan: Plan, profile: ModelProfile) -> tuple[Bucket, ...]:
    """Put neighbouring layers with the same owners into one bucket, and tied weights into one more each.

    Where optimizer states are sharded, only layers whose states are on one device go together; where
    gradients are, each layer is by itself. Of a layer that several devices own each range is one. In one
    global order, the layers whose backward ends first at the front; only buckets of several owners.
    """
    rank_of = {name: rank for rank, name in enumerate(plan.device_names)}
    holders: list[set[int]] = [set() for _ in range(profile.num_layers)]
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for layer in range(*stage.layers):
                holders[layer].add(rank_of[stage.device])

    def owners(*layers: int) -> tuple[int, ...]:
        return tuple(sorted(set().union(*(holders[layer] for layer in layers))))

    states = plan.state_owners

    def buckets_of(layers: tuple[int, ...], ranks: tuple[int, ...], *, tied: bool = False) -> list[Bucket]:
        parts = [each for each in plan.owner_ranges if each.layer == layers[0]]
        if parts:
            return [
                Bucket(layers, ranks, tied, state_owner=rank_of[each.device], part=(each.start, each.stop))
                for each in parts
            ]
        owner = None if states is None else rank_of[states[layers[0]]]
        return [Bucket(layers, ranks, tied, state_owner=owner)]

    cut = {each.layer for each in plan.owner_ranges}
    tied_buckets = [buckets_of(layers, owners(*layers), tied=True) for layers in profile.tied_groups]
    buckets = [bucket for found in tied_buckets for bucket in found]
    start = profile.first_trained  # those below it have no gradients
    for stop in range(start + 1, profile.num_layers + 1):
        last = stop == profile.num_layers
        if (
            last
            or plan.sharding.by_layer
            or holders[stop] != holders[start]
            or (states and states[stop] != states[start])
            or not cut.isdisjoint((start, stop))
        ):
            buckets += buckets_of(tuple(range(start, stop)), owners(start))
            start = stop
    several = [bucket for bucket in buckets if len(bucket.ranks) > 1]
    return tuple(sorted(several, key=order_of_layers))


def with_collectives(
    plan: Plan,
    buckets: Sequence[Bucket],
    profile: ModelProfile,
    network: Network,
    most_bytes: float | None = None,
    prices: Prices | None = None,
) -> tuple[Bucket, ...]:
    """Return the buckets, cut, each with the collective that is cheapest for its owners on the idle network.

    The owners of a ring are in its order, in which the library sums, too. most_bytes and prices: see
    `cut_buckets`.
    """
    names = plan.device_names
    ranks = {name: rank for rank, name in enumerate(names)}
    known: dict[tuple[tuple[int, ...], float], Bucket] = {}  # many parts are alike

    def summed(bucket: Bucket) -> Bucket:
        if bucket.state_owner is not None:
            return bucket  # reduced to the owner, whatever is cheaper
        if bucket.collective is Collective.HIERARCHICAL:
            return summed_by(
                bucket, bucket.collective, plan, network
            )  # beside other parts: see `cut_buckets`
        num_bytes = plan.gradient_share * bucket.num_bytes(profile)
        alike = known.get((bucket.ranks, num_bytes))
        if alike is None:
            alike = known[bucket.ranks, num_bytes] = chosen(bucket, num_bytes)
        return replace(bucket, ranks=alike.ranks, collective=alike.collective, nodes=alike.nodes)

    def chosen(bucket: Bucket, num_bytes: float) -> Bucket:
        ring, collective = ring_and_collective(network, num_bytes, [names[rank] for rank in bucket.ranks])
        if collective is Collective.RING:
            return replace(bucket, ranks=tuple(ranks[name] for name in ring))
        return summed_by(bucket, collective, plan, network)

    return tuple(map(summed, cut_buckets(plan, buckets, profile, network, most_bytes, prices)))


def not_by_nodes(
    plan: Plan, buckets: Sequence[Bucket], num_bytes: Callable[[int], float], network: Network
) -> tuple[Bucket, ...]:
    """Return the buckets, those that go by nodes by a ring in the order of the ranks, or a tree, instead.

    num_bytes: what each owner of a bucket (its index) gives, as it travels.
    """

    def plain(index: int, bucket: Bucket) -> Bucket:
        ranks = tuple(sorted(bucket.ranks))
        if bucket.state_owner is not None or (bucket.ranks == ranks and not bucket.nodes):
            return bucket
        owners = [plan.device_names[rank] for rank in ranks]
        return replace(
            bucket, ranks=ranks, nodes=(), collective=ring_or_tree(network, num_bytes(index), owners)
        )

    return tuple(plain(*entry) for entry in enumerate(buckets))


def summed_by(bucket: Bucket, collective: Collective, plan: Plan, network: Network) -> Bucket:
    """Return the bucket with this collective, and with its owners by node where that needs them."""
    nodes: tuple[tuple[int, ...], ...] = ()
    if collective is Collective.HIERARCHICAL:
        nodes = owners_by_node(bucket, plan, network)
    return replace(bucket, collective=collective, nodes=nodes)


def owners_by_node(bucket: Bucket, plan: Plan, network: Network) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of a bucket by node, in the order in which the simulator sums over them."""
    ranks = {plan.device_names[rank]: rank for rank in bucket.ranks}
    return tuple(tuple(ranks[name] for name in names) for names in network.by_node(list(ranks)))


def in_order_of_backwards(
    plan: Plan, buckets: Iterable[Bucket], ends_s: Mapping[tuple[int, int], float]
) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which their last backward ends, so that no SYNC holds up another."""
    ready = [0.0] * plan.num_layers
    for (pipeline, stage), end in ends_s.items():
        for layer in range(*plan.pipelines[pipeline].stages[stage].layers):
            ready[layer] = max(ready[layer], end)
    return tuple(sorted(buckets, key=lambda bucket: max(ready[layer] for layer in bucket.layers)))
