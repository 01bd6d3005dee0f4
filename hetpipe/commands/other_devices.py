"""Other devices than those of today, for `compare` and `plan`: what if, and which of them to use."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from datetime import date
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cost_model.catalogue import accelerator
from cost_model.cluster import Cluster
from cost_model.dtypes import check_fast
from cost_model.errors import InfeasibleError, InputError
from cost_model.expenses import expenses
from cost_model.profile import ModelProfile
from cost_model.units import parse_seconds
from cost_model.what_if import changed, check_measured_links
from hetpipe.commands.inputs import PlanRequest, for_whole
from hetpipe.commands.options import AUTO, ObjectiveOptions, WhatIfOptions
from hetpipe.commands.output import estimates_of, note, print_json, status, statuses
from hetpipe.program.instructions import Schedule
from hetpipe.reporting.expense_tables import (
    WhatIfRow,
    choice_sentences,
    costed_json,
    expense_json,
    front_sentence,
    front_table,
    unknown_sentences,
    what_if_sentences,
    what_if_table,
)
from hetpipe.reporting.tables import estimate_sentences, show
from hetpipe.reporting.what_if_plans import what_if_row, with_best
from hetpipe.simulation.prediction import evaluator
from partition.plan import Plan
from partition.problem import Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from partition.explanation.pareto import Limits

TODAY, TOGETHER = "today", "all together"


def check_what_if(
    request: PlanRequest, options: WhatIfOptions, *, measure: bool, strategies: Sequence[str] | None = None
) -> None:
    """Check the options before anything slow is done.

    strategies: that were named.

    Raises: InputError for what is no change, options that exclude each other, an unknown kind to estimate, or
        a front where neither prices nor watts are known.
    """
    if options.pareto and options.what_if:
        raise InputError("--pareto and --what-if exclude each other; ask for one after the other")
    if measure and (options.pareto or options.what_if):
        raise InputError("--measure runs the strategies; leave out --what-if and --pareto")
    if strategies and (options.pareto or options.what_if):
        raise InputError(f"--what-if and --pareto are planned for by {AUTO} alone; leave out --strategy")
    if request.options.shared_network and (options.pareto or options.what_if):
        raise InputError("--what-if and --pareto compare steps by turns; leave out --shared-network")
    if options.plot_file is not None and not (options.pareto or options.what_if or measure):
        raise InputError("--plot draws what --what-if, --pareto or --measure finds; give one of them too")
    if options.plot_file is not None:
        from hetpipe.commands.pictures import check_picture

        check_picture(options.plot_file)
    for kind in options.estimate or ():
        accelerator(kind)
    changed_clusters(request.usable, options.what_if or (), ())
    if options.pareto:
        from partition.explanation.device_sets import check_choice
        from partition.explanation.pareto import known_objectives

        _check_own_bounds(request, "the sets of --pareto")
        check_choice(bool(request.options.pins))
        known_objectives(request.usable)


def changed_clusters(
    cluster: Cluster, texts: Sequence[str], kinds: Collection[str]
) -> dict[str, Cluster | InputError]:
    """Return the cluster of today, of each change, and where there are several of all of them together.

    Of all together there is none if one change alone comes to the same, as of two for the same link; and why
    there is none where one of them leaves another nothing to change.

    Raises: InputError for what is no change of today's cluster.
    """
    clusters = {TODAY: cluster, **{text: changed(cluster, text, kinds) for text in texts}}
    if len(clusters) == 2:
        return {**clusters}
    together = cluster
    try:
        for text in texts:
            together = changed(together, text, kinds)
    except InputError as error:
        return {**clusters, TOGETHER: error}
    return {**clusters} if together in clusters.values() else {**clusters, TOGETHER: together}


def further_kinds(cluster: Cluster, options: WhatIfOptions) -> list[str]:
    """Return the kinds that changes add and those to estimate, less those of today's cluster."""
    clusters = changed_clusters(cluster, options.what_if or (), options.estimate or ()).values()
    devices = [device for each in clusters if isinstance(each, Cluster) for device in each.devices]
    kinds = dict.fromkeys([*(device.kind for device in devices), *(options.estimate or ())])
    return [kind for kind in kinds if all(device.kind != kind for device in cluster.devices)]


