from dataclasses import replace

import pytest

from cost_model.cluster import Device
from hetpipe.reporting.comparison_tables import gain_sentence
from hetpipe.simulation.prediction import evaluator
from partition.baselines.catalogue import BASELINES
from partition.estimates.plan_memory import plan_memory
from partition.explanation.gains import Gain, best_other, gain, with_ample_memory
from partition.problem import Problem, problem_of
from partition.solver import compare
from small_case import equal_stages, small_cluster, small_profile


def gain_of(problem: Problem) -> Gain:
    evaluate = evaluator(problem.profile, problem.cluster)
    found = gain(problem, evaluate, compare(problem, evaluate, proof_s=0))
    assert found is not None
    return found


def uneven(memory_bytes: float = 1e6) -> Problem:
    """Four equal layers on two devices, one three times as fast as the other, with instant links."""
    profile, cluster = equal_stages(4)
    layers = tuple(replace(layer, parameter_bytes=100.0) for layer in profile.layers)
    node = cluster.nodes[0]
    devices = tuple(
        Device(f"n/{index}", "n", "one", memory_bytes, speed=speed) for index, speed in enumerate((3.0, 1.0))
    )
    cluster = replace(cluster, nodes=(replace(node, devices=devices),))
    return problem_of(replace(profile, layers=layers), cluster, 32)


def test_the_gain_is_over_the_best_of_all_other_strategies():
    found = gain_of(uneven())
    # sharing 24 : 8 samples both take 24 x 4 s, which Poplar finds too; alone the fast device takes 32 x 4 s
    assert (found.over, found.total) == ("poplar", pytest.approx(1.0))
    assert found.balance == found.memory == pytest.approx(1.0)
    assert gain_sentence(found) == "auto is as fast as the best other strategy that fits, poplar"


@pytest.mark.slow
def test_what_only_fits_in_pieces_is_gained_by_memory():
    # the whole model needs 4 x 100 x (1 + 1 + 2) bytes: no device holds it, layers by speed do
    found = gain_of(uneven(memory_bytes=1250.0))
    assert found.over in ("memory-proportional", "speed-proportional")
    assert found.total is not None and found.memory is not None and found.total > 1.02
    assert found.total == pytest.approx(found.balance * found.memory)
    assert found.balance == pytest.approx(1.0, rel=0.01)
    said = gain_sentence(found)
    assert f"auto is {found.total:.2f} times as fast as the best other strategy that fits, " in said
    assert f"times {found.memory:.2f} by memory" in said


@pytest.mark.slow
def test_where_no_other_strategy_fits_there_is_no_ratio():
    # with recompute alone three layers fit on one device and one on the other
    problem = uneven()
    big, small = problem.cluster.devices
    devices = (replace(big, memory_bytes=1300.0), replace(small, memory_bytes=500.0))
    cluster = replace(problem.cluster, nodes=(replace(problem.cluster.nodes[0], devices=devices),))
    layers = tuple(
        replace(layer, saved_bytes_per_sample=60.0, output_bytes_per_sample=1.0)
        for layer in problem.profile.layers
    )
    found = gain_of(replace(problem, cluster=cluster, profile=replace(problem.profile, layers=layers)))
    assert (found.over, found.total, found.memory) == (None, None, None)
    assert gain_sentence(found).startswith("no other strategy fits: ")


def test_without_a_plan_there_is_no_gain():
    problem = uneven(memory_bytes=100.0)
    evaluate = evaluator(problem.profile, problem.cluster)
    outcomes = compare(problem, evaluate, proof_s=0)
    assert gain(problem, evaluate, outcomes) is None
    assert best_other(outcomes) is None


def test_ample_memory_changes_nothing_but_memory():
    problem = problem_of(small_profile(), small_cluster(), 4)
    ample = with_ample_memory(problem)
    assert [device.name for device in ample.cluster.devices] == ["a/0", "b/0"]
    assert ample.profile is problem.profile and ample.cluster.network == problem.cluster.network
    whole = BASELINES["ddp"](ample, None)
    assert all(
        plan_memory(whole, problem.profile, name).total_bytes < ample.cluster.device(name).usable_bytes
        for name in whole.device_names
    )
