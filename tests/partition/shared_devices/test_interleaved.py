"""Plans in which a few equal devices hold two stages each, and when the planner takes them."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.cluster import Link
from hetpipe.program.instructions import Schedule
from hetpipe.program.verification import verify
from hetpipe.simulation.prediction import evaluator, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from partition import auto as planner
from partition.baselines.catalogue import WELL_KNOWN
from partition.bounds.best_bound import best_bound, fractional_bound_s
from partition.estimates.pipeline_costs import PipelineCosts
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan
from partition.problem import Problem
from partition.shared_devices.interleaved import even_cuts, interleaved_plans
from partition.solver import solve
from random_plans import fits
from random_problems import random_problem
from small_case import INSTANT, equal_stages


def halves(batch: int, *, more_bytes: float = 40.0, link: Link = INSTANT, num_layers: int = 12) -> Problem:
    """Layers of F 1 s, B 2 s on two equal devices, each with memory for the states of half of them.

    A layer saves 1 byte a microbatch; more_bytes is what a device has beside the states.
    """
    profile, cluster = equal_stages(2, link=link)
    (kind,) = profile.kinds.values()
    layer = replace(profile.layers[0], parameter_bytes=100.0, saved_bytes_per_sample=1.0)
    layers = tuple(replace(layer, name=f"layer{index}") for index in range(num_layers))
    kind = replace(kind, layers=kind.layers[:1] * num_layers)
    (node,) = cluster.nodes
    states = 100.0 * num_layers / 2 * (2 + profile.optimizer_bytes_per_parameter_byte)
    devices = tuple(replace(device, memory_bytes=states + more_bytes) for device in node.devices)
    cluster = replace(cluster, nodes=(replace(node, devices=devices),))
    return Problem(replace(profile, layers=layers, kinds={"one": kind}), cluster, batch, (1,))


def planned(problem: Problem) -> Plan:
    return solve(problem, evaluator(problem.profile, problem.cluster))


def candidates(problem: Problem, ceiling_s: float = float("inf")) -> list[Plan]:
    return interleaved_plans(problem, PipelineCosts(problem), ceiling_s)


@pytest.mark.slow
def test_two_chunks_on_two_devices_beat_the_best_plain_plan(monkeypatch: pytest.MonkeyPatch):
    # 18 s a microbatch on each device: 4 and half a one for the bubble, against 4 and a whole one
    problem = halves(4)
    deeper = planned(problem)  # HeteroG's rule visits each device three times here: a third of a microbatch
    assert deeper.predicted is not None and deeper.predicted.step_s == pytest.approx(78)
    monkeypatch.setattr(planner, "BASELINES", WELL_KNOWN)
    found = planned(problem)
    assert found.predicted is not None and found.predicted.step_s == pytest.approx(81)
    (pipeline,) = found.pipelines
    assert [stage.device for stage in pipeline.stages] == ["n/0", "n/1"] * 2
    program = lower(found, problem.profile, problem.cluster)
    verify(program, problem.profile, problem.cluster)
    assert program.schedule is Schedule.INTERLEAVED
    monkeypatch.setattr(planner, "interleaved_plans", lambda *_: [])
    plain = planned(problem)
    assert plain.predicted is not None and plain.predicted.step_s == pytest.approx(90)


def test_an_interleaved_plan_is_outside_the_bound_of_unshared_pipelines():
    problem = halves(4)
    search = PipelineSearch(problem)
    found = planner.auto(problem, evaluator(problem.profile, problem.cluster), search=search)
    bound = best_bound(search)
    assert bound.pipeline_s is not None and bound.pipeline_s > 81  # no plan without shared devices does it
    assert bound.of(found) == (bound.fractional_s, bound.fractional_space)


@pytest.mark.slow
def test_slow_links_and_little_memory_keep_the_plain_pipeline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "BASELINES", WELL_KNOWN)
    slow = planned(halves(4, link=Link(20.0, 1e30)))
    assert len(slow.pipelines[0].stages) == 2
    # 4 + 2 microbatches of 3 layers on n/0: 18 bytes of activations, where 2 of 6 layers need 12
    tight = halves(4, more_bytes=17)
    assert candidates(tight) == []
    assert len(candidates(halves(4, more_bytes=18))) == 1
    assert len(planned(tight).pipelines[0].stages) == 2


def test_only_what_may_win_is_a_candidate():
    problem = halves(4)
    # one device starts after 9 s of the other's chunk at best: 9 + 72
    assert candidates(problem, 81.0) == [] and len(candidates(problem, 81.5)) == 1
    assert candidates(halves(1)) == []  # a single microbatch has nothing to fill a bubble with
    (node,) = problem.cluster.nodes
    many = tuple(replace(node.devices[0], name=f"n/{index}") for index in range(9))
    crowd = replace(problem, cluster=replace(problem.cluster, nodes=(replace(node, devices=many),)))
    assert candidates(crowd) == []
    fewer = replace(crowd, cluster=replace(crowd.cluster, nodes=(replace(node, devices=many[:6]),)))
    assert [len(plan.device_names) for plan in candidates(fewer)] == [6]
    assert candidates(halves(4, num_layers=3)) == []


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_candidates_fit_and_run_and_are_not_below_the_bound(seed: int):
    problem = random_problem(seed)
    for plan in candidates(problem):
        assert fits(plan, problem)
        program = lower(plan, problem.profile, problem.cluster)
        verify(program, problem.profile, problem.cluster)
        step_s = simulate_plan(plan, problem.profile, problem.cluster).makespan_s
        assert step_s >= fractional_bound_s(problem) * (1 - 1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_even_cuts_have_the_least_squares_of_all_cuts(weights: list[int], data: st.DataObject):
    count = data.draw(st.integers(1, len(weights)))

    def squares(edges: tuple[int, ...]) -> int:
        return sum(sum(weights[a:b]) ** 2 for a, b in pairwise(edges))

    inner = combinations(range(1, len(weights)), count - 1)
    found = even_cuts(weights, count)
    assert len(found) == count + 1 and list(found) == sorted(set(found))
    assert squares(found) == min(squares((0, *cuts, len(weights))) for cuts in inner)
