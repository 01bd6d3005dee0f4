"""plan, simulate, compare: from a profile and a cluster to figures, without torch."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InfeasibleError
from cost_model.profile import ModelProfile
from hetpipe.commands.common import (
    AllowSlowOption,
    BatchOption,
    BudgetOption,
    ClusterOption,
    DtypeOption,
    JsonOption,
    MicrobatchOption,
    ModelOption,
    ProfileOption,
    ScheduleOption,
    SequenceOption,
    StrategyOption,
    check_strategy,
    checked_plan,
    get_profile,
    note,
    print_json,
    write_output,
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
from hetpipe.commands.measuring import measure_outcomes
from hetpipe.models.names import model_entry
from hetpipe.program.costs import ProgramCosts, check_memory
from hetpipe.program.instructions import Schedule
from hetpipe.program.trace import chrome_trace
from hetpipe.program.verification import verify
from hetpipe.reporting.critical_path import Share, critical_path, shares
from hetpipe.reporting.idle_time import DeviceTime, device_times
from hetpipe.reporting.speed_breakdown import speed_sentence, speed_shares
from hetpipe.reporting.tables import (
    bound_sentence,
    comparison_table,
    console,
    estimate_sentences,
    gain_sentence,
    measured_table,
    path_sentence,
    plan_sentences,
    plan_table,
    run_report_tables,
    show,
    waiting_table,
)
from hetpipe.runs.run_folder import PREDICTED
from hetpipe.simulation.prediction import evaluator, figured, scheduled
from hetpipe.simulation.schedule_selection import Choice
from hetpipe.simulation.simulator import simulate
from partition.plan import Plan, Prediction
from partition.plan_file import plan_text, read_plan
from partition.problem import Problem, problem_of

if TYPE_CHECKING:
    from partition.solver import Outcome

AUTO = "auto"
NOTHING: "tuple[Outcome, ...]" = ()


def plan_command(
    cluster: ClusterOption,
    model: ModelOption = None,
    profile: ProfileOption = None,
    global_batch_size: BatchOption = 16,
    sequence_length: SequenceOption = 64,
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
    program: Annotated[bool, typer.Option("--program", help="Print what each rank runs, verified.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here.")] = None,
    profile_budget: BudgetOption = 60.0,
    json: JsonOption = False,
) -> None:
    """Decide who holds which layers, and show it beside the plain alternatives."""
    check_strategy(strategy)
    proof_s = proof_seconds(no_proof, proof_s)
    devices = read_cluster(cluster)
    left = remaining(devices, exclude)
    fast = () if allow_slow_bf16 else left.devices
    costs = get_profile(
        model, profile, left, sequence_length, dtype=dtype, fast=fast, budget_s=profile_budget, quiet=json
    )
    problem = problem_of(costs, left, global_batch_size, microbatch_size)
    problem = forced_problem(problem, strategy, pin, pipelines, max_devices)
    if json:
        found, outcomes = solve_problem(problem, strategy, proof_s=proof_s), NOTHING
    else:
        found, outcomes = plan_and_compare(problem, strategy, proof_s=proof_s)
    found = dataclasses.replace(found, cluster_sha256=devices.sha256)
    found, choice = scheduled(found, costs, devices, schedule)
    check_memory(found, costs, devices)
    text = ""
    if program:
        verify(choice.program, costs, devices)
        text = choice.program.text
    if output is not None:
        write_output(output, plan_text(found))
    if json:
        extra = {"program": text} if program else {}
        extra |= choice_json(choice) if schedule is not None else {}
        print_json({**found.to_json(), **extra})
        note(_estimates(costs, devices))
        return
    show_plan(found, outcomes, costs, devices)
    show(choice_sentences(choice, schedule))
    sys.stdout.write(text)


def solve_problem(problem: Problem, strategy: str, *, proof_s: float | None = None) -> Plan:
    """The plan of one strategy, with its figures; proof_s: as for `partition.solver.solve`.

    Raises: InfeasibleError if nothing fits.
    """
    from partition.solver import solve

    return solve(problem, evaluator(problem.profile, problem.cluster), strategy, proof_s=proof_s)


def plan_and_compare(
    problem: Problem, strategy: str, *, proof_s: float | None = None
) -> tuple[Plan, "tuple[Outcome, ...]"]:
    """The plan of a strategy, and the outcome of every strategy.

    Raises: InfeasibleError if the strategy has no plan.
    """
    from partition.solver import compare

    with _telling("planning") as tell:
        judge = evaluator(problem.profile, problem.cluster)
        outcomes = compare(problem, judge, progress=tell, proof_s=proof_s)
    plan = next((outcome.plan for outcome in outcomes if outcome.strategy == strategy), None)
    return plan or solve_problem(problem, strategy, proof_s=proof_s), outcomes


def choice_sentences(choice: Choice, schedule: Schedule | None) -> list[str]:
    """The schedule taken, where one was asked for or there was a choice."""
    return [str(choice)] if schedule is not None or choice.asked is Schedule.AUTO else []


def choice_json(choice: Choice) -> dict[str, Any]:
    return {"schedule_choice": choice.to_json()}


@contextmanager
def _telling(what: str) -> Iterator[Any]:
    if not sys.stdout.isatty():
        yield None
        return
    with console(sys.stderr).status(what) as status:
        yield status.update


def _estimates(profile: ModelProfile, cluster: Cluster) -> list[str]:
    return estimate_sentences(profile, (device.kind for device in cluster.devices))


def show_plan(plan: Plan, outcomes: "tuple[Outcome, ...]", profile: ModelProfile, cluster: Cluster) -> None:
    """Print the plan with its bound, and all strategies."""
    from partition.explanation.gains import best_plain

    show(
        [
            *plan_sentences(plan, profile, cluster),
            plan_table(plan, profile, cluster),
            comparison_table(outcomes, plan, best_plain(outcomes)),
        ]
    )


def simulate_command(
    plan: Annotated[Path, typer.Argument(help="A plan.json.")],
    profile: Annotated[Path, typer.Option("--profile", help="The profile.json.")],
    cluster: ClusterOption,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write Chrome trace events here.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the step here, as PNG and as SVG.")
    ] = None,
    schedule: ScheduleOption = None,
    json: JsonOption = False,
) -> None:
    """Run a plan on a virtual clock: step time, bubble, memory, and what the step waits for."""
    devices = read_cluster(cluster)
    costs = get_profile(None, profile, devices, 0)
    given = read_plan(plan)
    given = checked_plan(given, costs, devices)
    figures, choice = figured(given, costs, devices, schedule)
    check_memory(figures, costs, devices)
    assert figures.predicted is not None
    prices = ProgramCosts(choice.program, costs, devices)
    simulated = simulate(prices)
    if trace is not None:
        write_output(trace, chrome_trace([(PREDICTED, simulated)]))
    if plot is not None:
        from hetpipe.commands.pictures import save_picture
        from hetpipe.reporting.plots import gantt, stage_labels

        save_picture(gantt(simulated, labels=stage_labels(given, costs, devices)), plot)
    causes = shares(critical_path(simulated, prices))
    times = dict(zip(simulated.device_names, device_times(simulated, prices), strict=True))
    speed = speed_shares(simulated, prices, costs, devices)
    if json:
        data = _prediction_json(figures.predicted, causes, times)
        print_json({**data, "speed": speed, **choice_json(choice)})
        note(_estimates(costs, devices))
        return
    show([*plan_sentences(figures, costs, devices), plan_table(figures, costs, devices)])
    show([*choice_sentences(choice, schedule), speed_sentence(speed)])
    show([path_sentence(causes), waiting_table(times)])


def _prediction_json(
    predicted: Prediction, causes: Iterable[Share], times: Mapping[str, DeviceTime]
) -> dict[str, Any]:
    data = predicted.to_json()
    for name, entry in times.items():
        data["devices"][name] |= dataclasses.asdict(entry)
    data["critical_path"] = [dataclasses.asdict(entry) for entry in causes]
    return data


def compare_command(
    cluster: ClusterOption,
    model: ModelOption = None,
    profile: ProfileOption = None,
    global_batch_size: BatchOption = 16,
    sequence_length: SequenceOption = 64,
    dtype: DtypeOption = None,
    allow_slow_bf16: AllowSlowOption = False,
    microbatch_size: MicrobatchOption = None,
    pin: PinOption = None,
    exclude: ExcludeOption = None,
    pipelines: PipelinesOption = None,
    max_devices: MaxDevicesOption = None,
    no_proof: NoProofOption = False,
    proof_s: ProofSecondsOption = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run each that fits, a few steps long.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", help="Steps of each run of --measure.")] = 5,
    profile_budget: BudgetOption = 60.0,
    json: JsonOption = False,
) -> None:
    """All strategies side by side."""
    proof_s = proof_seconds(no_proof, proof_s)
    devices = remaining(read_cluster(cluster), exclude)
    fast = () if allow_slow_bf16 else devices.devices
    costs = get_profile(
        model, profile, devices, sequence_length, dtype=dtype, fast=fast, budget_s=profile_budget, quiet=json
    )
    problem = problem_of(costs, devices, global_batch_size, microbatch_size)
    problem = forced_problem(problem, AUTO, pin, pipelines, max_devices)
    from partition.explanation.gains import best_plain, gain
    from partition.solver import compare

    outcomes = compare(problem, evaluator(costs, devices), proof_s=proof_s)
    plans = {outcome.strategy: outcome.plan for outcome in outcomes if outcome.plan is not None}
    if not plans:
        reasons = "; ".join(f"{outcome.strategy}: {outcome.reason}" for outcome in outcomes)
        raise InfeasibleError(f"no strategy fits: {reasons}")
    gained = gain(problem, evaluator(costs, devices), outcomes)
    if not json:
        show(
            [
                *_estimates(costs, devices),
                comparison_table(outcomes, plans.get(AUTO), best_plain(outcomes)),
                *([gain_sentence(gained)] if gained else []),
                *[bound_sentence(plan.predicted) for plan in [plans.get(AUTO)] if plan and plan.predicted],
            ]
        )
    place = None if model is None else model_entry(model).place
    reports = {}
    if measure:
        reports = measure_outcomes(plans, costs, cluster, steps, quiet=json, model_folder=place)
    if json:
        strategies = [_outcome_json(outcome, reports) for outcome in outcomes]
        print_json({"strategies": strategies, "gain": gained and gained.to_json()})
        note(_estimates(costs, devices))
    elif reports:
        show([measured_table(list(reports.values())), *run_report_tables(list(reports.values())[-1])[2:]])


def _outcome_json(outcome: "Outcome", reports: Any) -> dict[str, Any]:
    figures = outcome.plan.predicted if outcome.plan is not None else None
    report = reports.get(outcome.strategy)
    return {
        "strategy": outcome.strategy,
        "fits": outcome.plan is not None,
        "reason": outcome.reason,
        "predicted_step_s": figures and figures.step_s,
        "samples_per_s": figures and figures.samples_per_s,
        "measured_step_s": report and report.measured_step_s,
        "plan": outcome.plan and outcome.plan.to_json(),
    }
