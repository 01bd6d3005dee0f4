"""Which of the plans that a search has looked at is fast by turns and where messages share the network."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

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
    most_longer: and how much longer than that one's a step may be by turns. work: of all plans together
    (`work_of`), some 150,000 in a second; of more plans it is every few, and none where not even the last
    could be run. last: plans that are run as often as a prediction is, of which the best is taken. alike: by
    how much, as a share of it, the longer steps of plans may differ that are as good; with other draws those
    of one plan do by 0.01.
    """

    meeting: float = 0.0
    most_longer: float = math.inf
    work: int = 3_000_000
    last: int = 8
    alike: float = 0.01


ALL = Look()
TIES = Look(meeting=0.03, most_longer=0.001, work=1_000_000, last=3)
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
        shared_s = cache(self._shared_s)  # several looks come by the same plans
        for look in self.looks:
            plan = self._taken(plan, candidates, look, shared_s)
        return plan

    def _taken(
        self,
        plan: Plan,
        candidates: Mapping[Plan, float],
        look: Look,
        shared_s: Callable[[Plan, int | None], float | None],
    ) -> Plan:
        work = work_of(plan)
        if work * look.last > look.work:
            return plan
        own_s, own_shared_s = candidates[plan], shared_s(plan, None)
        if own_shared_s is None or own_shared_s < (1 + look.meeting) * own_s:
            return plan

        def longer_s(step_s: float, place: int, steps: int | None) -> float:
            found_s = shared_s(plans[place], steps)
            return math.inf if found_s is None else max(step_s, found_s)

        plans = list(candidates)
        limit_s = (1 - look.alike) * max(own_s, own_shared_s)
        most_s = min(limit_s, (1 + look.most_longer) * own_s)
        near = sorted((step_s, place) for place, step_s in enumerate(candidates.values()) if step_s <= most_s)
        every = max(1, math.ceil(len(near) * work / look.work))
        tried = [(step_s, place) for step_s, place in near[::every] if self._fits(plans[place])]
        once = sorted((longer_s(step_s, place, 1), step_s, place) for step_s, place in tried)
        last = [(longer_s(step_s, place, None), step_s, place) for _, step_s, place in once[: look.last]]
        alike_s = min(limit_s, (1 + look.alike) * min(last, default=(math.inf,))[0])
        alike = [(step_s, place) for each_s, step_s, place in last if each_s <= alike_s]
        return plans[min(alike)[1]] if alike else plan

    def _shared_s(self, plan: Plan, steps: int | None) -> float | None:
        program = lower(plan, self.profile, self.cluster)
        costs = ProgramCosts(program, self.profile, self.cluster, self._network, self._prices)
        return shared_step_s(costs, steps=steps)

    def _fits(self, plan: Plan) -> bool:
        try:
            check_memory(plan, self.profile, self.cluster)
        except InfeasibleError:
            return False
        return True

    @cached_property
    def _network(self) -> Network:
        return Network(self.cluster, self.profile.links, self.profile.all_reduces)

    @cached_property
    def _prices(self) -> Prices:
        return Prices(self.profile)
