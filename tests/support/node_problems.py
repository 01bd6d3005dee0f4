"""Small problems on nodes of equal devices, whose steps are found by hand."""

import random

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.problem import Problem

INSIDE = Link(0.0, 1e12)


def problem_of_nodes(
    kinds: dict[str, float],
    nodes: list[tuple[str, int]],
    *,
    network: Link,
    batch: int,
    num_layers: int = 8,
    parameter_bytes: float = 10e3,
    output_bytes: float = 0.0,
    memory_bytes: float = 1e9,
    sizes: tuple[int, ...] = (1,),
) -> Problem:
    """Layers of F 1 s and B 2 s on a kind of speed 1; nodes as (kind, devices), named n0, n1 and so on."""
    layers = tuple(
        LayerProfile(f"layer {index}", parameter_bytes, output_bytes, 1.0) for index in range(num_layers)
    )
    profiles = {
        kind: KindProfile(
            "measured",
            sizes,
            (LayerTimes(tuple(s / speed for s in sizes), tuple(2 * s / speed for s in sizes)),) * num_layers,
        )
        for kind, speed in kinds.items()
    }
    made = tuple(
        Node(f"n{n}", tuple(Device(f"n{n}/{d}", f"n{n}", kind, memory_bytes) for d in range(count)), INSIDE)
        for n, (kind, count) in enumerate(nodes)
    )
    profile = ModelProfile("even", 8, "float32", layers, profiles)
    return Problem(profile, Cluster("nodes", network, made), batch, sizes)


def random_sync_problem(seed: int) -> Problem:
    """Two kinds on nodes of four, whose network takes 5 to 100 % of the compute of a step for one sum."""
    rng = random.Random(seed)
    kinds = {"fast": 1.0, "slow": rng.uniform(0.2, 0.7)}
    nodes = [("fast", 4)] * 2 + [("slow", 4)] * rng.randint(1, 2)
    per_device = rng.choice((4, 8))
    batch, num_layers = 4 * len(nodes) * per_device, rng.choice((6, 10))
    sum_s = 3 * num_layers * per_device * rng.uniform(0.05, 1)
    parameter_bytes = 10e3
    return problem_of_nodes(
        kinds,
        nodes,
        network=Link(1e-4, 2 * num_layers * parameter_bytes / sum_s),
        batch=batch,
        num_layers=num_layers,
        output_bytes=parameter_bytes * rng.uniform(0.0, 0.02),
        memory_bytes=parameter_bytes * num_layers * rng.choice((3.0, 10.0)),
        sizes=(1, 2),
    )
