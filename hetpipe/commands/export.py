"""export: a checkpoint as a Hugging Face folder."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from cost_model.errors import InputError
from cost_model.strict_files import read_json
from hetpipe.commands.options import JsonOption
from hetpipe.commands.output import print_json
from hetpipe.models.huggingface_folder import described
from hetpipe.runs.run_folder import RunFolder


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

    from hetpipe.models.huggingface import folder_spec, model_spec
    from hetpipe.training import checkpoint

    logging.disable_progress_bar()
    source = checkpoint.latest(RunFolder(run).checkpoints) if checkpoint.holds_run(run) else run
    if source is None:
        raise InputError(f"{run}: holds no complete checkpoint; train without --no-save, to the end")
    manifest = checkpoint.read_manifest(source)
    config = source / checkpoint.CONFIG_FILE
    spec = folder_spec(described(source, manifest.model, read_json(config))) if config.exists() else None
    model = (spec or model_spec(manifest.model)).build()
    checkpoint.export_huggingface(source, output, model)
    vocabulary = source / checkpoint.VOCABULARY_FILE
    if vocabulary.exists():
        shutil.copyfile(vocabulary, output / "tokenizer.json")
    if json:
        print_json({"checkpoint": str(source), "step": manifest.step, "folder": str(output)})
    else:
        typer.echo(f"wrote step {manifest.step} of {manifest.model} to {output}")
