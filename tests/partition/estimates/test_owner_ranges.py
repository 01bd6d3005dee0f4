"""Layers of which several devices own a range each: when they are cut, where, and what comes of it."""

import json
import random
from dataclasses import replace
from itertools import product

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError, InputError
from cost_model.profile import ModelProfile
from cost_model.sharding import OwnerRange
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Broadcast, Norm, Step, Sync
from hetpipe.program.program_text import parse_program
from hetpipe.program.verification import verify
from hetpipe.reporting.sums_table import summed_gradients
from hetpipe.reporting.tables import plan_sentences
from hetpipe.simulation.prediction import evaluator, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from partition.estimates.optimizer_sharding import fits, with_state_owners
from partition.estimates.plan_memory import plan_memory
from partition.plan import Pipeline, Plan, Stage
from partition.plan_file import plan_from_data
from partition.problem import Problem, check_plan
from partition.solver import solve
from small_case import equal_stages


def replicas(
    sizes: tuple[float, ...], memory_bytes: tuple[float, ...], zero: int = 1, link: Link | None = None
) -> tuple[Plan, ModelProfile, Cluster]:
    """The whole model, layers of so many bytes, on a node for each memory; a sample each."""
    profile = equal_stages(len(sizes))[0]
    layers = tuple(
        replace(layer, parameter_bytes=size) for layer, size in zip(profile.layers, sizes, strict=True)
    )
    kind = replace(profile.kinds["one"], optimizer_s_per_byte=0.5)
    profile = replace(profile, layers=layers, kinds={"one": kind})
    nodes = tuple(
        Node(f"n{i}", (Device(f"n{i}/0", f"n{i}", "one", memory),)) for i, memory in enumerate(memory_bytes)
    )
    pipelines = tuple(Pipeline(1, 1, (Stage((name,), (0, len(sizes)), 1),)) for name in names(memory_bytes))
    cluster = Cluster("flat", link or Link(0.0, 1e30), nodes)
    return Plan("manual", "made-up", len(memory_bytes), pipelines, zero=zero), profile, cluster


def names(memory_bytes: tuple[float, ...]) -> list[str]:
    return [f"n{i}/0" for i in range(len(memory_bytes))]


def test_a_layer_that_is_most_of_the_model_is_cut_where_no_owner_has_room_for_it() -> None:
    # Weights and gradients take 20 bytes on each; states 16, 2 and 2. Whoever had those of the first would
    # need 36. With 30 and 30 each takes 10; with 25 and 35, 5 and 15.
    plan, profile, cluster = replicas((8.0, 1.0, 1.0), (30.0, 30.0))
    owned = with_state_owners(plan, profile, cluster)
    assert owned.owner_ranges == (OwnerRange(0, "n0/0", 0.0, 0.625), OwnerRange(0, "n1/0", 0.625, 1.0))
    assert owned.state_owners == ("n0/0", "n1/0", "n1/0")
    assert fits(owned, profile, cluster)
    assert [plan_memory(owned, profile, name).optimizer_bytes for name in owned.device_names] == [10.0, 10.0]
    other = replicas((8.0, 1.0, 1.0), (25.0, 35.0))[2]
    uneven = with_state_owners(plan, profile, other)
    assert [plan_memory(uneven, profile, name).optimizer_bytes for name in uneven.device_names] == [5.0, 15.0]
    # where whole layers fit they stay whole: a message fewer
    ample = replicas((8.0, 1.0, 1.0), (36.0, 24.0))[2]
    assert with_state_owners(plan, profile, ample).owner_ranges == ()
    # and where an optimizer steps whole parameters
    whole = replace(profile, whole_states=True)
    assert with_state_owners(plan, whole, cluster).owner_ranges == ()
    with pytest.raises(InputError, match="owner_ranges of the plan cuts layer 0 between devices"):
        check_plan(owned, whole, cluster)


def test_blocks_end_between_layers_where_both_sides_take_that() -> None:
    # 9 equal layers of 2 bytes of states, 18 in all; three devices take 7, 5 and 7.5 beside 18 of all else.
    # In proportion the first had 6.5; with three layers, 6, the others take 12 as well, 4.8 and 7.2 of it in
    # proportion: the sixth layer is cut.
    plan, profile, cluster = replicas((1.0,) * 9, (18.0 + 7, 18.0 + 5, 18.0 + 7.5))
    owned = with_state_owners(plan, profile, cluster)
    assert fits(owned, profile, cluster)
    assert {each.layer for each in owned.owner_ranges} == {5}
    held = [plan_memory(owned, profile, name).optimizer_bytes for name in owned.device_names]
    assert held == pytest.approx([6.0, 4.8, 7.2], abs=2 / 1024)


