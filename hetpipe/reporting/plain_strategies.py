"""The plain strategies on the devices of a plan, to be drawn beside it."""

import dataclasses
from typing import TYPE_CHECKING

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, InputError
from cost_model.other_clusters import without
from cost_model.profile import ModelProfile
from hetpipe.simulation.prediction import evaluator
from partition.plan import Plan

if TYPE_CHECKING:  # the solver loads more than other pictures need
    from partition.solver import Outcome


def beside_others(plan: Plan, profile: ModelProfile, cluster: Cluster) -> "list[Outcome]":
    """Return the outcomes of the plain strategies with their figures, then the plan, which has its own."""
    from partition.baselines.catalogue import WELL_KNOWN
    from partition.problem import problem_of
    from partition.solver import Outcome

    unknown = [device.name for device in cluster.devices if device.kind not in profile.kinds]
    problem = problem_of(
        profile, without(cluster, unknown), plan.global_batch_size, gradient_dtype=plan.gradient_dtype
    )
    evaluate = evaluator(profile, cluster)
    outcomes = []
    for name, strategy in WELL_KNOWN.items():
        try:
            plain = strategy(problem, evaluate)
        except (InfeasibleError, InputError) as error:
            outcomes.append(Outcome.without_plan(name, error))
        else:
            outcomes.append(Outcome(name, dataclasses.replace(plain, predicted=evaluate(plain))))
    own = plan.strategy if plan.strategy not in WELL_KNOWN else f"{plan.strategy}, this plan"
    return [*outcomes, Outcome(own, plan)]


def even_split(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan | None:
    """Return a plan with as many layers on each device, for contrast; None where it does not fit."""
    from partition.baselines.layer_splits import gpipe_even
    from partition.problem import problem_of

    size = plan.pipelines[0].microbatch_size
    try:
        return gpipe_even(problem_of(profile, cluster, plan.global_batch_size, size))
    except (InfeasibleError, InputError):
        return None
