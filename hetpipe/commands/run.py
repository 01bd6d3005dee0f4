"""run: plan, train, and show how far the prediction was off."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cost_model.cluster import Cluster, is_emulated
from cost_model.errors import InputError
from cost_model.other_clusters import slowed, with_room, without
from cost_model.profile import ModelProfile
from hetpipe.commands.given_plan import GivenOptions, check_devices, predict_given
from hetpipe.commands.inputs import PlanRequest, named_model, plan_request, with_states
from hetpipe.commands.learning import LearningOptions, measured_for
from hetpipe.commands.measured_network import measured_network
from hetpipe.commands.options import (
    AUTO,
    ClusterOption,
    JsonOption,
    PlanOptions,
    RequiredModel,
    ScheduleOption,
    StrategyOption,
    VerboseOption,
    with_options,
)
from hetpipe.commands.output import choice_json, choice_sentences, note, print_json, warn_if_too_fast
from hetpipe.commands.plan import NO_OUTCOMES, new_plan, show_plan
from hetpipe.commands.run_file import JobArgument
from hetpipe.commands.several_hosts import (
    Asked,
    HostOptions,
    bring_back_lost,
    follow_leader,
    joined_profile,
    leading,
    place_of,
    print_launch,
)
from hetpipe.commands.started_by import started
from hetpipe.commands.training import (
    RunStart,
    TrainingOptions,
    kept_checkpoint,
    kept_sentences,
    run_start,
    train_shown,
)
from hetpipe.models.rank_modules import modules_ahead
from hetpipe.program.verification import verify
from hetpipe.reporting.lost_reader import reader_outlived
from hetpipe.reporting.run_tables import run_report_tables
from hetpipe.reporting.shared_sentences import shared_sentences
from hetpipe.reporting.tables import estimate_sentences, show
from hetpipe.runs.settings import Settings, TaskSettings, check_lengths
from hetpipe.runtime.processes import under_torchrun
from hetpipe.runtime.rank_server import server_ahead
from hetpipe.simulation.prediction import Prediction, predict
from partition.plan import Plan
from partition.plan_file import read_plan

if TYPE_CHECKING:
    from hetpipe.hosts.leader import Leader
    from hetpipe.training.adaptation import Adapt
    from hetpipe.training.recovery import Replan
    from partition.solver import Outcome

EMPTY: list[Any] = []  # tables of a dry run


@with_options
@reader_outlived()
def run_command(
    *,
    job: JobArgument = None,
    model: RequiredModel,
    cluster_file: ClusterOption,
    given: GivenOptions,
    strategy: StrategyOption = AUTO,
    options: PlanOptions,
    schedule: ScheduleOption = None,
    training: TrainingOptions,
    learning: LearningOptions,
    hosts: HostOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and verify, train nothing.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the last table only.")] = False,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Train a model over the devices of a cluster file; torchrun may start it too, a process per device."""
    with ExitStack() as ends:
        by = ends.enter_context(started(hosts))
        if not hosts.are_several and under_torchrun() and os.environ["RANK"] != "0":
            _follow()
        _check_adapt(training, given, several=hosts.are_several or by.are_several)
        silent = quiet or json
        request = plan_request(cluster_file, options, strategy)
        file = given.plan_file
        plan = None if file is None else _given_plan(file, given, options, strategy, request.cluster)
        if hosts.print_launch:
            print_launch(hosts, request.usable)
            return
        entry = named_model(model, options)
        is_new = options.profile_file is None and training.resume is None
        given.check(plan, entry, request.usable, is_new=is_new)
        if not dry_run and not under_torchrun():
            ends.enter_context(server_ahead(modules_ahead(entry, request.usable.devices)))
        place = None if dry_run else place_of(by.options(hosts, request.usable), request.usable)
        length = given.sequence_length

        def measure(part: Cluster | None = None) -> ModelProfile:
            return _profile(request, model, plan, length, part=part, quiet=silent)

        if place is not None and not place.leads:
            follow_leader(place, Asked.training(request, entry, training, learning), measure)
            return
        others = ends.enter_context(leading(place, Asked.training(request, entry, training, learning)))
        if others is not None:
            bring_back_lost(others, training, entry)
        start = run_start(
            entry, training, schedule, learning, request.run, dry_run=dry_run, several=others is not None
        )
        if start.over:
            note([start.over])
            return
        check_lengths(start.settings, compiled=options.compiled)
        if others is None:
            request, length = _as_before(request, start, given.sequence_length)
        request = replace(request, run=measured_for(start.settings))
        measuring = others if options.profile_file is None else None
        profile = measure() if measuring is None else joined_profile(measuring, request.usable, measure)
        profile = with_states(profile, request.run)
        request, cluster_file = ends.enter_context(
            measured_network(measuring, request, cluster_file, anew=options.remeasure)
        )
        batch = given.batch(plan, profile.sequence_length)
        batch = start.batch if batch is None else batch
        prediction, outcomes = _predict(plan, profile, request, start, batch=batch, alone=silent, file=file)
        estimates = _verified(prediction, profile, request.cluster, start)
        shared = shared_sentences(prediction, hosts=others is not None)
        if not silent:
            forced = options.forces_plan
            show_plan(prediction.plan, outcomes, profile, request.cluster, details=verbose, forced=forced)
            show([*choice_sentences(prediction.choice, start.settings.schedule), *shared])
        if dry_run:
            result, tables = _planned(prediction, profile, start.settings), EMPTY
        else:
            replan = None if given.plan_file is not None else _replan(profile, request, start, batch=batch)
            adapt = _adapt(profile, request, start, batch=batch) if training.adapt else None
            result, tables = _train(
                start, cluster_file, profile, prediction, [*estimates, *shared],
                replan=replan, adapt=adapt, hosts=others, quiet=silent,
            )  # fmt: skip
    if json:
        print_json({**result, **choice_json(prediction.choice)})
        note([*estimates, *shared])
    else:
        show(tables)