def test_states_find_room_wherever_there_is_enough_in_all_and_whole_layers_where_any_dealing_does() -> None:
    # the oracle: every dealing of whole layers, and the sum of what is free, which ranges can fill
    counts = {"whole": 0, "cut": 0, "nothing": 0}
    for seed in range(300):
        rng = random.Random(seed)
        sizes = tuple(float(rng.choice([1, 1, 2, 3, 8])) for _ in range(rng.randint(1, 4)))
        free = tuple(float(rng.randint(0, 12)) for _ in range(rng.randint(2, 3)))
        plan, profile, cluster = replicas(sizes, tuple(2 * sum(sizes) + room for room in free))
        owned = with_state_owners(plan, profile, cluster)
        states = [2 * size for size in sizes]
        any_whole = any(
            all(
                sum(size for size, to in zip(states, dealt, strict=True) if to == device) <= room
                for device, room in enumerate(free)
            )
            for dealt in product(range(len(free)), repeat=len(sizes))
        )
        rounding = len(free) * max(states) / 1024
        if any_whole and not fits(owned, profile, cluster):
            assert sum(states) + rounding > sum(free), (seed, sizes, free)  # a range ends on one of 1024
        if sum(states) + rounding <= sum(free):
            assert fits(owned, profile, cluster), (seed, sizes, free)
        if owned.owner_ranges:
            blocks = _blocks(sizes, free)
            assert not fits(blocks, profile, cluster), (seed, sizes, free)
        counts["cut" if owned.owner_ranges else "whole" if fits(owned, profile, cluster) else "nothing"] += 1
        total = sum(plan_memory(owned, profile, name).optimizer_bytes for name in owned.device_names)
        assert total == pytest.approx(sum(states))
    assert min(counts.values()) > 20, counts


def _blocks(sizes: tuple[float, ...], free: tuple[float, ...]) -> Plan:
    """The same with whole layers."""
    plan, profile, cluster = replicas(sizes, tuple(2 * sum(sizes) + room for room in free))
    return with_state_owners(plan, replace(profile, whole_states=True), cluster)


def test_who_owns_a_range_fetches_and_sums_the_layer_whole_beside_it() -> None:
    # One layer of 8 bytes: a quarter and three quarters. Under zero 2 all 8 bytes of weights, the range of
    # gradients, all 8 of the backward; under zero 3 the range of weights, and all 8 while the layer works.
    plan, profile, _ = replicas((8.0,), (99.0, 99.0), zero=2)
    ranges = OwnerRange(0, "n0/0", 0.0, 0.25), OwnerRange(0, "n1/0", 0.25, 1.0)
    for zero, weights in ((2, (8.0, 8.0)), (3, (2.0 + 8.0, 6.0 + 8.0))):
        owned = replace(plan, zero=zero, state_owners=("n0/0",), owner_ranges=ranges)
        found = [plan_memory(owned, profile, name) for name in owned.device_names]
        assert tuple(each.parameter_bytes for each in found) == weights
        assert [each.gradient_bytes for each in found] == [2.0 + 8.0, 6.0 + 8.0]
        assert [each.optimizer_bytes for each in found] == [4.0, 12.0]


def cut_in_two(zero: int = 1, link: Link | None = None) -> tuple[Plan, ModelProfile, Cluster]:
    """Two layers of 8 bytes: the second device owns three quarters of the first, and the last one."""
    plan, profile, cluster = replicas((8.0, 8.0), (99.0, 99.0), zero, link)
    ranges = OwnerRange(0, "n0/0", 0.0, 0.25), OwnerRange(0, "n1/0", 0.25, 1.0)
    return replace(plan, state_owners=("n0/0", "n1/0"), owner_ranges=ranges), profile, cluster


def test_a_program_has_a_bucket_for_each_range() -> None:
    plan, profile, cluster = cut_in_two()
    program = lower(plan, profile, cluster)
    verify(program, profile, cluster)
    assert [(bucket.layers, bucket.state_owner, bucket.part) for bucket in program.buckets] == [
        ((1,), 1, (0.0, 1.0)),
        ((0,), 0, (0.0, 0.25)),
        ((0,), 1, (0.25, 1.0)),
    ]
    assert [bucket.num_bytes(profile) for bucket in program.buckets] == [8.0, 2.0, 6.0]
    for instructions in program.ranks:
        assert instructions[-8:] == (
            *map(Sync, range(3)), Norm(), Step(), *map(Broadcast, range(3))
        )  # fmt: skip
    assert parse_program(program.text, program.plan) == program
    assert "owner=1 part=0.25:1.0" in program.text
    ways = [each.way for each in summed_gradients(ProgramCosts(program, profile, cluster))]
    assert ways[1] == "reduced to n1/0, which owns the states from 25% to 100%"


@pytest.mark.parametrize("zero", [2, 3])
def test_a_step_layer_by_layer_has_rounds_of_each_range(zero: int) -> None:
    plan, profile, cluster = cut_in_two(zero)
    program = lower(plan, profile, cluster)
    verify(program, profile, cluster)
    text = program.text
    assert "0B0@0 REDUCE1.0 REDUCE2.0" in text
    assert ("GATHER1.0 GATHER2.0 GATHER0.0 0F0@0" in text) is (zero == 3)


