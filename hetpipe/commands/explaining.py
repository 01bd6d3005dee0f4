"""explain: why a plan is as it is."""

from pathlib import Path
from typing import Annotated

import typer

from cost_model.cluster_file import read_cluster
from hetpipe.commands.common import (
    BudgetOption,
    ClusterOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    ProfileOption,
    SequenceOption,
    checked_plan,
    get_profile,
    note,
    print_json,
)
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.verification import verify
from hetpipe.reporting.idle_time import device_times
from hetpipe.reporting.speed_breakdown import speed_sentence, speed_shares
from hetpipe.reporting.tables import estimate_sentences, plan_sentences, show
from hetpipe.simulation.prediction import evaluator, figured
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan_file import read_plan
from partition.problem import problem_of


def explain_command(
    plan: Annotated[Path, typer.Argument(help="A plan.json.")],
    cluster: ClusterOption,
    model: ModelOption = None,
    profile: ProfileOption = None,
    sequence_length: SequenceOption = 64,
    dtype: DtypeOption = None,
    profile_budget: BudgetOption = 60.0,
    json: JsonOption = False,
) -> None:
    """Say where the speed goes, why each stage has its layers, what left-out devices would add."""
    given, devices = read_plan(plan), read_cluster(cluster)
    costs = get_profile(
        model, profile, devices, sequence_length, dtype=dtype, budget_s=profile_budget, quiet=json
    )
    given = checked_plan(given, costs, devices)
    from hetpipe.reporting.explanation import explanation_sentences
    from partition.constraints.forced_plans import without
    from partition.explanation.explain import explain

    program = lower(given, costs, devices)
    verify(program, costs, devices)  # what does not fit has no speed to explain
    prices = ProgramCosts(program, costs, devices)
    trace = simulate(prices)
    times = zip(trace.device_names, device_times(trace, prices), strict=True)
    unknown = [device.name for device in devices.devices if device.kind not in costs.kinds]
    problem = problem_of(costs, without(devices, unknown), given.global_batch_size)
    waits = {name: entry.waiting_for for name, entry in times}
    found = explain(given, problem, evaluator(costs, devices), waits)
    speed = speed_shares(trace, prices, costs, devices)
    lines = [speed_sentence(speed), *explanation_sentences(found, given, problem)]
    estimates = estimate_sentences(costs, (device.kind for device in devices.devices))
    if json:
        print_json({**found.to_json(), "speed": speed, "sentences": lines})
        note(estimates)
        return
    show([*plan_sentences(figured(given, costs, devices)[0], costs, devices), *lines])
