"""The inner loop of the planner's clock as machine code. To import this loads a compiler, for 0.5 s."""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from cost_model.network import FreeAt, idle
from hetpipe.simulation.fast_kernel import SimulationArrays, computed
from partition.exact.compiled import compiled

Floats = npt.NDArray[np.float64]

_computed = compiled(computed)


def compiled_clock(work: SimulationArrays) -> tuple[SimulationArrays, FreeAt, Iterator[int]]:
    """The work as arrays, when its resources are free, and the ranks as `computed` gives them."""
    places = {resource: place for place, resource in enumerate(dict.fromkeys(work.ways))}
    times = np.zeros(len(places))
    numbered = work._replace(ways=list(map(places.__getitem__, work.ways)))
    arrays = SimulationArrays(
        *(
            np.array(entry, np.float64 if name.endswith("_s") else np.int64)
            for name, entry in numbered._asdict().items()
        )
    )
    return arrays, _Times(places, times), _computed(arrays, times)


class _Times:
    """`FreeAt` where the times of the resources that messages occupy are in an array."""

    def __init__(self, places: Mapping[int, int], times: Floats) -> None:
        self._places, self._times, self._others = places, times, idle()

    def __getitem__(self, resource: int) -> float:
        place = self._places.get(resource)
        return self._others[resource] if place is None else float(self._times[place])

    def __setitem__(self, resource: int, free_s: float) -> None:
        place = self._places.get(resource)
        if place is None:
            self._others[resource] = free_s
        else:
            self._times[place] = free_s
