"""Which of the plans that a search has looked at is fast by turns and where messages share the network."""

import math
from collections.abc import Mapping

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError
from cost_model.layer_costs import Prices
from cost_model.network import Network
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts, check_memory
from hetpipe.simulation.prediction import predict
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.shared_network import STEPS, shared_step_s
from partition.plan import Plan
from partition.solver import Choose

WORK = 3_000_000
"""Instructions that are run of all plans together, some half a minute; of more plans it is every few."""
LAST = 8
"""Plans that are run as often as a prediction is, of which the best is taken."""
GAIN = 0.001
"""How much shorter a step has to be, as a share of it, for another plan than that of the search."""


def least_shared(profile: ModelProfile, cluster: Cluster) -> Choose:
    """Return what takes the plan with the least step, be it by turns or where messages share the network.

    The longer of both steps counts, so that it is no worse whichever clock is right. It is the plan of the
    search where none is shorter by `GAIN`, or where plans go layer by layer. The same plans have the same
    answer.
    """
    network, prices = Network(cluster, profile.links, profile.all_reduces), Prices(profile)

    def shared_s(plan: Plan, steps: int = STEPS) -> float | None:
        program = lower(plan, profile, cluster)
        return shared_step_s(ProgramCosts(program, profile, cluster, network, prices), steps=steps)

    def fits(plan: Plan) -> bool:
        try:
            check_memory(plan, profile, cluster)
        except InfeasibleError:
            return False
        return True

    def choose(plan: Plan, candidates: Mapping[Plan, float]) -> Plan:
        own = predict(plan, profile, cluster)
        own_shared_s = shared_step_s(own.costs)
        if own_shared_s is None:
            return plan
        limit_s = (1 - GAIN) * max(own.step_s, own_shared_s)
        near = sorted((step_s, place) for place, step_s in enumerate(candidates.values()) if step_s < limit_s)
        every = max(1, math.ceil(len(near) * sum(map(len, own.program.ranks)) / WORK))
        plans, found = list(candidates), list[tuple[float, float, int]]()
        for step_s, place in near[::every]:
            longer_s = shared_s(plans[place], steps=1) if fits(plans[place]) else None
            if longer_s is not None:
                found.append((max(step_s, longer_s), step_s, place))
        for _, step_s, place in sorted(found)[:LAST]:
            longer_s = shared_s(plans[place])
            if longer_s is not None and max(step_s, longer_s) < limit_s:
                plan, limit_s = plans[place], max(step_s, longer_s)
        return plan

    return choose
