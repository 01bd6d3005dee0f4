"""Which strategy is first on clusters shaped after published ones, run for real? See README.md."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cost_model.cluster_file import read_cluster
from cost_model.profile import ModelProfile, profile_text, read_profile
from hetpipe.commands.measure import measure_rounds
from hetpipe.profiling.profile_cache import processor_name, profile_model
from hetpipe.runs.measured_rounds import MeasuredRounds, losses_apart
from hetpipe.simulation.prediction import evaluator
from partition.auto import STRATEGIES
from partition.problem import problem_of
from partition.solver import Outcome, compare

CLUSTERS = {path.stem: path for path in sorted((Path(__file__).parent / "clusters").glob("*.toml"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-medium-24")
    parser.add_argument("--sequence-length", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="of a step, for each device")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=2, help="each runs every plan once, in turn")
    parser.add_argument("--steps", type=int, default=3, help="of a run; the first is not timed")
    parser.add_argument("--profile-budget", type=float, default=60.0)
    parser.add_argument("--predict", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=Path("strategies-results"), help="a folder")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    profile = _profile(options)
    for name in options.clusters:
        cluster = read_cluster(CLUSTERS[name])
        problem = problem_of(profile, cluster, options.samples * len(cluster.devices))
        names = [strategy for strategy in STRATEGIES if strategy in {*options.strategies, "auto"}]
        outcomes = compare(problem, evaluator(profile, cluster), names)
        plans = {outcome.strategy: outcome.plan for outcome in outcomes if outcome.plan is not None}
        measured: Mapping[str, MeasuredRounds] = {}
        if not options.predict:
            measured = measure_rounds(
                plans, profile, CLUSTERS[name], options.steps, rounds=options.rounds, quiet=True
            )
            rows = [asdict(each) for each in measured.values()]
            (options.results / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(_table(name, outcomes, measured), flush=True)
    print(f"{options.model}, length {options.sequence_length}; {processor_name()}")


def _profile(options: argparse.Namespace) -> ModelProfile:
    path = options.results / "profile.json"
    if not path.exists():
        cluster = read_cluster(next(iter(CLUSTERS.values())))
        found = profile_model(
            options.model, cluster, options.sequence_length, budget_s=options.profile_budget
        )
        path.write_text(profile_text(found))
    profile = read_profile(path)
    if (profile.model, profile.sequence_length) != (options.model, options.sequence_length):
        sys.exit(f"{path} is of {profile.model}; give another --results")
    return profile


def _table(name: str, outcomes: Sequence[Outcome], measured: Mapping[str, MeasuredRounds]) -> str:
    """Markdown: predicted beside measured, and how many times slower than `auto`, by the median."""
    lines = [
        f"### {name}\n",
        "| strategy | predicted s | measured s, median [min, max] of n | error | slower than auto: predicted "
        "| measured |",
        "|---|---|---|---|---|---|",
    ]
    ours = outcomes[-1].plan
    for outcome in outcomes:
        if outcome.plan is None or outcome.plan.predicted is None:
            lines.append(f"| {outcome.strategy} | does not fit | | | | |")
            continue
        assert ours is not None and ours.predicted is not None
        predicted_s = outcome.plan.predicted.step_s
        cells = ["", "", f"{predicted_s / ours.predicted.step_s:.2f}", ""]
        if each := measured.get(outcome.strategy):
            seconds = each.step_seconds
            star = " *" if any(report.host_overloaded for report in each.reports) else ""
            cells[0] = f"{each.step_s:.3f} [{min(seconds):.3f}, {max(seconds):.3f}] of {len(seconds)}{star}"
            cells[1], cells[3] = f"{each.error:+.1%}", f"{each.step_s / measured['auto'].step_s:.2f}"
        lines.append(f"| {outcome.strategy} | {predicted_s:.3f} | {' | '.join(cells)} |")
    apart = losses_apart(list(measured.values()))
    if apart is not None:
        lines.append(f"\nLosses agree to {apart:.1e} of their size at every step; * host busy or overloaded")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
