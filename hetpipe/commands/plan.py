"""plan: decide who holds which layers."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from hetpipe.commands.inputs import PlanRequest, for_whole, plan_request
from hetpipe.commands.options import (
    AUTO,
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelOption,
    ObjectiveOptions,
    PlanOptions,
    ScheduleOption,
    SequenceOption,
    StrategyOption,
    VerboseOption,
    with_options,
)
from hetpipe.commands.other_devices import check_objective, chosen_plan, plan_expenses
from hetpipe.commands.output import (
    check_output,
    choice_json,
    choice_sentences,
    estimates_of,
    note,
    print_json,
    status,
    write_output,
)
from hetpipe.program.costs import check_memory
from hetpipe.program.verification import verify
from hetpipe.reporting.comparison_tables import comparison_table, forced_sentences, misfit_sentences
from hetpipe.reporting.memory_tables import memory_json, memory_table, mostly_frozen
from hetpipe.reporting.shared_sentences import shared_sentences
from hetpipe.reporting.tables import plan_sentences, plan_table, show
from hetpipe.simulation.prediction import evaluator, predict
from partition.plan import Plan
from partition.plan_file import plan_data, plan_text
from partition.problem import Problem

if TYPE_CHECKING:
    from partition.solver import Choose, Outcome

PLAN_FILE = "hetpipe.plan"
NO_OUTCOMES: "tuple[Outcome, ...]" = ()


@with_options
def plan_command(
    *,
    cluster_file: ClusterOption,
    model: ModelOption = None,
    global_batch_size: BatchOption = 16,
    sequence_length: SequenceOption = None,
    strategy: StrategyOption = AUTO,
    options: PlanOptions,
    objective: ObjectiveOptions,
    schedule: ScheduleOption = None,
    program: Annotated[bool, typer.Option("--program", help="Print what each rank runs, verified.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here.")] = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Decide who holds which layers, and show it beside the plain alternatives."""
    check_output(output, PLAN_FILE)
    request = plan_request(cluster_file, options, strategy)
    check_objective(request, objective, schedule)
    cluster = request.cluster
    profile = request.profile(model, sequence_length, quiet=json)
    problem = request.problem(profile, global_batch_size)
    plan, outcomes, sentences = _planned(problem, request, objective, alone=json)
    prediction = predict(plan, profile, cluster, schedule)
    check_memory(prediction.plan, profile, cluster)
    shared = shared_sentences(prediction)
    text = ""
    if program:
        verify(prediction.program, profile, cluster)
        text = prediction.program.text
    if output is not None:
        write_output(output, plan_text(prediction.plan))
    if json:
        extra: dict[str, object] = {"program": text} if program else {}
        extra |= choice_json(prediction.choice) if schedule is not None else {}
        extra |= plan_expenses(plan, cluster) if objective.given else {}
        extra |= {"memory": memory_json(prediction.plan, profile, cluster)} if mostly_frozen(profile) else {}
        print_json({**plan_data(prediction.plan), **extra})
        note([*estimates_of(profile, cluster), *shared])
        return
    forced = options.forces_plan
    show_plan(prediction.plan, outcomes, profile, cluster, details=verbose, forced=forced)
    if mostly_frozen(profile):
        show([memory_table(prediction.plan, profile, cluster)])
    show([*sentences, *choice_sentences(prediction.choice, schedule), *shared])
    sys.stdout.write(text)


def _planned(
    problem: Problem, request: PlanRequest, objective: ObjectiveOptions, *, alone: bool
) -> tuple[Plan, "tuple[Outcome, ...]", tuple[str, ...]]:
    """Return the plan that is asked for, the outcomes of all strategies and sentences about its choice.

    There are no outcomes where the plan is wanted alone or chosen by an objective, and sentences only there.
    """
    if objective.given:
        plan, sentences = chosen_plan(problem, request.cluster, objective, quiet=alone)
        return plan, NO_OUTCOMES, sentences
    found = new_plan(
        problem, request.cluster, request.strategy,
        proof_s=request.proof_s, alone=alone, choose=request.choose(problem.profile),
    )  # fmt: skip
    return *found, ()


def new_plan(
    problem: Problem,
    cluster: Cluster,
    strategy: str,
    *,
    proof_s: float | None,
    alone: bool,
    choose: "Choose | None" = None,
) -> tuple[Plan, "tuple[Outcome, ...]"]:
    """Return the plan of a strategy for the cluster, and unless it is wanted alone the outcomes of all.

    cluster: whole, also where the problem is on a part of it. proof_s, choose: as for
    `partition.solver.solve`.

    Raises: InfeasibleError if the strategy has no plan.
    """
    if alone:
        plan = solve_problem(problem, strategy, proof_s=proof_s, choose=choose)
        outcomes = NO_OUTCOMES
    else:
        plan, outcomes = plan_and_compare(problem, strategy, proof_s=proof_s, choose=choose)
    return for_whole(plan, problem.cluster, cluster), outcomes


def solve_problem(
    problem: Problem, strategy: str, *, proof_s: float | None = None, choose: "Choose | None" = None
) -> Plan:
    """Return the plan of one strategy, with its figures; proof_s, choose: as for `partition.solver.solve`.

    Raises: InfeasibleError if nothing fits.
    """
    from partition.solver import solve

    evaluate = evaluator(problem.profile, problem.cluster)
    return solve(problem, evaluate, strategy, proof_s=proof_s, choose=choose)


def plan_and_compare(
    problem: Problem,
    strategy: str,
    *,
    proof_s: float | None = None,
    choose: "Choose | None" = None,
    quiet: bool = False,
) -> tuple[Plan, "tuple[Outcome, ...]"]:
    """Return the plan of a strategy, and the outcomes of it and of those that most know.

    proof_s, choose: as for `partition.solver.solve`.

    Raises: InfeasibleError if the strategy has no plan.
    """
    from partition.baselines.catalogue import WELL_KNOWN
    from partition.solver import compare

    with status("planning", quiet=quiet) as tell:
        evaluate = evaluator(problem.profile, problem.cluster)
        strategies = dict.fromkeys([*WELL_KNOWN, strategy, AUTO])
        outcomes = compare(problem, evaluate, strategies, progress=tell, proof_s=proof_s, choose=choose)
    plan = next((outcome.plan for outcome in outcomes if outcome.strategy == strategy), None)
    return plan or solve_problem(problem, strategy, proof_s=proof_s), outcomes


def show_plan(
    plan: Plan,
    outcomes: "tuple[Outcome, ...]",
    profile: ModelProfile,
    cluster: Cluster,
    *,
    details: bool = False,
    forced: bool = False,
) -> None:
    """Print the plan with its bound, and all strategies where there are outcomes of them.

    forced: whether a part of the plan was decided by the user.
    """
    show([*plan_sentences(plan, profile, cluster, details=details), plan_table(plan, profile, cluster)])
    if outcomes:
        misfits = misfit_sentences(outcomes, details=details)
        show([comparison_table(outcomes, plan), *misfits, *forced_sentences(forced=forced)])