def test_a_program_that_sums_other_ranges_than_the_plan_says_is_refused() -> None:
    plan, profile, cluster = cut_in_two()
    program = lower(plan, profile, cluster)
    first, second, third = program.buckets
    for buckets, reason in (
        (
            (first, replace(second, part=(0.0, 0.5)), third),
            r"owns \[0.0, 0.25\] of layer 0, the program sums",
        ),
        ((first, replace(second, part=(0.0, 1.0))), "the program sums them over"),
        ((first, replace(second, state_owner=1), third), "optimizer states of layer 0 are on n0/0"),
    ):
        with pytest.raises(InputError, match=reason):
            verify(replace(program, buckets=buckets), profile, cluster)


def test_each_device_steps_its_range() -> None:
    plan, profile, cluster = cut_in_two(link=Link(1.0, 8.0))
    whole = replace(plan, owner_ranges=(), state_owners=("n1/0", "n1/0"))
    first, other = (simulate_plan(each, profile, cluster) for each in (plan, whole))
    steps = [
        [event.end_s - event.start_s for event in trace.events if isinstance(event.instruction, Step)]
        for trace in (first, other)
    ]
    assert steps == [[1.0, 7.0], [0.0, 8.0]]  # 0.5 s a byte
    assert first.makespan_s < other.makespan_s


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ([(0, "n0/0", 0.0, 0.5)], r"owner_ranges has \[0, 0.5\) of layer 0; give two or more that cover"),
        ([(0, "n0/0", 0.0, 0.5), (0, "n1/0", 0.6, 1.0)], r"has \[0, 0.5\), \[0.6, 1\) of layer 0"),
        ([(0, "n0/0", 0.0, 0.5), (0, "n1/0", 0.5, 0.9)], "give two or more that cover"),
        ([(0, "n0/0", 0.0, 0.5), (0, "n0/0", 0.5, 1.0)], "'n0/0', which owns two ranges of layer 0"),
        ([(0, "n0/0", 0.0, 0.5), (0, "x/0", 0.5, 1.0)], "'x/0', which does not hold layer 0"),
        ([(0, "n1/0", 0.0, 0.5), (0, "n0/0", 0.5, 1.0)], r"state_owners\[0\] is 'n0/0', and 'n1/0' owns"),
        ([(0, "n1/0", 0.5, 1.0), (0, "n0/0", 0.0, 0.5)], "owner_ranges is not in order"),
        ([(0, "n0/0", 0.5, 0.5), (0, "n1/0", 0.5, 1.0)], r"owner_ranges has \[0.5, 0.5\) of layer 0; give a"),
        ([(7, "n0/0", 0.0, 0.5), (7, "n1/0", 0.5, 1.0)], "'n0/0', which does not hold layer 7"),
    ],
)
def test_wrong_ranges_are_refused(ranges: list[tuple[int, str, float, float]], reason: str) -> None:
    plan = cut_in_two()[0]
    keys = ("layer", "device", "start", "stop")
    data = json.loads(json.dumps(plan.to_json()))
    data["owner_ranges"] = [dict(zip(keys, each, strict=True)) for each in ranges]
    with pytest.raises(InputError, match=reason):
        plan_from_data(data, "plan.json")


def test_ranges_need_owners_and_no_hosts() -> None:
    plan = cut_in_two()[0]
    with pytest.raises(InputError, match="owner_ranges is given, and state_owners is not"):
        replace(plan, state_owners=None)
    stage = replace(plan.pipelines[0].stages[0], offload=("optimizer states",))
    pipelines = (replace(plan.pipelines[0], stages=(stage,)), plan.pipelines[1])
    with pytest.raises(InputError, match="hosts keep states of whole layers"):
        replace(plan, pipelines=pipelines)


def test_ranges_are_written_and_read_back_and_a_plan_without_has_the_hash_of_before() -> None:
    plan, profile, cluster = cut_in_two()
    assert plan_from_data(json.loads(json.dumps(plan.to_json())), "plan.json") == plan
    whole = replace(plan, owner_ranges=())
    assert "owner_ranges" not in whole.to_json()
    assert plan.sha256 != whole.sha256
    assert "(ZeRO-1, 1 layer in ranges)" in plan_sentences(plan, profile, cluster)[0]


def test_the_planner_cuts_a_layer_where_the_plan_fits_only_so() -> None:
    # The same on each of two devices: 20 bytes of weights and gradients, and half of the 20 of states.
    _, profile, cluster = replicas((8.0, 1.0, 1.0), (30.5, 30.5))
    problem = Problem(profile, cluster, 8, (1,))
    found = solve(problem, evaluator(profile, cluster))
    assert found.zero == 1 and len(found.pipelines) == 2 and found.owner_ranges
    assert fits(found, profile, cluster)
    whole = replace(problem, profile=replace(profile, whole_states=True))
    with pytest.raises(InfeasibleError, match="are missing"):
        solve(whole, evaluator(whole.profile, cluster))
