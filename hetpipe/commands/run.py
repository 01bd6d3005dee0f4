"""run: plan, train, and show how far the prediction was off."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cost_model.cluster import EMULATED, Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.commands.common import (
    AllowSlowOption,
    BudgetOption,
    ClusterOption,
    DtypeOption,
    JsonOption,
    MicrobatchOption,
    ProfileOption,
    ScheduleOption,
    StrategyOption,
    check_strategy,
    checked_plan,
    get_profile,
    note,
    print_json,
    warn,
    warn_if_too_fast,
)
from hetpipe.commands.forcing import (
    ExcludeOption,
    MaxDevicesOption,
    NoProofOption,
    PinOption,
    PipelinesOption,
    ProofSecondsOption,
    forced_problem,
    proof_seconds,
    remaining,
)
from hetpipe.commands.kept import kept_checkpoint, kept_sentences, kept_settings
from hetpipe.commands.models import RequiredModel
from hetpipe.commands.planning import (
    AUTO,
    choice_json,
    choice_sentences,
    plan_and_compare,
    show_plan,
    solve_problem,
)
from hetpipe.models.names import model_entry
from hetpipe.program.verification import verify
from hetpipe.reporting.tables import (
    console,
    estimate_sentences,
    plan_sentences,
    plan_table,
    run_report_tables,
    show,
)
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Clock, Settings
from hetpipe.runtime.processes import under_torchrun
from hetpipe.simulation.prediction import figured, scheduled
from partition.plan import Plan
from partition.plan_file import read_plan
from partition.problem import Problem, problem_of

if TYPE_CHECKING:
    from hetpipe.runs.run_report import RunReport

RUNS = Path("runs")


def run_command(
    model: RequiredModel,
    cluster: ClusterOption,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan.json to run, instead of planning.")
    ] = None,
    profile: ProfileOption = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="UTF-8 text to train on; give it several times.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps to train for.")] = 100,
    total_steps: Annotated[
        int | None, typer.Option("--total-steps", help="Length of the learning-rate schedule; else --steps.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option("--global-batch-size", help="Samples a step; 16, or the plan's.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", help="Tokens a sample; 64, or the profile's.")
    ] = None,
    dtype: DtypeOption = None,
    allow_slow_bf16: AllowSlowOption = False,
    microbatch_size: MicrobatchOption = None,
    strategy: StrategyOption = AUTO,
    pin: PinOption = None,
    exclude: ExcludeOption = None,
    pipelines: PipelinesOption = None,
    max_devices: MaxDevicesOption = None,
    no_proof: NoProofOption = False,
    proof_s: ProofSecondsOption = None,
    schedule: ScheduleOption = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    learning_rate: Annotated[float, typer.Option("--learning-rate")] = 1e-4,
    every: Annotated[
        int | None,
        typer.Option("--every", help="A checkpoint each so many steps too; 0, or that of --resume."),
    ] = None,
    save: Annotated[
        bool,
        typer.Option("--save/--no-save", help="Keep the trained model: a checkpoint at the end, or none."),
    ] = True,
    resume: Annotated[
        str | None, typer.Option("--resume", help='"auto", a run folder, or a checkpoint to go on from.')
    ] = None,
    clock: Annotated[
        Clock, typer.Option("--clock", help="What an emulated device charges: the profile's times, or CPU.")
    ] = Clock.NOMINAL,
    run_folder: Annotated[
        Path | None, typer.Option("--run-folder", help="Where to write; else runs/<model>-<number>.")
    ] = None,
    profile_budget: BudgetOption = 60.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and verify, train nothing.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the last table only.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a model over the devices of a cluster file; torchrun may start it too, a process per device."""
    if under_torchrun() and os.environ["RANK"] != "0":
        from hetpipe.training.torchrun import follow

        follow()
        return
    check_strategy(strategy)
    proof_s = proof_seconds(no_proof, proof_s)
    devices = read_cluster(cluster)
    left = remaining(devices, exclude)
    given = read_plan(plan) if plan is not None else None
    if given is not None and (pin or exclude or pipelines is not None or max_devices is not None):
        raise InputError(
            "--plan decides everything; leave out --pin, --exclude, --pipelines and --max-devices"
        )
    texts = _readable(data or ())
    entry = model_entry(model)
    folder = RunFolder(run_folder) if run_folder is not None else None
    source = None if dry_run else _source(resume, folder, entry.name)
    before = kept_settings(source)
    length = sequence_length or 64
    used = left.devices if given is None else [devices.device(name) for name in given.device_names]
    costs = get_profile(
        model, profile, left, length,
        dtype=dtype, fast=() if allow_slow_bf16 else used, budget_s=profile_budget, quiet=quiet or json,
    )  # fmt: skip
    if sequence_length is not None and sequence_length != costs.sequence_length:
        raise InputError(
            f"--sequence-length is {sequence_length}, the profile is of {costs.sequence_length}; "
            "profile again"
        )
    settings = Settings(
        model=entry.name,
        steps=steps,
        global_batch_size=global_batch_size or (given.global_batch_size if given else 16),
        sequence_length=costs.sequence_length,
        total_steps=total_steps,
        seed=seed,
        learning_rate=learning_rate,
        dtype=costs.dtype,
        every=every if every is not None else (before.every if before else 0),
        save=save,
        clock=clock,
        schedule=schedule or (before.schedule if before else None),
        data=tuple(map(str, texts)),
        resume_from=None if source is None else str(source),
        model_folder=entry.place,
    )
    silent = quiet or json
    if given is not None:
        chosen = _given_plan(given, settings, costs, devices, quiet=silent)
    else:
        problem = problem_of(costs, left, settings.global_batch_size, microbatch_size)
        problem = forced_problem(problem, strategy, pin, pipelines, max_devices)
        chosen = _new_plan(problem, devices, strategy, proof_s=proof_s, quiet=silent)
    running, choice = scheduled(chosen, costs, devices, settings.schedule)
    verify(choice.program, costs, devices)
    if not silent:
        show(choice_sentences(choice, settings.schedule))
    used = [devices.device(name) for name in chosen.device_names]
    warn_if_too_fast(device.speed for device in used if device.kind == EMULATED)
    estimates = estimate_sentences(costs, (device.kind for device in used))
    if dry_run:
        result: dict[str, Any] = {"plan": running.to_json(), "settings": settings.to_json()}
        tables: list[Any] = []
    else:
        if entry.folder is not None:
            from hetpipe.data.task import model_notes

            note(model_notes(settings))
        report, folder = _train(settings, cluster, costs, chosen, folder, quiet=silent)
        kept = kept_checkpoint(folder)
        result = {
            "run_folder": str(folder.path),
            "checkpoint": None if kept is None else str(kept),
            **report.to_json(),
        }
        tables = [*run_report_tables(report), *estimates, f"run folder: {folder.path}"]
        tables += kept_sentences(folder, kept, steps)
    if json:
        print_json({**result, **choice_json(choice)})
        note(estimates)
    else:
        show(tables)


