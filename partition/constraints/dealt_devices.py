"""Devices dealt out to a number of pipelines, as sets to begin with."""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

from cost_model.cluster import Device
from partition.problem import Pin, Problem

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Of pipelines that are tried where none is forced."""
EACH = (1, 2, 4)
"""Free devices of a pipeline that are tried, beside all there are, where something is forced."""
Arrangement = tuple[tuple[Device, ...], ...]
"""The devices of each pipeline, from first to last stage."""


def dealt(
    problem: Problem, number: int, whole_s: Mapping[str, float], each: Sequence[int] = ()
) -> list[Arrangement]:
    """Return arrangements of so many pipelines: pins in their order, free devices where layers lack memory.

    Devices with most memory, or speed, are dealt first; then each part of a pipeline is in that order or the
    other way round. None where the pins need more pipelines. whole_s: seconds of the model on each
    device. each: numbers of free devices of a pipeline that are tried, beside all there are.
    """
    pins, devices = problem.forced.pins, problem.cluster.devices
    names = {pin.device for pin in pins}
    free = [device for device in devices if device.name not in names]
    most = min(len(free), (problem.forced.max_devices or len(devices)) - len(pins))
    found: dict[tuple[tuple[str, ...], ...], Arrangement] = {}
    by_memory = sorted(free, key=lambda device: -device.usable_bytes)
    by_speed = sorted(free, key=lambda device: whole_s[device.name])
    for ranked in (by_memory, by_speed):
        for use in sorted({most, *(min(most, number * count) for count in each)}):
            for chains in _deal(problem, number, ranked[:use]):
                key = tuple(tuple(device.name for device in chain) for chain in chains)
                found.setdefault(key, chains)
    return list(found.values())


def _deal(problem: Problem, number: int, free: Sequence[Device]) -> Iterator[Arrangement]:
    """Give arrangements: a pin goes to the fullest pipeline with room, a device where layers lack most."""
    chains: list[list[Pin]] = [[] for _ in range(number)]
    for pin in sorted(problem.forced.pins, key=lambda pin: (pin.start, pin.stop)):
        able = [chain for chain in chains if not chain or chain[-1].stop <= pin.start]
        if not able:
            return
        max(able, key=lambda chain: chain[-1].stop if chain else -1).append(pin)
    gaps: list[tuple[int, list[Device]]] = []  # (layers, devices) of what pins leave to others
    parts: list[list[list[Device]]] = []
    for chain in chains:
        row: list[list[Device]] = []
        stops = [0, *(pin.stop for pin in chain)]
        starts = [*(pin.start for pin in chain), problem.profile.num_layers]
        own = [[problem.cluster.device(pin.device)] for pin in chain]
        for stop, start, pinned in zip(stops, starts, [*own, []], strict=True):
            row += [[], pinned]
            if start > stop:
                gaps.append((start - stop, row[-2]))
        parts.append(row)
    leanest = [(0.0, index) for index in range(len(gaps))]  # bytes for each layer: a heap
    for device in free:
        if leanest:
            held, index = heappop(leanest)
            layers, given = gaps[index]
            given.append(device)
            if len(given) < layers:
                heappush(leanest, (held + device.usable_bytes / layers, index))
    if any(not given for _, given in gaps):
        return
    for step in (1, -1):
        yield tuple(tuple(device for part in row for device in part[::step]) for row in parts)