def _as_before(
    request: PlanRequest, start: RunStart, sequence_length: int | None
) -> tuple[PlanRequest, int | None]:
    """Return what is measured, where nothing says how, as before: the precision and the length."""
    options, before = request.options, start.before
    if options.profile_file is not None:
        return request, sequence_length
    if options.dtype is None and before.dtype is not None:
        request = replace(request, options=replace(options, dtype=before.dtype))
    return request, before.sequence_length if sequence_length is None else sequence_length


def _follow() -> NoReturn:
    """Train as another rank than the one that plans, and end with the training."""
    from hetpipe.data.task import registered_task
    from hetpipe.training.torchrun import follow

    follow(registered_task)


def _given_plan(
    plan_file: Path, given: GivenOptions, options: PlanOptions, strategy: str, cluster: Cluster
) -> Plan:
    """Read a plan to run.

    Raises: InputError if a part of it is forced too, or another batch or dtype of gradients is asked for
        than it is for, or the cluster lacks a device of it.
    """
    plan = read_plan(plan_file)
    if strategy != AUTO:
        raise InputError(f"--plan decides everything; leave out --strategy {strategy}")
    if options.microbatch_size is not None:
        raise InputError(f"--plan decides everything; leave out --microbatch-size {options.microbatch_size}")
    if options.forces_plan or options.exclude or options.thorough or options.shared_network:
        raise InputError(
            "--plan decides everything; leave out --pin, --exclude, --pipelines, --max-devices, --thorough "
            "and --shared-network"
        )
    if given.global_batch_size not in (None, plan.global_batch_size):
        raise InputError(
            f"--global-batch-size is {given.global_batch_size}, the plan's is {plan.global_batch_size}; "
            "leave it out, or plan again"
        )
    if options.gradient_dtype not in (None, plan.gradient_dtype):
        raise InputError(
            f"--gradient-dtype is {options.gradient_dtype}, the plan's is {plan.gradient_dtype}; leave it "
            "out, or plan again"
        )
    check_devices(plan, cluster, plan_file)
    return plan


def _profile(
    request: PlanRequest,
    model: str,
    plan: Plan | None,
    sequence_length: int | None,
    *,
    part: Cluster | None,
    quiet: bool,
) -> ModelProfile:
    """Return the profile to train by, of the devices of the plan where there is one.

    part: the devices of this host, None for all.

    Raises: InputError if it is of another sequence length than asked for.
    """
    used = None if plan is None else [request.cluster.device(name) for name in plan.device_names]
    return request.profile(model, sequence_length, used=used, trains=True, part=part, quiet=quiet)


def _predict(
    plan: Plan | None,
    profile: ModelProfile,
    request: PlanRequest,
    start: RunStart,
    *,
    batch: int | None,
    alone: bool,
    file: Path | None = None,
) -> "tuple[Prediction, tuple[Outcome, ...]]":
    """Predict the plan that is given, or a new one, under the schedule of the run.

    Beside a new one, unless it is wanted alone, return the outcomes of all strategies. file: of a given one.

    Raises: InputError if a given one does not fit; InfeasibleError if there is no new one.
    """
    if plan is not None and file is not None:
        return predict_given(plan, profile, request.cluster, start.settings.schedule, file), NO_OUTCOMES
    problem = request.problem(profile, 16 if batch is None else batch, gradient_dtype=start.gradient_dtype)
    plan, outcomes = new_plan(
        problem, request.cluster, request.strategy,
        proof_s=request.proof_s, alone=alone, choose=request.choose(profile),
    )  # fmt: skip
    return predict(plan, profile, request.cluster, start.settings.schedule), outcomes


