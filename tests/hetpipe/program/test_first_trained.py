"""No backward and no gradient below the first trained layer: programs, their times and their memory."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from clock_cases import Case, cases
from cost_model.cluster import Cluster, Link
from cost_model.errors import InfeasibleError, InputError
from cost_model.memory import StageShape, device_memory
from cost_model.profile import ModelProfile
from hetpipe.program.instructions import Compute, Direction, Instruction, Pass, Program, Schedule, Transfer
from hetpipe.program.program_text import parse_instruction, parse_program
from hetpipe.program.verification import observed_in_flight, verify
from hetpipe.simulation.prediction import evaluator, predict
from hetpipe.simulation.schedule_selection import lower
from partition.estimates.plan_memory import plan_memory
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem
from partition.solver import solve
from random_problems import frozen_below
from small_case import equal_plan, equal_stages, small_cluster, small_profile


def of_three(first_trained: int, output_bytes: float = 0.0) -> tuple[ModelProfile, Cluster]:
    """Three layers of F 1 s, B 2 s and 4 bytes on three devices, the first ones frozen."""
    profile, cluster = equal_stages(3)
    layers = (
        replace(layer, parameter_bytes=4.0, output_bytes_per_sample=output_bytes, saved_bytes_per_sample=7.0)
        for layer in profile.layers
    )
    profile = replace(profile, layers=tuple(layers), optimizer_bytes_per_parameter_byte=2.0)
    nodes = tuple(
        replace(node, devices=tuple(replace(device, memory_bytes=1e3) for device in node.devices))
        for node in cluster.nodes
    )
    return frozen_below(profile, first_trained), replace(cluster, nodes=nodes)


def words(program: Program, rank: int) -> str:
    return " ".join(map(str, program.ranks[rank]))


def test_a_stage_below_only_forwards_and_the_first_trained_one_sends_nothing_back():
    profile, cluster = of_three(1)
    program = lower(equal_plan([2, 2, 1], 3), profile, cluster)
    assert words(program, 0) == "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 NORM STEP"
    assert words(program, 1) == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1RECV_F2 1F2 1SEND_F2 "
        "1RECV_B1 1B1 1RECV_B2 1B2 NORM STEP"
    )
    assert [stage.in_flight for stage in program.plan.pipelines[0].stages] == [3, 2, 1]
    assert parse_program(program.text, program.plan) == program
    assert " first_trained=1\n" in program.text
    verify(program, profile, cluster)


def test_what_is_left_out_takes_no_time():
    # Stage 2 is done with its backwards at 5, 8 and 11 s, stage 1 two seconds later each; with a backward the
    # first stage would be done at 15.
    for first_trained, step_s, busy_s in ((0, 15, (9, 9, 9)), (1, 13, (3, 9, 9)), (2, 11, (3, 3, 9))):
        profile, cluster = of_three(first_trained)
        found = predict(equal_plan([3, 2, 1], 3), profile, cluster)
        assert found.step_s == step_s
        assert tuple(map(found.trace.busy_s, range(3))) == busy_s


def test_the_first_trained_layer_of_a_profile():
    profile = small_profile()
    assert profile.first_trained == 0
    untied = replace(profile.layers[3], tied_to=None, tied_bytes=0.0)
    assert frozen_below(replace(profile, layers=(*profile.layers[:3], untied)), 3).first_trained == 3
    # the head trains a matrix that it shares with the embeddings
    assert frozen_below(profile, 3).first_trained == 0
    assert equal_stages(3)[0].first_trained == 0  # no layer has any weights


def test_without_a_backward_all_outputs_wait_and_nothing_else_does():
    profile, cluster = of_three(2, output_bytes=10.0)
    plan = equal_plan([4, 1, 1], 4)
    first, second = (plan_memory(plan, profile, f"n/{index}") for index in range(2))
    # 4 outputs; the input of a microbatch and of the next one; what one keeps while it runs
    assert (first.parameter_bytes, first.boundary_bytes, first.saved_bytes) == (4, 4 * 10, 7)
    assert (second.boundary_bytes, second.gradient_bytes, second.optimizer_bytes) == (2 * 10 + 4 * 10, 0, 0)
    both = device_memory(profile, [StageShape(0, 2, 1, 1, num_microbatches=4)])
    assert both.saved_bytes == 2 * 7 + 10  # and what the first layer hands to the second
    again = StageShape(0, 2, 1, 1, recompute=True, num_microbatches=4, segment_layers=1)
    assert device_memory(profile, [again]) == device_memory(profile, [again._replace(recompute=False)])
    tight = replace(
        cluster, nodes=tuple(
            replace(node, devices=tuple(replace(one, memory_bytes=40.0) for one in node.devices))
            for node in cluster.nodes
        )
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match="'n/1', which has 40 usable; 31 bytes are missing"):
        verify(lower(plan, profile, tight), profile, tight)


def changed(program: Program, rank: int, old: str, *new: str) -> Program:
    entries: list[Instruction] = []
    for entry in program.ranks[rank]:
        entries += map(parse_instruction, new) if str(entry) == old else [entry]
    return replace(program, ranks=(*program.ranks[:rank], tuple(entries), *program.ranks[rank + 1 :]))


def test_more_than_is_needed_is_refused():
    profile, cluster = of_three(1)
    program = lower(equal_plan([3, 2, 1], 3), profile, cluster)
    sends = changed(program, 1, "1B0", "1B0", "1SEND_B0")
    for broken, message in (
        (changed(sends, 0, "0F2", "0F2", "0RECV_B0"), "0RECV_B0, a gradient that no layer before it needs"),
        (changed(program, 0, "0F2", "0F2", "0B0"), "rank 0 has 0B0, where nothing is trained"),
        (changed(program, 1, "1B2"), "has 14 computations, the plan needs 15"),
        (replace(program, first_trained=0), "goes back to layer 0, the first that the profile trains is 1"),
    ):
        with pytest.raises(InputError, match=message):
            verify(broken, profile, cluster)
    whole = lower(equal_plan([3, 2, 1], 3), *of_three(0))
    with pytest.raises(InputError, match="goes back to layer 0"):
        verify(whole, profile, cluster)


def transfers(program: Program, op: Pass) -> Counter[tuple[int, int]]:
    """Messages by (pipeline, stage whose input or its gradient crosses)."""
    return Counter(
        (entry.pipeline, entry.boundary)
        for entry in all_of(program)
        if isinstance(entry, Transfer) and entry.op is op and entry.direction is Direction.SEND
    )


def all_of(program: Program) -> Iterable[Instruction]:
    return (entry for instructions in program.ranks for entry in instructions)


def check_counts(case: Case) -> None:
    """Each stage runs, and each boundary carries, what the first trained layer asks for, and no more."""
    program, first_trained = case.program, case.problem.profile.first_trained
    verify(program, case.problem.profile, case.problem.cluster)
    assert parse_program(program.text, program.plan) == program
    ran = Counter(
        (entry.pipeline, entry.stage, entry.op) for entry in all_of(program) if isinstance(entry, Compute)
    )
    sent = {op: transfers(program, op) for op in Pass}
    for index, pipeline in enumerate(program.plan.pipelines):
        many = pipeline.num_microbatches
        for number, stage in enumerate(pipeline.stages):
            backward = stage.stop > first_trained
            assert ran[index, number, Pass.FORWARD] == many
            assert ran[index, number, Pass.BACKWARD] == backward * many
            crosses = number > 0 and (index, number) not in program.local_boundaries
            assert sent[Pass.FORWARD][index, number] == crosses * many
            assert sent[Pass.BACKWARD][index, number] == (crosses and stage.start > first_trained) * many
            if not backward:
                assert observed_in_flight(program)[index, number] == pipeline.in_flight(number) == many


def test_no_schedule_computes_or_sends_more_than_is_needed():
    below = 0
    for case in cases(seed for seed in range(150) if seed % 5 in (1, 3)):
        ample = tuple(
            replace(node, devices=tuple(replace(device, memory_bytes=1e9) for device in node.devices))
            for node in case.problem.cluster.nodes
        )
        problem = replace(case.problem, cluster=replace(case.problem.cluster, nodes=ample))
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.LIST):
            check_counts(replace(case, problem=problem, schedule=schedule))
        below += "no backward below" in case.features
    assert below >= 10


def test_chunks_of_an_interleaved_pipeline_below_only_forward():
    profile, cluster = equal_stages(4)
    layers = tuple(replace(layer, parameter_bytes=4.0) for layer in profile.layers)
    profile = frozen_below(replace(profile, layers=layers), 3)
    devices = tuple(replace(device, memory_bytes=1e3) for device in cluster.devices[:2])
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], devices=devices),))
    stages = tuple(Stage((f"n/{index % 2}",), (index, index + 1), 4 - index) for index in range(4))
    plan = Plan("manual", "made-up", 4, (Pipeline(1, 4, stages),))
    problem = Problem(profile, cluster, 4, (1,))
    for schedule in (Schedule.INTERLEAVED, Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.LIST):
        check_counts(Case(0, problem, plan, schedule))


@pytest.mark.slow
def test_cuts_change_where_half_of_the_layers_need_no_backward():
    profile, cluster = equal_stages(8)
    layers = tuple(replace(layer, parameter_bytes=4.0) for layer in profile.layers)
    profile = replace(profile, layers=layers)
    devices = tuple(replace(device, memory_bytes=1e3) for device in cluster.devices[:2])
    cluster = replace(cluster, network=Link(0.0, 1e9), nodes=(replace(cluster.nodes[0], devices=devices),))
    found = {}
    for first_trained in (0, 4):
        frozen = frozen_below(profile, first_trained)
        problem = Problem(frozen, cluster, 32, (1,))
        plan = solve(problem, evaluator(frozen, cluster), strategy="speed-proportional")
        auto = solve(problem, evaluator(frozen, cluster))
        assert plan.predicted is not None and auto.predicted is not None
        assert auto.predicted.step_s <= plan.predicted.step_s
        found[first_trained] = plan.pipelines[0].stages[0].stop, plan.predicted.step_s
    # 4 layers of 3 s each: the way there is 4 s, the way back 8 s; then 5 forwards and a backward against 9 s
    assert found == {0: (4, pytest.approx(4 + 32 * 12 + 8)), 4: (5, pytest.approx(5 + 32 * 9 + 2))}


@pytest.mark.slow
def test_a_pipeline_takes_no_more_samples_than_its_outputs_have_room_for():
    """Two devices, of which the small one holds the frozen layers, and not all outputs that would wait."""
    *layers, head = small_profile().layers
    untied = replace(head, tied_to=None, tied_bytes=0.0)
    profile = frozen_below(replace(small_profile(), layers=(*layers, untied)), 2)
    rng, plans = random.Random(3), 0
    for _ in range(6):
        cluster = small_cluster(fast_bytes=rng.uniform(1100, 2500), slow_bytes=rng.uniform(500, 1500))
        problem = Problem(profile, cluster, rng.choice([8, 40]), (1, 2))
        try:
            plan = solve(problem, evaluator(profile, cluster))
        except InfeasibleError:
            continue
        program = lower(plan, profile, cluster)
        verify(program, profile, cluster)
        assert program.plan.pipelines == plan.pipelines
        plans += 1
    assert plans >= 2
