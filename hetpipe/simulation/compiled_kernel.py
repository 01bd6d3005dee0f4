"""The inner loop of the fast simulator as machine code. To import this loads a compiler, for 0.5 s."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from cost_model.network import FreeAt, idle
from hetpipe.simulation.fast_kernel import SimulationArrays, ranks_as_they_finish
from hetpipe.simulation.simulation_arrays import SimulationLists
from partition.estimates.compiled import compiled

Floats = npt.NDArray[np.float64]
WholeNumbers = npt.NDArray[np.int64]
CompiledArrays = SimulationArrays[WholeNumbers, Floats]

_ranks_as_they_finish: Callable[[CompiledArrays, Floats], Iterator[int]] = compiled(ranks_as_they_finish)


def compiled_clock(work: SimulationLists) -> tuple[CompiledArrays, FreeAt, Iterator[int]]:
    """Return the work as arrays, when its resources are free, and the ranks as they finish.

    The loop looks at an array of times, in which resources are numbered anew: only those of its messages.
    """
    places = {resource: place for place, resource in enumerate(dict.fromkeys(work.resources))}
    times_s = np.zeros(len(places))  # [place] when that resource is free
    numbered = work._replace(resources=list(map(places.__getitem__, work.resources)))
    arrays: CompiledArrays = SimulationArrays._make(
        np.array(numbers, np.float64 if name.endswith("_s") else np.int64)
        for name, numbers in numbered._asdict().items()
    )
    return arrays, _Times(places, times_s), _ranks_as_they_finish(arrays, times_s)


class _Times:
    """A `FreeAt` where the times of the resources that messages occupy are in an array."""

    def __init__(self, places: Mapping[int, int], times_s: Floats) -> None:
        self._places, self._times_s, self._others = places, times_s, idle()

    def __getitem__(self, resource: int) -> float:
        place = self._places.get(resource)
        return self._others[resource] if place is None else float(self._times_s[place])

    def __setitem__(self, resource: int, free_s: float) -> None:
        place = self._places.get(resource)
        if place is None:
            self._others[resource] = free_s
        else:
            self._times_s[place] = free_s
