"""run: plan, train, and show how far the prediction was off."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cost_model.cluster import EMULATED, Cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.commands.inputs import PlanRequest, checked_plan, plan_request
from hetpipe.commands.options import (
    AUTO,
    ClusterOption,
    JsonOption,
    PlanOptions,
    RequiredModel,
    ScheduleOption,
    StrategyOption,
    with_options,
)
from hetpipe.commands.output import choice_json, choice_sentences, note, print_json, warn_if_too_fast
from hetpipe.commands.plan import new_plan, show_plan
from hetpipe.commands.training import (
    RunStart,
    TrainingOptions,
    kept_checkpoint,
    kept_sentences,
    run_start,
    train_shown,
)
from hetpipe.program.verification import verify
from hetpipe.reporting.tables import (
    estimate_sentences,
    plan_sentences,
    plan_table,
    run_report_tables,
    show,
)
from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import under_torchrun
from hetpipe.simulation.prediction import Prediction, predict, with_bound
from partition.plan import Plan
from partition.plan_file import read_plan
from partition.problem import Problem

EMPTY: list[Any] = []  # tables of a dry run


@with_options
def run_command(
    *,
    model: RequiredModel,
    cluster_file: ClusterOption,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="A plan.json to run, instead of planning.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option("--global-batch-size", help="Samples a step; 16, or the plan's.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", help="Tokens a sample; 64, or the profile's.")
    ] = None,
    strategy: StrategyOption = AUTO,
    options: PlanOptions,
    schedule: ScheduleOption = None,
    training: TrainingOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and verify, train nothing.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the last table only.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a model over the devices of a cluster file; torchrun may start it too, a process per device."""
    if under_torchrun() and os.environ["RANK"] != "0":
        from hetpipe.training.torchrun import follow

        follow()
        return
    silent = quiet or json
    request = plan_request(cluster_file, options, strategy)
    plan = None if plan_file is None else _given_plan(plan_file, options)
    start = run_start(model, training, dry_run=dry_run)
    settings = start.settings(schedule)
    profile = _profile(request, model, plan, sequence_length, quiet=silent)
    if plan is not None:
        prediction = _predict_given(
            plan, settings, profile, request.cluster, global_batch_size=global_batch_size, quiet=silent
        )
    else:
        problem = request.problem(profile, 16 if global_batch_size is None else global_batch_size)
        prediction = _predict_new(request, settings, problem, quiet=silent)
    verify(prediction.program, profile, request.cluster)
    if not silent:
        show(choice_sentences(prediction.choice, settings.schedule))
    used = [request.cluster.device(name) for name in prediction.plan.device_names]
    warn_if_too_fast(device.speed for device in used if device.kind == EMULATED)
    estimates = estimate_sentences(profile, (device.kind for device in used))
    if dry_run:
        facts = {"sequence_length": profile.sequence_length, "dtype": profile.dtype}
        result = {"plan": prediction.plan.to_json(), **facts, "settings": settings.to_json()}
        tables = EMPTY
    else:
        result, tables = _train(start, settings, cluster_file, profile, prediction, estimates, quiet=silent)
    if json:
        print_json({**result, **choice_json(prediction.choice)})
        note(estimates)
    else:
        show(tables)


def _given_plan(plan_file: Path, options: PlanOptions) -> Plan:
    """Read a plan to run.

    Raises: InputError if a part of it is forced too.
    """
    plan = read_plan(plan_file)
    if options.forces_plan or options.exclude:
        raise InputError(
            "--plan decides everything; leave out --pin, --exclude, --pipelines and --max-devices"
        )
    return plan


def _profile(
    request: PlanRequest, model: str, plan: Plan | None, sequence_length: int | None, *, quiet: bool
) -> ModelProfile:
    """Return the profile to train by, of the devices of the plan where there is one.

    Raises: InputError if it is of another sequence length than asked for.
    """
    used = None if plan is None else [request.cluster.device(name) for name in plan.device_names]
    profile = request.profile(model, sequence_length or 64, used=used, quiet=quiet)
    if sequence_length is not None and sequence_length != profile.sequence_length:
        raise InputError(
            f"--sequence-length is {sequence_length}, the profile is of {profile.sequence_length}; "
            "profile again"
        )
    return profile


def _predict_given(
    plan: Plan,
    settings: Settings,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    global_batch_size: int | None,
    quiet: bool,
) -> Prediction:
    """Predict a given plan and show it.

    Raises: InputError if the plan does not fit the profile or the cluster, or is for another batch.
    """
    if global_batch_size not in (None, plan.global_batch_size):
        raise InputError(
            f"--global-batch-size is {global_batch_size}, the plan's is {plan.global_batch_size}; "
            "leave it out, or plan again"
        )
    plan = checked_plan(plan, profile, cluster)
    prediction = with_bound(predict(plan, profile, cluster, settings.schedule), profile, cluster)
    if not quiet:
        plan = prediction.plan
        show([*plan_sentences(plan, profile, cluster), plan_table(plan, profile, cluster)])
    return prediction


def _predict_new(request: PlanRequest, settings: Settings, problem: Problem, *, quiet: bool) -> Prediction:
    """Plan, show the plan beside the others, and predict it under the schedule of the run."""
    plan, outcomes = new_plan(
        problem, request.cluster, request.strategy, proof_s=request.proof_s, alone=quiet
    )
    if not quiet:
        show_plan(plan, outcomes, problem.profile, request.cluster)
    return predict(plan, problem.profile, request.cluster, settings.schedule)


def _train(
    start: RunStart,
    settings: Settings,
    cluster_file: Path,
    profile: ModelProfile,
    prediction: Prediction,
    estimates: Sequence[str],
    *,
    quiet: bool,
) -> tuple[dict[str, Any], list[Any]]:
    """Train, and return what to print of it: as JSON, and as tables."""
    if start.entry.folder is not None:
        from hetpipe.data.task import model_notes

        note(model_notes(profile.model, settings.model_folder))
    report, folder = train_shown(settings, cluster_file, profile, prediction, start.folder, quiet=quiet)
    kept = kept_checkpoint(folder)
    result = {
        "run_folder": str(folder.path),
        "checkpoint": None if kept is None else str(kept),
        **report.to_json(),
    }
    tables = [*run_report_tables(report), *estimates, f"run folder: {folder.path}"]
    return result, tables + kept_sentences(folder, kept, settings.steps)
