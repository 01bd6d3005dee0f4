"""What a step waits for gathers of weights alone, against the simulated step."""

from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.simulation.prediction import evaluator
from partition.baselines.catalogue import BASELINES
from partition.estimates.effort import effort_for
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.ranking import Contest, Ranking
from partition.estimates.weight_gathers import gathers_s
from partition.plan import Figures, Plan
from partition.problem import Problem


def four_nodes(bytes_per_s: float) -> Problem:
    """Four nodes of two devices, one kind twice as fast; ten layers of 10 kB; 32 samples."""
    layers = tuple(LayerProfile(f"layer {index}", 10e3, 10.0, 1.0) for index in range(10))
    kinds = {
        kind: KindProfile("measured", (1, 2), (LayerTimes((s, 2 * s), (2 * s, 4 * s)),) * 10)
        for kind, s in (("fast", 1e-3), ("slow", 2e-3))
    }
    nodes = tuple(
        Node(f"n{n}", tuple(Device(f"n{n}/{d}", f"n{n}", kind, 300e3) for d in range(2)), Link(0.0, 1e9))
        for n, kind in enumerate(("fast", "fast", "slow", "slow"))
    )
    profile = ModelProfile("even", 8, "float32", layers, kinds)
    return Problem(profile, Cluster("nodes", Link(0.0, bytes_per_s), nodes), 32, (1, 2))


@pytest.mark.parametrize("rule", ["poplar-3", "cephalo"])
@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 1e8])
def test_no_step_is_shorter_than_its_gathers(rule: str, bytes_per_s: float) -> None:
    problem = four_nodes(bytes_per_s)
    plan, costs = BASELINES[rule](problem, None), PipelineCosts(problem)
    step_s = evaluator(problem.profile, problem.cluster)(plan).step_s
    assert 0 < gathers_s(plan, costs) <= step_s
    if bytes_per_s == 1e5:  # little but gathers and sums
        assert gathers_s(plan, costs) > 0.25 * step_s
    assert gathers_s(replace(plan, zero=2), costs) == 0


def test_a_plan_that_gathers_for_longer_than_the_best_step_is_not_simulated() -> None:
    problem = four_nodes(1e5)
    evaluate, asked = evaluator(problem.profile, problem.cluster), list[Plan]()

    def evaluated(plan: Plan) -> Figures:
        asked.append(plan)
        return evaluate(plan)

    plan, costs = BASELINES["poplar-3"](problem, None), PipelineCosts(problem)
    contest = Contest(Ranking(problem, evaluated), costs, effort_for(8).choice)
    contest.step_s = 0.99 * gathers_s(plan, costs)
    contest.enter([plan])
    assert not asked
    contest.step_s = 1.01 * gathers_s(plan, costs)
    contest.enter([plan])
    assert asked == [plan]
