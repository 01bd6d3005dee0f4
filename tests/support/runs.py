"""Short real runs on this host: clusters of plain CPU devices, a profile that needs no measurement."""

import math
from pathlib import Path
from typing import Any

from cost_model.cluster import CPU, Cluster
from cost_model.cluster_file import read_cluster
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.data.task import chain_of
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.mixed_precision import lowered_dtype, weight_dtype
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import RunReport
from hetpipe.runs.settings import Settings
from hetpipe.training.run import train
from partition.plan import Pipeline, Plan, Stage

EMULATED_CLUSTER = """
name = "emulated"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "emulated", count = 3, speed = 0.5, memory = "2 GiB" }]
"""

CPU_CLUSTER = """
name = "cpus"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "cpu", count = 4, memory = "4 GiB" }]
"""

RECOMPUTE = ({}, {"recompute": True}, {"recompute": True, "segment_layers": 1})
"""What stages do: nothing again, all at once, layer by layer."""


def cluster_file(folder: Path, text: str = CPU_CLUSTER) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def emulated_cluster(folder: Path) -> Cluster:
    return read_cluster(cluster_file(folder, EMULATED_CLUSTER))


def made_up_profile(model: str, kind: str = CPU, layer_s: float = 0.001) -> ModelProfile:
    """The sizes of the model's parameters with times that are made up, all layers alike."""
    return made_up_profile_of(chain_of(model_spec(model)), model, kind, layer_s)


def made_up_profile_of(
    chain: ChainModel,
    model: str,
    kind: str = CPU,
    layer_s: float = 0.001,
    *,
    dtype: str = "float32",
    sequence_length: int = 64,
) -> ModelProfile:
    layers = []
    width = weight_dtype(dtype).itemsize
    held = chain.weight_bytes(weight_dtype(dtype), lowered_dtype(dtype))
    for index, name in enumerate(chain.layer_names):
        infos = chain.parameters(index)
        sizes = {info.name: float(width * math.prod(info.shape)) for info in infos}
        before = {info.name: other for other in reversed(range(index)) for info in chain.parameters(other)}
        tied = [info.name for info in infos if info.tied and info.name in before]
        layers.append(
            LayerProfile(
                name=name,
                parameter_bytes=held[index].stored,
                output_bytes_per_sample=16384.0,
                saved_bytes_per_sample=1e6,
                tied_to=chain.layer_names[min(before[entry] for entry in tied)] if tied else None,
                tied_bytes=sum(sizes[entry] for entry in tied),
                unreached_bytes=held[index].stored - held[index].trained,
                lowered_bytes=held[index].lowered,
                rounded_bytes=held[index].rounded,
            )
        )
    times = LayerTimes((layer_s, 2 * layer_s), (2 * layer_s, 4 * layer_s))
    entry = KindProfile("measured", (1, 2), (times,) * chain.num_layers, 1e-10)
    return ModelProfile(model, sequence_length, dtype, tuple(layers), {kind: entry})


def chain_plan(
    model: str,
    cuts: list[int],
    microbatch_size: int,
    batch: int = 16,
    node: str = "here",
    **stage: Any,
) -> Plan:
    """One pipeline over node/0, node/1, ...: stage s holds layers [cuts[s], cuts[s + 1])."""
    num_stages = len(cuts) - 1
    stages = tuple(
        Stage((f"{node}/{index}",), (cuts[index], cuts[index + 1]), num_stages - index, **stage)
        for index in range(num_stages)
    )
    return Plan("manual", model, batch, (Pipeline(microbatch_size, batch, stages),))


def replica_plan(model: str, num_layers: int, *shares: tuple[int, int], zero: int) -> Plan:
    """All layers on each device, with its (microbatch size, samples); the last one recomputes by layer."""
    last = len(shares) - 1
    pipelines = []
    for index, share in enumerate(shares):
        again = index == last
        stage = Stage((f"here/{index}",), (0, num_layers), 1, again, segment_layers=int(again))
        pipelines.append(Pipeline(*share, (stage,)))
    batch = sum(samples for _, samples in shares)
    return Plan("manual", model, batch, tuple(pipelines), zero=zero)


def run(
    folder: Path, plan: Plan, settings: Settings, profile: ModelProfile, cluster: str = CPU_CLUSTER
) -> tuple[RunReport, list[float]]:
    """Train; gives the report and the losses of all steps so far."""
    folder.mkdir(parents=True, exist_ok=True)
    run_folder = RunFolder(folder / "run")
    report = train(settings, cluster_file(folder, cluster), profile, plan, run_folder)
    return report, [entry["loss"] for entry in run_folder.read_metrics()]
