"""Which of the plans that a search has looked at is fastest where messages share the network."""

import math
from collections.abc import Mapping

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError
from cost_model.profile import ModelProfile
from hetpipe.program.costs import check_memory
from hetpipe.simulation.prediction import predict
from hetpipe.simulation.shared_network import shared_step_s
from partition.plan import Plan
from partition.solver import Choose

NEAR = 0.15
"""How much longer than the shortest a step by turns may be, as a share of it, to be looked at."""
WORK = 3_000_000
"""Instructions that are run of all plans together, some half a minute; of more plans it is every few."""
LAST = 8
"""Plans that are run as often as a prediction is, of which the best is taken."""
GAIN = 0.001
"""How much shorter a step has to be, as a share of it, for another plan than that of the search."""


def least_shared(profile: ModelProfile, cluster: Cluster) -> Choose:
    """Return what takes the plan with the least step where messages share the network.

    Of those within `NEAR` of the least step by turns. The plan of the search where none is shorter by `GAIN`,
    or where plans go layer by layer. The same plans have the same answer.
    """

    def shared_s(plan: Plan, **how: int) -> float | None:
        return shared_step_s(predict(plan, profile, cluster).costs, **how)

    def fits(plan: Plan) -> bool:
        try:
            check_memory(plan, profile, cluster)
        except InfeasibleError:
            return False
        return True

    def choose(plan: Plan, candidates: Mapping[Plan, float]) -> Plan:
        own = predict(plan, profile, cluster).costs
        own_s = shared_step_s(own)
        if own_s is None:
            return plan
        limit_s = (1 + NEAR) * min(candidates.values(), default=0.0)
        near = sorted(
            (step_s, place) for place, step_s in enumerate(candidates.values()) if step_s <= limit_s
        )
        every = max(1, math.ceil(len(near) * sum(map(len, own.program.ranks)) / WORK))
        plans, found = list(candidates), list[tuple[float, int]]()
        for _, place in near[::every]:
            step_s = shared_s(plans[place], steps=1) if fits(plans[place]) else None
            if step_s is not None:
                found.append((step_s, place))
        last = [(shared_s(plans[place]), place) for _, place in sorted(found)[:LAST]]
        least_s, place = min(((s, place) for s, place in last if s is not None), default=(own_s, -1))
        return plans[place] if least_s < (1 - GAIN) * own_s else plan

    return choose
