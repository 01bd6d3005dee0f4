"""Baselines by hand and against torchgpipe; `auto` is never worse than any of them."""

import subprocess
import sys
from dataclasses import replace

import pytest
from torchgpipe.balance import blockpartition

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError, InputError
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.simulation.prediction import evaluator
from partition.auto import STRATEGIES
from partition.baselines.layer_splits import proportional_cuts, torchgpipe
from partition.baselines.strategy import TooManyDevicesError
from partition.bounds.best_bound import bound_space
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.step_estimate import StepEstimate
from partition.exact.chain_search import search_chains
from partition.plan import Plan
from partition.problem import Problem
from partition.solver import compare, solve
from random_problems import closed_form, random_problem, with_ample_memory

Shape = list[tuple[str, tuple[int, int], int]]


def even_layers(
    num_layers: int,
    speeds: list[float],
    memory_bytes: list[float],
    batch: int = 8,
    sizes: tuple[int, ...] = (1,),
) -> Problem:
    """Layers of 1 s forward, 2 s backward and 4 bytes of states; 1 byte saved, none at boundaries."""
    layer = LayerTimes((1.0,), (2.0,))
    profile = ModelProfile(
        model="even",
        sequence_length=8,
        dtype="float32",
        layers=tuple(LayerProfile(f"layer {index}", 1.0, 0.0, 1.0) for index in range(num_layers)),
        kinds={"kind": KindProfile("measured", (1,), (layer,) * num_layers)},
    )
    pairs = enumerate(zip(speeds, memory_bytes, strict=True))
    devices = tuple(Device(f"a/{index}", "a", "kind", size, speed=speed) for index, (speed, size) in pairs)
    return Problem(profile, Cluster("lab", Link(0.0, 1.0), (Node("a", devices),)), batch, sizes)


def shape(plan: Plan) -> Shape:
    (pipeline,) = plan.pipelines
    return [(stage.device, stage.layers, stage.in_flight) for stage in pipeline.stages]


def test_single_takes_the_fastest_device_that_fits() -> None:
    problem = even_layers(4, [1.0, 4.0, 2.0], [100.0, 19.0, 20.0])
    assert shape(STRATEGIES["single"](problem, None)) == [("a/2", (0, 4), 1)]


def test_gpipe_splits_by_count_with_all_in_flight() -> None:
    problem = even_layers(5, [1.0, 2.0], [100.0, 100.0])
    assert shape(STRATEGIES["gpipe-even"](problem, None)) == [("a/0", (0, 2), 8), ("a/1", (2, 5), 8)]


def test_gpipe_on_small_memory_falls_back_to_1f1b() -> None:
    # two layers: 8 bytes of states, and 2 per microbatch in flight; 8 of them would need 24
    problem = even_layers(4, [1.0, 1.0], [23.0, 23.0])
    assert shape(STRATEGIES["gpipe-even"](problem, None)) == [("a/0", (0, 2), 2), ("a/1", (2, 4), 1)]


def test_speed_proportional_gives_layers_by_speed() -> None:
    problem = even_layers(8, [3.0, 1.0], [100.0, 100.0])
    assert shape(STRATEGIES["speed-proportional"](problem, None)) == [("a/0", (0, 6), 2), ("a/1", (6, 8), 1)]


def test_memory_proportional_gives_layers_by_memory() -> None:
    problem = even_layers(8, [3.0, 1.0], [100.0, 300.0])
    assert shape(STRATEGIES["memory-proportional"](problem, None))[0][1] == (0, 2)


