"""Tables and pictures of plans with many pipelines: those alike are shown as one."""

from collections.abc import Hashable, Sequence

from cost_model.cluster import Cluster
from partition.plan import Pipeline, Plan

MANY_ROWS = 24
"""A screen: of more stages, or devices, not each has a row."""
MOST_WAITING = 8
"""Devices that have a row then, where rows are of several lines."""


def shown_together(plan: Plan, cluster: Cluster) -> list[list[int]]:
    """Return the numbers of the pipelines that a table shows as one: each alone, unless they are many."""
    if sum(len(pipeline.stages) for pipeline in plan.pipelines) <= MANY_ROWS:
        return [[number] for number in range(len(plan.pipelines))]
    alike: dict[Hashable, list[int]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        alike.setdefault(_shape(plan, pipeline, cluster), []).append(number)
    return list(alike.values())


def shown_devices(plan: Plan, cluster: Cluster) -> dict[str, int]:
    """Return the devices that have a row in a picture, each with how many others are shown by it.

    They are in the order of the plan's.
    """
    others: dict[str, int] = {}
    for numbers in shown_together(plan, cluster):
        for stage in plan.pipelines[numbers[0]].stages:
            others[stage.device] = max(len(numbers) - 1, others.get(stage.device, 0))
    return {name: others[name] for name in plan.device_names if name in others}


def alike(count: int) -> str:
    """Return what is added to the name of what is shown for so many others too; nothing for none.

    >>> alike(1200), alike(0)
    (', 1,200 alike', '')
    """
    return f", {count:,} alike" if count else ""


def _shape(plan: Plan, pipeline: Pipeline, cluster: Cluster) -> Hashable:
    """Return all that a table shows of a pipeline, but for names and busy shares of its devices.

    What a device owns of a sharded plan is in its memory alone: owners are not like the others.
    """
    stages = []
    for stage in pipeline.stages:
        device = cluster.device(stage.device)
        held = (stage.layers, stage.in_flight, stage.recompute, stage.segment_layers, stage.offload)
        owned = () if plan.state_owners is None else tuple(plan.owned_shares(device.name).items())
        stages.append((held, owned, device.kind, device.speed, device.usable_bytes))
    return (pipeline.microbatch_size, pipeline.num_samples, tuple(stages))


def range_of(shares: Sequence[float]) -> str:
    """Return shares in percent, the least and the most where they differ; nothing of none.

    >>> range_of([0.851, 0.87, 0.849]), range_of([0.5, 0.5]), range_of([])
    ('85-87%', '50%', '')
    """
    if not shares:
        return ""
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return most if least == most else f"{least[:-1]}-{most}"
