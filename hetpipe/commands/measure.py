"""Measure plans by runs of a few steps."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_model.profile import ModelProfile
from hetpipe.models.names import ModelEntry
from hetpipe.runs.measured_rounds import MeasuredRounds
from hetpipe.runs.run_folder import RunFolder
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
    run: Mapping[str, Any] | None = None,
) -> RunReport:
    """Train under a plan for a few steps and return its report; the first step is not timed.

    keep: where to keep the run folder, else it is thrown away. model: where it is more than a name. run:
    settings that layers were measured with.
    """
    from hetpipe.training.run import measure

    own = {} if model is None else model.in_settings
    settings = Settings.of(plan, profile, steps=steps, **own, **(run or {}))
    return measure(settings, cluster_file, profile, plan, keep=keep)


def measure_rounds(
    plans: Mapping[str, Plan],
    profile: ModelProfile,
    cluster_file: Path,
    steps: int,
    *,
    rounds: int,
    quiet: bool = False,
    model: ModelEntry | None = None,
    run: Mapping[str, Any] | None = None,
) -> dict[str, MeasuredRounds]:
    """Return the runs of plans by strategy; in each round all plans are run in turn, equal ones once.

    model, run: as for `measure_plan`.
    """
    from hetpipe.runtime.scratch import scratch_folder

    first: dict[str, str] = {}
    like = {strategy: first.setdefault(_decided(plan), strategy) for strategy, plan in plans.items()}
    found: dict[str, list[tuple[RunReport, tuple[float, ...]]]] = {name: [] for name in first.values()}
    for turn in range(rounds):
        for strategy, runs in found.items():
            if not quiet and sys.stdout.isatty():
                from hetpipe.reporting.tables import console

                console(sys.stderr).print(f"round {turn + 1} of {rounds}, {strategy}: {steps} steps")
            with scratch_folder("compare") as place:
                folder = RunFolder(place / "run")
                report = measure_plan(
                    plans[strategy], profile, cluster_file, steps, keep=folder.path, model=model, run=run
                )
                losses = tuple(float(entry["loss"]) for entry in folder.read_metrics())
            runs.append((report, losses))
    return {
        strategy: MeasuredRounds(
            strategy,
            tuple(report for report, _ in found[other]),
            tuple(losses for _, losses in found[other]),
            None if other == strategy else other,
        )
        for strategy, other in like.items()
    }


def _decided(plan: Plan) -> str:
    """Return what plans that run alike have in common."""
    return str({key: value for key, value in plan.to_json().items() if key in DECIDING})


DECIDING = ("pipelines", "zero", "state_owners", "owner_ranges", "layer_zero", "gradient_dtype")
