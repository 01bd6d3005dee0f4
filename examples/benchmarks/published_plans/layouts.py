"""The layouts that Sailor, Zorse and HexiScale published, as plans, with cluster and profile; see README.md.

`facts.json` holds what their repositories say. GPUs that share each layer by tensor parallelism are written
as one device: with the times that were measured of them together, and with the memory of all.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "clusters"))

from estimated_profile import PASSES, SHARE, with_kinds

from cost_model.catalogue import accelerator
from cost_model.cluster_file import cluster_from_data
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem, problem_of

FACTS: Mapping[str, Any] = json.loads((Path(__file__).parent / "facts.json").read_text(encoding="utf-8"))
FLOAT32_BYTES, FLOAT16_BYTES = 4, 2
LATENCY_S = 100e-6  # of networks; no repository says it
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Layout:
    """A published plan with the problem that it answers.

    cluster_data: the cluster as in cluster.toml. said_s: the seconds of a step that its authors give, and
    said: how they come by it. alone: the same GPUs, each a device of its own; None where they are that.
    """

    name: str
    problem: Problem
    plan: Plan
    cluster_data: Mapping[str, Any]
    said_s: float
    said: str
    alone: Problem | None = None


def layouts() -> Iterator[Layout]:
    """Yield all, system by system."""
    for entry in FACTS["sailor"]["plans"]:
        yield sailor(entry)
    yield from zorse()
    for reading, network in product(
        FACTS["hexiscale"]["readings"], FACTS["hexiscale"]["between_bytes_per_s"]
    ):
        yield hexiscale(reading, network)


def sailor(entry: Mapping[str, Any]) -> Layout:
    """Return one of the plans that Sailor was validated with: groups of GPUs, a group a node."""
    degree, stages = entry["degree"], entry["kinds"]
    # the name of a group on its node, in the order of stages and replicas
    groups = [(stage, replica) for stage in range(len(stages)) for replica in range(len(stages[0]))]
    kinds = [stages[stage][replica] for stage, replica in groups]
    names = {group: f"n{place}/0" for place, group in enumerate(groups)}
    profile, data = sailor_profile(degree, kinds), sailor_cluster(degree, kinds, joined=True)
    problem = problem_of(profile, cluster_from_data(data, entry["name"]), entry["batch"])
    pipelines = tuple(
        Pipeline(
            entry["microbatch_size"],
            entry["batch"] // len(stages[0]),
            tuple(
                Stage((names[stage, replica],), cut, len(stages) - stage)
                for stage, cut in enumerate(pairwise(entry["cuts"]))
            ),
        )
        for replica in range(len(stages[0]))
    )
    single = cluster_from_data(sailor_cluster(degree, kinds, joined=False), entry["name"])
    alone = problem_of(sailor_profile(1, kinds), single, entry["batch"])
    plan = problem.plan("sailor", pipelines)
    return Layout(f"sailor-{entry['name']}", problem, plan, data, entry["measured_s"], "measured", alone)


def sailor_profile(degree: int, kinds: Sequence[str]) -> ModelProfile:
    """Return the measured layers where so many GPUs share each, on groups of these kinds."""
    facts = FACTS["sailor"]
    table = facts["groups"][str(degree)]
    runs = [run for run, count in enumerate(facts["runs"]) for _ in range(count)]
    layers = tuple(
        LayerProfile(
            f"layer{place}",
            degree * table["parameter_bytes_each"][run],
            table["output_bytes"][run],
            degree * table["saved_bytes_each"][run],
        )
        for place, run in enumerate(runs)
    )
    block = layers[len(layers) // 2]
    found = {}
    for kind in dict.fromkeys(kinds):
        rows = table["kinds"][kind]
        times = tuple(
            LayerTimes(_seconds(rows["forward_ms"][run]), _seconds(rows["backward_ms"][run])) for run in runs
        )
        update_s = rows["optimizer_ms"] / 1e3 / block.parameter_bytes
        found[joined_kind(kind, degree)] = KindProfile(
            "measured", tuple(table["microbatch_sizes"]), times, optimizer_s_per_byte=update_s
        )
    return ModelProfile(facts["model"], facts["sequence_length"], "float32", layers, found)


def sailor_cluster(degree: int, kinds: Sequence[str], *, joined: bool) -> dict[str, Any]:
    """Return a node for each group of GPUs, which are one device or are one each."""
    facts, nodes = FACTS["sailor"], []
    for place, kind in enumerate(kinds):
        shared = degree if joined else 1
        usable = facts["memory_bytes"][kind] - facts["framework_bytes"][str(shared)]
        devices = {
            "kind": joined_kind(kind, shared),
            "count": degree // shared,
            "memory": f"{shared * usable:.0f} B",
        }
        inside = _channel(facts["inside_bytes_per_s"][kind][str(degree)], 20e-6)
        nodes.append({"name": f"n{place}", "devices": [devices], "interconnect": inside})
    return _cluster("sailor", _channel(facts["between_bytes_per_s"], LATENCY_S), nodes)


def joined_kind(kind: str, degree: int) -> str:
    """Name the kind of a device that is so many GPUs.

    >>> joined_kind("Titan-RTX", 8), joined_kind("Titan-RTX", 1)
    ('8xTitan-RTX', 'Titan-RTX')
    """
    return kind if degree == 1 else f"{degree}x{kind}"


def zorse() -> Iterator[Layout]:
    """Yield the plan of Zorse's example: one group of four GPUs, a stage, that share the batch.

    Twice: with gradients and states sharded (ZeRO stage 2, summed in each microbatch here), and with states
    alone (stage 1, gradients summed once a step, as Zorse does, which runs a layer for all microbatches).
    """
    facts = FACTS["zorse"]
    given, kinds = facts["plan"], facts["memory_mib"]
    devices = [
        {"kind": kind, "memory": f"{memory} MiB", "count": given["gpus"].count(kind)}
        for kind, memory in kinds.items()
    ]
    inside = _channel(facts["inside_bytes_per_s"], facts["inside_latency_s"])
    data = _cluster("zorse", inside, [{"name": "paper103", "devices": devices, "interconnect": inside}])
    cluster = cluster_from_data(data, "zorse")
    profile = llama("Llama-1.3B", with_scores=True)
    problem = problem_of(profile, cluster, given["batch"])
    free = list(cluster.devices)
    pipelines = []
    for kind, count in zip(given["gpus"], given["num_microbatches"], strict=True):
        device = next(each for each in free if each.kind == kind)
        free.remove(device)
        stage = Stage((device.name,), (0, profile.num_layers), 1)
        pipelines.append(Pipeline(given["microbatch_size"], count * given["microbatch_size"], (stage,)))
    for zero in (2, 1):
        plan = dataclasses.replace(problem.plan("zorse", tuple(pipelines)), zero=zero)
        said = "estimated by its planner"
        yield Layout(f"zorse-zero{zero}", problem, plan, data, given["estimated_s"], said)


def hexiscale(reading: str, network: str) -> Layout:
    """Return the plan of HexiScale's script, with a reading of which kind each machine has, and a network."""
    facts = FACTS["hexiscale"]
    kinds = facts["readings"][reading]
    nodes = [
        {
            "name": f"m{machine}",
            "devices": [{"kind": kind, "count": count, "memory": f"{facts['memory_gib'][kind]} GiB"}],
            "interconnect": _channel(facts["inside_bytes_per_s"][kind], 20e-6),
        }
        for machine, (kind, count) in enumerate(zip(kinds, facts["gpus_of_machine"], strict=True))
    ]
    data = _cluster("hexiscale", _channel(facts["between_bytes_per_s"][network], LATENCY_S), nodes)
    cluster = cluster_from_data(data, "hexiscale")
    profile = with_kinds(llama(facts["model"], with_scores=False), set(kinds))
    free = {machine: list(cluster.nodes[machine].devices) for machine in range(len(nodes))}
    cuts = [0]
    for count in facts["layers"]:
        cuts.append(cuts[-1] + count)
    # the embedding goes with the first block, head and loss with the last
    cuts = [0, *(cut + 1 for cut in cuts[1:-1]), profile.num_layers]
    count = facts["num_pipelines"]
    pipelines = tuple(
        Pipeline(
            facts["microbatch_size"],
            facts["samples_of_pipeline"],
            tuple(
                Stage((free[machine].pop(0).name,), cut, len(cuts) - 1 - stage, True, 1)
                for stage, (machine, cut) in enumerate(zip(facts["machines"], pairwise(cuts), strict=True))
            ),
        )
        for _ in range(count)
    )
    batch = count * facts["samples_of_pipeline"]
    problem = problem_of(profile, cluster, batch)
    said_s = _claimed_s(batch, profile, [each.kind for each in cluster.devices])
    name = f"hexiscale-{reading}-{network}".replace(" ", "-").replace("/", "p")
    return Layout(name, problem, problem.plan("hexiscale", pipelines), data, said_s, "by its utilisation")


