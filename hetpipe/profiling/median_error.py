"""The accuracy of measured medians."""

import math
import statistics
from collections.abc import Sequence

TARGET = 0.02
"""Relative standard error of a median at which measuring may stop."""


def standard_error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of a median, from two order statistics of the measurements.

    The measurements are independent. The interval from the c-th smallest to the c-th largest value, c = (n +
    1) / 2 - sqrt(n), covers the median with a probability known for any distribution; half its width over the
    normal quantile of that probability is the estimate (Price and Bonett, Journal of Statistical Computation
    and Simulation, 2001). Unlike 1.2533 sd / sqrt(n), a few very late measurements do not spoil it.

    >>> round(standard_error_of_median([1.0, 2.0, 4.0]), 3)  # c = 1, covered with 1 - 2 / 8
    1.304
    >>> standard_error_of_median([3.0])
    inf
    """
    num = len(values)
    if num < 2:
        return math.inf
    rank = max(1, round((num + 1) / 2 - math.sqrt(num)))
    # outside = P(fewer than `rank` of the values lie below the median), each with probability 1 / 2
    logs = [math.lgamma(num + 1) - math.lgamma(i + 1) - math.lgamma(num - i + 1) for i in range(rank)]
    outside = sum(math.exp(value - num * math.log(2)) for value in logs)
    ordered = sorted(values)
    quantile = statistics.NormalDist().inv_cdf(1 - outside)
    return (ordered[num - rank] - ordered[rank - 1]) / (2 * quantile)


def precision_text(standard_error: float, where: str | None = None) -> str:
    """Return what a person is told of the worst relative standard error.

    >>> precision_text(0.014, "block0 forward, microbatch 1")
    'standard error of the median: worst 1.4 % (block0 forward, microbatch 1), reached'
    >>> precision_text(0.031)
    'standard error of the median: worst 3.1 %, budget spent at 3.1 %'
    """
    worst = f"{100 * standard_error:.1f} %"
    outcome = "reached" if standard_error < TARGET else f"budget spent at {worst}"
    place = f" ({where})" if where else ""
    return f"standard error of the median: worst {worst}{place}, {outcome}"
