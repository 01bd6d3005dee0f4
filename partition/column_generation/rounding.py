"""Whole pipelines out of the relaxed programme over columns."""

import math
from collections.abc import Sequence

import numpy as np

from partition.column_generation.column_generation import Column, Columns
from partition.column_generation.master_problem import NO_LIMITS, Limits, solve_master
from partition.estimates.class_pipeline import ClassPipeline
from partition.estimates.effort import LARGE

STEPS = 7


def rounded(
    columns: Columns, counts: Sequence[int], batch: int, limits: Limits = NO_LIMITS
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
            total, chosen = _whole(live, counts, batch, limits)
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
    live: Sequence[tuple[Column, int]], counts: Sequence[int], batch: int, limits: Limits
) -> tuple[float, list[tuple[Column, int]]]:
    """Return (samples, pipelines) of the integer programme; of a large cluster most by rounding down."""
    uses, values = [column.uses for column, _ in live], [float(value) for _, value in live]
    base = np.zeros(len(live))
    left = list(map(float, counts))
    if sum(counts) > LARGE:
        base = np.floor(solve_master(uses, values, counts, limits).amounts + 1e-9)
        used = base @ np.array(uses)
        left = list(np.array(counts) - used)
        limits = limits.left(int(base.sum()), int(used.sum()), left)
    missing = batch - float(base @ np.array(values))
    rest = solve_master(uses, values, left, limits, integer=True, enough=missing)
    amounts = np.round(rest.amounts) + base
    chosen = [column for amount, column in zip(amounts, live, strict=True) for _ in range(int(amount))]
    return float(amounts @ np.array(values)) if rest.met else 0.0, chosen
