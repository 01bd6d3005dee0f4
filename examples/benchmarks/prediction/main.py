"""How far are predicted step time and memory from measured ones? See README.md."""

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

from combinations import BERT, CLUSTERS, COMBINATIONS, GPT, Combination, cluster_of, toml_of

from cost_model.profile import ModelProfile, profile_text, read_profile
from hetpipe.profiling.profile_cache import processor_name, profile_model
from hetpipe.runs.settings import Clock, Settings
from hetpipe.training.run import measure
from partition.plan import Plan

SEQUENCE_LENGTH = 64


def main() -> None:
    options = _options()
    if not options.table_only:
        profiles = {model: _profile(model, options) for model in (BERT, GPT)}
        for turn in range(options.rounds):
            for combination in COMBINATIONS:
                _measure(combination, profiles[combination.model], Clock.NOMINAL, turn, options)
        if options.cpu_clock:
            for combination in COMBINATIONS:
                _measure(combination, profiles[combination.model], Clock.CPU, 0, options)
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    print(_table([row for row in rows if row["clock"] == Clock.NOMINAL], "clock nominal"))
    print(_table([row for row in rows if row["clock"] == Clock.CPU], "clock cpu"))
    _plot(rows, options.results.with_name("predicted-and-measured"))
    names = ("torch", "transformers", "numpy")
    print(
        f"{_machine()}; Python {platform.python_version()}, " + ", ".join(f"{n} {version(n)}" for n in names)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="each runs every combination once, in turn")
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not timed")
    parser.add_argument("--retries", type=int, default=1, help="of a run whose host was overloaded")
    parser.add_argument("--profile-budget", type=float, default=60.0)
    parser.add_argument("--no-cpu-clock", dest="cpu_clock", action="store_false")
    parser.add_argument("--results", type=Path, default=Path("prediction.jsonl"), help="a line for each run")
    parser.add_argument("--table-only", action="store_true", help="from the results of before")
    return parser.parse_args()


def _profile(model: str, options: argparse.Namespace) -> ModelProfile:
    path = options.results.with_name(f"{model}-profile.json")
    if path.exists():
        return read_profile(path)
    cluster = cluster_of(COMBINATIONS[0])
    profile = profile_model(model, cluster, SEQUENCE_LENGTH, budget_s=options.profile_budget, use_cache=False)
    path.write_text(profile_text(profile))
    return profile


def _measure(
    combination: Combination, profile: ModelProfile, clock: Clock, turn: int, options: argparse.Namespace
) -> None:
    """One run; repeated if the host was overloaded, the last one counts. A line into the results."""
    plan = combination.plan(profile, cluster_of(combination))
    settings = Settings.of(plan, profile, steps=options.steps, clock=clock)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "cluster.toml"
        path.write_text(toml_of(CLUSTERS[combination.cluster]))
        for _ in range(options.retries + 1):
            report = measure(settings, path, profile, plan)
            if not report.host_overloaded or clock is Clock.CPU:
                break
    peaks = [
        device.peak_bytes / device.predicted_bytes - 1
        for device in report.devices.values()
        if device.peak_bytes is not None
    ]
    row = {
        "model": combination.model,
        "cluster": combination.cluster,
        "plan": combination.name,
        "layers": _layers(plan),
        "clock": clock,
        "round": turn,
        "predicted_s": report.predicted_step_s,
        "measured_s": report.global_batch_size / report.samples_per_s,
        "step_s": report.measured_step_s,
        "memory_error": max(peaks, key=abs),
        "overloaded": report.host_overloaded,
    }
    with open(options.results, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    error = row["measured_s"] / report.predicted_step_s - 1
    print(
        f"{clock} {turn} {combination.model} {combination.cluster} {combination.name}: {error:+.1%}",
        file=sys.stderr,
    )


def _layers(plan: Plan) -> str:
    return " + ".join("/".join(str(stage.num_layers) for stage in p.stages) for p in plan.pipelines)


def _table(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Markdown: a row for each combination, and what they come to."""
    if not rows:
        return ""
    lines = [
        f"{title}\n",
        "| model | cluster | plan, microbatch | layers | predicted s "
        "| by the wall clock s, median [min, max] of n | error | steps alone s | memory error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    errors, memory, pairs = [], [], []
    for combination in COMBINATIONS:
        key = (combination.model, combination.cluster, combination.name)
        mine = [row for row in rows if (row["model"], row["cluster"], row["plan"]) == key]
        if not mine:
            continue
        measured = [row["measured_s"] for row in mine]
        steps = statistics.median(row["step_s"] for row in mine)
        predicted, median = mine[0]["predicted_s"], statistics.median(measured)
        worst = max((row["memory_error"] for row in mine), key=abs)
        errors.append(abs(median / predicted - 1))
        memory.append(abs(worst))
        pairs.append((predicted, median))
        mark = " *" if any(row["overloaded"] for row in mine) else ""
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {mine[0]['layers']} | {predicted:.3f} "
            f"| {median:.3f} [{min(measured):.3f}, {max(measured):.3f}] of {len(measured)}{mark} "
            f"| {median / predicted - 1:+.1%} | {steps:.3f} | {worst:+.1%} |"
        )
    lines.append(
        f"\nstep by the wall clock: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; "
        f"memory: median {statistics.median(memory):.1%}, worst {max(memory):.1%}; "
        f"Spearman of predicted and measured step time {_spearman(pairs):.3f}; * host overloaded\n"
    )
    return "\n".join(lines)


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of predicted and measured (Spearman, 1904); no ties occur."""
    count = len(pairs)
    ranks = [sorted(range(count), key=lambda index, side=side: pairs[index][side]) for side in (0, 1)]
    places = [{entry: place for place, entry in enumerate(order)} for order in ranks]
    squares = sum((places[0][index] - places[1][index]) ** 2 for index in range(count))
    return 1 - 6 * squares / (count * (count**2 - 1))


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5), layout="constrained")
    limit = 1.1 * max(max(row["predicted_s"], row["measured_s"]) for row in rows)
    axes.plot([0, limit], [0, limit], color="0.6", linewidth=1, zorder=0)
    for clock, colour, marker in ((Clock.NOMINAL, "#0072B2", "o"), (Clock.CPU, "#E69F00", "^")):
        mine = [row for row in rows if row["clock"] == clock]
        if not mine:
            continue
        measured = [row["measured_s"] for row in mine]
        axes.scatter(
            [row["predicted_s"] for row in mine],
            measured,
            s=22,
            color=colour,
            marker=marker,
            label=f"clock {clock}",
        )
    axes.set(
        xlabel="predicted step, seconds",
        ylabel="measured by the wall clock, seconds",
        xlim=(0, limit),
        ylim=(0, limit),
    )
    axes.legend(frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.savefig(path.with_suffix(".svg"))


def _machine() -> str:
    return f"{os.cpu_count()} cores ({processor_name()})"


if __name__ == "__main__":
    main()
