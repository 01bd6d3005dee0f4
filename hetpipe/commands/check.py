"""check: prove that the split model computes what the whole one does."""

import dataclasses
from typing import Annotated

import typer

from hetpipe.commands.inputs import named_model
from hetpipe.commands.options import AdapterOptions, JsonOption, RequiredModel, with_options
from hetpipe.commands.output import print_json, status
from hetpipe.reporting.tables import show
from hetpipe.runs.settings import Settings, TaskSettings

CHECK_FAILED = 4


@with_options
def check_command(
    *,
    model: RequiredModel,
    adapters: AdapterOptions,
    full: Annotated[bool, typer.Option("--full", help="The model at full size, not a small copy.")] = False,
    json: JsonOption = False,
) -> None:
    """Prove that the split model computes what the whole one does: loss and every gradient."""
    with status("loading torch", quiet=json):
        entry = named_model(model, adapters)
    from hetpipe.models.adapters import task_spec
    from hetpipe.models.split_check import check_split

    settings = TaskSettings(entry.name, run=Settings(steps=1, **entry.in_settings))
    with status(f"checking {entry.name}", quiet=json):
        report = check_split(task_spec(settings), full=full)
    if json:
        print_json(dataclasses.asdict(report))
    elif report.passed:
        show(
            [
                f"{report.model}: split equals whole for {len(report.cuts)} splits; loss differs by "
                f"{report.loss_difference:.1e}, gradients by {report.gradient_difference:.1e} (float64, "
                "relative)"
            ]
        )
    else:
        typer.echo(f"error: {report.model}: {report.reason}", err=True)
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)