def compare_changes(
    request: PlanRequest, profile: ModelProfile, batch_size: int, options: WhatIfOptions, *, json: bool
) -> None:
    """Print the plan of `auto` for today's devices and for each change.

    Raises: InputError if a change names a kind that the profile lacks; InfeasibleError if nothing fits.
    """
    texts = list(dict.fromkeys(options.what_if or ()))
    changes = changed_clusters(request.usable, texts, (*profile.kinds, *(options.estimate or ())))
    clusters = {name: cluster for name, cluster in changes.items() if isinstance(cluster, Cluster)}
    for name, cluster in clusters.items():
        _check_planned(name, cluster, request, profile)
    problems = {
        name: cluster if isinstance(cluster, InputError) else _problem(cluster, request, profile, batch_size)
        for name, cluster in changes.items()
    }
    proof_s = request.proof_s or 0.0
    with statuses(quiet=json) as tell:
        rows = [_row(name, problem, proof_s, tell) for name, problem in problems.items()]
        rows = [
            row if isinstance(problem, InputError) else with_best(row, problem, rows)
            for row, problem in zip(rows, problems.values(), strict=True)
        ]
    if all(row.plan is None for row in rows):
        raise InfeasibleError(f"no plan fits, today and changed: {rows[0].reason}")
    devices = [device for cluster in clusters.values() for device in cluster.devices]
    estimates = estimate_sentences(profile, (device.kind for device in devices))
    written: list[Path] = []
    if options.plot_file is not None:
        from hetpipe.reporting.plots import what_if

        of = (profile.model, batch_size)
        written = _save(what_if(rows), of, request.cluster, options.plot_file)
    if json:
        rows_json = [row.to_json(rows[0].step_s) for row in rows]
        print_json({"what_if": rows_json, "files": [str(picture) for picture in written]})
        note(estimates)
        return
    unknown = unknown_sentences(devices, rows)
    show([*estimates, what_if_table(rows), *what_if_sentences(rows), *unknown])
    for picture in written:
        typer.echo(str(picture))


def _save(ax: "Axes", model_and_batch: tuple[str, int], cluster: Cluster, path: Path) -> list[Path]:
    """Write a picture of plans for several sets of devices, with its title; return the files."""
    from hetpipe.commands.pictures import save_picture
    from hetpipe.reporting.plots import subject, title

    of = subject(*model_and_batch, f"on {cluster.name!r}", date.today())
    return save_picture(title(ax, of), path)


def _problem(
    cluster: Cluster, request: PlanRequest, profile: ModelProfile, batch_size: int
) -> Problem | InputError:
    """Return the problem on a changed cluster, or why it has none: wishes that its devices cannot keep.

    Raises: InputError where those of today cannot either.
    """
    try:
        return dataclasses.replace(request, usable=cluster).problem(profile, batch_size)
    except InputError as error:
        if cluster is request.usable:
            raise
        return error


def _row(
    change: str, problem: Problem | InputError, proof_s: float, tell: Callable[[str], None]
) -> WhatIfRow:
    """Return the plan of `auto` for the devices of a change, telling that it is looked for."""
    if isinstance(problem, InputError):
        return WhatIfRow(change, None, reason=str(problem))
    tell(f"planning: {change}")
    return what_if_row(change, problem, proof_s=proof_s)


def _check_planned(change: str, cluster: Cluster, request: PlanRequest, profile: ModelProfile) -> None:
    """Refuse what cannot be planned for as the change says.

    Raises: InputError if the profile lacks a kind, a measured link counts instead of a changed one, or a
        device is not made for the dtype.
    """
    for device in cluster.devices:
        if device.kind not in profile.kinds:
            raise InputError(
                f'what if "{change}": the profile has no kind {device.kind!r} '
                f"({', '.join(profile.kinds)}); add --estimate {device.kind}, or measure it"
            )
    if not request.options.allow_slow_bf16:
        check_fast(profile.dtypes, cluster.devices)
    try:
        check_measured_links(request.usable, cluster, profile)
    except InputError as error:
        raise InputError(f'what if "{change}": {error}') from None


