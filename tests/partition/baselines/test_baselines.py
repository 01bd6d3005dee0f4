"""Data parallelism and PipeDream: by hand, on random problems, and against brute force."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.simulation.prediction import evaluator, predict
from partition.baselines.catalogue import BASELINES
from partition.baselines.data_parallel import ddp, poplar
from partition.baselines.pipedream import (
    EqualDevices,
    ReplicatedStage,
    pipedream,
    refinement,
    replicated_stages,
)
from partition.baselines.strategy import TooManyDevicesError
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import plan_memory
from partition.estimates.timed_pipeline import TimedStage, TimingCache
from partition.plan import Plan
from partition.problem import Problem
from random_problems import random_problem, with_ample_memory

NEW = ("ddp", "poplar", "pipedream")
BATCHES = (1, 2, 13, 97)  # fewer samples than devices, and primes


def alike(
    speeds: list[float],
    batch: int,
    sizes: tuple[int, ...] = (1,),
    memory_bytes: float = 100.0,
    layers: int = 4,
) -> Problem:
    """Layers of 1 s forward, 2 s backward a sample, 4 bytes of states and 1 byte saved; no boundaries."""
    times = LayerTimes((1.0, 2.0), (2.0, 4.0))
    profile = ModelProfile(
        model="alike",
        sequence_length=8,
        dtype="float32",
        layers=tuple(LayerProfile(f"layer {index}", 1.0, 0.0, 1.0) for index in range(layers)),
        kinds={"kind": KindProfile("measured", (1, 2), (times,) * layers)},
    )
    devices = tuple(
        Device(f"a/{index}", "a", "kind", memory_bytes, speed=speed) for index, speed in enumerate(speeds)
    )
    return Problem(profile, Cluster("lab", Link(0.0, 1e9), (Node("a", devices),)), batch, sizes)


def shares(plan: Plan) -> list[tuple[str, int, int]]:
    """(device, samples, microbatch size) of pipelines of one stage."""
    assert all(len(entry.stages) == 1 for entry in plan.pipelines)
    return [(entry.stages[0].device, entry.num_samples, entry.microbatch_size) for entry in plan.pipelines]


def compute_s(problem: Problem, plan: Plan) -> float:
    """When the last of the devices, each with the whole model, has computed."""
    shop, layers = TimingCache(PipelineCosts(problem)), problem.profile.num_layers
    return max(
        shop.pipeline([TimedStage(problem.cluster.device(device), 0, layers)], size).timing.time_s(samples)
        for device, samples, size in shares(plan)
    )


def test_ddp_gives_equal_shares_in_microbatches_of_one_size():
    assert shares(ddp(alike([2.0, 1.0], 7, (1, 2)))) == [("a/0", 4, 1), ("a/1", 3, 1)]


def test_ddp_takes_the_size_that_the_slowest_device_prefers():
    problem = alike([2.0, 1.0], 8, (1, 2))
    quick = LayerTimes((1.0, 1.5), (2.0, 3.0))  # two samples in less than twice the time
    kinds = {"kind": replace(problem.profile.kinds["kind"], layers=(quick,) * 4)}
    problem = replace(problem, profile=replace(problem.profile, kinds=kinds))
    assert shares(ddp(problem)) == [("a/0", 4, 2), ("a/1", 4, 2)]


def test_ddp_takes_a_size_that_fits_every_class():
    quick = LayerTimes((1.0, 1.5), (2.0, 3.0))
    problem = alike([2.0, 1.0], 8, (1, 2))
    kinds = {"kind": replace(problem.profile.kinds["kind"], layers=(quick,) * 4)}
    big, small = problem.cluster.devices
    # 20 bytes with one sample, 24 with two, which would be faster on both
    for devices in ((replace(big, memory_bytes=22.0), small), (big, replace(small, memory_bytes=22.0))):
        cluster = replace(problem.cluster, nodes=(Node("a", devices),))
        tight = replace(problem, cluster=cluster, profile=replace(problem.profile, kinds=kinds))
        assert shares(ddp(tight)) == [("a/0", 4, 1), ("a/1", 4, 1)]


def test_ddp_names_the_device_that_lacks_most():
    # 4 layers of 4 bytes of states and 1 saved: 20 bytes
    with pytest.raises(InfeasibleError, match=r"ddp: layers \[0, 4\) need 20 bytes on 'a/0'") as caught:
        ddp(alike([1.0, 1.0], 4, memory_bytes=17.0))
    assert (caught.value.device, caught.value.missing_bytes) == ("a/0", 3.0)


def test_ddp_needs_a_sample_for_each_device():
    with pytest.raises(InfeasibleError, match="ddp: 2 samples for 3 devices") as caught:
        ddp(alike([1.0] * 3, 2))
    assert caught.value.missing_bytes == 0


def test_poplar_shares_by_speed():
    # speeds 3 : 2 : 1, 12 samples of 12 s: all end after 24 s
    assert shares(poplar(alike([3.0, 2.0, 1.0], 12))) == [("a/0", 6, 1), ("a/1", 4, 1), ("a/2", 2, 1)]


def test_poplar_gives_slow_devices_nothing_of_few_samples():
    assert shares(poplar(alike([1.0, 8.0], 3))) == [("a/1", 3, 1)]


def test_poplar_leaves_out_devices_that_are_too_small():
    problem = alike([1.0, 1.0], 4)
    (node,) = problem.cluster.nodes
    small = replace(node, devices=(node.devices[0], replace(node.devices[1], memory_bytes=19.0)))
    problem = replace(problem, cluster=replace(problem.cluster, nodes=(small,)))
    assert shares(poplar(problem)) == [("a/0", 4, 1)]
    with pytest.raises(InfeasibleError, match=r"poplar: .* 'a/0', .* 3 bytes are missing"):
        poplar(alike([1.0, 1.0], 4, memory_bytes=17.0))


@pytest.mark.parametrize("seed", range(40))
def test_poplar_is_never_slower_than_ddp(seed: int):
    problem = with_ample_memory(random_problem(seed))
    for batch in (5, 13, 97):
        asked = replace(problem, global_batch_size=batch, microbatch_sizes=(1, 2, 4))
        assert compute_s(asked, poplar(asked)) <= compute_s(asked, ddp(asked)) * (1 + 2e-5)


@pytest.mark.parametrize("seed", range(40))
def test_plans_fit_and_hold_every_sample_and_run(seed: int):
    problem = random_problem(seed)
    for batch in BATCHES:
        asked = replace(problem, global_batch_size=batch)
        for name in NEW:
            try:
                plan = BASELINES[name](asked, None)
            except InfeasibleError as error:
                assert str(error).startswith(f"{name}: ")
                assert error.missing_bytes > 0 or batch < len(asked.cluster.devices)
                continue
            assert plan.strategy == name
            assert sum(entry.num_samples for entry in plan.pipelines) == batch
            for device in plan.device_names:
                usable_bytes = asked.cluster.device(device).usable_bytes
                assert plan_memory(plan, asked.profile, device).total_bytes <= usable_bytes * (1 + 1e-12)
            if batch < 97:
                assert predict(plan, asked.profile, asked.cluster).step_s > 0


@pytest.mark.parametrize("seed", range(10))
def test_the_simulator_chooses_among_few(seed: int):
    problem, asked = with_ample_memory(random_problem(seed)), []
    simulate = evaluator(problem.profile, problem.cluster)
    for name, strategy in BASELINES.items():
        if name != "single" and len(problem.cluster.devices) > problem.profile.num_layers:
            continue
        if name == "ddp" and len(problem.cluster.devices) > problem.global_batch_size:
            continue
        asked.clear()
        strategy(problem, lambda plan: (asked.append(plan), simulate(plan))[1])
        assert len(asked) <= 2


def test_pipedream_replicates_a_long_stage():
    # 1 s and 2 s of compute, three devices: periods of 1 s with the second layer twice
    devices = EqualDevices(3, 9, layer_s=(1.0, 2.0), sync_s=(5.0, 0.1), hop_s=(0.0, 0.2))
    assert replicated_stages(devices) == (ReplicatedStage(0, 1, 1), ReplicatedStage(1, 2, 2))


def test_pipedream_is_data_parallel_where_gradients_are_cheap():
    devices = EqualDevices(3, 9, layer_s=(1.0, 2.0), sync_s=(0.0, 0.0), hop_s=(0.0, 9.0))
    assert replicated_stages(devices) == (ReplicatedStage(0, 2, 3),)


def test_shares_of_two_and_three_replicas_are_refined():
    problem = alike([1.0] * 5, 12)
    stages = (ReplicatedStage(0, 2, 2), ReplicatedStage(2, 4, 3))
    draft = refinement(problem, stages, 4, 1)
    places = [tuple(stage.device.name for stage in entry.stages) for entry in draft]
    assert places == [("a/0", "a/2"), ("a/0", "a/3"), ("a/1", "a/3"), ("a/1", "a/4")]
    assert [(entry.num_samples, entry.microbatch_size) for entry in draft] == [(4, 4), (2, 2), (2, 2), (4, 4)]


def test_shares_of_whole_microbatches():
    problem = alike([1.0] * 3, 11)
    draft = refinement(problem, (ReplicatedStage(0, 4, 3),), 2, 2)
    assert [entry.num_samples for entry in draft] == [4, 4, 3]


def test_pipedream_cuts_where_the_least_memory_does_not_hold_the_model():
    # two layers: 8 bytes of states, 2 a microbatch; replicas of the whole model would need 20 bytes
    plan = pipedream(alike([1.0, 1.0], 8, memory_bytes=12.0))
    assert [stage.layers for stage in plan.pipelines[0].stages] == [(0, 2), (2, 4)]


def test_pipedream_names_what_is_missing():
    with pytest.raises(InfeasibleError, match=r"pipedream: .* need 20 bytes on 'a/0', .* 11 are") as caught:
        pipedream(alike([1.0], 8, memory_bytes=9.0))
    assert (caught.value.device, caught.value.missing_bytes) == ("a/0", 11.0)


def test_pipedream_asks_the_simulator_for_what_it_is_soon_done_with():
    """Three devices for two stages, of which one has two replicas: both pipelines share a device."""
    asked: list[Plan] = []

    def planned(samples: int) -> Plan:
        problem = alike([1.0] * 3, samples, memory_bytes=16.0)
        simulate = evaluator(problem.profile, problem.cluster)
        return pipedream(problem, lambda plan: (asked.append(plan), simulate(plan))[1])

    assert len(planned(12).pipelines) == 2
    assert 1 <= len(asked) <= 2
    asked.clear()
    with pytest.raises(TooManyDevicesError, match=r"^pipedream: a step of its plan is some 4,800,000"):
        planned(600_000)
    assert not asked


def test_pipedream_plans_stages_that_share_devices_by_name():
    plan = pipedream(alike([1.0] * 3, 12, layers=3))
    assert set(plan.device_names) == {"a/0", "a/1", "a/2"}
    assert sum(entry.num_samples for entry in plan.pipelines) == 12


def all_stages(num_layers: int, num_devices: int, most: int) -> Iterator[tuple[ReplicatedStage, ...]]:
    for count in range(1, num_layers + 1):
        for inner in combinations(range(1, num_layers), count - 1):
            edges = (0, *inner, num_layers)
            for replicas in product(range(1, min(most, num_devices) + 1), repeat=count):
                if sum(replicas) <= num_devices:
                    yield tuple(map(ReplicatedStage, edges, edges[1:], replicas))


@pytest.mark.parametrize("seed", range(60))
def test_pipedream_has_the_least_period(seed: int):
    rng = random.Random(seed)
    layers, count = rng.randint(1, 5), rng.randint(1, 6)
    devices = EqualDevices(
        num_devices=count,
        most_replicas=rng.randint(1, 6),
        layer_s=tuple(rng.choice([0.0, rng.uniform(0.1, 3)]) for _ in range(layers)),
        sync_s=tuple(rng.uniform(0, rng.choice([0.01, 2.0])) for _ in range(layers)),
        hop_s=(0.0, *(rng.uniform(0, 2) for _ in range(layers - 1))),
    )
    found = replicated_stages(devices)
    every = list(all_stages(layers, count, devices.most_replicas))
    assert found in every
    least_s = min(map(devices.period_s, every))
    assert devices.period_s(found) == pytest.approx(least_s, rel=1e-8, abs=1e-290)
    near = [stages for stages in every if devices.period_s(stages) <= least_s * (1 + 1e-12)]
    fewest = min(sum(stage.num_replicas for stage in stages) for stages in near)
    assert sum(stage.num_replicas for stage in found) == fewest
