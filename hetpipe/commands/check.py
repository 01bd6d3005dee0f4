"""check: prove that the split model computes what the whole one does."""

import dataclasses
from typing import Annotated

import typer

from hetpipe.commands.options import JsonOption, RequiredModel
from hetpipe.commands.output import print_json
from hetpipe.models.names import model_entry

CHECK_FAILED = 4


def check_command(
    model: RequiredModel,
    full: Annotated[bool, typer.Option("--full", help="The model at full size, not a small copy.")] = False,
    json: JsonOption = False,
) -> None:
    """Prove that the split model computes what the whole one does: loss and every gradient."""
    entry = model_entry(model)
    from hetpipe.models.huggingface import model_spec
    from hetpipe.models.split_check import check_split

    report = check_split(model_spec(entry.name, entry.place), full=full)
    if json:
        print_json(dataclasses.asdict(report))
    elif report.passed:
        typer.echo(
            f"{report.model}: split equals whole for {len(report.cuts)} splits; loss differs by "
            f"{report.loss_difference:.1e}, gradients by {report.gradient_difference:.1e} (float64, relative)"
        )
    else:
        typer.echo(f"error: {report.model}: {report.reason}", err=True)
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)
