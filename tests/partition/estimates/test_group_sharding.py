"""How much of each group is sharded: as little as its memory asks for, and what `auto` makes of it."""

from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.profile import ModelProfile
from hetpipe.simulation.prediction import evaluator, simulate_plan
from partition.estimates.group_sharding import layer_groups, least_sharded
from partition.estimates.optimizer_sharding import fits
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem
from partition.solver import solve
from small_case import equal_stages

LAYERS = 12
NAMES = ("a/0", "a/1", "b/0", "b/1")


def two_by_two(cut: int = 6, other: int = 6) -> tuple[Plan, ModelProfile]:
    """Two pipelines of two stages; layers of 4 bytes of weights."""
    profile = equal_stages(LAYERS)[0]
    layers = tuple(replace(layer, parameter_bytes=4.0) for layer in profile.layers)
    pipelines = tuple(
        Pipeline(1, 3, (Stage((f"{node}/0",), (0, at), 2), Stage((f"{node}/1",), (at, LAYERS), 1)))
        for node, at in (("a", cut), ("b", other))
    )
    return Plan("manual", "made-up", 6, pipelines), replace(profile, layers=layers)


def cluster_of(*memory_bytes: float) -> Cluster:
    devices = [Device(name, name[0], "one", memory) for name, memory in zip(NAMES, memory_bytes, strict=True)]
    nodes = tuple(Node(node, tuple(d for d in devices if d.node == node)) for node in "ab")
    return Cluster("four", Link(0.0, 1e9), nodes)


def test_stages_cut_alike_are_groups_of_their_own_and_others_are_one() -> None:
    assert layer_groups(two_by_two()[0]) == [set(range(6)), set(range(6, LAYERS))]
    assert layer_groups(two_by_two(6, 5)[0]) == [set(range(LAYERS))]


@pytest.mark.parametrize(("zero", "memory"), [(1, 72.0), (2, 64.0), (3, 56.0)])
def test_a_group_has_the_lowest_stage_with_which_it_fits(zero: int, memory: float) -> None:
    # A stage of six layers has 24 bytes of weights and as many of gradients, and half of 48 of states: 72.
    # Gradients sharded: half of them, and those of one layer on their way: 64. Weights, too: half of these,
    # and those of a layer: 56. The owners of neighbouring layers take turns, where that is needed.
    plan, profile = two_by_two()
    found = least_sharded(plan, profile, cluster_of(1e4, memory, 1e4, memory))
    assert found is not None and fits(found, profile, cluster_of(1e4, memory, 1e4, memory))
    assert found.zero == zero
    assert [int(found.sharding_of(layer)) for layer in (0, 5, 6, LAYERS - 1)] == [1, 1, zero, zero]
    less = least_sharded(plan, profile, cluster_of(1e4, memory - 1, 1e4, memory - 1))
    assert less is None if zero == 3 else less is not None and less.zero == zero + 1


def test_a_plan_that_cannot_go_layer_by_layer_has_states_sharded_at_most() -> None:
    plan, profile = two_by_two()
    rounded = replace(plan, gradient_dtype="bf16")
    assert least_sharded(rounded, profile, cluster_of(1e4, 64.0, 1e4, 64.0)) is None
    assert least_sharded(rounded, profile, cluster_of(*[1e4] * 4)) is not None


@pytest.mark.slow
def test_auto_shards_weights_within_the_replicas_of_stages_where_that_is_soonest() -> None:
    # Ten layers on two nodes of two devices. Inside a node messages take no time, and between nodes weights
    # take far longer than a layer's 3 s, so that replicas of the whole model do not pay. In a single pipeline
    # some device has three layers or more; in two of two stages all have five, of half the samples, and
    # fit with sharded weights alone: in 58,000 bytes gradients would do, their owners' ranges of two
    # layers halved.
    profile = equal_stages(10)[0]
    layers = tuple(replace(layer, parameter_bytes=4000.0) for layer in profile.layers)
    profile, cluster = replace(profile, layers=layers), cluster_of(*[56_000.0] * 4)
    nodes = tuple(replace(node, interconnect=Link(0.0, 1e9)) for node in cluster.nodes)
    cluster = replace(cluster, network=Link(0.1, 500.0), nodes=nodes)
    problem = Problem(profile, cluster, 12, (1,))
    found = solve(problem, evaluator(profile, cluster))
    assert found.zero == 3 and found.fetches_apart and fits(found, profile, cluster)
    assert (
        sorted(stage.layers for each in found.pipelines for stage in each.stages)
        == [(0, 5)] * 2 + [(5, 10)] * 2
    )
    figures = found.predicted
    assert figures is not None and figures.bound_s is not None
    assert figures.step_s == simulate_plan(found, profile, cluster).makespan_s
    # 7 microbatches' time of 15 s at the most loaded stage, and little besides; three layers take 108 s
    assert 90.0 - 1e-3 <= figures.bound_s <= figures.step_s < 107.0
    assert "memory not counted" in str(figures.bound_space)
