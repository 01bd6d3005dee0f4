"""Weights that GPUs fetch each for itself (`Plan.fetches_apart`): they pass through the memory of hosts.

    owner: GPU -> pinned, once before a step   |   host to host, for each fetch   |   fetcher: pinned -> GPU

The first is counted with the STEP, after which the weights are new; what the hosts take between them, be it
one, as a message over the link of the two devices; the last after it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cost_model.cluster import Cluster, Link
from cost_model.host_memory import FETCH_ROOMS, GPU_HOST_LINK
from cost_model.profile import ModelProfile
from cost_model.sharded_memory import Piece, pieces_of
from cost_model.sharding import Sharding
from partition.plan import Plan


@dataclass(frozen=True, slots=True)
class HostFetches:
    """The bytes in pinned memory of its host by which a GPU gives weights to others, and gets them.

    served_bytes: of weights that it owns and others fetch. room_bytes: of the largest that it fetches, as
    many as are under way at once (`FETCH_ROOMS`).
    """

    served_bytes: float
    room_bytes: float

    @property
    def pinned_bytes(self) -> float:
        return self.served_bytes + self.room_bytes


def host_fetches(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, HostFetches]:
    """Return what each GPU of a plan gives and gets through its host, by device; {} where none does."""
    if not plan.fetches_apart or plan.state_owners is None:
        return {}
    pieces = [_sharded(plan, each) for each in pieces_of(profile)]
    shares = {name: plan.owned_shares(name) for name in plan.device_names}
    fetched = {
        name: {
            piece: away
            for layer in plan.layers_of(name)
            for piece in pieces[layer]
            if (away := 1 - shares[name].get(piece.home, 0.0)) > 0
        }
        for name in plan.device_names
    }
    num_asking = Counter(piece for wanted in fetched.values() for piece in wanted)
    found = {}
    for name in plan.device_names:
        served = [
            shares[name].get(piece.home, 0.0) * piece.num_bytes
            for piece, count in num_asking.items()
            if count > (piece in fetched[name])  # owners of a range fetch the others
        ]
        rooms = sorted((away * piece.num_bytes for piece, away in fetched[name].items()), reverse=True)
        if cluster.device(name).is_gpu and (any(served) or rooms):
            found[name] = HostFetches(sum(sorted(served, reverse=True)), sum(rooms[:FETCH_ROOMS]))
    return found


def _sharded(plan: Plan, pieces: Iterable[Piece]) -> list[Piece]:
    return [piece for piece in pieces if plan.sharding_of(piece.home) is Sharding.WEIGHTS]


def gpu_host_link(cluster: Cluster, device: str) -> Link:
    """Return the link between a GPU and its host: that of the cluster file, else `GPU_HOST_LINK`."""
    host = cluster.node_of(device).host_memory
    return GPU_HOST_LINK if host is None else host.link


def served_s(fetches: Mapping[str, HostFetches], cluster: Cluster, device: str) -> float:
    """Return the seconds in which the weights that others fetch go from a device to its host, before a step.

    The devices of a node that serve have an equal part of its link each.
    """
    if device not in fetches or not fetches[device].served_bytes:
        return 0.0
    sharing = _num_of_node(cluster, device, [name for name, each in fetches.items() if each.served_bytes])
    return gpu_host_link(cluster, device).transfer_s(fetches[device].served_bytes * sharing)


def taken_s(fetches: Mapping[str, HostFetches], cluster: Cluster, device: str, num_bytes: float) -> float:
    """Return the seconds in which weights that have come to its host go to a device; shared as `served_s`."""
    if device not in fetches:
        return 0.0
    sharing = _num_of_node(cluster, device, [name for name, each in fetches.items() if each.room_bytes])
    return gpu_host_link(cluster, device).transfer_s(num_bytes * sharing)


def _num_of_node(cluster: Cluster, device: str, names: Iterable[str]) -> int:
    node = cluster.device(device).node
    return sum(cluster.device(name).node == node for name in names)


def pinned_bytes(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, float]:
    """Return the bytes of pinned memory of each host through which weights are fetched, by node."""
    found: dict[str, float] = {}
    for name, each in host_fetches(plan, profile, cluster).items():
        node = cluster.device(name).node
        found[node] = found.get(node, 0.0) + each.pinned_bytes
    return found
