"""A bound of a step whose weights are gathered layer by layer, from what it must send alone."""

from cost_model.memory import trained_bytes
from cost_model.network import idle
from cost_model.sharding import GATHERS_AHEAD, Sharding
from cost_model.sum_times import broadcast_due
from partition.estimates.pipeline_costs import PipelineCosts
from partition.plan import Plan


def gathers_s(plan: Plan, costs: PipelineCosts) -> float:
    """Return seconds for which some device waits for weights in a step, one gather after another (R14).

    Of plans whose devices have the whole model each; 0 of others. A device takes part in a gather of each
    layer for every forward and every backward, and while one is under way at most `GATHERS_AHEAD` others are.
    Counted are layers of which one device owns all, and whose weights are not gathered for the layer before
    anyway, which may be so at the ends of the model; each as if the network were idle.
    """
    profile = costs.problem.profile
    if plan.sharding is not Sharding.WEIGHTS or not plan.breadth_first or plan.state_owners is None:
        return 0.0
    turns = max(-(-each.num_microbatches // each.in_flight(0)) for each in plan.pipelines)
    cut = {each.layer for each in plan.owner_ranges}
    tied = {layer for group in profile.tied_groups for layer in group}
    waits_s = dict.fromkeys(plan.device_names, 0.0)
    for layer in range(profile.first_trained + 1, plan.num_layers - 1):
        if layer in cut or layer in tied or plan.sharding_of(layer) is not Sharding.WEIGHTS:
            continue
        num_bytes = trained_bytes(profile, [layer])
        if num_bytes:
            ready_s = dict.fromkeys(plan.device_names, 0.0)
            due_s = broadcast_due(idle(), costs.network, num_bytes, ready_s, plan.state_owners[layer])
            for name, seconds in due_s.items():
                waits_s[name] += 2 * turns * seconds
    return max(waits_s.values()) / (1 + GATHERS_AHEAD)
