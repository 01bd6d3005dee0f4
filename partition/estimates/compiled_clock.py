"""The clock of a pipeline under 1F1B as machine code: the results of `pipeline_clock`, to the last bit.

To import this loads a compiler, for some 0.4 s: only where very many pipelines are timed.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from partition.estimates.arrays import Floats
from partition.estimates.compiled import compiled
from partition.estimates.pipeline_clock import Seconds, backward_hops, forward_hops

_WholeNumbers = npt.NDArray[np.int64]


class CompiledClock:
    """Makespans of a pipeline for any numbers of microbatches, each from the begin: see `PipelineClock`."""

    def __init__(self, full: Seconds, in_flight: Sequence[int]) -> None:
        self._hops = np.array(forward_hops(full)), np.array(backward_hops(full))
        self._in_flight = np.array(in_flight, np.int64)

    def makespan_s(self, num_microbatches: int, last: Seconds | None = None) -> float:
        """Return the seconds from the first forward to the last backward; last: of a smaller last one."""
        last_hops = self._hops
        if last is not None:
            last_hops = np.array(forward_hops(last)), np.array(backward_hops(last))
        return float(_makespan_s(*self._hops, *last_hops, self._in_flight, num_microbatches))


def _run(
    forward: Floats,
    backward: Floats,
    last_forward: Floats,
    last_backward: Floats,
    in_flight: _WholeNumbers,
    num_microbatches: int,
) -> float:
    """Return the makespan. Hops: by [stage], busy, occupied and latency seconds of it and the link behind."""
    count, final = len(in_flight), num_microbatches - 1
    clock, forward_free, backward_free = np.zeros(count), np.zeros(count), np.zeros(count)
    arrived = np.zeros((count, num_microbatches))
    for microbatch in range(num_microbatches):
        hops, due = (last_forward if microbatch == final else forward), 0.0
        for stage in range(count):
            now = max(due, clock[stage]) + hops[stage, 0]  # R1
            free = max(now, forward_free[stage]) + hops[stage, 1]  # R2, R4
            clock[stage], forward_free[stage], due = now, free, free + hops[stage, 2]  # R3
        for stage in range(count - 1, -1, -1):
            done = microbatch - in_flight[stage] + 1
            if microbatch == final:
                begin, end = max(0, done), num_microbatches
            elif done >= 0:
                begin, end = done, done + 1
            else:
                break  # nor has any stage before it, where no fewer are in flight
            for other in range(begin, end):
                hops = last_backward if other == final else backward
                now = max(arrived[stage, other], clock[stage]) + hops[stage, 0]
                clock[stage] = now
                if stage > 0:
                    backward_free[stage] = max(now, backward_free[stage]) + hops[stage, 1]
                    arrived[stage - 1, other] = backward_free[stage] + hops[stage, 2]
    return float(clock.max())


_makespan_s: Callable[..., float] = compiled(_run)
