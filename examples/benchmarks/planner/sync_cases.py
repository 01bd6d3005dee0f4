"""Random clusters on which gradient sync takes much of a step.

20 to 132 devices of 2 to 4 kinds on nodes of 4 or 8, 8 to 64 samples a device, 1 to 100 Gbit/s between nodes.
Layers are those of GPT models, their seconds counted from FLOPs, not measured.
"""

import numpy as np

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.problem import Problem

KINDS = {
    "A100": (90e12, 40e9),
    "V100": (38e12, 16e9),
    "T4": (14e12, 15e9),
    "R3090": (42e12, 24e9),
    "L4": (30e12, 24e9),
}
"""FLOPs in a second, and bytes."""
INTERCONNECTS = {"A100": 200e9, "V100": 60e9}
OTHER_INTERCONNECT = 10e9
SIZES = (1, 2, 4, 8)
MODELS = ((1024, 24, 512), (1280, 36, 1024), (1600, 48, 1024), (2048, 24, 2048), (2560, 32, 2048))
"""Hidden size, blocks, sequence length."""
VOCABULARY = 50e3
GBIT_PER_S = (1, 2.5, 5, 10, 12, 25, 50, 100)
SHARES = (0.05, 0.1, 0.15, 0.25, 0.2, 0.15, 0.05, 0.05)


def sync_case(seed: int) -> Problem:
    """Return a random problem with 8 to 64 samples a device; the same for the same seed."""
    rng = np.random.default_rng(1000 + seed)
    num_devices, num_kinds = int(rng.choice([16, 24, 32, 48, 64, 96, 128])), int(rng.integers(2, 5))
    kinds = [str(kind) for kind in rng.choice(list(KINDS), num_kinds, replace=False)]
    shape = MODELS[int(rng.integers(0, len(MODELS)))]
    profile = gpt_profile(f"sync-{seed}", kinds, rng, shape)
    cluster = _cluster(seed, kinds, num_devices, rng)
    samples = int(rng.choice([8, 16, 32, 64]))
    return Problem(profile, cluster, len(cluster.devices) * samples, SIZES)


def gpt_profile(
    name: str, kinds: list[str], rng: np.random.Generator, shape: tuple[int, int, int]
) -> ModelProfile:
    """Return a model of some hidden size, blocks and sequence length, on kinds of some speed."""
    hidden, blocks, length = shape
    embedding, boundary = 4 * VOCABULARY * hidden, 4.0 * length * hidden
    block_bytes, saved_bytes = 4 * 12 * hidden * hidden, length * hidden * 34.0 + 80 * length * length
    head = embedding * float(rng.choice([0.02, 1.0]))
    layers = (
        LayerProfile("embedding", embedding, boundary, boundary),
        *(LayerProfile(f"block{place}", block_bytes, boundary, saved_bytes) for place in range(blocks)),
        LayerProfile("head", head, 4.0 * length * VOCABULARY, 8.0 * length * VOCABULARY),
    )
    block_flops = length * (24 * hidden * hidden + 4 * length * hidden)
    flops = [1e6 * length, *[block_flops] * blocks, 2 * length * hidden * VOCABULARY]
    profiles = {}
    for kind in kinds:
        rate, fixed = KINDS[kind][0] * float(rng.uniform(0.8, 1.2)), float(rng.uniform(0.05, 0.6))
        forward_s = [tuple(count / rate * (size + fixed) for size in SIZES) for count in flops]
        times = tuple(LayerTimes(row, tuple(2 * seconds for seconds in row)) for row in forward_s)
        profiles[kind] = KindProfile("measured", SIZES, times, optimizer_s_per_byte=1e-11)
    return ModelProfile(name, length, "float32", layers, profiles)


def _cluster(seed: int, kinds: list[str], num_devices: int, rng: np.random.Generator) -> Cluster:
    parts = rng.dirichlet([3] * len(kinds))
    gbit_per_s = float(rng.choice(GBIT_PER_S, p=SHARES))
    nodes = []
    for part, kind in zip(parts, kinds, strict=True):
        width = int(rng.choice([4, 8]))
        count = max(1, round(float(part) * num_devices / width))
        memory_bytes = KINDS[kind][1] * float(rng.choice([1, 1, 2]))
        inside = Link(20e-6, INTERCONNECTS.get(kind, OTHER_INTERCONNECT))
        for place in range(count):
            name = f"{kind.lower()}n{place}"
            devices = (Device(f"{name}/{slot}", name, kind, memory_bytes) for slot in range(width))
            nodes.append(Node(name, tuple(devices), inside))
    network = Link(100e-6 if gbit_per_s > 5 else 1e-3, gbit_per_s * 1e9 / 8)
    return Cluster(f"sync-{seed}", network, tuple(nodes))
