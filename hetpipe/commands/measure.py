"""Measure plans by runs of a few steps."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from cost_model.profile import ModelProfile
from hetpipe.models.names import ModelEntry
from hetpipe.runs.run_report import RunReport
from hetpipe.runs.settings import Settings
from partition.plan import Plan


def measure_plan(
    plan: Plan,
    profile: ModelProfile,
    cluster_file: Path,
    steps: int,
    *,
    keep: Path | None = None,
    model: ModelEntry | None = None,
) -> RunReport:
    """Train under a plan for a few steps and return its report; the first step is not timed.

    keep: where to keep the run folder, else it is thrown away. model: where it is more than a name.
    """
    from hetpipe.training.run import measure

    settings = Settings.of(plan, profile, steps=steps, **({} if model is None else model.in_settings))
    return measure(settings, cluster_file, profile, plan, keep=keep)


def measure_outcomes(
    plans: Mapping[str, Plan],
    profile: ModelProfile,
    cluster_file: Path,
    steps: int,
    *,
    quiet: bool = False,
    model: ModelEntry | None = None,
) -> dict[str, RunReport]:
    """Return the reports of plans by strategy; equal plans are run once."""
    found: dict[str, RunReport] = {}
    reports: dict[str, RunReport] = {}
    for strategy, plan in plans.items():
        key = str(plan.to_json()["pipelines"])
        if key not in found:
            if not quiet and sys.stdout.isatty():
                from hetpipe.reporting.tables import console

                console(sys.stderr).print(f"running {strategy}: {steps} steps")
            found[key] = measure_plan(plan, profile, cluster_file, steps, model=model)
        reports[strategy] = dataclasses.replace(found[key], strategy=strategy)
    return reports
