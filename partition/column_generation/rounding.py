"""Whole pipelines out of the relaxed programme over columns."""

import math
from collections.abc import Sequence

import numpy as np

from partition.column_generation.column_generation import Column, Columns
from partition.column_generation.master_problem import solve_master
from partition.estimates.class_pipeline import ClassPipeline

STEPS = 7
LARGE = 128  # devices from which only what the floor of the relaxed amounts leaves is rounded


def rounded(
    columns: Columns, counts: Sequence[int], batch: int, most_pipelines: int | None = None
) -> list[tuple[float, list[ClassPipeline]]]:
    """Solve the integer programme at step times from the relaxed one's upwards: [(seconds, pipelines)].

    Returned are the least step found in which they do the batch, and the longest in which they do not.
    counts: devices of each class; batch: samples of the step.
    """
    every = list(columns.pool.columns.values())
    low, high = columns.step_s, 1.6 * columns.step_s
    step_s, best, fallback = 1.03 * low, None, None
    for _ in range(STEPS):
        values = columns.pool.values(step_s)
        live = [(column, value) for column, value in zip(every, values, strict=True) if value]
        if live:
            total, chosen = _whole(live, counts, batch, most_pipelines)
            found = (
                step_s,
                [ClassPipeline(column.microbatch_size, value, column.stages) for column, value in chosen],
            )
            if total >= batch:
                high, best = step_s, found
            else:
                low, fallback = step_s, found
        step_s = math.sqrt(low * high) if best else 1.25 * step_s
        if best and high / low < 1.004:
            break
    return [answer for answer in (best, fallback) if answer]


def _whole(
    live: Sequence[tuple[Column, int]], counts: Sequence[int], batch: int, most_pipelines: int | None
) -> tuple[float, list[tuple[Column, int]]]:
    """Return (samples, pipelines) of the integer programme; of a large cluster most by rounding down."""
    uses, values = [column.uses for column, _ in live], [float(value) for _, value in live]
    base = np.zeros(len(live))
    left = list(map(float, counts))
    limit = most_pipelines
    if sum(counts) > LARGE:
        base = np.floor(solve_master(uses, values, counts, most_pipelines=limit).amounts + 1e-9)
        left = list(np.array(counts) - base @ np.array(uses))
        limit = None if limit is None else limit - int(base.sum())
    missing = batch - float(base @ np.array(values))
    rest = solve_master(uses, values, left, integer=True, most_pipelines=limit, enough=missing)
    amounts = np.round(rest.amounts) + base
    chosen = [column for amount, column in zip(amounts, live, strict=True) for _ in range(int(amount))]
    return float(amounts @ np.array(values)), chosen
