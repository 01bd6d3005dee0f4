"""Fewer classes for a bound: some together, as if all their devices had the best of what any has."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from partition.estimates.device_classes import DeviceClasses
from partition.estimates.stage_tables import Floats, ProblemTables


def joined(tables: ProblemTables, most_lost: float) -> Iterator[ProblemTables]:
    """Tables of the same problem with one class less each time, until too much is lost.

    What is computed on them bounds the plans of all devices from below: `ProblemTables` counts the shortest
    times, the most memory and all channels of a class. Joined next are always the two that lose least.

    most_lost: speed and memory that the devices may gain, each as a share of the cluster's, added up.
    """
    lost = 0.0
    while len(tables.classes.members) > 1:
        gained, pair = min((_gained(tables, pair), pair) for pair in _pairs(tables.classes))
        lost += gained
        if lost > most_lost:
            return
        others = [[entry] for entry in range(len(tables.classes.members)) if entry not in pair]
        tables = ProblemTables(tables.problem, tables.classes.joined([*others, pair]))
        yield tables


def _pairs(classes: DeviceClasses) -> Iterator[tuple[int, int]]:
    return combinations(range(len(classes.members)), 2)


def _gained(tables: ProblemTables, pair: tuple[int, int]) -> float:
    counts = np.array(tables.classes.counts, dtype=np.float64)
    gains = 0.0
    for values in (_speeds(tables), tables.usable_bytes):
        best = max(values[entry] for entry in pair)
        more = sum(counts[entry] * (best - values[entry]) for entry in pair)
        gains += float(more / max(counts @ values, 1e-300))
    return gains


def _speeds(tables: ProblemTables) -> Floats:
    """Samples per second of the whole model, by class, if memory were no matter."""
    sizes = tables.problem.microbatch_sizes
    busy_s = np.min([tables.at(size).busy_s[:, 0, -1] / size for size in sizes], axis=0)
    return np.asarray(1 / np.maximum(busy_s, 1e-300))
