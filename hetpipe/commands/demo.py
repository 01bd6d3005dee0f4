"""demo: three unequal emulated devices, nothing needed."""

import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from hetpipe.commands.init import emulated_text
from hetpipe.commands.inputs import get_profile
from hetpipe.commands.measure import measure_plan
from hetpipe.commands.options import JsonOption, ProfileOptions
from hetpipe.commands.output import print_json, write_output
from hetpipe.commands.pictures import run_pictures, save_picture, save_pictures
from hetpipe.commands.plan import plan_and_compare, show_plan
from hetpipe.reporting.pages import write_page
from hetpipe.reporting.run_tables import measured_table, run_report_tables
from hetpipe.reporting.tables import show
from hetpipe.runs.run_folder import RunFolder
from partition.problem import problem_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetpipe.runs.run_report import RunReport
    from partition.solver import Outcome

MODEL = "bert-tiny"
SPEEDS = (0.6, 0.4, 0.2)
MEMORY_BYTES = 640 * 2**20
SEQUENCE_LENGTH, BATCH_SIZE, STEPS, BUDGET_S = 128, 16, 8, 10.0
EVEN = "gpipe-even"


def demo_command(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A new folder for what the demo writes.")
    ] = Path("hetpipe-demo"),
    steps: Annotated[int, typer.Option("--steps", help="Steps under each plan.", min=2)] = STEPS,
    json: JsonOption = False,
) -> None:
    """Plan, train and draw on three unequal devices that this host plays; under two minutes."""
    if output.exists():
        raise InputError(f"{output}: exists already; give another folder with -o")
    output.mkdir(parents=True)
    cluster_file = _demo_cluster(output)
    cluster = read_cluster(cluster_file)
    options = ProfileOptions(profile_budget_s=BUDGET_S)
    profile = get_profile(MODEL, cluster, SEQUENCE_LENGTH, options, quiet=json)
    plan, outcomes = plan_and_compare(problem_of(profile, cluster, BATCH_SIZE), "auto", quiet=json)
    if not json:
        show_plan(plan, outcomes, profile, cluster)
    from partition.explanation.gains import best_other

    best = best_other(outcomes)
    others = [outcome.plan for outcome in outcomes if outcome.strategy in (EVEN, best)]
    reports = []
    for shown in [*filter(None, others), plan]:
        if not json:
            typer.echo(f"training {steps} steps under {shown.strategy} ...")
        folder = output / shown.strategy
        reports.append(measure_plan(shown, profile, cluster_file, steps, keep=folder))
    pictures = _draw(output, output / plan.strategy, outcomes, reports)
    if json:
        runs = [report.to_json() for report in reports]
        print_json({"runs": runs, "pictures": [str(picture) for picture in pictures]})
        return
    show(
        [
            *run_report_tables(reports[-1]),
            measured_table(reports),
            f"pictures: {output / 'pictures'} (predicted-and-measured.png first)",
            "no model is kept of these few steps; `hetpipe run` keeps one",
        ]
    )


def _demo_cluster(output: Path) -> Path:
    """Write the cluster file of the demo, slower where the host has few cores, and return its path."""
    scale = min(1.0, 0.6 * (os.cpu_count() or 1) / sum(SPEEDS))
    speeds = [round(speed * scale, 3) for speed in SPEEDS]
    cluster_file = output / "cluster.toml"
    write_output(cluster_file, emulated_text(speeds, MEMORY_BYTES, name="demo"))
    return cluster_file


def _draw(
    output: Path, run: Path, outcomes: "Sequence[Outcome]", reports: "Sequence[RunReport]"
) -> list[Path]:
    """Draw a run, and the speeds of the strategies, predicted and measured; return the files."""
    from hetpipe.reporting.plots import speedups, subject, title

    folder = output / "pictures"
    pictures = save_pictures(run_pictures(RunFolder(run)), folder)
    pictures.append(write_page(RunFolder(run), folder / RunFolder(run).page.name))
    measured = {report.strategy: report.measured_step_s for report in reports}
    of = subject(MODEL, BATCH_SIZE, f"on {len(SPEEDS)} devices of 'demo'", date.today())
    return pictures + save_picture(title(speedups(outcomes, measured), of), folder / "speed")
