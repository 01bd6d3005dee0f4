"""How fast are we where devices differ, beside runtimes and plans that people use today? See README.md."""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from encoder import make_task
from plans import PLANS, checked
from runtimes import Files, contender_rank, costs_of

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InfeasibleError
from cost_model.profile import ModelProfile, profile_text, read_profile
from hetpipe.profiling.profile_cache import processor_name, profile_model
from hetpipe.reporting.colours import BLUE, INK, SKY
from hetpipe.reporting.plots.style import save, strip
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import OVERLOADED_CORES, OVERLOADED_SHARE
from hetpipe.runs.settings import Settings
from hetpipe.runtime.emulated_links import Board
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.simulation.prediction import evaluator
from hetpipe.training.run import train
from partition.plan import Plan
from partition.plan_file import plan_text, read_plan
from partition.problem import problem_of

CLUSTERS = {path.stem: path for path in sorted((Path(__file__).parent / "clusters").glob("*.toml"))}
CLUSTER_NAMES = sorted(CLUSTERS, key=lambda name: len(read_cluster(CLUSTERS[name]).devices))
RUNTIME = {
    "torch 1F1B, even": "TorchPipeline",
    "torch 1F1B, balanced": "TorchPipeline",
    "torchgpipe": "TorchGPipe",
    "DDP, equal": "DataParallel",
    "DDP, Poplar": "DataParallel",
}
"""What runs a contender's plan; our executor runs those that are not named."""

Row = dict[str, Any]


def main() -> None:
    options = _options()
    options.results.mkdir(parents=True, exist_ok=True)
    rows_file = options.results / "steps.jsonl"
    profile = _profile(options)
    if not options.table_only:
        for turn in range(options.rounds):
            for name in options.clusters:
                for contender in PLANS:
                    done = any(
                        (row["cluster"], row["contender"], row["round"]) == (name, contender, turn)
                        for row in _rows(rows_file)
                    )
                    if not done:
                        row = _measure(name, contender, profile, options)
                        with open(rows_file, "a", encoding="utf-8") as file:
                            file.write(json.dumps({**row, "round": turn}) + "\n")
    rows = _rows(rows_file)
    for name in options.clusters:
        print(_table(name, [row for row in rows if row["cluster"] == name], options))
    _plot(rows, options)
    print(
        f"{options.model}, length {options.length}; {os.cpu_count()} cores ({processor_name()}); "
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "torchgpipe", "numpy"))
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="each runs every contender once, in turn")
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not timed")
    parser.add_argument("--model", default="encoder-12x192", help="encoder-BLOCKSxWIDTH")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=32, help="of a step, for each device of the cluster")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTER_NAMES, default=CLUSTER_NAMES)
    parser.add_argument("--profile-budget", type=float, default=45.0)
    parser.add_argument(
        "--results", type=Path, default=Path("peers-results"), help="a folder, taken up again"
    )
    parser.add_argument("--table-only", action="store_true", help="from the results of before")
    return parser.parse_args()


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _profile(options: argparse.Namespace) -> ModelProfile:
    path = options.results / "profile.json"
    if not path.exists():
        cluster = read_cluster(CLUSTERS[CLUSTER_NAMES[0]])
        profile = profile_model(
            options.model, cluster, options.length, budget_s=options.profile_budget, task=make_task
        )
        path.write_text(profile_text(profile))
    profile = read_profile(path)
    if (profile.model, profile.sequence_length) != (options.model, options.length):
        sys.exit(f"{path} is of {profile.model}, length {profile.sequence_length}; give another --results")
    return profile


def _plan(name: str, contender: str, profile: ModelProfile, options: argparse.Namespace) -> Path:
    """The file of a contender's plan for a cluster; made where it is missing.

    Raises: InfeasibleError if it does not fit.
    """
    path = Path(options.results) / "plans" / name / f"{contender.replace(', ', '-').replace(' ', '-')}.json"
    if not path.exists():
        cluster = read_cluster(CLUSTERS[name])
        problem = problem_of(profile, cluster, options.samples * len(cluster.devices))
        plan = checked(PLANS[contender](problem), problem)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plan_text(plan))
    return path


def _measure(name: str, contender: str, profile: ModelProfile, options: argparse.Namespace) -> Row:
    """One run of a contender: a row of the results, without its round."""
    try:
        path = _plan(name, contender, profile, options)
    except InfeasibleError as error:
        print(f"{name} {contender}: {error}", file=sys.stderr)
        return {"cluster": name, "contender": contender, "measured_s": [], "wall_s": None}
    plan, cluster = read_plan(path), read_cluster(CLUSTERS[name])
    runtime = RUNTIME.get(contender)
    if runtime is None:
        measured, wall_s, overloaded = _run_ours(name, plan, profile, options)
    else:
        measured, wall_s, overloaded = _run_theirs(name, path, plan, runtime, options)
    predicted_s = evaluator(profile, cluster)(plan).step_s
    error = statistics.median(measured) / predicted_s - 1
    print(f"{name} {contender}: {statistics.median(measured):.3f} s, {error:+.1%}", file=sys.stderr)
    return {
        "cluster": name,
        "contender": contender,
        "layers": " + ".join("/".join(str(s.num_layers) for s in p.stages) for p in plan.pipelines),
        "microbatch": sorted({pipeline.microbatch_size for pipeline in plan.pipelines}),
        "samples": plan.global_batch_size,
        "speed": max(cluster.device(device).speed for device in plan.device_names),
        "predicted_s": predicted_s,
        "measured_s": measured,
        "wall_s": wall_s,
        "overloaded": overloaded,
    }


