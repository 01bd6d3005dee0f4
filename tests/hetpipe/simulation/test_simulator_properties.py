"""Laws of the simulator on random programs of one pipeline whose links are not shared."""

import random
from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Link, Node
from cost_model.collectives import ring_all_reduce
from cost_model.network import Network, reserve
from cost_model.profile import ModelProfile
from cost_model.sum_times import all_reduce_due
from hetpipe.simulation.prediction import simulate_plan
from partition.plan import Pipeline, Plan, Stage
from random_problems import random_cluster, random_profile

SEEDS = range(25)
SLACK = 1 + 1e-9  # rounding


def random_case(seed: int) -> tuple[Plan, ModelProfile, Cluster]:
    """One pipeline over two to five devices of one node, where each pair has its own links; nothing tied."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    num_layers = rng.randint(count, 8)
    profile = random_profile(rng, num_layers)
    cluster = random_cluster(rng, count, 1e6)
    devices = tuple(replace(device, node="n") for device in cluster.devices)
    cuts = [0, *sorted(rng.sample(range(1, num_layers), count - 1)), num_layers]
    flights = sorted((rng.randint(1, 6) for _ in range(count)), reverse=True)
    stages = tuple(
        Stage((device.name,), (cuts[index], cuts[index + 1]), flights[index])
        for index, device in enumerate(devices)
    )
    samples = rng.randint(1, 20)
    plan = Plan("manual", "random", samples, (Pipeline(rng.choice([1, 2, 4]), samples, stages),))
    link = Link(rng.choice([0.0, 0.3]), rng.choice([0.5, 5.0, 100.0]))
    return plan, profile, Cluster("one node", link, (Node("n", devices),))


def step_s(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    return simulate_plan(plan, profile, cluster).makespan_s


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [1.1, 3.0])
def test_a_better_link_never_makes_a_step_slower(seed: int, factor: float):
    plan, profile, cluster = random_case(seed)
    given, link = step_s(plan, profile, cluster), cluster.network
    more = replace(cluster, network=replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s))
    less = replace(cluster, network=replace(link, latency_s=link.latency_s / factor))
    assert step_s(plan, profile, more) <= given * SLACK
    assert step_s(plan, profile, less) <= given * SLACK


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [1.1, 3.0])
def test_a_faster_device_never_makes_a_step_slower(seed: int, factor: float):
    plan, profile, cluster = random_case(seed)
    given = step_s(plan, profile, cluster)
    (node,) = cluster.nodes
    for index, device in enumerate(node.devices):
        devices = list(node.devices)
        devices[index] = replace(device, speed=factor * device.speed)
        faster = replace(cluster, nodes=(replace(node, devices=tuple(devices)),))
        assert step_s(plan, profile, faster) <= given * SLACK


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_is_its_messages_one_by_one(seed: int):
    """Whether its members share cards or not; resources that are busy before, too."""
    rng = random.Random(seed)
    cluster = random_cluster(rng, rng.randint(2, 8), 1.0)
    network = Network(cluster)
    names = [device.name for device in cluster.devices]
    if rng.random() < 0.5:  # members of a node apart in the ring share its cards
        rng.shuffle(names)
    free_at = [rng.choice([0.0, 5.0]) for _ in network.resources]
    expected_free_at = list(free_at)
    due = dict.fromkeys(names, 3.0)
    for messages in ring_all_reduce(7.3, names):
        arrived = {
            destination: reserve(expected_free_at, network.route(source, destination), due[source], size)
            for source, destination, size in messages
        }
        due = {name: max(due[name], arrived[name]) for name in names}
    assert all_reduce_due(free_at, network, 7.3, dict.fromkeys(names, 3.0)) == due
    assert free_at == expected_free_at
