"""profile, check, export: verbs about a model."""

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated

import typer

from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.profile import profile_text
from hetpipe.commands.common import (
    BudgetOption,
    ClusterOption,
    JsonOption,
    SequenceOption,
    get_profile,
    print_json,
    write_output,
)
from hetpipe.model_names import model_entry
from hetpipe.report import profile_table, show
from hetpipe.run_folder import RunFolder

CHECK_FAILED = 4

RequiredModel = Annotated[str, typer.Option("--model", help="A model by name, such as bert-large.")]


def profile_command(
    model: RequiredModel,
    cluster: ClusterOption,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile here.")] = None,
    sequence_length: SequenceOption = 64,
    profile_budget: BudgetOption = 60.0,
    show_layers: Annotated[bool, typer.Option("--show", help="Print the layers as a table.")] = False,
    json: JsonOption = False,
) -> None:
    """Measure a model's layers on each kind of device of the cluster."""
    devices = read_cluster(cluster)
    profile = get_profile(model, None, devices, sequence_length, budget_s=profile_budget, quiet=json)
    if output is not None:
        write_output(output, profile_text(profile))
    if json:
        print_json(profile.to_json())
        return
    if show_layers:
        show([profile_table(profile)])
    where = f"; wrote {output}" if output is not None else ""
    typer.echo(f"{profile.model}: {profile.num_layers} layers on {', '.join(profile.kinds)}{where}")


def check_command(
    model: RequiredModel,
    full: Annotated[bool, typer.Option("--full", help="The model at full size, not a small copy.")] = False,
    json: JsonOption = False,
) -> None:
    """Prove that the split model computes what the whole one does: loss and every gradient."""
    model_entry(model)
    from hetpipe.checking import check_split
    from hetpipe.models import model_spec

    report = check_split(model_spec(model), full=full)
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


def export_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a checkpoint of one.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The Hugging Face folder to make.")],
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists and is not an empty folder; give another -o")
    if not run.is_dir():
        raise InputError(f"{run}: no such folder; give a run folder, or a checkpoint of one")
    from transformers.utils import logging

    from hetpipe import checkpoint
    from hetpipe.models import model_spec

    logging.disable_progress_bar()
    root = RunFolder(run).checkpoints
    source = checkpoint.latest(root) if root.is_dir() else run
    if source is None:
        raise InputError(f"{root}: holds no complete checkpoint; train with --save or --every")
    manifest = checkpoint.read_manifest(source)
    checkpoint.export_huggingface(source, output, model_spec(manifest.model).build())
    vocabulary = source / checkpoint.VOCABULARY_FILE
    if vocabulary.exists():
        shutil.copyfile(vocabulary, output / "tokenizer.json")
    if json:
        print_json({"checkpoint": str(source), "step": manifest.step, "folder": str(output)})
    else:
        typer.echo(f"wrote step {manifest.step} of {manifest.model} to {output}")
