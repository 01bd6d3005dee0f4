"""What gradient sync adds to a step, cheaply: for the search; the simulator has the verdict."""

import itertools
from collections.abc import Sequence

from cost_model.communication import all_reduce_estimate_s
from cost_model.memory import trained_bytes
from partition.pipeline_costs import PipelineCosts
from partition.worker import Worker


class SyncCosts:
    """Estimates for sets of workers of one problem; remembers the bytes of ranges of layers."""

    def __init__(self, costs: PipelineCosts) -> None:
        self._costs = costs
        self._bytes: dict[tuple[int, int], float] = {}

    def exposed_s(self, workers: Sequence[Worker]) -> float:
        """Seconds that the busiest device spends in the sums of its buckets, as if none were hidden.

        Neighbouring layers with the same owners are a bucket; tied weights, which the ends of a pipeline
        share, are one more. Buckets of different devices go side by side.
        """
        seconds: dict[str, float] = {}
        layers = self._costs.problem.profile.num_layers
        if len(workers) > 1:
            cuts = sorted({stage.stop for worker in workers for stage in worker.stages} | {0})
            at = [0] * len(workers)
            for start, stop in itertools.pairwise(cuts):
                owners = []
                for index, worker in enumerate(workers):
                    while worker.stages[at[index]].stop <= start:
                        at[index] += 1
                    owners.append(worker.stages[at[index]].device.name)
                self._add(seconds, owners, self._trained(start, stop))
        for layer in range(layers):
            home = self._costs.problem.profile.tied_home(layer)
            if home != layer:
                ends = {
                    stage.device.name
                    for worker in workers
                    for stage in worker.stages
                    if stage.start <= layer < stage.stop or stage.start <= home < stage.stop
                }
                self._add(seconds, sorted(ends), self._costs.problem.profile.tied_bytes(layer))
        return max(seconds.values(), default=0.0)

    def _add(self, seconds: dict[str, float], owners: Sequence[str], num_bytes: float) -> None:
        if len(owners) > 1:
            spent = all_reduce_estimate_s(self._costs.network, num_bytes, owners)
            for name in owners:
                seconds[name] = seconds.get(name, 0.0) + spent

    def _trained(self, start: int, stop: int) -> float:
        if (start, stop) not in self._bytes:
            self._bytes[start, stop] = trained_bytes(self._costs.problem.profile, range(start, stop))
        return self._bytes[start, stop]
