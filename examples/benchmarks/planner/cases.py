"""Random planning problems: unequal clusters and models with heavy ends."""

import numpy as np

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.problem import Problem

SIZES = (1, 2, 4, 8, 16)
GBIT = 1e9 / 8


def random_case(seed: int, *, devices: int | None = None) -> tuple[Problem, bool]:
    """A cluster of 2 to 64 devices and a model of 12 to 98 layers; also whether memory is tight.

    2 to 6 kinds up to eight times apart in speed, links of 1 to 100 Gbit/s, at least 8 samples per device.
    Tight: a device holds 12 to 70 % of the model with four samples in flight; ample: 110 to 300 %.
    """
    rng = np.random.default_rng(seed)
    num_devices = devices or round(2 ** rng.uniform(1, 6))
    num_kinds = int(min(rng.integers(2, 7), num_devices))
    num_layers = round(12 * (98 / 12) ** rng.uniform())
    layers = _layers(rng, num_layers)
    work = np.ones(num_layers) * 10 ** rng.uniform(-2.5, -1.5)
    if rng.random() < 0.3:
        work *= rng.uniform(0.5, 1.5, num_layers)
    work[0] *= rng.uniform(0.05, 0.3)
    work[-1] *= rng.uniform(0.5, 4)
    speeds = 8 ** -rng.uniform(0, 1, num_kinds)
    speeds /= speeds.max()
    kinds = {f"kind-{kind}": _kind(rng, work / speeds[kind]) for kind in range(num_kinds)}
    profile = ModelProfile(f"random-{seed}", 128, "float32", layers, kinds)
    cuts = np.sort(rng.choice(np.arange(1, num_devices), num_kinds - 1, replace=False))
    counts = np.diff([0, *cuts, num_devices])
    tight = bool(rng.random() < 0.5)
    states = sum(4 * layer.parameter_bytes for layer in layers)
    saved = sum(layer.saved_bytes_per_sample for layer in layers)
    bounds = (np.log(0.12), np.log(0.7)) if tight else (np.log(1.1), np.log(3))
    memory = (states + 4 * saved) * np.exp(rng.uniform(*bounds, num_kinds))
    least = 1.6 * (states + 2 * saved)
    memory *= max(1.0, least / float((memory * counts).sum()))
    gbit = 10 ** rng.uniform(0, 2)
    nodes = _nodes(rng, counts, memory, max(gbit, rng.uniform(60, 400)) * GBIT)
    cluster = Cluster(f"random-{seed}", Link(50e-6, gbit * GBIT), nodes)
    batch = round(num_devices * 2 ** rng.uniform(3, 5.5))
    return Problem(profile, cluster, batch, SIZES), tight


def regular_case(
    num_devices: int, num_kinds: int, num_layers: int, *, samples: int | None = None, seed: int = 0
) -> Problem:
    """Equally many devices of each kind on nodes of 4 to 8, memory tight; samples: 16 per device if None."""
    rng = np.random.default_rng(seed)
    layers = _layers(rng, num_layers)
    work = np.full(num_layers, 0.01)
    work[0], work[-1] = 0.002, 0.02
    speeds = np.geomspace(1, 1 / 8, num_kinds)
    kinds = {f"kind-{kind}": _kind(rng, work / speeds[kind]) for kind in range(num_kinds)}
    profile = ModelProfile("regular", 128, "float32", layers, kinds)
    counts = np.full(num_kinds, num_devices // num_kinds)
    states = sum(4 * layer.parameter_bytes for layer in layers)
    saved = sum(layer.saved_bytes_per_sample for layer in layers)
    memory = (states + 4 * saved) * np.geomspace(0.7, 0.2, num_kinds)
    nodes = _nodes(rng, counts, memory, 25e9, size=min(4 if num_devices <= 64 else 8, int(counts[0])))
    cluster = Cluster("regular", Link(50e-6, 25 * GBIT), nodes)
    return Problem(profile, cluster, samples or 16 * num_devices, SIZES)


def equal_case(seed: int) -> Problem:
    """2 to 8 equal devices, each on a node of its own, 2 to 16 samples, links of 0.1 to 20 Gbit/s.

    Odd seeds: 1.4 to 3 times the memory of the model in all; even ones: each device holds it.
    """
    rng = np.random.default_rng(1000 + seed)
    num_devices = int(rng.choice([2, 3, 4, 6, 8]))
    num_layers = int(rng.integers(2 * num_devices, 33))
    layers = _layers(rng, num_layers)
    work = np.ones(num_layers) * 10 ** rng.uniform(-2.5, -1.5)
    work[0] *= 0.2
    work[-1] *= rng.uniform(0.5, 2)
    profile = ModelProfile(f"few-{seed}", 128, "float32", layers, {"kind-0": _kind(rng, work)})
    states = sum(4 * layer.parameter_bytes for layer in layers)
    saved = sum(layer.saved_bytes_per_sample for layer in layers)
    memory = (states + 4 * saved) * (rng.uniform(1.4, 3) / num_devices if seed % 2 else rng.uniform(1.1, 2))
    gbit = 10 ** rng.uniform(-1, 1.3)
    nodes = _nodes(rng, np.array([num_devices]), np.array([memory]), 1e10, size=1)
    batch = int(rng.choice([2, 4, 8, 16]))
    sizes = tuple(size for size in SIZES[:4] if size <= batch)
    return Problem(profile, Cluster(f"equal-{seed}", Link(50e-6, gbit * GBIT), nodes), batch, sizes)


def _layers(rng: np.random.Generator, num_layers: int) -> tuple[LayerProfile, ...]:
    """Equal blocks between an embedding and a head that are up to five times as large."""
    parameters = np.ones(num_layers) * 4 * 10 ** rng.uniform(6.5, 7.5)
    saved = np.ones(num_layers) * 10 ** rng.uniform(7, 8)
    parameters[[0, -1]] *= rng.uniform(0.5, 5, 2)
    saved[0] *= 0.1
    saved[-1] *= rng.uniform(0.5, 4)
    output = 10 ** rng.uniform(5.7, 7)
    return tuple(
        LayerProfile(f"layer-{index}", float(parameters[index]), float(output), float(saved[index]))
        for index in range(num_layers)
    )


def _kind(rng: np.random.Generator, seconds: np.ndarray) -> KindProfile:
    """Forward to backward 1:2; a microbatch costs its samples and a fixed part of 5 to 100 % of one."""
    fixed = rng.uniform(0.05, 1)
    per_size = [seconds * (size + fixed) / (1 + fixed) for size in SIZES]
    return KindProfile(
        "measured",
        SIZES,
        tuple(
            LayerTimes(
                tuple(float(entry[layer]) / 3 for entry in per_size),
                tuple(float(entry[layer]) * 2 / 3 for entry in per_size),
            )
            for layer in range(len(seconds))
        ),
        optimizer_s_per_byte=1e-12,
    )


def _nodes(
    rng: np.random.Generator,
    counts: np.ndarray,
    memory: np.ndarray,
    inside: float,
    *,
    size: int | None = None,
) -> tuple[Node, ...]:
    """Nodes of one kind each, of 1, 2, 4 or 8 devices."""
    nodes: list[Node] = []
    for kind, count in enumerate(counts):
        of_node = size or int(2 ** rng.integers(0, 4))
        for first in range(0, int(count), of_node):
            name = f"k{kind}n{first // of_node}"
            devices = tuple(
                Device(f"{name}/{index}", name, f"kind-{kind}", float(memory[kind]))
                for index in range(min(of_node, int(count) - first))
            )
            nodes.append(Node(name, devices, Link(8e-6, inside)))
    return tuple(nodes)
