"""From pipelines over classes of devices to named devices: neighbours on one node where possible."""

from collections.abc import Sequence

from cost_model.cluster import Device
from partition.estimates.class_pipeline import ClassPipeline
from partition.estimates.device_classes import DeviceClasses
from partition.estimates.timed_pipeline import TimedStage


def place(classes: DeviceClasses, pipelines: Sequence[ClassPipeline]) -> list[tuple[TimedStage, ...]]:
    """Devices for the stages of each pipeline; each device once.

    The pipelines that take most devices choose first; each class of a pipeline goes to the node that its
    earlier stages are on, else to the node where it just fits, so that few messages leave a node.
    """
    free: list[dict[str, list[Device]]] = []
    for group in classes.members:
        nodes: dict[str, list[Device]] = {}
        for device in group:
            nodes.setdefault(device.node, []).append(device)
        free.append(nodes)
    placed: list[tuple[TimedStage, ...]] = [() for _ in pipelines]
    for index in sorted(range(len(pipelines)), key=lambda index: (-len(pipelines[index].stages), index)):
        stages = pipelines[index].stages
        wanted: dict[int, int] = {}
        for stage in stages:
            wanted[stage.class_index] = wanted.get(stage.class_index, 0) + 1
        homes: list[str] = []
        taken = {entry: _take(free[entry], count, homes) for entry, count in wanted.items()}
        placed[index] = tuple(
            TimedStage(taken[stage.class_index].pop(0), stage.start, stage.stop, stage.recompute)
            for stage in stages
        )
    return placed


def _take(nodes: dict[str, list[Device]], count: int, homes: list[str]) -> list[Device]:
    """Remove `count` devices from the free ones of a class; homes: nodes that the pipeline is on already."""
    taken: list[Device] = []
    while count:
        here = next((name for name in homes if nodes.get(name)), None)
        if here is None:
            whole = [name for name, devices in nodes.items() if len(devices) >= count]
            here = (
                min(whole, key=lambda name: len(nodes[name]))
                if whole
                else max(nodes, key=lambda name: len(nodes[name]))
            )
            homes.append(here)
        part = nodes[here][:count]
        nodes[here] = nodes[here][count:]
        if not nodes[here]:
            del nodes[here]
        taken += part
        count -= len(part)
    return taken