def _claimed_s(batch: int, profile: ModelProfile, kinds: Sequence[str]) -> float:
    """Return the step that the claimed share of their peak FLOPS is: 6 of each parameter and token."""
    facts = FACTS["hexiscale"]
    peak = sum(facts["peak_tflops"][kind] for kind in kinds) * 1e12
    parameters = sum(layer.parameter_bytes for layer in profile.layers) / FLOAT32_BYTES
    return 6 * parameters * batch * profile.sequence_length / (facts["claimed_utilisation"] * peak)


def llama(model: str, *, with_scores: bool) -> ModelProfile:
    """Return a Llama whose blocks Zorse's authors measured, in float16 autocast.

    with_scores: whether attention keeps its scores for the backward, as without flash attention. The head was
    not measured: its multiplications are priced as those of a block, by parameters. The embedding is free.
    """
    facts = FACTS["zorse"]
    of, sizes = facts["models"][model], tuple(facts["microbatch_sizes"])
    seq, hidden = of["sequence_length"], of["hidden_size"]
    table = of["vocabulary"] * hidden
    passed = seq * hidden * FLOAT16_BYTES
    # 34 s h + 5 a s^2 bytes a sample at 16 bit (Korthikanti et al., MLSys 2023)
    saved = 34 * seq * hidden + (5 * of["num_heads"] * seq**2 if with_scores else 0)
    parameters = of["parameters_of_block"]
    block = _layer("block", parameters, passed, saved)
    logits = seq * of["vocabulary"] * FLOAT32_BYTES
    layers = (
        dataclasses.replace(_layer("embedding", table, passed, 0.0), lowered_bytes=0.0),
        *(dataclasses.replace(block, name=f"block{place}") for place in range(of["num_blocks"])),
        _layer("head", table, 0.0, passed + logits),
    )
    share = table / parameters
    kinds = {}
    for kind, rows in of["kinds"].items():
        forward, backward = _seconds(rows["forward_ms"]), _seconds(rows["backward_ms"])
        nothing = LayerTimes((0.0,) * len(sizes), (0.0,) * len(sizes))
        head = LayerTimes(tuple(share * each for each in forward), tuple(share * each for each in backward))
        times = (nothing, *(LayerTimes(forward, backward),) * of["num_blocks"], head)
        bandwidth = accelerator(kind).memory_bandwidth_bytes_per_s
        kinds[kind] = KindProfile("measured", sizes, times, optimizer_s_per_byte=PASSES / (SHARE * bandwidth))
    return ModelProfile(model, seq, "float16-autocast", layers, kinds)


