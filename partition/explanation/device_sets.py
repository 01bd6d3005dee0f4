"""Parts of a cluster's devices, and lower bounds on what any plan takes that uses all of such a part."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from cost_model.errors import InfeasibleError, InputError
from cost_model.expenses import Expenses, expenses
from cost_model.other_clusters import without
from partition.bounds.sharded_bound import sharded_bound
from partition.estimates.device_classes import DeviceClasses, equal_devices
from partition.problem import Problem

MOST_SETS = 600
"""Sets beyond these are thinned out: each takes a linear programme."""


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """Some devices (names): no plan that uses all of them has a step below least_s."""

    names: frozenset[str]
    least_s: float
    expenses: Expenses


@dataclass(frozen=True, slots=True)
class DeviceSets:
    """The sets of devices of a problem on which the states of its model fit, larger ones first.

    complete: whether each plan uses a set of these, but for the exchange of equal devices.
    """

    sets: tuple[DeviceSet, ...]
    complete: bool


def device_sets(problem: Problem, most: int = MOST_SETS) -> DeviceSets:
    """Return the sets of devices by how many there are of each class, with the fractional bound of each.

    Devices of a class have kind, speed, memory, price, watts and node shape in common; of a class the first
    ones of the cluster are taken, node by node. Beyond `most` sets the counts of the largest classes are
    thinned out, none and all always among them.

    Raises: InputError if devices are pinned.
    """
    check_choice(bool(problem.forced.pins))
    classes = _classes(problem)
    levels = [tuple(range(count + 1)) for count in classes.counts]
    while prod(map(len, levels)) > most and max(map(len, levels)) > 2:
        longest = max(range(len(levels)), key=lambda index: len(levels[index]))
        levels[longest] = _thinned(levels[longest])
    complete = all(len(level) == count + 1 for level, count in zip(levels, classes.counts, strict=True))
    found = tuple(_sets(problem, classes, levels))
    return DeviceSets(tuple(sorted(found, key=lambda entry: -len(entry.names))), complete)


def check_choice(pinned: bool) -> None:
    """Refuse to choose devices where some are pinned.

    Raises: InputError.
    """
    if pinned:
        raise InputError("pinned devices leave no choice of devices; leave out --pin")


def _classes(problem: Problem) -> DeviceClasses:
    alike = equal_devices(problem.cluster).class_indices()
    return DeviceClasses.by(
        problem.cluster.devices, lambda device: (alike[device.name], device.price_per_hour, device.watts)
    )


def _thinned(level: tuple[int, ...]) -> tuple[int, ...]:
    """Return every second count, from the largest down, and none.

    >>> _thinned((0, 1, 2, 3, 4)), _thinned((0, 1, 2, 3))
    ((0, 2, 4), (0, 1, 3))
    """
    return tuple(sorted({0, *level[::-2]}))


def _sets(problem: Problem, classes: DeviceClasses, levels: Sequence[Sequence[int]]) -> Iterator[DeviceSet]:
    for counts in product(*levels):
        names = frozenset(
            device.name
            for group, count in zip(classes.members, counts, strict=True)
            for device in group[:count]
        )
        if not names:
            continue
        try:
            least_s = sharded_bound(on_devices(problem, names)).fractional_s
        except InfeasibleError:
            continue
        yield DeviceSet(names, least_s, expenses(problem.cluster, names))


def on_devices(problem: Problem, names: frozenset[str]) -> Problem:
    """Return the problem on some of its devices."""
    others = [device.name for device in problem.cluster.devices if device.name not in names]
    return dataclasses.replace(problem, cluster=without(problem.cluster, others))
