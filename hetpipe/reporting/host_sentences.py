"""What hosts do for their devices under a plan, in words: how fast they step, what passes through them."""

from collections.abc import Iterator

from cost_model.cluster import Cluster
from cost_model.host_memory import GPU_HOST_LINK, lent_by
from cost_model.profile import ModelProfile
from cost_model.units import format_bytes
from partition.estimates.host_fetches import pinned_bytes
from partition.plan import OPTIMIZER_STEP, Plan

GB = 1e9


def host_sentences(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[str]:
    """Say how fast hosts step, and over what weights are fetched through them; [] where none does."""
    return [*_steps(plan, profile, cluster), *_fetches(plan, profile, cluster)]


def _steps(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Iterator[str]:
    """Tell rates as the cluster file states them, or as they were measured; hosts alike together."""
    stepping = {
        cluster.device(name).node for name in plan.device_names if plan.offloaded_layers(name, OPTIMIZER_STEP)
    }
    groups: dict[tuple[float, str], list[str]] = {}
    for node in cluster.nodes:
        host = lent_by(node, profile) if node.name in stepping else None
        if host is not None and host.step_bytes_per_s is not None:
            source = "measured with the profile" if host != node.host_memory else "as the cluster file states"
            groups.setdefault((host.step_bytes_per_s, source), []).append(node.name)
    for (rate, source), names in groups.items():
        yield (
            f"the CPU of {', '.join(names)} steps {rate / GB:.3g} GB of parameters a second for its devices, "
            f"{source}"
        )


def _fetches(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Iterator[str]:
    """Tell what is pinned where GPUs fetch weights through hosts, and over which link these go."""
    groups: dict[tuple[float, bool], list[str]] = {}
    pinned = pinned_bytes(plan, profile, cluster)
    for node in cluster.nodes:
        if node.name in pinned:
            link = GPU_HOST_LINK if node.host_memory is None else node.host_memory.link
            key = link.bandwidth_bytes_per_s, node.host_memory is not None
            groups.setdefault(key, []).append(f"{format_bytes(pinned[node.name])} of {node.name}")
    for (rate, stated), named in groups.items():
        assumed = "" if stated else " (taken for PCIe 3: the cluster file has no host_link)"
        yield (
            f"sharded weights are fetched through pinned memory, {', '.join(named)}, at {rate / GB:.3g} GB/s "
            f"each way{assumed}"
        )


def rate_sentences(profile: ModelProfile) -> list[str]:
    """Say how fast the CPU of the host steps that each kind was measured on; [] where that is not known."""
    groups: dict[float, list[str]] = {}
    for kind, times in profile.kinds.items():
        if times.host_step_bytes_per_s is not None:
            groups.setdefault(times.host_step_bytes_per_s, []).append(kind)
    return [
        f"the CPU of the host of {', '.join(kinds)} steps {rate / GB:.3g} GB of parameters a second"
        for rate, kinds in groups.items()
    ]
