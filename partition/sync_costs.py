"""What gradient sync adds to a step, cheaply: for the search; the simulator has the verdict."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from cost_model.communication import LARGE_RING, all_reduce_estimate_s
from cost_model.memory import trained_bytes
from cost_model.ring_pace import MovingRing
from partition.pipeline_costs import PipelineCosts
from partition.plan import Plan
from partition.worker import Worker

_Chain = Sequence[tuple[str, int]]
"""A pipeline's stages as (device, stop layer)."""


class SyncCosts:
    """Estimates for sets of pipelines of one problem; remembers the bytes of ranges of layers.

    Layers with the same owners are summed together; tied weights, over the owners of both layers, are one
    more sum. Sums of different devices go side by side.
    """

    def __init__(self, costs: PipelineCosts) -> None:
        self._costs, self._profile = costs, costs.problem.profile
        self._bytes: dict[tuple[int, ...], float] = {}
        layers = range(self._profile.num_layers)
        self._tied = [layer for layer in layers if self._profile.tied_home(layer) != layer]

    def exposed_s(self, workers: Sequence[Worker]) -> float:
        """Seconds that the busiest device spends in sums, as if none were hidden."""
        return self._exposed_s(
            [[(stage.device.name, stage.stop) for stage in worker.stages] for worker in workers]
        )

    def exposed_of_plan_s(self, plan: Plan) -> float:
        """`exposed_s` of a plan, whose pipelines may share devices."""
        if sum(len(entry.stages) for entry in plan.pipelines) > len(plan.device_names):
            return max(self.of_plan_s(plan).values())
        return self._exposed_s(
            [[(stage.device, stage.stop) for stage in entry.stages] for entry in plan.pipelines]
        )

    def of_plan_s(self, plan: Plan) -> dict[str, float]:
        """Seconds that each device of a plan spends in sums with others."""
        holders: list[list[str]] = [[] for _ in self._profile.layers]
        for name in plan.device_names:
            for layer in plan.layers_of(name):
                holders[layer].append(name)
        return self._by_device(holders, plan.device_names)

    def ring_s(self, num_bytes: float, names: Sequence[str]) -> float:
        """About the seconds of an all-reduce between devices (names)."""
        if len(names) > LARGE_RING:
            return MovingRing(self._costs.network, names).all_reduce_s(num_bytes)
        return all_reduce_estimate_s(self._costs.network, num_bytes, names)

    def _exposed_s(self, chains: Sequence[_Chain]) -> float:
        """Of pipelines that share no device."""
        if len(chains) > LARGE_RING:
            return self._large_s(chains)
        holders: list[list[str]] = [[] for _ in self._profile.layers]
        for chain in chains:
            start = 0
            for name, stop in chain:
                for layer in range(start, stop):
                    holders[layer].append(name)
                start = stop
        return max(self._by_device(holders, [name for chain in chains for name, _ in chain]).values())

    def _by_device(self, holders: Sequence[list[str]], names: Iterable[str]) -> dict[str, float]:
        """holders: the devices of each layer."""
        buckets: dict[tuple[str, ...], list[int]] = {}
        for layer, owners in enumerate(holders):
            buckets.setdefault(tuple(owners), []).append(layer)
        sums = [(owners, self._trained(tuple(layers))) for owners, layers in buckets.items()]
        sums += self._tied_sums(holders)
        seconds = dict.fromkeys(names, 0.0)
        for owners, num_bytes in sums:
            if len(owners) > 1:
                spent = self.ring_s(num_bytes, owners)
                for name in owners:
                    seconds[name] += spent
        return seconds

    def _tied_sums(self, holders: Sequence[list[str]]) -> Iterable[tuple[tuple[str, ...], float]]:
        for layer in self._tied:
            home = holders[self._profile.tied_home(layer)]
            if home != holders[layer]:
                owners = tuple(dict.fromkeys((*home, *holders[layer])))
                yield owners, self._profile.tied_bytes(layer)

    def _large_s(self, chains: Sequence[_Chain]) -> float:
        """The ring of the owners moves over the layers, and changes only where a pipeline is cut."""
        cuts: dict[int, list[int]] = {}
        for index, chain in enumerate(chains):
            for _, stop in chain[:-1]:
                cuts.setdefault(stop, []).append(index)
        at = [0] * len(chains)
        ring = MovingRing(self._costs.network, [chain[0][0] for chain in chains])
        spent_s = [0.0] * (self._profile.num_layers + 1)  # of the sums of all layers before
        total = 0.0
        edges = sorted({0, *cuts, self._profile.num_layers})
        for start, stop in pairwise(edges):
            for index in cuts.get(start, ()):
                at[index] += 1
                ring.move(index, chains[index][at[index]][0])
            spent_s[start] = total
            total += ring.all_reduce_s(self._trained(tuple(range(start, stop))))
        spent_s[-1] = total
        most = max(
            spent_s[stop] - spent_s[start]
            for chain in chains
            for start, stop in pairwise([0, *(stop for _, stop in chain)])
        )
        for layer in self._tied:
            owners = {name for chain in chains for name in self._tied_owners(chain, layer)}
            most += self.ring_s(self._profile.tied_bytes(layer), sorted(owners))
        return most

    def _tied_owners(self, chain: _Chain, layer: int) -> Iterable[str]:
        for wanted in (self._profile.tied_home(layer), layer):
            yield next(name for name, stop in chain if wanted < stop)

    def _trained(self, layers: tuple[int, ...]) -> float:
        if layers not in self._bytes:
            self._bytes[layers] = trained_bytes(self._profile, layers)
        return self._bytes[layers]
