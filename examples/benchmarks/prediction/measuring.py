"""What the tables of predicted and measured steps have in common: options, the profile, a run, a cell."""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_model.cluster_file import cluster_from_data
from cost_model.profile import ModelProfile, profile_text, read_profile
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.settings import Settings
from hetpipe.training.run import measure
from partition.plan import Plan


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all these tables."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not timed")
    parser.add_argument("--retries", type=int, default=2, help="of a run whose host was overloaded")
    parser.add_argument("--profile-budget", type=float, default=30.0)
    parser.add_argument("--profile", type=Path, help="where the profile is kept for another time")
    return parser


def kept_profile(
    options: argparse.Namespace, model: str, sequence_length: int, clusters: Mapping[str, dict[str, Any]]
) -> ModelProfile:
    """Return the profile of a model on the first of the clusters: what is kept, or a new one."""
    if options.profile is not None and options.profile.exists():
        return read_profile(options.profile)
    cluster = cluster_from_data(next(iter(clusters.values())), "first")
    budget_s = options.profile_budget
    profile = profile_model(model, cluster, sequence_length, budget_s=budget_s, use_cache=False)
    if options.profile is not None:
        options.profile.write_text(profile_text(profile))
    return profile


def measured_steps(
    plan: Plan, profile: ModelProfile, cluster: str, options: argparse.Namespace
) -> tuple[list[float], str]:
    """Return the seconds of a run's steps but the first, and a star where the host was overloaded."""
    settings = Settings.of(plan, profile, steps=options.steps, save=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(cluster, encoding="utf-8")
        for _ in range(options.retries + 1):
            report = measure(settings, path, profile, plan)
            if not report.host_overloaded:
                break
    assert report.owners_agree
    return list(report.step_s_all[1:]), " *" if report.host_overloaded else ""


def spread(steps: Sequence[float]) -> str:
    """Return the cell of measured seconds: median, least, most and how many."""
    return f"{statistics.median(steps):.3f} [{min(steps):.3f}, {max(steps):.3f}] of {len(steps)}"


def show(lines: Sequence[str], errors: Sequence[float]) -> None:
    """Print a table, with the median and the worst of its errors."""
    worst = max(map(abs, errors))
    print("\n".join(lines))
    print(f"\n{len(errors)} plans: median error {statistics.median(map(abs, errors)):.1%}, worst {worst:.1%}")
    print("* host overloaded")
