"""demo: three unequal emulated devices, nothing needed."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from hetpipe.commands.common import JsonOption, get_profile, print_json, write_output
from hetpipe.commands.hosts import emulated_text
from hetpipe.commands.measuring import measure_plan
from hetpipe.commands.pictures import plot_run, save_picture
from hetpipe.commands.planning import plan_and_compare
from hetpipe.reporting.tables import (
    comparison_table,
    measured_table,
    plan_sentences,
    plan_table,
    run_report_tables,
    show,
)
from hetpipe.runs.run_folder import RunFolder
from partition.problem import problem_of

if TYPE_CHECKING:
    from partition.plan import Plan

MODEL = "bert-tiny"
SPEEDS = (0.6, 0.4, 0.2)
MEMORY_BYTES = 640 * 2**20
SEQUENCE_LENGTH, BATCH_SIZE, STEPS, BUDGET_S = 128, 16, 8, 10.0
EVEN = "gpipe-even"


def demo_command(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A new folder for what the demo writes.")
    ] = Path("hetpipe-demo"),
    json: JsonOption = False,
) -> None:
    """Plan, train and draw on three unequal devices that this host plays; under two minutes."""
    if output.exists():
        raise InputError(f"{output}: exists already; give another folder with -o")
    output.mkdir(parents=True)
    cluster_file = output / "cluster.toml"
    scale = min(1.0, 0.6 * (os.cpu_count() or 1) / sum(SPEEDS))
    speeds = [round(speed * scale, 3) for speed in SPEEDS]
    write_output(cluster_file, emulated_text(speeds, MEMORY_BYTES, name="demo"))
    cluster = read_cluster(cluster_file)
    profile = get_profile(MODEL, None, cluster, SEQUENCE_LENGTH, budget_s=BUDGET_S, quiet=json)
    ours, outcomes = plan_and_compare(problem_of(profile, cluster, BATCH_SIZE), "auto")
    if not json:
        show(
            [
                *plan_sentences(ours, profile, cluster),
                plan_table(ours, profile, cluster),
                comparison_table(outcomes, ours),
            ]
        )
    even = next((outcome.plan for outcome in outcomes if outcome.strategy == EVEN), None)
    plans: list[Plan] = [plan for plan in (even, ours) if plan is not None]
    reports = []
    for plan in plans:
        if not json:
            typer.echo(f"training {STEPS} steps under {plan.strategy} ...")
        folder = output / plan.strategy
        reports.append(measure_plan(plan, profile, cluster_file, STEPS, keep=folder))
    pictures = plot_run(RunFolder(output / ours.strategy), output / "pictures")
    from hetpipe.reporting.plots import speedups

    measured = {report.strategy: report.measured_step_s for report in reports}
    pictures += save_picture(speedups(outcomes, measured), output / "pictures" / "speed")
    if json:
        print_json(
            {"runs": [report.to_json() for report in reports], "pictures": [str(entry) for entry in pictures]}
        )
        return
    show(
        [
            *run_report_tables(reports[-1]),
            measured_table(reports),
            f"pictures: {output / 'pictures'} (predicted-and-measured.png first)",
            "no model is kept of these few steps; `hetpipe run` keeps one",
        ]
    )