def _verified(prediction: Prediction, profile: ModelProfile, cluster: Cluster, start: RunStart) -> list[str]:
    """Verify the program, warn of a host that is too slow, say what attention costs on GPUs.

    Return sentences about estimated times.

    Raises: InputError or InfeasibleError if it cannot run there.
    """
    verify(prediction.program, profile, cluster)
    used = prediction.costs.devices
    warn_if_too_fast(device.speed for device in used if is_emulated(device.kind))
    if any(device.is_gpu for device in used):
        from hetpipe.models.huggingface import attention_sentence

        model, folder = TaskSettings.of(profile, start.settings).base_model, start.settings.model_folder
        note(filter(None, [attention_sentence(model, folder, profile.sequence_length)]))
    return estimate_sentences(profile, (device.kind for device in used))


def _replan(profile: ModelProfile, request: PlanRequest, start: RunStart, *, batch: int | None) -> "Replan":
    """Return what plans the same run without the devices that were lost, and with less on those too full."""

    def replan(lost: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
        usable = with_room(without(request.usable, sorted(lost)), room_bytes)
        left = replace(request, usable=usable, proof_s=0.0)
        prediction, _ = _predict(None, profile, left, start, batch=batch, alone=True)
        verify(prediction.program, profile, request.cluster)
        return prediction

    return replan


def _adapt(profile: ModelProfile, request: PlanRequest, start: RunStart, *, batch: int | None) -> "Adapt":
    """Return what plans the same run with devices that have become slow, or says what a plan does then."""

    def adapt(
        lost: frozenset[str], times: Mapping[str, float], room_bytes: Mapping[str, float], plan: Plan | None
    ) -> Prediction:
        whole = slowed(request.cluster, times)
        usable = slowed(with_room(without(request.usable, sorted(lost)), room_bytes), times)
        now = replace(request, cluster=whole, usable=usable, proof_s=0.0)
        if plan is not None:  # without a word on the cluster, which is another one now
            return predict(plan, profile, whole, start.settings.schedule)
        prediction, _ = _predict(None, profile, now, start, batch=batch, alone=True)
        verify(prediction.program, profile, whole)
        return prediction

    return adapt


def _check_adapt(training: TrainingOptions, given: GivenOptions, *, several: bool) -> None:
    """Refuse --adapt where no other plan can be taken, as on several hosts.

    Raises: InputError if so.
    """
    if not training.adapt:
        return
    if given.plan_file is not None:
        raise InputError("--adapt plans again, and --plan decides the plan; leave out one of them")
    if not training.save:
        raise InputError("--adapt moves layers by a checkpoint; leave out --no-save")
    if under_torchrun() or several:
        raise InputError("--adapt starts the ranks again, which works on one host without torchrun")


def _planned(prediction: Prediction, profile: ModelProfile, settings: Settings) -> dict[str, Any]:
    """Return what a dry run prints as JSON."""
    return {
        "plan": prediction.plan.to_json(),
        "sequence_length": profile.sequence_length,
        "dtype": profile.dtype,
        "settings": settings.to_json(),
    }


def _train(
    start: RunStart,
    cluster_file: Path,
    profile: ModelProfile,
    prediction: Prediction,
    estimates: Sequence[str],
    *,
    replan: "Replan | None",
    adapt: "Adapt | None",
    hosts: "Leader | None",
    quiet: bool,
) -> tuple[dict[str, Any], list[Any]]:
    """Train, and return what to print of it: as JSON, and as tables."""
    settings = start.settings
    if start.entry.folder is not None:
        from hetpipe.data.task import model_notes

        note(model_notes(TaskSettings.of(profile, settings).base_model, settings.model_folder))
    if profile.compiled:
        note(["blocks are compiled before the first step, which waits for it"])
    report, folder = train_shown(
        start, cluster_file, profile, prediction, replan=replan, adapt=adapt, hosts=hosts, quiet=quiet
    )
    kept = kept_checkpoint(folder)
    result = {
        "run_folder": str(folder.path),
        "checkpoint": None if kept is None else str(kept),
        **report.to_json(),
    }
    tables = [*run_report_tables(report), *estimates, f"run folder: {folder.path}"]
    return result, tables + kept_sentences(folder, kept, settings.steps)
