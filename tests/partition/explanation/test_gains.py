from dataclasses import replace

import pytest

from cost_model.cluster import Device
from hetpipe.reporting.tables import gain_sentence
from hetpipe.simulation.prediction import evaluator
from partition.baselines.layer_splits import BASELINES
from partition.estimates.plan_memory import plan_memory
from partition.explanation.gains import PLAIN, Gain, best_plain, gain, with_ample_memory
from partition.problem import Problem, problem_of
from partition.solver import compare
from small_case import equal_stages, small_cluster, small_profile


def gain_of(problem: Problem) -> Gain | None:
    evaluate = evaluator(problem.profile, problem.cluster)
    return gain(problem, evaluate, compare(problem, evaluate, proof_s=0))


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


def test_plain_strategies_are_known():
    assert set(PLAIN) <= BASELINES.keys()


@pytest.mark.slow
def test_with_ample_memory_all_of_the_gain_is_balance():
    found = gain_of(uneven())
    assert found is not None and found.total is not None
    # alone the fast device takes 32 x 4 s; sharing 24 : 8 samples both take 24 x 4 s
    assert found.over == "single"
    assert found.total == pytest.approx(32 / 24, rel=0.01)
    assert found.memory == pytest.approx(1.0)


@pytest.mark.slow
def test_what_only_fits_in_pieces_is_gained_by_memory():
    # the whole model needs 4 x 100 x (1 + 1 + 2) bytes: no device holds it, an even split fits
    found = gain_of(uneven(memory_bytes=1250.0))
    assert found is not None and found.total is not None and found.memory is not None
    assert found.over in ("gpipe-even", "torchgpipe")
    assert found.balance == pytest.approx(32 / 24, rel=0.01)
    assert found.total == pytest.approx(found.balance * found.memory)
    assert f"times {found.memory:.2f} by memory" in gain_sentence(found)


@pytest.mark.slow
def test_where_no_plain_strategy_fits_there_is_no_ratio():
    # three layers on one device and one on the other is all that fits, and no even split is that
    problem = uneven()
    big, small = problem.cluster.devices
    devices = (replace(big, memory_bytes=1250.0), replace(small, memory_bytes=450.0))
    cluster = replace(problem.cluster, nodes=(replace(problem.cluster.nodes[0], devices=devices),))
    found = gain_of(replace(problem, cluster=cluster))
    assert found is not None
    assert (found.over, found.total, found.memory) == (None, None, None)
    assert gain_sentence(found).startswith("no plain strategy fits: ")


def test_without_a_plan_there_is_no_gain():
    problem = uneven(memory_bytes=100.0)
    evaluate = evaluator(problem.profile, problem.cluster)
    outcomes = compare(problem, evaluate, proof_s=0)
    assert gain(problem, evaluate, outcomes) is None
    assert best_plain(outcomes) is None


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