def _layer(name: str, parameters: int, output_bytes: float, saved_bytes: float) -> LayerProfile:
    held = parameters * FLOAT32_BYTES
    return LayerProfile(name, held, output_bytes, saved_bytes, lowered_bytes=held / 2)


def _seconds(milliseconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(value / 1e3 for value in milliseconds)


def _channel(bandwidth_bytes_per_s: float, latency_s: float) -> dict[str, str]:
    return {"bandwidth": f"{bandwidth_bytes_per_s:.0f} B/s", "latency": f"{latency_s * 1e6:.0f} us"}


def _cluster(name: str, network: Mapping[str, str], nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "reserve": "0 B",
        "driver_memory": "0 B",
        "network": dict(network),
        "nodes": list(nodes),
    }


def cluster_text(data: Mapping[str, Any]) -> str:
    """Return a cluster as cluster.toml."""
    lines = [f"{key} = {json.dumps(data[key])}" for key in ("name", "reserve", "driver_memory")]
    lines.append(f"network = {_inline(data['network'])}")
    for node in data["nodes"]:
        devices = ", ".join(map(_inline, node["devices"]))
        lines += ["", "[[nodes]]", f"name = {json.dumps(node['name'])}", f"devices = [{devices}]"]
        lines.append(f"interconnect = {_inline(node['interconnect'])}")
    return "\n".join(lines) + "\n"


def _inline(table: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + " }"
