"""What gradient sums add to a step, by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, Link, Node, NodeAllReduce
from partition.estimates.gradient_sync import SyncCosts
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.step_estimate import StepEstimate
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem
from small_case import equal_stages, small_profile

Layers = tuple[int, int]


def nodes_of(kind: str, names: Sequence[str], devices_each: int, network: Link) -> Cluster:
    nodes = [
        Node(name, tuple(Device(f"{name}/{index}", name, kind, 1e6) for index in range(devices_each)))
        for name in names
    ]
    return Cluster("by hand", network, tuple(nodes))


def plan_of(*pipelines: Sequence[tuple[str, Layers]]) -> Plan:
    """Pipelines of one sample over stages (device, layers)."""
    entries = [
        Pipeline(1, 1, tuple(Stage((name,), layers, 1) for name, layers in each)) for each in pipelines
    ]
    return Plan("manual", "made-up", len(entries), tuple(entries))


def exposed_s(costs: PipelineCosts, plan: Plan) -> float:
    return SyncCosts(costs).exposed_s([pipeline for pipeline, _ in StepEstimate(costs).timed(plan)])


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        pytest.param([("a/0", (0, 3)), ("b/0", (3, 4))], {"a/0": 6.75, "b/0": 6.75}, id="neighbours"),
        pytest.param(
            [("a/0", (0, 1)), ("b/0", (1, 3)), ("c/0", (3, 4))], {"a/0": 6.75, "c/0": 6.75}, id="ends"
        ),
        pytest.param([("c/0", (0, 4))], {}, id="both layers on one device"),
    ],
)
def test_tied_weights_are_summed_over_the_owners_of_both_layers(
    stages: list[tuple[str, Layers]], expected: dict[str, float]
):
    # layers 0 and 3 share 250 bytes: 2 rounds of 125 bytes at 40 a second, 0.25 s of latency each
    cluster = nodes_of("fast", "abc", 1, Link(0.25, 40.0))
    costs = PipelineCosts(Problem(small_profile(), cluster, 1, (1,)))
    sums, plan = SyncCosts(costs), plan_of(stages)
    assert sums.of_plan_s(plan) == pytest.approx(expected)
    assert exposed_s(costs, plan) == pytest.approx(max(expected.values(), default=0.0))


@pytest.mark.parametrize("count", [2, 3])
def test_sums_that_go_inside_nodes_first_by_hand(count: int):
    # The whole model of 12 bytes on 2 devices of each of n nodes; 12 B/s inside, 1 B/s between them. 1 s to
    # the first of each node, 2 (n - 1) rounds of 12 / n s, 1 s back.
    profile, _ = equal_stages(2)
    layers = tuple(replace(layer, parameter_bytes=6.0) for layer in profile.layers)
    cluster = nodes_of("one", "abc"[:count], 2, Link(0.0, 1.0))
    nodes = tuple(replace(node, interconnect=Link(0.0, 12.0)) for node in cluster.nodes)
    problem = Problem(replace(profile, layers=layers), replace(cluster, nodes=nodes), 2 * count, (1,))
    costs, names = PipelineCosts(problem), [device.name for device in problem.cluster.devices]
    sums = SyncCosts(costs)
    plan = plan_of(*([(name, (0, 2))] for name in names))
    expected = 2 + 2 * (count - 1) * 12 / count
    assert exposed_s(costs, plan) == pytest.approx(expected)
    assert sums.of_plan_s(plan) == pytest.approx(dict.fromkeys(names, expected))
    assert sums.ring_s(12.0, names) > expected  # of the norm, which all share, in a ring


@pytest.mark.parametrize("count", [2, 3, 70])
def test_sums_inside_nodes_that_say_how_long_they_take_by_hand(count: int):
    # As above, but a pair of devices of a node says 0.02 s and 1/1200 s a byte: 0.03 s for the 12 bytes.
    # With 70 nodes all rings are looked at at once.
    profile, _ = equal_stages(2)
    layers = tuple(replace(layer, parameter_bytes=6.0) for layer in profile.layers)
    plain = nodes_of("one", [f"n{index}" for index in range(count)], 2, Link(0.0, 1.0))
    told = (NodeAllReduce(2, Link(0.02, 1200.0)),)
    nodes = tuple(replace(node, interconnect=Link(0.0, 12.0), all_reduces=told) for node in plain.nodes)
    problem = Problem(replace(profile, layers=layers), replace(plain, nodes=nodes), 2 * count, (1,))
    costs = PipelineCosts(problem)
    sums = SyncCosts(costs)
    plan = plan_of(*([(device.name, (0, 2))] for device in problem.cluster.devices))
    expected = 0.03 + 2 * (count - 1) * 12 / count + 0.03  # a ring of all: 2 (2n - 1) rounds of 12 / 2n s
    assert exposed_s(costs, plan) == pytest.approx(expected)
    inside = plan_of(*([(device.name, (0, 2))] for device in nodes[0].devices))
    assert exposed_s(costs, inside) == pytest.approx(0.03)
    assert sums.of_plan_s(inside) == pytest.approx(dict.fromkeys(("n0/0", "n0/1"), 0.03))


@pytest.mark.parametrize("nodes", ["ab", "abc", "abcd"])
def test_a_card_carries_all_rounds_of_the_rings_of_its_devices(nodes: str):
    # On each node a pipeline of two devices. Layers of 8 and of 4 bytes, each summed over all n nodes:
    # 2 (n - 1) rounds of 8 / n and of 4 / n seconds, which take turns at the cards; no device has both.
    count = len(nodes)
    profile, _ = equal_stages(2)
    layers = tuple(
        replace(layer, parameter_bytes=num_bytes)
        for layer, num_bytes in zip(profile.layers, (8.0, 4.0), strict=True)
    )
    cluster = nodes_of("one", nodes, 2, Link(0.0, 1.0))
    costs = PipelineCosts(Problem(replace(profile, layers=layers), cluster, count, (1,)))
    plan = plan_of(*([(f"{node}/0", (0, 1)), (f"{node}/1", (1, 2))] for node in nodes))
    rounds = 2 * (count - 1)
    each = {
        f"{node}/{index}": rounds * num_bytes / count
        for node in nodes
        for index, num_bytes in ((0, 8), (1, 4))
    }
    assert SyncCosts(costs).of_plan_s(plan) == pytest.approx(each)
    # the later layer's sum begins with the 2 s of backward of the first stages still to come
    later_s = rounds * 4 / count - 2.0
    assert exposed_s(costs, plan) == pytest.approx(later_s + rounds * 8 / count)
