"""Which stages keep their optimizer states in the memory of their host, where devices lack room."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from cost_model.cluster import Cluster
from cost_model.host_memory import LEAST_PARTS, MOST_ROOM_BYTES, NUM_ROOMS
from cost_model.profile import ModelProfile
from partition.estimates.optimizer_sharding import fits, unsharded
from partition.estimates.plan_memory import memory_on
from partition.plan import OPTIMIZER_STATES, Plan
from partition.problem import Problem


def has_host_memory(cluster: Cluster) -> bool:
    """Return whether plans may keep anything in the memory of a host."""
    return any(node.host_memory is not None for node in cluster.nodes)


def with_offload(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """Return the plan with the optimizer states of devices that lack memory on their hosts, where these may.

    All stages of such a device are offloaded, of no other: moves cost time, and the less the fewer share a
    link. Whether all fits then is for `fits` to say.
    """
    full = {
        device.name
        for device in map(cluster.device, plan.device_names)
        if cluster.node_of(device.name).host_memory is not None
        and memory_on(plan, profile, device).total_bytes > device.usable_bytes
    }
    if not full:
        return plan
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, offload=(OPTIMIZER_STATES,)) if stage.device in full else stage
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def offloaded_plans(problem: Problem, plans_of: Callable[[Problem], Iterable[Plan]]) -> Iterator[Plan]:
    """Yield plans with states on hosts that fit memory, out of plans of problems with smaller states.

    plans_of: a search, which knows nothing of hosts. Devices keep room for what moves: three
    sixteenths of the states, or three times 16 MiB.
    """
    seen = set()
    for smaller in _without_states(problem):
        for plan in plans_of(smaller):
            if plan.pipelines in seen:
                continue
            seen.add(plan.pipelines)
            offloaded = with_offload(plan, problem.profile, problem.cluster)
            if offloaded.offloads and fits(offloaded, problem.profile, problem.cluster):
                yield offloaded


def _without_states(problem: Problem) -> Iterator[Problem]:
    """Yield problems to search in, whose plans have room for what moves."""
    yield unsharded(problem, NUM_ROOMS / LEAST_PARTS)
    room_bytes = NUM_ROOMS * MOST_ROOM_BYTES
    if all(device.usable_bytes > 2 * room_bytes for device in problem.cluster.devices):
        nodes = tuple(
            replace(
                node,
                devices=tuple(
                    replace(device, reserve_bytes=device.reserve_bytes + room_bytes)
                    for device in node.devices
                ),
            )
            for node in problem.cluster.nodes
        )
        yield unsharded(replace(problem, cluster=replace(problem.cluster, nodes=nodes)), 0.0)