def _readable(data: Iterable[Path]) -> tuple[Path, ...]:
    """The texts by their full paths; refused before anything is measured."""
    texts = tuple(entry.resolve() for entry in data)
    if texts:
        from hetpipe.data.vocabulary import read_corpus

        read_corpus(texts)
    return texts


def _source(resume: str | None, folder: RunFolder | None, name: str) -> Path | None:
    """The checkpoint to go on from."""
    if resume is None:
        return None
    from hetpipe.training.run import find_checkpoint

    return find_checkpoint(resume, folder, RUNS, name)


def _given_plan(
    plan: Plan, settings: Settings, profile: ModelProfile, cluster: Cluster, *, quiet: bool
) -> Plan:
    if plan.global_batch_size != settings.global_batch_size:
        raise InputError(
            f"--global-batch-size is {settings.global_batch_size}, the plan's is {plan.global_batch_size}; "
            "leave it out, or plan again"
        )
    plan = checked_plan(plan, profile, cluster)
    figures, _ = figured(plan, profile, cluster, settings.schedule)
    if not quiet:
        show([*plan_sentences(figures, profile, cluster), plan_table(figures, profile, cluster)])
    return dataclasses.replace(figures, pipelines=plan.pipelines)


def _new_plan(
    problem: Problem, cluster: Cluster, strategy: str, *, proof_s: float | None, quiet: bool
) -> Plan:
    if quiet:
        plan = solve_problem(problem, strategy, proof_s=proof_s)
    else:
        plan, outcomes = plan_and_compare(problem, strategy, proof_s=proof_s)
        show_plan(plan, outcomes, problem.profile, cluster)
    return dataclasses.replace(plan, cluster_sha256=cluster.sha256)


def _train(
    settings: Settings,
    cluster_file: Path,
    profile: ModelProfile,
    plan: Plan,
    folder: RunFolder | None,
    *,
    quiet: bool,
) -> "tuple[RunReport, RunFolder]":
    from hetpipe.training.checkpoint_room import room_of
    from hetpipe.training.run import train

    if settings.resume_from is not None:
        checkpoints = Path(settings.resume_from).parent
        if folder is None and checkpoints.name == "checkpoints":
            folder = RunFolder(checkpoints.parent)
        note([f"going on from {settings.resume_from}"])
    elif folder is not None and folder.plan.exists() and kept_checkpoint(folder) is None:
        warn(f"{folder.path} holds a run already; its files are replaced")
    made, folder = folder is None, folder or RunFolder.create(RUNS, settings.model)
    if shortage := room_of(folder, settings, profile).shortage:
        warn(shortage)
    try:
        with _step_bar(settings.steps, quiet=quiet) as on_event:
            report = train(settings, cluster_file, profile, plan, folder, on_event=on_event)
    except KeyboardInterrupt:
        if newest_one := kept_checkpoint(folder):
            note([f"--resume {folder.path} goes on from {newest_one.name}"])
        raise
    finally:
        if made and not any(folder.path.iterdir()):  # refused before anything was written
            folder.path.rmdir()
    finite = [entry["finite"] for entry in folder.read_metrics()]
    if skipped := finite.count(False):
        warn(
            f"{skipped} of {len(finite)} steps changed nothing: their gradients were not finite; lower "
            "--learning-rate"
        )
    return report, folder


@contextmanager
def _step_bar(steps: int, *, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Takes the events of a run: a bar on a terminal, else a line for every tenth of the steps."""
    lines = not quiet and not sys.stdout.isatty()
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console(),
        disable=quiet or lines,
    )
    with bar:
        task = bar.add_task("training", total=steps, text="")

        def on_event(event: dict[str, Any]) -> None:
            if event.get("event") != "step":
                return
            text = (
                f"loss {event['loss']:.4f}  {event['samples_per_s']:.4g} samples/s  "
                f"bubble {event['bubble']:.0%}"
            )
            done = int(event["step"])
            bar.update(task, completed=done, text=text)
            if lines and (done % max(1, steps // 10) == 0 or done == steps):
                typer.echo(f"step {done}/{steps}  {text}")

        yield on_event
