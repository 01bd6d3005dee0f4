"""Cases of few instructions: all clocks find the times worked out in the comments."""

from dataclasses import replace

from clock_cases import LISTED, Case, compare_fast, compare_lists
from cost_model.cluster import Cluster, Device, Link, Node
from hetpipe.program.instructions import Compute, Pass
from partition.plan import Pipeline, Plan, Stage
from partition.problem import problem_of_plan
from shared_plans import layers_of, plan_of
from shared_plans import pipeline as pipeline_of


def test_two_stages_of_one_device_beside_a_pipeline_on_another_last_as_long_as_the_scheduler_says():
    """A case that a search once found."""
    plan = plan_of(
        pipeline_of(1, (1, 0, 1, 1), (0, 1, 2, 1), (1, 2, 3, 1), (0, 3, 5, 1)), pipeline_of(3, (0, 0, 5, 1))
    )
    profile, cluster = layers_of(1.0, 0.25, 1.0, 1.0, 0.5)
    network = replace(cluster.network, latency_s=0.3)
    problem = problem_of_plan(plan, profile, replace(cluster, network=network))
    for schedule in LISTED:
        assert compare_lists(Case(0, problem, plan, schedule)) == 14


def one_microbatch(*pipelines: dict[str, tuple[int, int]]) -> Plan:
    """Pipelines of one sample, each the layers [start, stop) of its devices."""
    entries = [
        Pipeline(1, 1, tuple(Stage((name,), layers, 1) for name, layers in stages.items()))
        for stages in pipelines
    ]
    return Plan("manual", "made-up", len(entries), tuple(entries))


def by_hand(parameter_bytes: tuple[float, ...], speed: float, *pipelines: dict[str, tuple[int, int]]) -> Case:
    """Layers of F 1 s, B 2 s on a/0, a/1, b/0 and b/1 (of this speed); messages of a byte, a second each."""
    profile, _ = layers_of(*[3.0] * len(parameter_bytes))
    layers = tuple(
        replace(layer, output_bytes_per_sample=1.0, parameter_bytes=num_bytes)
        for layer, num_bytes in zip(profile.layers, parameter_bytes, strict=True)
    )
    speeds = {"a": (1.0, 1.0), "b": (1.0, speed)}
    nodes = [
        Node(
            name, tuple(Device(f"{name}/{i}", name, "one", 1e6, speed=each) for i, each in enumerate(entries))
        )
        for name, entries in speeds.items()
    ]
    cluster = Cluster("two", Link(0.0, 1.0), tuple(nodes))
    plan = one_microbatch(*pipelines)
    return Case(0, problem_of_plan(plan, replace(profile, layers=layers), cluster), plan)


def test_a_gradient_waits_for_the_sum_that_took_its_card_before_it():
    # a/0 does all layers until 9, the backward of layer 2 until 5; the others begin at 0, 2 and 4, and b/1 is
    # done at 7. The sum of layer 2, 4 bytes over a/0 and b/1, holds both cards from 7 to 11. b/0 is done at
    # 10: its gradient leaves at 11, a/1 goes on from 12 to 14. The norm: 6 rounds of 8 bytes. Layer 0 trains
    # something, or nothing were sent back to it.
    case = by_hand((1e-300, 0.0, 4.0), 1.0, {"a/0": (0, 3)}, {"a/1": (0, 1), "b/0": (1, 2), "b/1": (2, 3)})
    assert case.trace.makespan_s == 14 + 6 * 8
    compare_fast(case)


def test_of_two_messages_that_are_ready_at_once_the_lower_rank_has_the_card_first():
    # Forwards leave node a from 1 and from 2 s on. b/0 computes from 2 to 5 s, b/1 in 2 s from 3 to 5 s: the
    # gradient of b/0 arrives at 6, that of b/1 at 7. In each round of the norm two messages of 8 bytes leave
    # each node.
    case = by_hand((0.0, 0.0), 1.5, {"a/0": (0, 1), "b/0": (1, 2)}, {"a/1": (0, 1), "b/1": (1, 2)})
    assert [case.ends_s[Compute(Pass.BACKWARD, index, 0, 0)] for index in range(2)] == [8, 9]
    assert case.trace.makespan_s == 9 + 6 * 2 * 8
    compare_fast(case)
    assert compare_lists(case) == 8
