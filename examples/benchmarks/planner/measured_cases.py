"""Random clusters as in `sync_cases`, with layers that others have measured on real GPUs.

`measured_layers.json` has OPT-350M on seven kinds and GPT-Neo 2.7B on three, from the Sailor project
(SOSP 2025, MIT licence; repository and commit are in the file).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sync_cases import GBIT_PER_S, SHARES, sync_case

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.problem import Problem

SIZES = (1, 2, 4)
SEQUENCE_LENGTH = 2048
MODELS: Mapping[str, Any] = json.loads((Path(__file__).parent / "measured_layers.json").read_text())["models"]
OF_THREE = 3  # cases, the last has measured layers


def mixed_case(index: int) -> Problem:
    """Return a random problem, every third one with measured layers; the same for the same index."""
    turn, place = divmod(index, OF_THREE)
    if place == OF_THREE - 1:
        return measured_case(turn)
    return sync_case(turn * (OF_THREE - 1) + place)


def measured_case(seed: int) -> Problem:
    """Return a random problem of measured layers with 8 to 64 samples a device."""
    rng = np.random.default_rng(5000 + seed)
    model = str(rng.choice(list(MODELS)))
    known = list(MODELS[model]["kinds"])
    num_kinds = min(len(known), int(rng.integers(2, 5)))
    kinds = [str(kind) for kind in rng.choice(known, num_kinds, replace=False)]
    num_devices, gbit_per_s = int(rng.choice([16, 24, 32, 48, 64, 96, 128])), rng.choice(GBIT_PER_S, p=SHARES)
    counts = [max(1, round(float(part) * num_devices)) for part in rng.dirichlet([3] * num_kinds)]
    profile = measured_profile(model, kinds)
    cluster = measured_cluster(model, dict(zip(kinds, counts, strict=True)), float(gbit_per_s))
    return Problem(profile, cluster, len(cluster.devices) * int(rng.choice([8, 16, 32, 64])), SIZES)


def measured_profile(model: str, kinds: Sequence[str]) -> ModelProfile:
    """Return the profile of a measured model on some kinds."""
    table = MODELS[model]
    runs = [run for run, count in enumerate(table["runs"]) for _ in range(count)]
    columns = [table[name] for name in ("parameter_bytes", "output_bytes", "saved_bytes")]
    layers = tuple(
        LayerProfile(f"layer{place}", *(float(column[run]) for column in columns))
        for place, run in enumerate(runs)
    )
    profiles = {}
    for kind in kinds:
        forward, backward = (table["kinds"][kind][name] for name in ("forward_ms", "backward_ms"))
        times = tuple(LayerTimes(_seconds(forward[run]), _seconds(backward[run])) for run in runs)
        profiles[kind] = KindProfile("measured", SIZES, times, optimizer_s_per_byte=1e-11)
    return ModelProfile(model, SEQUENCE_LENGTH, "float32", layers, profiles)


def measured_cluster(model: str, counts: Mapping[str, int], gbit_per_s: float) -> Cluster:
    """Return a cluster of at least so many devices of each kind, on nodes as large as those measured."""
    nodes = []
    for kind, count in counts.items():
        row = MODELS[model]["kinds"][kind]
        width = row["devices_per_node"]
        inside = Link(20e-6, row["inside_bytes_per_s"])
        for place in range(max(1, round(count / width))):
            name = f"{kind.lower()}n{place}"
            devices = (Device(f"{name}/{slot}", name, kind, row["memory_bytes"]) for slot in range(width))
            nodes.append(Node(name, tuple(devices), inside))
    network = Link(100e-6 if gbit_per_s > 5 else 1e-3, gbit_per_s * 1e9 / 8)
    return Cluster(model, network, tuple(nodes))


def _seconds(milliseconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(value / 1e3 for value in milliseconds)