def _run_ours(
    name: str, plan: Plan, profile: ModelProfile, options: argparse.Namespace
) -> tuple[list[float], float, bool]:
    """The seconds of the timed steps, those of one by the wall clock in the mean, and whether disturbed."""
    settings = Settings.of(plan, profile, steps=options.steps, save=False)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        report = train(settings, CLUSTERS[name], profile, plan, run, make_task=make_task)
    return list(report.step_s_all[1:]), plan.global_batch_size / report.samples_per_s, report.host_overloaded


def _run_theirs(
    name: str, path: Path, plan: Plan, runtime: str, options: argparse.Namespace
) -> tuple[list[float], float, bool]:
    """The same of another runtime."""
    events: list[Row] = []
    shared_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared_memory) as folder:
        profile = str(options.results / "profile.json")
        files = Files(str(CLUSTERS[name]), profile, str(path), str(Path(folder) / "board"))
        Board.create(Path(files.board), costs_of(files, ddp=runtime == "DataParallel"))
        names = plan.device_names[:1] if runtime == "TorchGPipe" else plan.device_names
        group = RankGroup(names, (1,) * len(names))
        run_ranks(contender_rank, (files, runtime, options.steps), group, events.append)
    (event,) = events
    late = event["over_budget"] > OVERLOADED_SHARE or event["foreign_cores"] > OVERLOADED_CORES
    return event["seconds"], event["wall_s"], late and runtime != "TorchGPipe"


def _table(name: str, rows: Sequence[Row], options: argparse.Namespace) -> str:
    """Markdown of one cluster: contenders beside ours, and how near ours is to what the devices can do."""
    cluster = read_cluster(CLUSTERS[name])
    medians = _medians(rows)
    if "ours" not in medians:
        return f"{name}: no run of ours yet\n"
    speeds = ", ".join(f"{device.speed:g}" for device in cluster.devices)
    lines = [
        f"### {name}: speeds {speeds}, {options.samples * len(cluster.devices)} samples a step\n",
        "| contender | layers | microbatch | predicted s | measured s, median [min, max] of n | samples/s "
        "| slower than ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for contender, median in medians.items():
        mine = [row for row in rows if row["contender"] == contender]
        if median == float("inf"):
            lines.append(f"| {contender} | does not fit | | | | | |")
            continue
        values = [value for row in mine for value in row["measured_s"]]
        step_s = statistics.median(values)
        star = " *" if any(row["overloaded"] for row in mine) else ""
        lines.append(
            f"| {contender} | {mine[0]['layers']} | {'/'.join(map(str, mine[0]['microbatch']))} "
            f"| {mine[0]['predicted_s']:.3f} "
            f"| {step_s:.3f} [{min(values):.3f}, {max(values):.3f}] of {len(values)}{star} "
            f"| {mine[0]['samples'] / median:.1f} | {median / medians['ours']:.2f} |"
        )
    ours = next(row for row in rows if row["contender"] == "ours")
    lines.append(
        f"\nOurs: {ours['predicted_s'] / medians['ours']:.1%} of the predicted throughput"
        + _of_the_sum(cluster, rows, medians)
        + "; * host overloaded\n"
    )
    return "\n".join(lines)


def _medians(rows: Sequence[Row]) -> dict[str, float]:
    """Wall-clock seconds of a step by contender, median of runs, in the order of the table.

    inf for what does not fit; those without a run are left out.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["contender"], []).extend([row["wall_s"]] if row["measured_s"] else [])
    return {name: statistics.median(found[name] or [float("inf")]) for name in PLANS if name in found}


def _of_the_sum(cluster: Cluster, rows: Sequence[Row], medians: dict[str, float]) -> str:
    """Ours over (sum of speeds x the throughput of one device of speed 1), measured on the fastest."""
    if medians.get("one device", float("inf")) == float("inf"):
        return ""
    speed = next(row["speed"] for row in rows if row["contender"] == "one device")
    alone_s = medians["one device"] * speed
    share = alone_s / medians["ours"] / sum(device.speed for device in cluster.devices)
    return f", {share:.1%} of all devices' speeds together"


def _plot(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Bars: throughput of each contender over ours, a column for each cluster."""
    from matplotlib.figure import Figure

    shown = [name for name in options.clusters if any(row["cluster"] == name for row in rows)]
    if not shown:
        return
    figure = Figure(figsize=(2.6 * len(shown) + 1.2, 3.2), layout="constrained")
    for column, name in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), column + 1)
        medians = _medians([row for row in rows if row["cluster"] == name])
        if "ours" not in medians:
            continue
        shares = [medians["ours"] / medians[contender] if contender in medians else 0 for contender in PLANS]
        bars = axes.barh(range(len(PLANS)), shares, color=[BLUE, *[SKY] * (len(PLANS) - 1)], height=0.7)
        labels = [f"{share:.2f}" if share else "" for share in shares]
        over_line = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.bar_label(bars, labels, padding=2, fontsize=7, bbox=over_line)
        axes.set_yticks(range(len(PLANS)), list(PLANS) if column == 0 else [""] * len(PLANS), fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1, color=INK, linewidth=0.6, linestyle=":")
        axes.set_xlim(0, 1.2 * max(1.0, *shares))
        axes.set_title(f"{name} devices", fontsize=9)
        axes.tick_params(axis="x", labelsize=7)
        strip(axes)
    figure.supxlabel("samples per second, ours = 1", fontsize=8)
    print(f"picture: {save(figure, options.results / 'peers')[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