def compare_sets(problem: Problem, cluster: Cluster, plot_file: Path | None, *, json: bool) -> None:
    """Print the plans that no other beats in step, money and energy, and draw them where asked to."""
    from partition.explanation.pareto import pareto

    with status("planning for sets of devices", quiet=json):
        front = pareto(problem, evaluator(problem.profile, problem.cluster))
    estimates = estimates_of(problem.profile, problem.cluster)
    written: list[Path] = []
    if plot_file is not None:
        from hetpipe.reporting.plots import cost_front

        of = (problem.profile.model, problem.global_batch_size)
        written = _save(cost_front(front, cluster)[0], of, cluster, plot_file)
    if json:
        print_json(
            {
                "front": [costed_json(costed) for costed in front.plans],
                "planned": front.planned,
                "num_sets": front.num_sets,
                "complete": front.complete,
                "within": front.within,
                "files": [str(picture) for picture in written],
            }
        )
        note(estimates)
        return
    unknown = unknown_sentences(problem.cluster.devices, front.plans)
    show([*estimates, front_table(front, cluster), front_sentence(front), *unknown])
    for picture in written:
        typer.echo(str(picture))


def chosen_plan(
    problem: Problem, cluster: Cluster, options: ObjectiveOptions, *, quiet: bool
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with the least of an objective within limits, and sentences about it.

    cluster: whole, also where the problem is on a part of it.

    Raises: InputError for limits that are none; InfeasibleError if no plan within the limits was found.
    """
    from partition.explanation.pareto import best_within

    limits = _limits(options)
    evaluate = evaluator(problem.profile, problem.cluster)
    with status("planning for sets of devices", quiet=quiet):
        choice = best_within(problem, evaluate, options.objective, limits)
    plan = for_whole(choice.best.plan, problem.cluster, cluster)
    return plan, tuple(choice_sentences(choice))


def check_objective(request: PlanRequest, options: ObjectiveOptions, schedule: Schedule | None) -> None:
    """Check an objective and its limits before anything slow is done.

    Raises: InputError for another strategy than `auto`, a schedule, seconds for a proof, pins, limits that
        are none, or devices of which a price or power is not known that is needed.
    """
    if not options.given:
        return
    if request.strategy != AUTO:
        raise InputError(
            f"--objective, --deadline and --budget-per-hour are for --strategy auto; {request.strategy!r} "
            "decides all by itself"
        )
    if request.options.shared_network:
        raise InputError(
            "--objective, --deadline and --budget-per-hour go by steps by turns; leave out --shared-network"
        )
    if schedule is not None:
        raise InputError(
            "--objective, --deadline and --budget-per-hour go by steps under the default schedule; leave out "
            "--schedule"
        )
    _check_own_bounds(request, "--objective, --deadline and --budget-per-hour")
    from partition.explanation.device_sets import check_choice
    from partition.explanation.pareto import check_known

    check_choice(bool(request.options.pins))
    check_known(request.usable, options.objective, _limits(options))


def _check_own_bounds(request: PlanRequest, options: str) -> None:
    if request.options.proof_s is not None:
        raise InputError(f"{options} have bounds of their own; leave out --proof-seconds")


def _limits(options: ObjectiveOptions) -> "Limits":
    from partition.explanation.pareto import Limits

    return Limits(
        deadline_s=inf if options.deadline is None else parse_seconds(options.deadline),
        budget_per_hour=inf if options.budget_per_hour is None else options.budget_per_hour,
    )


def plan_expenses(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return what JSON output says of the money and energy of a plan."""
    return {"expenses": expense_json(plan, expenses(cluster, plan.device_names))}
