"""How fast is fine-tuning where cards differ, beside what people run today? See README.md."""

import argparse
import dataclasses
import json
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InfeasibleError
from cost_model.memory import StageShape, device_memory
from cost_model.profile import ModelProfile
from hetpipe.models.names import ModelEntry, model_entry
from hetpipe.profiling.profile_cache import processor_name, profile_model
from hetpipe.runs.lora import parse_lora
from hetpipe.runs.settings import Settings
from hetpipe.simulation.prediction import evaluator
from hetpipe.training.run import measure
from partition.baselines.data_parallel import ddp, poplar
from partition.baselines.layer_splits import gpipe_even, proportional_cuts
from partition.estimates.optimizer_sharding import fits
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem, problem_of
from partition.solver import solve

CLUSTERS = {path.stem: path for path in (Path(__file__).parent / "clusters").glob("*.toml")}
ORDER = ("two", "three", "four")
LOAD_IN = ("4bit", "8bit", "none")
ROOM = {"4bit": 1.0, "8bit": 1.2, "none": 2.2}
"""Memory of each device, as a multiple of what the clusters' files say: so the same does not fit."""
OURS = "auto"
LORA = "r=8,alpha=16,targets=all-linear"
BATCH = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 192,
    "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """A contender on a cluster: its plan, None where none fits, and the seconds of its timed steps.

    samples_per_s: of each run by the wall clock, with all that lies between its steps.
    """

    plan: Plan | None
    predicted_s: float
    measured_s: list[float]
    samples_per_s: list[float]
    overloaded: list[bool]


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as place:
        entry = _model(Path(place), options)
        files = {name: _cluster_file(Path(place), name, options) for name in options.clusters}
        profile = _profile(entry, files[options.clusters[0]], options)
        rows = {name: _planned(read_cluster(path), profile) for name, path in files.items()}
        steps_s = sum(row.predicted_s for each in rows.values() for row in each.values() if row.plan)
        print(f"a step of each takes {steps_s:.0f} s, by prediction", file=sys.stderr)
        for turn in range(options.rounds):
            for name, contenders in rows.items():
                for contender, row in contenders.items():
                    if row.plan is not None:
                        _run(row, files[name], entry, profile, options)
                        seconds = " ".join(f"{value:.3f}" for value in row.measured_s[1 - options.steps :])
                        print(f"round {turn + 1}, {name}, {contender}: {seconds} s", file=sys.stderr)
        for name, contenders in rows.items():
            print(_table(read_cluster(files[name]), contenders))
    names = ("torch", "transformers", "peft", "bitsandbytes", "numpy")
    print(
        f"{os.cpu_count()} cores ({processor_name()}); Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="each runs every contender once, in turn")
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not timed")
    parser.add_argument("--load-in", choices=LOAD_IN, default="4bit", help="none: LoRA beside float32")
    parser.add_argument("--length", type=int, default=16, help="tokens of a sample")
    parser.add_argument("--clusters", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--profile-budget", type=float, default=15.0)
    return parser.parse_args()


def _model(place: Path, options: argparse.Namespace) -> ModelEntry:
    """Return a small Llama, its weights drawn from the seed and held as --load-in says, with adapters.

    These are beside all its linear layers.
    """
    from hetpipe.models.adapters import with_named_targets
    from hetpipe.models.huggingface import model_spec

    folder = place / "llama-12x192"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    base = model_entry(str(folder))
    lora = with_named_targets(model_spec(base.name, base.place), parse_lora(LORA))
    return base.with_adapters(lora, load_in=None if options.load_in == "none" else options.load_in)


def _cluster_file(place: Path, name: str, options: argparse.Namespace) -> Path:
    """Write a cluster with room for a base held as --load-in says."""

    def with_room(found: re.Match[str]) -> str:
        return f'memory = "{float(found[1]) * ROOM[options.load_in]:g} MiB"'

    path = place / f"{name}.toml"
    path.write_text(re.sub(r'memory = "([\d.]+) MiB"', with_room, CLUSTERS[name].read_text()))
    return path


def _profile(entry: ModelEntry, cluster_file: Path, options: argparse.Namespace) -> ModelProfile:
    return profile_model(
        str(entry.place), read_cluster(cluster_file), options.length,
        budget_s=options.profile_budget, use_cache=False, lora=entry.lora, load_in=entry.load_in,
    )  # fmt: skip


def naive(problem: Problem) -> Plan:
    """Layers in proportion to memory, and one microbatch in the whole pipeline: device_map="auto".

    In the order of the cluster, of the microbatch size that is fastest.
    """
    devices, profile = problem.cluster.devices, problem.profile
    room = [device.usable_bytes for device in devices]
    evaluate, found = evaluator(profile, problem.cluster), []
    for size in problem.microbatch_sizes:
        shapes = [StageShape(layer, layer + 1, 1, size) for layer in range(profile.num_layers)]
        cuts = proportional_cuts([device_memory(profile, [shape]).total_bytes for shape in shapes], room)
        stages = tuple(
            Stage((device.name,), cut, 1) for device, cut in zip(devices, pairwise(cuts), strict=True)
        )
        pipeline = Pipeline(size, problem.global_batch_size, stages)
        plan = Plan("naive", profile.model, problem.global_batch_size, (pipeline,))
        if fits(plan, profile, problem.cluster):
            found.append(plan)
    if not found:
        raise InfeasibleError("layers in proportion to memory do not fit, whatever the microbatch")
    return min(found, key=lambda plan: evaluate(plan).step_s)


CONTENDERS: Mapping[str, Callable[[Problem], Plan]] = {
    OURS: lambda problem: solve(problem, evaluator(problem.profile, problem.cluster), proof_s=0.0),
    "by memory, one at a time": naive,
    "even split, 1F1B": lambda problem: gpipe_even(problem, evaluator(problem.profile, problem.cluster)),
    "DDP, equal": lambda problem: ddp(problem),
    "DDP, as fast as each is": lambda problem: poplar(problem),
}
"""By contender, in the order of the table."""


def _planned(cluster: Cluster, profile: ModelProfile) -> dict[str, Row]:
    problem, rows = problem_of(profile, cluster, BATCH), {}
    evaluate = evaluator(profile, cluster)
    for name, plan_of in CONTENDERS.items():
        try:
            plan = plan_of(problem)
        except InfeasibleError as error:
            print(f"{cluster.name}, {name}: {error}", file=sys.stderr)
            rows[name] = Row(None, float("inf"), [], [], [])
            continue
        rows[name] = Row(plan, evaluate(plan).step_s, [], [], [])
    return rows


def _run(
    row: Row, cluster_file: Path, entry: ModelEntry, profile: ModelProfile, options: argparse.Namespace
) -> None:
    assert row.plan is not None
    settings = Settings.of(row.plan, profile, steps=options.steps, save=False, **entry.in_settings)
    report = measure(settings, cluster_file, profile, row.plan)
    row.measured_s.extend(report.step_s_all[1:])
    row.samples_per_s.append(report.samples_per_s)
    row.overloaded.append(report.host_overloaded)


def _table(cluster: Cluster, rows: Mapping[str, Row]) -> str:
    """Return markdown: contenders beside ours, predicted and measured."""
    cards = ", ".join(
        f"{device.speed:g} and {device.memory_bytes / 2**20:g} MiB" for device in cluster.devices
    )
    lines = [
        f"### {cluster.name}: {cards}\n",
        "| contender | layers | microbatch | predicted s | measured s, median [min, max] of n | samples/s "
        "| slower than ours |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = statistics.median(rows[OURS].samples_per_s or [float("nan")])
    for contender, row in rows.items():
        if row.plan is None:
            lines.append(f"| {contender} | does not fit | | | | | |")
            continue
        median = statistics.median(row.measured_s or [float("nan")])
        speed = statistics.median(row.samples_per_s or [float("nan")])
        star = " *" if any(row.overloaded) else ""
        sizes = "/".join(map(str, sorted({each.microbatch_size for each in row.plan.pipelines})))
        lines.append(
            f"| {contender} | {_layers(row.plan.pipelines)} | {sizes} "
            f"| {row.predicted_s:.3f} | {median:.3f} [{min(row.measured_s, default=0):.3f}, "
            f"{max(row.measured_s, default=0):.3f}] of {len(row.measured_s)}{star} | {speed:.1f} "
            f"| {ours / speed:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _layers(pipelines: Sequence[Pipeline]) -> str:
    return " + ".join("/".join(str(stage.num_layers) for stage in each.stages) for each in pipelines)


if __name__ == "__main__":
    main()
