"""Two runtimes in the same processes, a step of each in turn, and what is said of their ratio."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from hetpipe.runtime.pace import sleep_until
from hetpipe.runtime.processes import Emit
from hetpipe.training.meeting import LEAD_S, gather


class Runtime(Protocol):
    """A step is: prepare (not timed), then run."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...
    def gradients(self) -> dict[str, Tensor]: ...


def compare(runtimes: Mapping[str, Runtime], num_pairs: int, emit: Emit | None) -> None:
    """Run a step of each in turn, the other one first in every second pair, and emit the seconds."""
    for pair in range(num_pairs):
        names = list(runtimes) if pair % 2 == 0 else list(runtimes)[::-1]
        measured = {name: timed(runtimes[name]) for name in names}
        if emit is not None:
            emit({"event": "pair", **measured})


def timed(runtime: Runtime) -> tuple[float, float]:
    """Return the seconds of a step, until its last rank has ended, and the CPU seconds of all ranks."""
    runtime.prepare()
    start_s = max(gather(time.monotonic())) + LEAD_S
    sleep_until(start_s)
    cpu_s = time.process_time()
    runtime.run()
    end_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    rows = gather((end_s, cpu_s))
    return max(end for end, _ in rows) - start_s, sum(used for _, used in rows)


def gradient_difference(runtimes: Mapping[str, Runtime]) -> float:
    """Return the largest absolute difference of a gradient of "ours" and "torch", on all ranks."""
    found, expected = (runtimes[name].gradients() for name in ("ours", "torch"))
    assert found.keys() == expected.keys()
    return max(gather(max(float((found[name] - expected[name]).abs().max()) for name in found)))


def ratio_cells(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the cells of a table: both steps, the median of the paired ratios and its interval."""
    ratios = [ours / torchs for ours, torchs in zip(seconds["ours"], seconds["torch"], strict=True)]
    low, high = median_interval(ratios)
    return (
        f"{spread(seconds['ours'])} | {spread(seconds['torch'])} "
        f"| {statistics.median(ratios):.3f} of {len(ratios)} | [{low:.3f}, {high:.3f}]"
    )


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return median, least and most of some values."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return an interval that holds the median with at least this probability, whatever the distribution.

    From the order statistics: the k-th smallest and k-th largest, where k is the largest with
    P(Binomial(n, 1/2) < k) <= (1 - level) / 2. Of few values it is their range.

    >>> median_interval(range(1, 31))
    (10, 21)
    """
    ordered, count = sorted(values), len(values)
    below, k = 0.0, 0
    while (below := below + math.comb(count, k) / 2**count) <= (1 - level) / 2:
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[count - k]
