"""The rules of published systems: by hand, on random problems, and as programs that run."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program.verification import verify
from hetpipe.simulation.prediction import evaluator, predict
from partition.baselines.catalogue import BASELINES, PUBLISHED
from partition.baselines.drafts import MOST_DEVICES
from partition.baselines.flops_shares import filled
from partition.baselines.layer_splits import whale_pp
from partition.baselines.strategy import TooManyDevicesError
from partition.baselines.virtual_workers import equal_distribution, hybrid_distribution, node_partition
from partition.estimates.batch_split import in_proportion
from partition.estimates.plan_memory import plan_memory
from partition.plan import Plan
from partition.problem import Problem
from random_problems import frozen_below, random_problem, with_ample_memory

FAST = Link(0.0, 1e9)
QUICK = LayerTimes((1.0, 1.5, 2.5), (2.0, 3.0, 5.0))
"""A microbatch of 1, 2 and 4 samples on one layer: 3, 4.5 and 7.5 s."""


def lab(
    nodes: Sequence[Sequence[float]], batch: int, *, layers: int = 4, memory_bytes: float = 1e6
) -> Problem:
    """Nodes of devices of these speeds; layers of QUICK, 4 bytes of states and 1 saved a sample."""
    profile = ModelProfile(
        model="lab",
        sequence_length=8,
        dtype="float32",
        layers=tuple(LayerProfile(f"layer {index}", 1.0, 0.0, 1.0) for index in range(layers)),
        kinds={"kind": KindProfile("measured", (1, 2, 4), (QUICK,) * layers)},
    )
    made = tuple(
        Node(
            name, tuple(Device(f"{name}/{k}", name, "kind", memory_bytes, speed=s) for k, s in enumerate(row))
        )
        for name, row in zip("abcdefgh", nodes, strict=False)
    )
    return Problem(profile, Cluster("lab", FAST, made), batch, (1, 2, 4))


def with_memory(problem: Problem, memory_bytes: Sequence[float]) -> Problem:
    """The problem of one node with these memories."""
    (node,) = problem.cluster.nodes
    devices = tuple(
        replace(device, memory_bytes=size) for device, size in zip(node.devices, memory_bytes, strict=True)
    )
    return replace(problem, cluster=replace(problem.cluster, nodes=(replace(node, devices=devices),)))


def shares(plan: Plan) -> list[tuple[str, int, int]]:
    """(device, samples, microbatch size) of pipelines of one stage."""
    assert all(len(entry.stages) == 1 for entry in plan.pipelines)
    return [(entry.stages[0].device, entry.num_samples, entry.microbatch_size) for entry in plan.pipelines]


def places(plan: Plan) -> list[list[tuple[str, tuple[int, int]]]]:
    return [[(stage.device, stage.layers) for stage in entry.stages] for entry in plan.pipelines]


def test_poplar_plans_where_a_larger_microbatch_was_measured_to_be_sooner():
    problem = replace(lab([[1.0, 1.0]], 8), any_size=True)
    sooner = LayerTimes((2.0, 1.0, 2.5), (4.0, 2.0, 5.0))
    kind = KindProfile("measured", (1, 2, 4), (sooner,) * 4)
    noisy = replace(problem, profile=replace(problem.profile, kinds={"kind": kind}))
    for name in ("poplar-2", "poplar-3"):
        assert sum(samples for _, samples, _ in shares(BASELINES[name](noisy, None))) == 8


def test_poplar_0_runs_each_device_at_its_peak():
    # both are fastest at 4 samples, a/1 holds 2: 30 / 4 = 7.5 s a sample, and 18 / 2 / 2 = 4.5 s
    problem = with_memory(lab([[1.0, 2.0]], 16), [1e6, 4 * (4 + 2)])
    assert shares(BASELINES["poplar-0"](problem, None)) == [("a/0", 6, 4), ("a/1", 10, 2)]


def test_poplar_1_has_room_for_larger_microbatches():
    # 8 bytes of weights and gradients, 8 of optimizer states, a sample saves 4: 20 bytes hold one sample, and
    # with half the states on each three
    problem = with_memory(lab([[1.0, 1.0]], 8), [20.0, 20.0])
    assert shares(BASELINES["poplar-0"](problem, None)) == [("a/0", 4, 1), ("a/1", 4, 1)]
    plan = BASELINES["poplar-1"](problem, None)
    assert shares(plan) == [("a/0", 4, 2), ("a/1", 4, 2)]
    assert plan.zero == 1 and plan.state_owners == ("a/0", "a/0", "a/1", "a/1")


@pytest.mark.parametrize("zero", [2, 3])
def test_poplar_2_and_3_run_equally_many_rounds(zero):
    # a/0 is twice as fast: in the seconds of 4 samples on it a/1 computes 2, so that 18 samples are 3 rounds
    plan = BASELINES[f"poplar-{zero}"](lab([[2.0, 1.0]], 18), None)
    assert plan.zero == zero and plan.state_owners is not None
    assert len({pipeline.num_microbatches for pipeline in plan.pipelines}) == 1
    assert sum(pipeline.num_samples for pipeline in plan.pipelines) == 18
    fast, slow = plan.pipelines
    assert fast.microbatch_size > slow.microbatch_size


@pytest.mark.parametrize(("name", "least"), [("0", 40), ("1", 32), ("2", 29), ("3", 26)])
def test_poplar_needs_less_memory_the_more_is_sharded(name, least):
    # 8 layers of 1 byte; gradients 1, states 2, a sample saves 1 in each: 8 + 8 + 16 + 8 = 40 bytes. States
    # halved: 32. Of gradients 4 owned ones and that of the last layer, while all is saved: 29. Of weights 4
    # owned ones and one fetched, where each device owns every other layer: 26.
    def plan(memory: float) -> Plan:
        problem = with_memory(lab([[1.0, 1.0]], 8, layers=8), [memory, memory])
        return BASELINES[f"poplar-{name}"](problem, None)

    assert plan(least).zero == int(name)
    with pytest.raises(InfeasibleError):
        plan(least - 1)


def test_whale_shares_by_speed_and_moves_what_does_not_fit():
    assert shares(BASELINES["whale-dp"](lab([[2.0, 1.0]], 6), None)) == [("a/0", 4, 4), ("a/1", 2, 2)]
    # a/0 holds one sample: one step of 1 + 4, so 6 samples are two steps of 1 + 2
    problem = with_memory(lab([[2.0, 1.0]], 6), [4 * (4 + 1), 1e6])
    assert shares(BASELINES["whale-dp"](problem, None)) == [("a/0", 2, 1), ("a/1", 4, 2)]


def test_what_has_no_room_goes_to_the_others_in_proportion():
    assert filled([3.0, 1.0, 1.0], [2, 9, 9], 10) == [2, 4, 4]
    rng = random.Random(1)
    for _ in range(200):
        count = rng.randint(1, 6)
        room = [rng.randint(1, 9) for _ in range(count)]
        total = rng.randint(1, sum(room))
        found = filled([rng.uniform(0.1, 5) for _ in range(count)], room, total)
        assert sum(found) == total and all(0 <= own <= most for own, most in zip(found, room, strict=True))


def test_whole_numbers_in_proportion_are_off_by_less_than_one():
    rng = random.Random(2)
    for _ in range(200):
        weights, total = [rng.uniform(0.01, 5) for _ in range(rng.randint(1, 7))], rng.randint(0, 50)
        found = in_proportion(weights, total)
        assert sum(found) == total
        exact = [total * weight / sum(weights) for weight in weights]
        assert all(abs(own - amount) < 1 for own, amount in zip(found, exact, strict=True))


def test_whale_moves_layers_to_the_device_with_room_that_is_used_least():
    # by speed 4 : 2 : 2 layers, but 18 bytes hold 3 layers of 5 and 3 further ones take the first's
    problem = with_memory(replace(lab([[2.0, 1.0, 1.0]], 4, layers=8), microbatch_sizes=(1,)), [18.0] * 3)
    (stages,) = places(whale_pp(problem))
    assert stages == [("a/0", (0, 3)), ("a/1", (3, 6)), ("a/2", (6, 8))]


def test_hap_gives_every_device_samples_by_speed():
    assert shares(BASELINES["hap"](lab([[3.0, 1.0]], 8), None)) == [("a/0", 6, 3), ("a/1", 2, 2)]
    with pytest.raises(InfeasibleError, match=r"hap: layers \[0, 4\) need 20 bytes on 'a/1'"):
        BASELINES["hap"](with_memory(lab([[3.0, 1.0]], 8), [1e6, 19.0]), None)


def test_cephalo_takes_whole_microbatches_that_end_soonest_all_in_one_pass():
    # 4 samples take 30 s on a/0 and 15 s on a/1: 4 and 8 of 12 end together
    plan = BASELINES["cephalo"](lab([[1.0, 2.0]], 12), None)
    assert shares(plan) == [("a/0", 4, 4), ("a/1", 8, 4)] and plan.zero == 3
    assert [pipeline.in_flight(0) for pipeline in plan.pipelines] == [1, 2]


def test_cephalo_lets_a_fast_small_device_compute_much_and_hold_nothing():
    # 16 bytes of states, a sample saves 4: a/0 holds no model. Four samples there: 16 bytes, the weights of
    # two layers and gradients of one. a/1 owns all of it, and computes one sample.
    problem = with_memory(lab([[4.0, 1.0]], 5), [19.0, 20.0])
    for name in ("poplar-0", "whale-dp"):
        with contextlib.suppress(InfeasibleError):
            assert "a/0" not in BASELINES[name](problem, None).device_names
    plan = BASELINES["cephalo"](problem, None)
    assert shares(plan) == [("a/0", 4, 4), ("a/1", 1, 1)]
    assert plan.state_owners == ("a/1",) * 4


def test_cephalo_passes_in_groups_where_not_all_fits_at_once():
    # beside 16 / 2 bytes of states, and what is fetched, no device of 27 bytes has room for all its 8 samples
    plan = BASELINES["cephalo"](with_memory(lab([[1.0, 1.0]], 16), [27.0, 27.0]), None)
    assert [pipeline.num_samples for pipeline in plan.pipelines] == [8, 8]
    flights = [(pipeline.in_flight(0), pipeline.stages[0].recompute) for pipeline in plan.pipelines]
    assert all(again or flight * 4 < 8 for flight, again in flights)


def test_cephalo_shards_states_alone_where_weights_cannot_be_sharded():
    assert BASELINES["cephalo"](lab([[1.0]], 4), None).zero == 1
    travels = replace(lab([[1.0, 2.0]], 12), gradient_dtype="bf16")
    assert BASELINES["cephalo"](travels, None).zero == 1


def test_virtual_workers_of_hetpipe():
    cluster = lab([[4.0, 4.0], [3.0, 3.0], [2.0, 2.0], [1.0, 1.0]], 8).cluster

    def names(workers):
        return ["".join(device.name.replace("/", "") for device in worker) for worker in workers]

    assert names(node_partition(cluster)) == ["a0a1", "b0b1", "c0c1", "d0d1"]
    assert names(equal_distribution(cluster)) == ["a0b0c0d0", "a1b1c1d1"]
    hybrid = hybrid_distribution(cluster, lambda device: device.speed)
    assert names(hybrid) == ["a0d0", "a1d1", "b0c0", "b1c1"]


def test_a_node_without_its_like_is_left_alone_and_one_device_makes_one_worker():
    def names(nodes):
        workers = hybrid_distribution(lab(nodes, 8).cluster, lambda device: device.speed)
        return ["".join(device.name.replace("/", "") for device in worker) for worker in workers]

    assert names([[1.0, 1.0], [2.0], [3.0]]) == ["c0a0a1", "b0"] or names([[1.0], [2.0], [3.0]]) == [
        "c0a0",
        "b0",
    ]
    assert names([[1.0], [2.0], [3.0]]) == ["c0a0", "b0"]


def test_a_worker_has_the_order_and_cuts_that_are_soonest():
    plan = BASELINES["hetpipe-ed"](lab([[3.0, 3.0], [1.0, 1.0]], 8), None)
    # three of four layers on the fast one, which is first or last; 4 samples each
    assert [entry.num_samples for entry in plan.pipelines] == [4, 4]
    assert all(
        {s.device[0]: s.num_layers for s in entry.stages} == {"a": 3, "b": 1} for entry in plan.pipelines
    )


def test_hexiscale_deals_a_node_out_and_cuts_by_memory():
    # layers of 5 bytes on 18 and 6: no device holds all four, a fast and a slow one do, and take 3 s each
    problem = replace(lab([[3.0, 3.0], [1.0, 1.0]], 8), microbatch_sizes=(1,))
    big, small = problem.cluster.nodes
    nodes = tuple(
        replace(node, devices=tuple(replace(device, memory_bytes=size) for device in node.devices))
        for node, size in ((big, 18.0), (small, 6.0))
    )
    plan = BASELINES["hexiscale"](replace(problem, cluster=replace(problem.cluster, nodes=nodes)), None)
    assert places(plan) == [
        [(f"a/{index}", (0, 3)), (f"b/{index}", (3, 4))] for index in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [5, 7, 10, 11, 14])
@pytest.mark.parametrize("speeds", [[2.0, 1.0], [1.0, 1.2], [3.0, 1.0]])
def test_poplar_finds_the_rounds_of_any_sizes_that_are_over_soonest(batch: int, speeds: list[float]):
    problem = replace(lab([speeds], batch), any_size=True)
    seconds = {0: 0.0, 1: 3.0, 2: 4.5, 3: 6.0, 4: 7.5}  # of a layer; 3 was not profiled

    def rounds_s(sizes: Sequence[int]) -> float:
        longest = max(4 * seconds[size] / speed for size, speed in zip(sizes, speeds, strict=True))
        return -(-batch // sum(sizes)) * longest

    least = min(rounds_s((a, b)) for a in range(5) for b in range(5) if a + b)
    sizes = {name: size for name, _, size in shares(BASELINES["poplar-2"](problem, None))}
    assert rounds_s([sizes.get("a/0", 0), sizes.get("a/1", 0)]) == pytest.approx(least)


@pytest.mark.parametrize(("name", "least"), [("poplar-2", 19), ("poplar-3", 17)])
def test_poplar_lets_a_slow_device_take_part_whose_memory_is_needed(name: str, least: int):
    """Two and three devices need two rounds of four samples each; of three each owns two layers."""
    problem = replace(lab([[1.0, 0.9, 0.8]], 4, layers=6), microbatch_sizes=(1,))
    assert len(shares(BASELINES[name](with_memory(problem, [least] * 3), None))) == 3
    assert len(shares(BASELINES[name](with_memory(problem, [least + 3] * 3), None))) == 2
    with pytest.raises(InfeasibleError):
        BASELINES[name](with_memory(problem, [least - 1] * 3), None)


def test_zorse_makes_a_stage_of_a_node_and_shares_by_speed():
    # 14 bytes hold two layers of four: two stages, 2 : 2; in the first the fast device has 2/3 of 6 samples
    problem = replace(lab([[2.0, 1.0], [3.0]], 6, memory_bytes=14.0), microbatch_sizes=(1,))
    plan = BASELINES["zorse"](problem, None)
    assert places(plan) == [
        [("a/0", (0, 2)), ("b/0", (2, 4))],
        [("a/1", (0, 2)), ("b/0", (2, 4))],
    ]  # fmt: skip
    assert [entry.num_samples for entry in plan.pipelines] == [4, 2]


def test_zorse_shards_states_inside_a_stage_where_nothing_else_fits():
    # four layers of 4 bytes and a saved one: 20 bytes hold the model, 18 with half of the states
    problem = replace(lab([[1.0, 1.0]], 4, memory_bytes=18.0), microbatch_sizes=(1,))
    plan = BASELINES["zorse"](problem, None)
    assert plan.zero == 1 and plan.state_owners == ("a/0", "a/0", "a/1", "a/1")
    assert BASELINES["zorse"](lab([[1.0, 1.0]], 4), None).zero == 0


def test_zorse_shards_gradients_too_where_sharded_states_do_not_fit():
    # weights 4, states 4 of two layers, saved 4: with all gradients 16 bytes; with two of its own, and one of
    # another layer in the backward of the last, 15
    problem = replace(lab([[1.0, 1.0]], 4, memory_bytes=15.5), microbatch_sizes=(1,))
    plan = BASELINES["zorse"](problem, None)
    assert plan.zero == 2 and set(plan.state_owners or ()) == {"a/0", "a/1"}
    assert [entry.num_samples for entry in plan.pipelines] == [2, 2]
    verify(predict(plan, problem.profile, problem.cluster).program, problem.profile, problem.cluster)


def test_zorse_has_no_such_plan_for_devices_that_serve_several_pipelines():
    # two stages, of which the second takes what both devices of the first give
    problem = replace(lab([[2.0, 1.0], [3.0]], 6, memory_bytes=9.0), microbatch_sizes=(1,))
    with pytest.raises(InfeasibleError, match=r"zorse: layers .* need 12 bytes .* 3 are missing"):
        BASELINES["zorse"](problem, None)


def test_heterog_places_the_layers_that_are_costly_to_sum_and_replicates_the_others():
    problem = with_memory(lab([[1.0, 1.0]], 8), [1e9] * 2)
    problem = replace(problem, cluster=replace(problem.cluster, network=Link(0.0, 1e3)))
    evaluate = evaluator(problem.profile, problem.cluster)
    assert BASELINES["heterog"](problem, evaluate).num_holders == (2, 2, 2, 2)
    # nearly all parameters in the last layer: to sum them would take 1,000 s of 1e6 bytes over 1e3 bytes/s
    layers = [*problem.profile.layers[:3], replace(problem.profile.layers[3], parameter_bytes=1e6)]
    costly = replace(problem, profile=replace(problem.profile, layers=tuple(layers)))
    assert BASELINES["heterog"](costly, evaluator(costly.profile, costly.cluster)).num_holders[3] == 1


@pytest.mark.parametrize("name", ["heterog", "zorse"])
def test_plans_that_share_devices_are_made_for_few(name: str):
    problem = lab([[1.0] * (MOST_DEVICES + 1)], 64)
    with pytest.raises(TooManyDevicesError, match=f"{name}: 33 devices; .* exclude 1 or"):
        BASELINES[name](problem, None)


def test_a_worker_of_more_devices_than_layers_is_said():
    with pytest.raises(TooManyDevicesError, match="hetpipe-np: a virtual worker of 5 devices for"):
        BASELINES["hetpipe-np"](lab([[1.0] * 5], 8), None)


@pytest.mark.parametrize("seed", range(24))
def test_plans_fit_hold_every_sample_and_make_a_program_that_runs(seed: int):
    problem = random_problem(seed)
    if seed % 2:
        problem = with_ample_memory(problem)
    if seed % 3 == 0:
        problem = replace(problem, profile=frozen_below(problem.profile, 2))
    for batch in (1, 2, 13):
        asked = replace(problem, global_batch_size=batch)
        for name, strategy in PUBLISHED.items():
            try:
                plan = strategy(asked, None)
            except (InfeasibleError, TooManyDevicesError) as error:
                assert str(error).startswith(f"{name}: ")
                continue
            assert plan.strategy == name
            assert sum(entry.num_samples for entry in plan.pipelines) == batch
            for device in plan.device_names:
                usable_bytes = asked.cluster.device(device).usable_bytes
                assert plan_memory(plan, asked.profile, device).total_bytes <= usable_bytes * (1 + 1e-12)
            verify(predict(plan, asked.profile, asked.cluster).program, asked.profile, asked.cluster)
