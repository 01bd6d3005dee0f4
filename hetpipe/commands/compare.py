"""compare: all strategies side by side."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cost_model.errors import InfeasibleError
from hetpipe.commands.inputs import PlanRequest, named_model, plan_request, with_estimates
from hetpipe.commands.measure import measure_rounds
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
    further_kinds,
)
from hetpipe.commands.output import estimates_of, note, print_json, status
from hetpipe.reporting.comparison_tables import (
    comparison_table,
    forced_sentences,
    gain_sentence,
    misfit_sentences,
)
from hetpipe.reporting.measured_tables import measured_rounds_tables
from hetpipe.reporting.tables import bound_sentence, show
from hetpipe.runs.measured_rounds import losses_apart
from hetpipe.simulation.prediction import evaluator
from partition.problem import Problem

if TYPE_CHECKING:
    from hetpipe.runs.measured_rounds import MeasuredRounds
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
    rounds: Annotated[
        int, typer.Option("--rounds", help="Rounds of --measure; each runs every plan in turn.", min=1)
    ] = 2,
    other_devices: WhatIfOptions,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """All strategies side by side."""
    names = _named(strategies or [])
    request = plan_request(cluster_file, options, AUTO)
    check_what_if(request, other_devices, measure=measure, strategies=strategies)
    further = further_kinds(request.usable, other_devices)
    profile = request.profile(model, sequence_length, trains=measure, further=further, quiet=json)
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
    outcomes, gained = _compared(problem, request, names, quiet=json)
    estimates = estimates_of(profile, request.usable)
    if not json:
        show(estimates)
        _show_outcomes(outcomes, gained, details=verbose, forced=options.forces_plan)
        if strategies is None:
            show([f"--strategy {ALL} compares the rules of published systems too: {PUBLISHED_NAMES}"])
    measured: Mapping[str, MeasuredRounds] = {}
    files: list[Path] = []
    if measure:
        entry = None if model is None else named_model(model, options)
        plans = {outcome.strategy: outcome.plan for outcome in outcomes if outcome.plan is not None}
        measured = measure_rounds(
            plans, profile, cluster_file, steps, rounds=rounds, quiet=json, model=entry, run=request.run
        )
        if other_devices.plot_file is not None:
            files = _draw(outcomes, measured, problem, other_devices.plot_file)
    if json:
        compared = [_outcome_json(outcome, measured) for outcome in outcomes]
        extra = {"losses_apart": losses_apart(list(measured.values())), "files": list(map(str, files))}
        print_json(
            {"strategies": compared, "gain": gained and gained.to_json(), **(extra if measured else {})}
        )
        note(estimates)
    elif measured:
        show(measured_rounds_tables(list(measured.values()), outcomes, profile.dtype, details=verbose))
        show([f"pictures: {', '.join(map(str, files))}"] if files else [])


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


def _draw(
    outcomes: "Sequence[Outcome]", measured: "Mapping[str, MeasuredRounds]", problem: Problem, path: Path
) -> list[Path]:
    """Draw speeds and memory of the strategies, predicted and measured, with the bound; return the files."""
    from hetpipe.commands.pictures import save_picture
    from hetpipe.reporting.plots import speeds_and_memory, subject, title

    seconds = {strategy: each.step_s for strategy, each in measured.items()}
    peaks = {strategy: each.peak_bytes for strategy, each in measured.items()}
    on = f"on {problem.cluster.name!r}"
    of = subject(problem.profile.model, problem.global_batch_size, on, date.today())
    above, _ = speeds_and_memory(outcomes, problem.cluster, seconds, peaks)
    return save_picture(title(above, of), path)


def _compared(
    problem: Problem, request: PlanRequest, strategies: Sequence[str], *, quiet: bool
) -> "tuple[tuple[Outcome, ...], Gain | None]":
    """Return the outcomes of strategies, and what the best one gains.

    Raises: InfeasibleError if no strategy has a plan.
    """
    from partition.explanation.gains import gain
    from partition.solver import compare

    evaluate = evaluator(problem.profile, problem.cluster)
    with status("planning", quiet=quiet) as tell:
        outcomes = compare(
            problem, evaluate, strategies,
            progress=tell, proof_s=request.proof_s, choose=request.choose(problem.profile),
        )  # fmt: skip
    if all(outcome.plan is None for outcome in outcomes):
        reason = next(outcome.reason for outcome in outcomes if outcome.strategy == AUTO)
        raise InfeasibleError(f"no strategy fits; {AUTO}: {reason}")
    with status("planning with ample memory", quiet=quiet):
        return outcomes, gain(problem, evaluate, outcomes)


def _show_outcomes(
    outcomes: "tuple[Outcome, ...]", gained: "Gain | None", *, details: bool, forced: bool
) -> None:
    """Print the strategies, what is gained, and the bound of `auto`."""
    plan = next((outcome.plan for outcome in outcomes if outcome.strategy == AUTO), None)
    show(
        [
            comparison_table(outcomes, plan),
            *misfit_sentences(outcomes, details=details),
            *forced_sentences(forced=forced),
            *([gain_sentence(gained)] if gained else []),
            *([bound_sentence(plan.predicted, details=details)] if plan and plan.predicted else []),
        ]
    )


def _outcome_json(outcome: "Outcome", measured: "Mapping[str, MeasuredRounds]") -> dict[str, Any]:
    figures = outcome.plan.predicted if outcome.plan is not None else None
    rounds = measured.get(outcome.strategy)
    return {
        "strategy": outcome.strategy,
        "fits": outcome.plan is not None,
        "reason": outcome.reason,
        "predicted_step_s": figures and figures.step_s,
        "samples_per_s": figures and figures.samples_per_s,
        "bound_s": figures and figures.bound_s,
        "measured_step_s": None,
        "measured_samples_per_s": None,
        **(rounds.to_json() if rounds is not None else {}),
        "plan": outcome.plan and outcome.plan.to_json(),
    }
