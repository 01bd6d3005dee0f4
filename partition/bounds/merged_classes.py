"""Merge device classes for a bound, as if all devices of a merged class had the best of what any has."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from partition.estimates.arrays import Floats
from partition.estimates.device_classes import DeviceClasses
from partition.estimates.stage_tables import ProblemTables


def merged(tables: ProblemTables, most_lost: float) -> Iterator[ProblemTables]:
    """Yield tables of the same problem with one class less each time, until too much is lost.

    What is computed on them bounds the plans of all devices from below: `ProblemTables` counts the shortest
    times, the most memory and all channels of a class. Merged next are always the two that lose least.

    most_lost: speed and memory that the devices may gain, each as a share of the cluster's, added up.
    """
    lost = 0.0
    while len(tables.classes.members) > 1:
        gained, pair = min((_gained(tables, pair), pair) for pair in _pairs(tables.classes))
        lost += gained
        if lost > most_lost:
            return
        others = [[index] for index in range(len(tables.classes.members)) if index not in pair]
        tables = ProblemTables(tables.problem, tables.classes.merged_into([*others, pair]))
        yield tables


def _pairs(classes: DeviceClasses) -> Iterator[tuple[int, int]]:
    return combinations(range(len(classes.members)), 2)


def _gained(tables: ProblemTables, pair: tuple[int, int]) -> float:
    """Return the speed and memory that merging two classes adds, each as a share of the cluster's."""
    counts = np.array(tables.classes.counts, dtype=np.float64)
    gains = 0.0
    for values in (_speeds(tables), tables.usable_bytes):
        best = max(values[index] for index in pair)
        more = sum(counts[index] * (best - values[index]) for index in pair)
        gains += float(more / max(counts @ values, 1e-300))
    return gains


def _speeds(tables: ProblemTables) -> Floats:
    """Return the samples per second of the whole model, by class, if memory were no matter."""
    sizes = tables.problem.microbatch_sizes
    busy_s = np.min([tables.at(size).busy_s[:, 0, -1] / size for size in sizes], axis=0)
    return np.asarray(1 / np.maximum(busy_s, 1e-300))
