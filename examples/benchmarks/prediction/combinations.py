"""The clusters and plans whose predictions are put to the test."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cost_model.cluster import Cluster
from cost_model.cluster_file import cluster_from_data
from cost_model.profile import ModelProfile
from hetpipe.simulation.prediction import evaluator
from partition.plan import Pipeline, Plan, Stage
from partition.problem import problem_of
from partition.solver import solve

BATCH = 8
FAST = {"bandwidth": "1 GB/s", "latency": "10 us"}
"""Inside nodes: no faster than the host's processes sum large buffers in reality, or sums come late."""

PlanOf = Callable[[ModelProfile, Cluster], Plan]


def cluster_data(
    name: str, nodes: list[list[float]], bandwidth: str, latency: str, inside: dict[str, str] | None = None
) -> dict[str, object]:
    """Data of a cluster.toml: emulated devices of these speeds, a list for each node; inside: its links."""
    return {
        "name": name,
        "network": {"bandwidth": bandwidth, "latency": latency},
        "nodes": [
            {
                "name": f"n{index}",
                "devices": [{"kind": "emulated", "speed": speed, "memory": "8 GiB"} for speed in speeds],
                "interconnect": inside or FAST,
            }
            for index, speeds in enumerate(nodes)
        ],
    }


CLUSTERS = {
    "2 fast": cluster_data("two-fast", [[0.8, 0.5]], "10 Gbit/s", "50 us"),
    "2 slow": cluster_data("two-slow", [[0.8], [0.4]], "500 Mbit/s", "1 ms"),
    "4 mixed": cluster_data("four-mixed", [[0.65, 0.45], [0.25, 0.12]], "2 Gbit/s", "0.2 ms"),
    "4 slow": cluster_data("four-slow", [[0.6], [0.4], [0.25], [0.15]], "800 Mbit/s", "2 ms"),
    "6 mixed": cluster_data("six", [[0.4, 0.3, 0.2], [0.2, 0.15, 0.1]], "1 Gbit/s", "0.5 ms"),
    "8 mixed": cluster_data(
        "eight", [[0.3, 0.25], [0.2, 0.2], [0.15, 0.1], [0.1, 0.1]], "1 Gbit/s", "0.2 ms"
    ),
}


@dataclass(frozen=True, slots=True)
class Combination:
    """One row of the table."""

    name: str
    model: str
    cluster: str
    plan: PlanOf


def even(microbatch_size: int, *, recompute: bool = False) -> PlanOf:
    """As many layers everywhere, devices in the order of the file."""

    def plan(profile: ModelProfile, cluster: Cluster) -> Plan:
        names = [device.name for device in cluster.devices]
        cuts = [round(index * profile.num_layers / len(names)) for index in range(len(names) + 1)]
        return chain("even", profile, names, cuts, microbatch_size, recompute=recompute)

    return plan


def chain(
    strategy: str,
    profile: ModelProfile,
    names: list[str],
    cuts: list[int],
    microbatch_size: int,
    *,
    recompute: bool = False,
) -> Plan:
    """One pipeline, 1F1B with the distance from the end in flight."""
    return Plan(
        strategy, profile.model, BATCH, (pipeline(names, cuts, microbatch_size, BATCH, recompute=recompute),)
    )


def pipeline(
    names: list[str], cuts: list[int], microbatch_size: int, num_samples: int, *, recompute: bool = False
) -> Pipeline:
    """Stage s holds layers [cuts[s], cuts[s + 1])."""
    stages = tuple(
        Stage((name,), (cuts[index], cuts[index + 1]), len(names) - index, recompute)
        for index, name in enumerate(names)
    )
    return Pipeline(microbatch_size, num_samples, stages)


def proportional(microbatch_size: int, *, recompute: bool = False, slow_first: bool = False) -> PlanOf:
    """Layers in proportion to speed, devices in the order of the file or, for a heavy head, the other way."""

    def plan(profile: ModelProfile, cluster: Cluster) -> Plan:
        devices = cluster.devices[::-1] if slow_first else cluster.devices
        names = [device.name for device in devices]
        speeds = [device.speed for device in devices]
        cuts = [0]
        for index in range(1, len(names)):
            ideal = round(profile.num_layers * sum(speeds[:index]) / sum(speeds))
            cuts.append(min(max(ideal, cuts[-1] + 1), profile.num_layers - (len(names) - index)))
        return chain(
            "uneven", profile, names, [*cuts, profile.num_layers], microbatch_size, recompute=recompute
        )

    return plan


def auto(profile: ModelProfile, cluster: Cluster) -> Plan:
    """What the planner chooses."""
    return solve(problem_of(profile, cluster, BATCH), evaluator(profile, cluster))


def two_pipelines(profile: ModelProfile, cluster: Cluster) -> Plan:
    """Unequal pipelines with cuts and microbatches of their own, gradients summed over unequal owners."""
    names = [device.name for device in cluster.devices]
    half = len(names) // 2
    layers = profile.num_layers

    def cuts(count: int, shift: int) -> list[int]:
        return [0, *(round(index * layers / count) + shift for index in range(1, count)), layers]

    first = pipeline(names[:half], cuts(half, 1), 2, BATCH - 2)
    second = pipeline(names[half:], cuts(len(names) - half, -1), 1, 2)
    return Plan("two pipelines", profile.model, BATCH, (first, second))


BERT, GPT = "bert-medium-24", "gpt2"
COMBINATIONS = (
    Combination("even, 1", BERT, "2 fast", even(1)),
    Combination("uneven, 4", BERT, "2 fast", proportional(4)),
    Combination("even, 2", BERT, "2 slow", even(2)),
    Combination("uneven, 2, recompute", BERT, "2 slow", proportional(2, recompute=True)),
    Combination("auto", BERT, "4 mixed", auto),
    Combination("even, 4", BERT, "4 mixed", even(4)),
    Combination("two pipelines", BERT, "4 mixed", two_pipelines),
    Combination("even, 1", BERT, "4 slow", even(1)),
    Combination("uneven, 1", BERT, "4 slow", proportional(1)),
    Combination("auto", BERT, "6 mixed", auto),
    Combination("uneven, 2", BERT, "8 mixed", proportional(2)),
    Combination("even, 2, recompute", GPT, "2 fast", even(2, recompute=True)),
    Combination("uneven, 1", GPT, "2 slow", proportional(1, slow_first=True)),
    Combination("auto", GPT, "4 mixed", auto),
    Combination("uneven, 2", GPT, "4 slow", proportional(2, slow_first=True)),
    Combination("uneven, 1, recompute", GPT, "4 mixed", proportional(1, recompute=True, slow_first=True)),
    Combination("uneven, 1", GPT, "6 mixed", proportional(1, slow_first=True)),
    Combination("auto", GPT, "8 mixed", auto),
)


def cluster_of(combination: Combination) -> Cluster:
    return cluster_from_data(CLUSTERS[combination.cluster], combination.cluster)


def toml_of(data: Mapping[str, Any]) -> str:
    """Return the TOML of a cluster's data; strings and numbers look alike in JSON."""

    def inline(value: Any) -> str:
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{key} = {inline(entry)}" for key, entry in value.items()) + " }"
        if isinstance(value, list):
            return "[" + ", ".join(map(inline, value)) + "]"
        return json.dumps(value)

    return "\n".join(f"{key} = {inline(value)}" for key, value in data.items()) + "\n"
