"""How much faster is an uneven plan than an even split, and does the prediction hold? See README.md."""

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from cost_model.cluster_file import read_cluster
from cost_model.known_clusters import known_clusters
from cost_model.profile import ModelProfile, profile_text, read_profile
from hetpipe.profiling.profile_cache import processor_name, profile_model
from hetpipe.runs.settings import Clock, Settings
from hetpipe.simulation.prediction import evaluator
from hetpipe.training.run import measure
from partition.plan import Pipeline, Plan
from partition.problem import problem_of
from partition.solver import compare

HERE = Path(__file__).parent
CLUSTER = known_clusters()["four-unequal"]
STRATEGIES = ("auto", "gpipe-even", "torchgpipe", "speed-proportional", "single")
RETRIES = 2


def main() -> None:
    options = _options()
    cluster = read_cluster(CLUSTER)
    profile = _profile(options)
    problem = problem_of(profile, cluster, options.global_batch_size)
    outcomes = compare(problem, evaluator(profile, cluster))
    plans = {entry.strategy: entry.plan for entry in outcomes if entry.strategy in STRATEGIES and entry.plan}
    missing = [name for name in STRATEGIES if name not in plans]
    if missing:
        sys.exit(f"{options.model} does not fit under {', '.join(missing)}: choose a smaller model")
    measured: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    wall: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    disturbed = 0
    for turn in range(options.rounds):
        for name in STRATEGIES:
            steps, wall_s, overloaded = _steps(plans[name], profile, options.steps, Clock.NOMINAL)
            disturbed += overloaded
            measured[name] += steps
            wall[name].append(wall_s)
            print(f"round {turn + 1} {name}: {' '.join(f'{value:.3f}' for value in steps)} s", flush=True)
    print()
    print(_table(plans, measured, wall))
    print()
    print(f"runs whose host was overloaded even when repeated: {disturbed}")
    if options.cpu_clock:
        found = {
            name: _steps(plans[name], profile, options.steps, Clock.CPU) for name in ("auto", "gpipe-even")
        }
        cpu = {name: steps for name, (steps, _, _) in found.items()}
        print("\n--clock cpu (devices charge the CPU seconds that were used; not by construction)\n")
        cpu_wall = {name: [wall_s] for name, (_, wall_s, _) in found.items()}
        print(_table({name: plans[name] for name in cpu}, cpu, cpu_wall))
    names = ("torch", "transformers", "numpy")
    print(
        f"\n{_machine()}; Python {platform.python_version()}, "
        + ", ".join(f"{n} {version(n)}" for n in names)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-medium-24")
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="each runs every plan once, in turn")
    parser.add_argument("--steps", type=int, default=3, help="of a run; the first is not timed")
    parser.add_argument("--profile", type=Path, help="else measured, or from the cache")
    parser.add_argument("--profile-budget", type=float, default=60.0)
    parser.add_argument("--no-cpu-clock", dest="cpu_clock", action="store_false")
    return parser.parse_args()


def _profile(options: argparse.Namespace) -> ModelProfile:
    if options.profile is not None:
        return read_profile(options.profile)
    profile = profile_model(options.model, read_cluster(CLUSTER), 64, budget_s=options.profile_budget)
    path = Path("uneven-vs-even-profile.json")
    path.write_text(profile_text(profile))
    print(f"profile: {path}", file=sys.stderr)
    return profile


def _steps(plan: Plan, profile: ModelProfile, steps: int, clock: Clock) -> tuple[list[float], float, bool]:
    """Seconds of the timed steps of one run, and of one by the wall clock in the mean.

    Repeated if the host was overloaded; last, whether it still was.
    """
    settings = Settings.of(plan, profile, steps=steps, clock=clock)
    for _ in range(RETRIES):
        report = measure(settings, CLUSTER, profile, plan)
        if not report.host_overloaded:
            break
        worst = max(device.over_budget for device in report.devices.values())
        print(
            f"{plan.strategy}: over budget {worst:.1%}, foreign load {report.foreign_cores:.2f} cores",
            file=sys.stderr,
        )
    return list(report.step_s_all[1:]), plan.global_batch_size / report.samples_per_s, report.host_overloaded


def _table(
    plans: Mapping[str, Plan], measured: Mapping[str, Sequence[float]], wall: Mapping[str, Sequence[float]]
) -> str:
    """Markdown: predicted and measured side by side, and how many times slower than ours each is.

    The last by the wall clock, with all that lies between the steps.
    """
    lines = [
        "| plan | layers | microbatch | predicted s | measured s, median [min, max] of n | error "
        "| slower than ours: predicted | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = plans["auto"]
    assert ours.predicted is not None
    ours_s = statistics.median(wall["auto"])
    for name, plan in plans.items():
        assert plan.predicted is not None
        values = measured[name]
        median = statistics.median(values)
        predicted = plan.predicted.step_s
        lines.append(
            f"| {name} | {'; '.join(map(_cuts, plan.pipelines))} "
            f"| {', '.join(str(pipeline.microbatch_size) for pipeline in plan.pipelines)} | {predicted:.3f} "
            f"| {median:.3f} [{min(values):.3f}, {max(values):.3f}] of {len(values)} "
            f"| {median / predicted - 1:+.1%} "
            f"| {predicted / ours.predicted.step_s:.2f} | {statistics.median(wall[name]) / ours_s:.2f} |"
        )
    return "\n".join(lines)


def _cuts(pipeline: Pipeline) -> str:
    cuts = "/".join(str(stage.num_layers) for stage in pipeline.stages)
    return f"{cuts} on {', '.join(stage.device for stage in pipeline.stages)}"


def _machine() -> str:
    return f"{os.cpu_count()} cores ({processor_name()})"


if __name__ == "__main__":
    main()