def test_proportional_cuts_leave_every_stage_a_layer() -> None:
    assert proportional_cuts([1.0, 1.0, 1.0], [100.0, 1.0, 1.0]) == [0, 1, 2, 3]
    assert proportional_cuts([1.0, 1.0, 1.0], [1.0, 1.0, 100.0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_torchgpipe_has_the_balance_of_torchgpipe(seed: int) -> None:
    problem = with_ample_memory(random_problem(seed))
    devices = problem.cluster.devices
    (pipeline,) = torchgpipe(problem).pipelines
    kind = problem.profile.kind(devices[0].kind)
    size = kind.microbatch_sizes.index(pipeline.microbatch_size)
    seconds = [(times.forward_s[size] + times.backward_s[size]) / devices[0].speed for times in kind.layers]
    blocks = blockpartition.solve(seconds, len(devices))
    assert [stage.num_layers for stage in pipeline.stages] == [len(block) for block in blocks if block]


def test_strategies_do_not_import_torch() -> None:
    code = (
        "import sys, partition.solver, partition.baselines.layer_splits as s; s._blockpartition();"
        "sys.exit('torch' in sys.modules or 'torchgpipe' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_bytes_are_named() -> None:
    # [2, 4) needs 2 * (4 + 1) bytes
    problem = even_layers(4, [1.0, 1.0], [100.0, 8.5])
    with pytest.raises(InfeasibleError) as caught:
        STRATEGIES["gpipe-even"](problem, None)
    assert str(caught.value).startswith(
        "gpipe-even: layers [2, 4) need 10 bytes on 'a/1', which has 8 usable; 2 bytes are missing"
    )
    assert (caught.value.device, caught.value.missing_bytes) == ("a/1", 1.5)


def test_more_devices_than_layers_is_bad_input() -> None:
    with pytest.raises(
        TooManyDevicesError, match="more stages than layers: 3 devices for the 2 layers of 'even'"
    ):
        STRATEGIES["gpipe-even"](even_layers(2, [1.0] * 3, [100.0] * 3), None)


def test_auto_leaves_out_a_device_that_does_not_pay() -> None:
    # one layer on a/1 would take 150 s a microbatch, all four on a/0 12 s
    plan = STRATEGIES["auto"](even_layers(4, [1.0, 0.02], [100.0, 100.0]), None)
    assert plan.device_names == ("a/0",)


def test_infeasible_names_the_least_that_is_missing() -> None:
    # 20 bytes of layers on 9 + 8: (2, 2) by layer needs 9 and 9, (1, 3) or (3, 1) lacks 4 or more
    problem = even_layers(4, [1.0, 1.0], [9.0, 8.0])
    with pytest.raises(InfeasibleError, match=r"whatever the order: .* 1 bytes are missing") as caught:
        STRATEGIES["auto"](problem, None)
    assert (caught.value.device, caught.value.missing_bytes) == ("a/1", 1.0)


def test_simulated_steps_are_never_below_the_estimate() -> None:
    for seed in range(60):
        problem = random_problem(seed)
        tied = any(layer.tied_to for layer in problem.profile.layers)  # their sync overlaps with the rest
        if tied or any(problem.global_batch_size % size for size in problem.microbatch_sizes):
            continue
        estimate, evaluate = StepEstimate(PipelineCosts(problem)), evaluator(problem.profile, problem.cluster)
        for plan in search_chains(problem).plans[:4]:
            assert evaluate(plan).step_s >= estimate.estimate_s(plan) * (1 - 1e-9)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(
    "seed",
    [
        *range(4, 12),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 12)),
        *(pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for seed in (2, 3, 13, 14)),
    ],
)
def test_auto_is_never_worse_than_a_baseline_and_fits(seed: int, simulated: bool) -> None:
    problem = random_problem(seed)
    evaluate = evaluator(problem.profile, problem.cluster) if simulated else closed_form(problem)
    outcomes = {outcome.strategy: outcome for outcome in compare(problem, evaluate, STRATEGIES)}
    assert list(outcomes) == [*STRATEGIES]
    ours = outcomes["auto"].plan
    if ours is None:
        assert all(outcome.plan is None and outcome.reason for outcome in outcomes.values())
        return
    assert ours.predicted is not None and ours.predicted.gap is not None
    for outcome in outcomes.values():
        if outcome.plan is not None and outcome.plan.predicted is not None:
            assert ours.predicted.step_s <= outcome.plan.predicted.step_s * (1 + 1e-9)
            for name, device in outcome.plan.predicted.devices.items():
                assert device.memory_bytes <= problem.cluster.device(name).usable_bytes * (1 + 1e-12)
            assert outcome.plan.predicted.gap is not None and outcome.plan.predicted.gap > -1e-9


def test_solve_fills_figures_bound_and_hashes() -> None:
    problem = even_layers(4, [1.0, 1.0], [100.0, 100.0])
    told: list[str] = []
    plan = solve(problem, closed_form(problem), progress=told.append)
    assert plan.strategy == "auto" and plan.predicted is not None
    assert plan.predicted.bound_s == pytest.approx(48.0, rel=1e-5)  # 8 samples of 12 s over two devices
    assert plan.predicted.bound_space == bound_space(problem)
    assert plan.predicted.fractional_bound_s == plan.predicted.bound_s
    assert plan.profile_sha256 == problem.profile.sha256 and plan.cluster_sha256 == problem.cluster.sha256
    assert told == ["planning auto", "proving a bound"]


def test_unknown_strategy_is_refused() -> None:
    problem = even_layers(4, [1.0], [100.0])
    with pytest.raises(InputError, match=r"unknown strategy 'gpipe'; did you mean .*gpipe"):
        solve(problem, closed_form(problem), "gpipe")


def test_zero_times_are_planned_without_a_bound() -> None:
    problem = even_layers(4, [1.0, 1.0], [23.0, 23.0])
    kind = KindProfile("measured", (1,), (LayerTimes((0.0,), (0.0,)),) * 4)
    problem = replace(problem, profile=replace(problem.profile, kinds={"kind": kind}))
    plan = solve(problem, evaluator(problem.profile, problem.cluster))
    assert plan.predicted is not None and plan.predicted.bound_s is None and plan.predicted.gap is None
