"""Values between those that were measured."""

from collections.abc import Sequence


def interpolate(sizes: Sequence[int], values: Sequence[float], size: float) -> float:
    """Return a value measured at some microbatch sizes, at any size.

    Exact at the measured sizes and linear between them; beyond the last the last segment goes on, never
    falling; below the first, and with one size, proportional.

    >>> interpolate([1, 2, 4], [1.0, 1.5, 2.5], 3), interpolate([2], [6.0], 3)
    (2.0, 9.0)
    """
    if size <= sizes[0]:
        return values[0] * (size / sizes[0])
    if len(sizes) == 1:
        return values[0] * (size / sizes[0])
    upper = next((index for index, measured in enumerate(sizes) if measured >= size), len(sizes) - 1)
    lower = upper - 1
    slope = (values[upper] - values[lower]) / (sizes[upper] - sizes[lower])
    if size > sizes[-1]:
        return values[-1] + max(0.0, slope) * (size - sizes[-1])
    return values[upper] if size == sizes[upper] else values[lower] + slope * (size - sizes[lower])
