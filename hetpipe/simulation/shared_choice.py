"""Which of the plans that a search has looked at is fast by turns and where messages share the network."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError
from cost_model.layer_costs import Prices
from cost_model.network import Network
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts, check_memory
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.shared_network import shared_step_s, work_of
from partition.plan import Plan
from partition.solver import Choose


@dataclass(frozen=True, slots=True)
class Look:
    """Which plans are looked at, beside that of the search.

    meeting: by how much, as a share of it, that step has to be longer where messages meet, for any to be.
    most_longer: and how much longer than that one's a step may be by turns. work: of all plans
    together (`work_of`), some 100,000 in a second; of more plans it is every few. last: plans that are run
    as often as a prediction is, of which the best is taken. alike: by how much, as a share of it, the longer
    steps of plans may differ that are as good; with other draws those of one plan do by 0.01.
    """

    meeting: float = 0.0
    most_longer: float = math.inf
    work: int = 3_000_000
    last: int = 8
    alike: float = 0.01


ALL = Look()
TIES = Look(meeting=0.03, most_longer=0.001, work=500_000, last=3)
"""Those that are as good by turns, in some seconds."""


EVERYWHERE = (TIES, ALL)
"""Where plans are looked for, one after the other: the best of all is not missed beside the best by turns."""


def least_shared(profile: ModelProfile, cluster: Cluster, looks: Sequence[Look] = EVERYWHERE) -> Choose:
    """Return what takes the plan with the least step, be it by turns or where messages share the network.

    The longer of both steps counts, so that it is no worse whichever clock is right; of plans that are
    alike so the shortest by turns is taken. It is the plan of the search where none is clearly shorter, or
    where plans go layer by layer. The same plans have the same answer.
    """
    return _LeastShared(profile, cluster, tuple(looks))


@dataclass(frozen=True)
class _LeastShared:
    """`least_shared`; the same where what it was made of is."""

    profile: ModelProfile
    cluster: Cluster
    looks: tuple[Look, ...]

    def __call__(self, plan: Plan, candidates: Mapping[Plan, float]) -> Plan:
        """Return the plan that is taken, given that of a search, and all that it has looked at."""
        for look in self.looks:
            plan = self._taken(plan, candidates, look)
        return plan

    def _taken(self, plan: Plan, candidates: Mapping[Plan, float], look: Look) -> Plan:
        work = work_of(plan, self._node_of)
        if work > look.work:
            return plan
        costs, own_s = self._costs(plan), candidates[plan]
        shared_s = shared_step_s(costs)
        if shared_s is None or shared_s < (1 + look.meeting) * own_s:
            return plan
        limit_s = (1 - look.alike) * max(own_s, shared_s)
        most_s = min(limit_s, (1 + look.most_longer) * own_s)
        near = sorted((step_s, place) for place, step_s in enumerate(candidates.values()) if step_s <= most_s)
        every = max(1, math.ceil(len(near) * work / look.work))
        plans, found = list(candidates), list[tuple[float, float, int]]()
        for step_s, place in near[::every]:
            if self._fits(plans[place]):
                found.append((self._longer_s(plans[place], step_s, steps=1), step_s, place))
        last = [
            (self._longer_s(plans[place], step_s), step_s, place)
            for _, step_s, place in sorted(found)[: look.last]
        ]
        alike_s = min(limit_s, (1 + look.alike) * min(last, default=(math.inf,))[0])
        alike = [(step_s, place) for longer_s, step_s, place in last if longer_s <= alike_s]
        return plans[min(alike)[1]] if alike else plan

    def _longer_s(self, plan: Plan, step_s: float, steps: int | None = None) -> float:
        """Return the longer of both steps, that by turns given; inf of a plan that goes layer by layer."""
        shared_s = shared_step_s(self._costs(plan), steps=steps)
        return math.inf if shared_s is None else max(step_s, shared_s)

    def _costs(self, plan: Plan) -> ProgramCosts:
        program = lower(plan, self.profile, self.cluster)
        return ProgramCosts(program, self.profile, self.cluster, self._network, self._prices)

    def _fits(self, plan: Plan) -> bool:
        try:
            check_memory(plan, self.profile, self.cluster)
        except InfeasibleError:
            return False
        return True

    @cached_property
    def _node_of(self) -> dict[str, str]:
        return {device.name: device.node for device in self.cluster.devices}

    @cached_property
    def _network(self) -> Network:
        return Network(self.cluster, self.profile.links, self.profile.all_reduces)

    @cached_property
    def _prices(self) -> Prices:
        return Prices(self.profile)
