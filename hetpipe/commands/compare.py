"""compare: all strategies side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cost_model.errors import InfeasibleError
from cost_model.profile import ModelProfile
from hetpipe.commands.inputs import PlanRequest, named_model, plan_request, with_estimates
from hetpipe.commands.measure import measure_outcomes
from hetpipe.commands.options import (
    ALL,
    AUTO,
    PUBLISHED_NAMES,
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelOption,
    PlanOptions,
    SequenceOption,
    StrategiesOption,
    VerboseOption,
    WhatIfOptions,
    with_options,
)
from hetpipe.commands.other_devices import (
    check_what_if,
    compare_changes,
    compare_sets,
)
from hetpipe.commands.output import estimates_of, note, print_json, status
from hetpipe.models.names import ModelEntry
from hetpipe.reporting.comparison_tables import comparison_table, gain_sentence, misfit_sentences
from hetpipe.reporting.run_tables import measured_table, run_marks
from hetpipe.reporting.tables import bound_sentence, show
from hetpipe.simulation.prediction import evaluator
from partition.problem import Problem

if TYPE_CHECKING:
    from hetpipe.runs.run_report import RunReport
    from partition.explanation.gains import Gain
    from partition.solver import Outcome


@with_options
def compare_command(
    *,
    cluster_file: ClusterOption,
    model: ModelOption = None,
    global_batch_size: BatchOption = 16,
    sequence_length: SequenceOption = None,
    strategies: StrategiesOption = None,
    options: PlanOptions,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run each that fits, a few steps long.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", help="Steps of each run of --measure.", min=1)] = 5,
    other_devices: WhatIfOptions,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """All strategies side by side."""
    names = _named(strategies or [])
    request = plan_request(cluster_file, options, AUTO)
    check_what_if(request.usable, other_devices, measure=measure)
    profile = request.profile(model, sequence_length, trains=measure, quiet=json)
    profile = with_estimates(
        profile, other_devices.estimate or (), dtype=options.dtype, allow_slow=options.allow_slow_bf16
    )
    if other_devices.what_if:
        compare_changes(request, profile, global_batch_size, other_devices, json=json)
        return
    problem = request.problem(profile, global_batch_size)
    if other_devices.pareto:
        compare_sets(problem, request.cluster, other_devices.plot_file, json=json)
        return
    outcomes, gained = _compared(problem, request, names)
    estimates = estimates_of(profile, request.usable)
    if not json:
        show(estimates)
        _show_outcomes(outcomes, gained, details=verbose)
        if strategies is None:
            show([f"--strategy {ALL} compares the rules of published systems too: {PUBLISHED_NAMES}"])
    reports: Mapping[str, RunReport] = {}
    if measure:
        entry = None if model is None else named_model(model, options)
        reports = _measured(outcomes, profile, cluster_file, entry, steps=steps, quiet=json)
    if json:
        compared = [_outcome_json(outcome, reports) for outcome in outcomes]
        print_json({"strategies": compared, "gain": gained and gained.to_json()})
        note(estimates)
    elif reports:
        show([measured_table(list(reports.values())), *run_marks(list(reports.values())[-1])])


def _named(strategies: Sequence[str]) -> tuple[str, ...]:
    """Return what is compared, each once, `auto` last.

    Raises: InputError for an unknown strategy.
    """
    from partition.auto import STRATEGIES
    from partition.solver import COMPARED, check_strategy

    if ALL in strategies:
        return tuple(STRATEGIES)
    for name in strategies:
        check_strategy(name)
    return (*(name for name in dict.fromkeys(strategies) if name != AUTO), AUTO) if strategies else COMPARED


def _measured(
    outcomes: "Sequence[Outcome]",
    profile: ModelProfile,
    cluster_file: Path,
    model: ModelEntry | None,
    *,
    steps: int,
    quiet: bool,
) -> "Mapping[str, RunReport]":
    """Run the plan of each strategy that fits, and return the reports by strategy."""
    plans = {outcome.strategy: outcome.plan for outcome in outcomes if outcome.plan is not None}
    return measure_outcomes(plans, profile, cluster_file, steps, quiet=quiet, model=model)


def _compared(
    problem: Problem, request: PlanRequest, strategies: Sequence[str]
) -> "tuple[tuple[Outcome, ...], Gain | None]":
    """Return the outcomes of strategies, and what the best one gains.

    Raises: InfeasibleError if no strategy has a plan.
    """
    from partition.explanation.gains import gain
    from partition.solver import compare

    evaluate = evaluator(problem.profile, problem.cluster)
    with status("planning") as tell:
        outcomes = compare(problem, evaluate, strategies, progress=tell, proof_s=request.proof_s)
    if all(outcome.plan is None for outcome in outcomes):
        reasons = "; ".join(f"{outcome.strategy}: {outcome.reason}" for outcome in outcomes)
        raise InfeasibleError(f"no strategy fits: {reasons}")
    with status("planning with ample memory"):
        return outcomes, gain(problem, evaluate, outcomes)


def _show_outcomes(outcomes: "tuple[Outcome, ...]", gained: "Gain | None", *, details: bool) -> None:
    """Print the strategies, what is gained, and the bound of `auto`."""
    plan = next((outcome.plan for outcome in outcomes if outcome.strategy == AUTO), None)
    show(
        [
            comparison_table(outcomes, plan),
            *misfit_sentences(outcomes, details=details),
            *([gain_sentence(gained)] if gained else []),
            *([bound_sentence(plan.predicted, details=details)] if plan and plan.predicted else []),
        ]
    )


def _outcome_json(outcome: "Outcome", reports: "Mapping[str, RunReport]") -> dict[str, Any]:
    figures = outcome.plan.predicted if outcome.plan is not None else None
    report = reports.get(outcome.strategy)
    return {
        "strategy": outcome.strategy,
        "fits": outcome.plan is not None,
        "reason": outcome.reason,
        "predicted_step_s": figures and figures.step_s,
        "samples_per_s": figures and figures.samples_per_s,
        "measured_step_s": report and report.measured_step_s,
        "measured_samples_per_s": report and report.samples_per_s,
        "plan": outcome.plan and outcome.plan.to_json(),
    }
