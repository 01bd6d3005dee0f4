"""Where the speed of all devices goes: by hand, and that nothing is lost."""

import random
from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Link
from cost_model.layer_profile import LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.reporting.speed_breakdown import (
    COMPUTES,
    DEVICES,
    GRADIENTS,
    LEFT_OUT,
    LONGER,
    MESSAGES,
    speed_sentence,
    speed_shares,
)
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.bounds.best_bound import fractional_bound_s
from partition.estimates.optimizer_sharding import with_state_owners
from partition.plan import Pipeline, Plan, Stage
from partition.problem import problem_of
from random_plans import random_case, random_plan
from small_case import equal_plan, equal_stages, plan_of


def shares_of(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, float]:
    costs = ProgramCosts(lower(plan, profile, cluster), profile, cluster)
    return speed_shares(simulate(costs), costs, profile, cluster)


def test_a_pipeline_fills_and_drains():
    profile, cluster = equal_stages(2)
    # two microbatches of 3 s at each of two stages: 9 s, of which each device computes for 6
    shares = shares_of(equal_plan((2, 1), 2), profile, cluster)
    assert shares[COMPUTES] == pytest.approx(2 / 3) and shares[DEVICES] == pytest.approx(1 / 3)
    assert speed_sentence(shares) == (
        "of the speed of all devices 66.7% computes; 33.3% waits for other devices"
    )


def test_a_device_that_is_left_out_counts_by_its_speed():
    profile, cluster = equal_stages(3)
    node = cluster.nodes[0]
    devices = (*node.devices[:2], replace(node.devices[2], speed=2.0))
    cluster = replace(cluster, nodes=(replace(node, devices=devices),))
    shares = shares_of(plan_of([("n/2", 0, 3, 1)], 4), profile, cluster)
    assert shares[COMPUTES] == pytest.approx(0.5) and shares[LEFT_OUT] == pytest.approx(0.5)
    assert speed_sentence(shares).endswith("50.0% computes; 50.0% is left out")
    strange = replace(node, devices=(*devices, replace(devices[0], name="n/9", kind="never measured")))
    assert shares_of(plan_of([("n/2", 0, 3, 1)], 4), profile, replace(cluster, nodes=(strange,))) == shares


def test_a_device_that_always_computes_loses_nothing():
    profile, cluster = equal_stages(1)
    assert speed_sentence(shares_of(equal_plan((1,), 3), profile, cluster)) == (
        "of the speed of all devices 100.0% computes"
    )


def test_a_sum_is_waited_for_when_all_have_computed():
    profile, cluster = equal_stages(2, link=Link(0.0, 1.0))
    profile = replace(profile, layers=tuple(replace(layer, parameter_bytes=2.0) for layer in profile.layers))
    replicas = tuple(
        Pipeline(1, count, (Stage((name,), (0, 2), 1),)) for name, count in (("n/0", 3), ("n/1", 1))
    )
    shares = shares_of(Plan("manual", "made-up", 4, replicas), profile, cluster)
    # 18 s on n/0 and 6 s on n/1, which waits for it for 12; then the sum of 4 bytes takes 4 s, the norm 32
    assert shares[COMPUTES] == pytest.approx(24 / 108)
    assert shares[DEVICES] == pytest.approx(12 / 108)
    assert shares[GRADIENTS] == pytest.approx(72 / 108) and shares[MESSAGES] == 0.0


def test_small_microbatches_and_recompute_are_a_share_of_their_own():
    profile, cluster = equal_stages(1)
    # two samples at once take as long as one
    times = LayerTimes((1.0, 1.0), (2.0, 2.0))
    profile = replace(profile, kinds={"one": KindProfile("measured", (1, 2), (times,))})
    whole = (Stage(("n/0",), (0, 1), 1),)
    for size, stages, expected in (
        (2, whole, 1.0),
        (1, whole, 0.5),
        (1, (replace(whole[0], recompute=True),), 3 / 8),
    ):
        plan = Plan("manual", "made-up", 4, (Pipeline(size, 4, stages),))
        shares = shares_of(plan, profile, cluster)
        assert shares[COMPUTES] == pytest.approx(expected)
        assert shares[LONGER] == pytest.approx(1 - expected)
    assert speed_sentence(shares).endswith("; 62.5% goes into small microbatches and recompute")


def test_with_one_kind_of_device_what_computes_is_the_bound_over_the_step():
    profile, cluster = equal_stages(3)
    plan = Plan(
        "manual",
        "made-up",
        7,
        (
            Pipeline(1, 5, (Stage(("n/0",), (0, 1), 2), Stage(("n/1",), (1, 3), 1))),
            Pipeline(1, 2, (Stage(("n/2",), (0, 3), 1),)),
        ),
    )
    step_s = simulate(ProgramCosts(lower(plan, profile, cluster), profile, cluster)).makespan_s
    bound_s = fractional_bound_s(problem_of(profile, cluster, 7))
    assert bound_s == pytest.approx(7 * 9 / 3, rel=1e-4)
    assert shares_of(plan, profile, cluster)[COMPUTES] == pytest.approx(bound_s / step_s, rel=1e-4)


def test_the_shares_add_up_for_any_plan():
    rng, lost = random.Random(1), dict.fromkeys((DEVICES, GRADIENTS, MESSAGES, LEFT_OUT, LONGER), 0)
    for seed in range(60):
        problem = random_case(seed)
        plan = random_plan(rng, problem)
        if seed % 2:
            plan = with_state_owners(plan, problem.profile, problem.cluster)
        shares = shares_of(plan, problem.profile, problem.cluster)
        assert sum(shares.values()) == pytest.approx(1), seed
        assert min(shares.values()) >= -1e-9, seed
        for what in lost:
            lost[what] += shares[what] > 0.01
    assert min(lost.values()) > 5
