"""Optimizer states on one owner of each layer: memory, programs, predictions, and real runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError, InputError
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Broadcast, Norm, Step, Sync
from hetpipe.program.program_text import parse_program
from hetpipe.program.verification import check_memory, verify
from hetpipe.reporting.critical_path import critical_path
from hetpipe.reporting.idle_time import Cause
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.simulation.prediction import evaluator, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from hetpipe.training import checkpoint
from hetpipe.training.resumption import find_checkpoint
from partition.bounds.best_bound import fractional_bound_s
from partition.bounds.sharded_bound import sharded_bound
from partition.estimates.optimizer_sharding import fits, with_state_owners
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import plan_memory
from partition.estimates.ranking import Ranking
from partition.estimates.step_estimate import StepEstimate
from partition.plan import Figures, Pipeline, Plan, Stage
from partition.plan_file import plan_from_data
from partition.problem import Problem
from partition.solver import solve
from runs import CPU_CLUSTER, chain_plan, made_up_profile, run
from small_case import equal_stages, plan_of, small_profile


def replicas(
    num_layers: int, memory_bytes: tuple[float, ...], parameter_bytes: float = 4.0, link: Link | None = None
) -> tuple[Plan, ModelProfile, Cluster]:
    """Return a pipeline of one stage, with a sample each, on a node for each memory.

    A layer takes 1 + 2 s a sample.
    """
    profile = equal_stages(num_layers)[0]
    kind = replace(profile.kinds["one"], optimizer_s_per_byte=0.5)
    layers = tuple(replace(layer, parameter_bytes=parameter_bytes) for layer in profile.layers)
    profile = replace(profile, layers=layers, kinds={"one": kind})
    nodes = tuple(
        Node(f"n{i}", (Device(f"n{i}/0", f"n{i}", "one", memory),)) for i, memory in enumerate(memory_bytes)
    )
    pipelines = tuple(
        Pipeline(1, 1, (Stage((f"n{i}/0",), (0, num_layers), 1),)) for i in range(len(memory_bytes))
    )
    cluster = Cluster("flat", link or Link(0.0, 1e30), nodes)
    return Plan("manual", "made-up", len(memory_bytes), pipelines, zero=1), profile, cluster


def test_states_go_where_memory_is_free_in_blocks() -> None:
    # Parameters and gradients of 8 layers take 64 bytes on each, states 8 bytes a layer. Free: 16 and 48.
    plan, profile, cluster = replicas(8, (80.0, 112.0))
    owned = with_state_owners(plan, profile, cluster)
    assert owned.state_owners == ("n0/0",) * 2 + ("n1/0",) * 6
    need = {name: plan_memory(owned, profile, name).optimizer_bytes for name in owned.device_names}
    assert need == {"n0/0": 16.0, "n1/0": 48.0}
    assert fits(owned, profile, cluster)
    check_memory(owned, profile, cluster)
    assert with_state_owners(owned, profile, cluster) is owned
    # whose states are nowhere in particular counts them everywhere
    assert plan_memory(plan, profile, "n0/0").optimizer_bytes == 64.0
    with pytest.raises(InfeasibleError, match="'n0/0'"):
        check_memory(replace(plan, zero=0), profile, cluster)


def test_an_estimate_steps_what_each_device_owns() -> None:
    # 8 layers of 3 s a sample; 6 layers of 4 bytes at the owner of most, 0.5 s a byte
    plan, profile, cluster = replicas(8, (80.0, 112.0))
    owned = with_state_owners(plan, profile, cluster)
    estimate = StepEstimate(PipelineCosts(Problem(profile, cluster, 2, (1,))))
    assert estimate.estimate_s(owned) == pytest.approx(24.0 + 12.0)
    assert simulate_plan(owned, profile, cluster).makespan_s == pytest.approx(24.0 + 12.0)
    assert estimate.estimate_s(plan) == pytest.approx(24.0 + 16.0)  # nobody in particular: all of it


def test_states_are_packed_layer_by_layer_where_blocks_do_not_fit() -> None:
    plan, profile, cluster = replicas(3, (16.0 + 8.0, 16.0 + 8.0))
    sizes = (1.0, 4.0, 3.0)  # states of 2, 8 and 6 bytes: only {1} and {0, 2} fit into 8 and 8
    layers = tuple(
        replace(layer, parameter_bytes=size) for layer, size in zip(profile.layers, sizes, strict=True)
    )
    profile = replace(profile, layers=layers)
    owned = with_state_owners(plan, profile, cluster)
    assert fits(owned, profile, cluster)
    assert owned.state_owners is not None
    assert owned.state_owners[0] == owned.state_owners[2] != owned.state_owners[1]


def test_tied_states_are_with_the_home_layer() -> None:
    # The head shares 250 of its 300 bytes with the embeddings, which have 400, 40 of them not trained.
    profile = small_profile()
    plan = plan_of([("a/0", 0, 3, 1), ("b/0", 3, 4, 1)], 1)
    everywhere = {name: plan_memory(plan, profile, name).optimizer_bytes for name in plan.device_names}
    assert everywhere == {"a/0": 2 * 760, "b/0": 2 * 300}
    owned = replace(plan, zero=1, state_owners=("a/0", "a/0", "a/0", "b/0"))
    sharded = {name: plan_memory(owned, profile, name).optimizer_bytes for name in plan.device_names}
    assert sharded == {"a/0": 2 * 760, "b/0": 2 * 50}


def test_a_program_reduces_to_the_owner_and_broadcasts_in_order() -> None:
    plan, profile, cluster = replicas(8, (80.0, 112.0))
    program = lower(plan, profile, cluster)
    verify(program, profile, cluster)
    assert [(bucket.layers, bucket.state_owner) for bucket in program.buckets] == [
        ((2, 3, 4, 5, 6, 7), 1),
        ((0, 1), 0),
    ]
    for instructions in program.ranks:
        assert instructions[-6:] == (Sync(0), Sync(1), Norm(), Step(), Broadcast(0), Broadcast(1))
    assert parse_program(program.text, program.plan) == program
    with pytest.raises(InputError, match="give the cluster"):
        lower(plan, profile)
    (first, *rest) = program.ranks
    early = replace(program, ranks=((*first[:-2], Broadcast(1), Broadcast(0)), *rest))
    with pytest.raises(InputError, match="broadcasts in order"):
        verify(early, profile, cluster)


def test_a_step_ends_with_its_last_broadcast() -> None:
    # 8 layers: 24 s of computing. Links of 1 s and 8 B/s: bucket 0 (24 bytes) takes 4 s to its owner, n1,
    # from 20 s on, when only the backwards of layers 1 and 0 are to come; bucket 1 (8 bytes) takes 2 s to n0
    # after them. NORM: 2 rounds of 16 bytes, 6 s. STEP of 24 bytes on n1: 12 s, on n0 4 s; n1 is ready at
    # 24 + 2 + 6 + 12 = 44 s, and 4 s later all is over.
    plan, profile, cluster = replicas(8, (80.0, 112.0), link=Link(1.0, 8.0))
    program = lower(plan, profile, cluster)
    costs = ProgramCosts(program, profile, cluster)
    trace = simulate(costs)
    steps = {event.rank: event for event in trace.events if isinstance(event.instruction, Step)}
    assert [(steps[rank].start_s, steps[rank].end_s) for rank in (0, 1)] == [(32.0, 36.0), (32.0, 44.0)]
    assert trace.makespan_s == 48.0
    path = critical_path(trace, costs)
    assert [(entry.cause, entry.duration_s) for entry in path][-3:] == [
        (Cause.NORM, 6.0),
        (Cause.OPTIMIZER, 12.0),
        (Cause.BROADCAST, 4.0),
    ]
    assert sum(entry.duration_s for entry in path) == pytest.approx(48.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero": 0, "state_owners": ["n0/0"] * 8}, "write zero 1"),
        ({"state_owners": ["n0/0"] * 7}, "names 7 devices, the plan has 8 layers"),
        ({"state_owners": ["n0/0"] * 7 + ["x/0"]}, "'x/0', which does not hold that layer"),
    ],
)
def test_wrong_owners_are_refused(changes: dict[str, object], reason: str) -> None:
    plan = replicas(8, (80.0, 112.0))[0]
    with pytest.raises(InputError, match=reason):
        plan_from_data(json.loads(json.dumps(plan.to_json())) | changes, "plan.json")


def test_owners_are_written_and_read_back() -> None:
    owned = with_state_owners(*replicas(8, (80.0, 112.0)))
    assert plan_from_data(json.loads(json.dumps(owned.to_json())), "plan.json") == owned


@pytest.mark.slow
def test_plans_that_differ_in_what_is_sharded_alone_are_ranked_apart() -> None:
    plan, profile, cluster = replicas(8, (80.0, 112.0))
    owned = with_state_owners(plan, profile, cluster)
    ranking = Ranking(
        Problem(profile, cluster, 2, (1,)), lambda each: Figures(float(each.zero), 1.0, 0.0, {})
    )
    assert [ranking(replace(owned, zero=zero))[0] for zero in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_the_planner_shards_where_nothing_else_fits() -> None:
    # Two layers of 2 bytes on two devices of 12 bytes: 8 of parameters and gradients, and room for half of
    # the 8 of states. A layer on each would fit as a pipeline, which is slower.
    _, profile, cluster = replicas(2, (12.0, 12.0), parameter_bytes=2.0)
    problem = Problem(profile, cluster, 8, (1,))
    evaluate = evaluator(profile, cluster)
    found = solve(problem, evaluate)
    assert found.zero == 1 and len(found.pipelines) == 2
    assert found.predicted is not None and found.predicted.bound_space is not None
    assert "optimizer states anywhere" in found.predicted.bound_space
    assert fits(found, profile, cluster)
    # 4 microbatches of 6 s each, and half of the optimizer's 2 s
    assert found.predicted.step_s == pytest.approx(25.0)
    assert found.predicted.bound_s == pytest.approx(24.0, rel=1e-5)
    # with memory to spare, too, since half of the optimizer's work is saved
    ample = replicas(2, (99.0, 99.0))[2]
    spared = solve(Problem(profile, ample, 8, (1,)), evaluate)
    whole = replace(spared, zero=0, state_owners=None)
    assert (spared.zero, evaluate(spared).step_s, evaluate(whole).step_s) == (1, 25.0, 26.0)


def test_sharded_plans_do_not_cross_their_bound() -> None:
    # n0 computes nearly all, n1 has nearly all of the states: the bound of plans that do not shard is false
    plan, profile, cluster = replicas(4, (32.0 + 1.0, 99.0))
    pipelines = (replace(plan.pipelines[0], num_samples=15), plan.pipelines[1])
    plan = with_state_owners(replace(plan, global_batch_size=16, pipelines=pipelines), profile, cluster)
    assert fits(plan, profile, cluster)
    step_s = simulate_plan(plan, profile, cluster).makespan_s
    problem = Problem(profile, cluster, 16, (1,))
    assert sharded_bound(problem).fractional_s <= step_s
    assert sharded_bound(problem).fractional_s < fractional_bound_s(problem)


def two_replicas(model: str, *, zero: int) -> Plan:
    """All layers on here/0, and once more cut in two on here/1 and here/2."""
    count = made_up_profile(model).num_layers
    first = Pipeline(2, 6, (Stage(("here/0",), (0, count), 1),))
    second = Pipeline(2, 10, (Stage(("here/1",), (0, 3), 2), Stage(("here/2",), (3, count), 1)))
    return Plan("manual", model, 16, (first, second), zero=zero)


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("bert-tiny", marks=pytest.mark.exhaustive), "gpt2-tiny"])
def test_sharding_changes_neither_losses_nor_weights(tmp_path: Path, model: str) -> None:
    profile = replace(made_up_profile(model), dtype="float64")
    settings = Settings(model, 6, dtype="float64", learning_rate=1e-3, save=True)
    _, expected = run(tmp_path / "plain", two_replicas(model, zero=0), settings, profile)
    report, losses = run(tmp_path / "sharded", two_replicas(model, zero=1), settings, profile)
    assert report.owners_agree
    assert losses == pytest.approx(expected, rel=1e-12)
    plain, sharded = (
        checkpoint.latest(RunFolder(tmp_path / name / "run").checkpoints) for name in ("plain", "sharded")
    )
    assert plain is not None and sharded is not None
    manifest, other = checkpoint.read_manifest(plain), checkpoint.read_manifest(sharded)
    for layer in range(profile.num_layers):
        mine = checkpoint.read_layer(plain, manifest, layer)
        theirs = checkpoint.read_layer(sharded, other, layer)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert (tensor - theirs[name]).abs().max() <= 1e-9 * max(1.0, tensor.abs().max()), name
    found = RunFolder(tmp_path / "sharded" / "run")
    text = found.program.read_text()
    assert "owner=" in text and "BCAST0" in text
    assert json.loads(found.plan.read_text())["state_owners"]


@pytest.mark.slow
def test_a_sharded_run_resumes_under_another_plan(tmp_path: Path) -> None:
    profile = replace(made_up_profile("bert-tiny"), dtype="float64")
    settings = Settings("bert-tiny", 6, dtype="float64", learning_rate=1e-3, save=False)
    _, expected = run(tmp_path / "whole", chain_plan("bert-tiny", [0, 3, 8], 4), settings, profile)
    first = replace(settings, steps=3, total_steps=6, save=True)
    run(tmp_path / "run", two_replicas("bert-tiny", zero=1), first, profile)
    source = find_checkpoint("auto", RunFolder(tmp_path / "run" / "run"), tmp_path, "bert-tiny")
    assert source is not None
    resumed = replace(settings, resume_from=str(source))
    _, losses = run(tmp_path / "run", chain_plan("bert-tiny", [0, 2, 5, 8], 4), resumed, profile)
    assert losses == pytest.approx(expected, rel=1e-12)


EMULATED = CPU_CLUSTER.replace('kind = "cpu", count = 4', 'kind = "emulated", count = 3, speed = 0.25')


@pytest.mark.slow
@pytest.mark.alone
def test_the_prediction_of_a_sharded_run_holds(tmp_path: Path) -> None:
    profile = made_up_profile("bert-tiny", kind="emulated", layer_s=0.002)
    settings = Settings("bert-tiny", 4, learning_rate=1e-3, save=False)
    report, _ = run(tmp_path, two_replicas("bert-tiny", zero=1), settings, profile, EMULATED)
    assert report.measured_step_s == pytest.approx(report.predicted_step_s, rel=0.1)
