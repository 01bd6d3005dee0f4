"""export: a checkpoint as a Hugging Face folder, adapters as a PEFT folder."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cost_model.errors import InputError
from cost_model.strict_files import read_json, write_atomically
from hetpipe.commands.options import JsonOption
from hetpipe.commands.output import print_json
from hetpipe.models.huggingface_folder import (
    CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    described,
)
from hetpipe.runs.quantization import split_load_in
from hetpipe.runs.run_folder import RunFolder, check_empty
from hetpipe.runs.settings import read_settings

if TYPE_CHECKING:
    from hetpipe.models.huggingface import ModelSpec
    from hetpipe.training.checkpoint import Manifest


def export_command(
    run: Annotated[
        Path, typer.Argument(help="A run folder, RUN/best of one with held-out data, or a checkpoint.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to make.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the weights of their base.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads, adapters as one that peft loads."""
    check_empty(output, "another -o")
    source = _source(run)
    from transformers.utils import logging

    from hetpipe.data.chat_template import read_template, write_for_transformers
    from hetpipe.training import checkpoint, checkpoint_weights

    logging.disable_progress_bar()
    manifest = checkpoint.read_manifest(source)
    if manifest.lora is not None:
        _export_adapters(source, manifest, output, merge=merge)
    elif merge:
        raise InputError(f"{source}: holds no adapters to merge, but the whole model; leave --merge out")
    else:
        checkpoint_weights.export_huggingface(
            source, output, _kept_spec(source, manifest.model).build_as_saved()
        )
    vocabulary = source / checkpoint.VOCABULARY_FILE
    if vocabulary.exists():
        shutil.copyfile(vocabulary, output / TOKENIZER_FILE)
    if (tokenizer := source / TOKENIZER_CONFIG_FILE).exists():
        shutil.copyfile(tokenizer, output / TOKENIZER_CONFIG_FILE)
    if (processor := source / checkpoint.PROCESSOR_FILE).exists():
        shutil.copyfile(processor, output / checkpoint.PROCESSOR_FILE)
    if (template := source / checkpoint.CHAT_TEMPLATE_FILE).exists():
        write_for_transformers(read_template(template), output)
    _write_tokenizer_config(source, manifest, output)
    if json:
        print_json({"checkpoint": str(source), "step": manifest.step, "folder": str(output)})
    else:
        typer.echo(f"wrote step {manifest.step} of {manifest.model} to {output}")


def _source(run: Path) -> Path:
    """Return the checkpoint that is asked for: one itself, the newest of a run, or its best.

    Raises: InputError if there is none.
    """
    from hetpipe.training import checkpoint
    from hetpipe.training.resumption import is_best

    if is_best(str(run)) and checkpoint.holds_run(run.parent):
        best = checkpoint.best(RunFolder(run.parent).checkpoints)
        if best is None:
            raise InputError(
                f"{run}: no checkpoint of {run.parent} was held against other data (--eval-data); give "
                f"{run.parent}"
            )
        return best
    if not run.is_dir():
        raise InputError(f"{run}: no such folder; give a run folder, or a checkpoint of one")
    if not checkpoint.holds_run(run):
        return run
    newest = checkpoint.latest(RunFolder(run).checkpoints)
    if newest is None:
        raise InputError(f"{run}: holds no complete checkpoint; train without --no-save, to the end")
    return newest


def _write_tokenizer_config(source: Path, manifest: "Manifest", output: Path) -> None:
    """Say beside a tokenizer how `AutoTokenizer` is to load it, unless the model's folder or a template did.

    That of an encoder-decoder says how texts end and are filled up.
    """
    from hetpipe.data.pairs import ends_of_pairs
    from hetpipe.data.special_tokens import own_end, roles_of, tokenizer_config_text
    from hetpipe.data.vocabulary import is_trained_here, load_vocabulary
    from hetpipe.models.task_inputs import MASK, TOKENS, TYPES

    if not (output / TOKENIZER_FILE).exists():
        return
    vocabulary, target = load_vocabulary(output / TOKENIZER_FILE), output / TOKENIZER_CONFIG_FILE
    name = manifest.model.removesuffix("" if manifest.lora is None else manifest.lora.suffix)
    spec = _kept_spec(source, split_load_in(name)[0])
    if spec.task.translates:
        write_atomically(target, tokenizer_config_text(ends_of_pairs(vocabulary, spec.inputs)))
    elif not target.exists():
        inputs = [TOKENS, *([TYPES] if spec.inputs.token_types else []), MASK]
        end = own_end(vocabulary, None if is_trained_here(vocabulary) else spec.folder, target)
        said = {"model_input_names": inputs, **roles_of(vocabulary, end)}
        write_atomically(target, tokenizer_config_text(said))


def _kept_spec(source: Path, name: str) -> "ModelSpec":
    """Return the model of a checkpoint, by the configuration in it where it is of a folder.

    Raises: InputError if it is of neither a folder nor a name, but of a program.
    """
    from hetpipe.models.huggingface import folder_spec, model_spec
    from hetpipe.training import checkpoint

    config = source / checkpoint.CONFIG_FILE
    if config.exists():
        return folder_spec(described(source, name, read_json(config)))
    if not (source / checkpoint.VOCABULARY_FILE).exists():
        raise InputError(
            f"{source}: is of a model that a program gave to hetpipe.Trainer, and only that can build it; "
            "call trainer.save_pretrained there, or hetpipe.load_weights"
        )
    return model_spec(name)


def _export_adapters(source: Path, manifest: "Manifest", output: Path, *, merge: bool) -> None:
    """Write adapters alone, or the weights of their base with them.

    Raises: InputError if the base is needed, and not where the run found it.
    """
    from hetpipe.models.adapters import held_in
    from hetpipe.models.huggingface import model_spec
    from hetpipe.training.adapter_export import export_adapter, export_merged

    assert manifest.lora is not None
    name, load_in = split_load_in(manifest.model.removesuffix(manifest.lora.suffix))
    config = RunFolder(source.parent.parent).config
    place = read_settings(config).model_folder if config.exists() else None
    if not merge:
        export_adapter(source, output, _kept_spec(source, name), place or name)
        return
    if place is None and (source / CONFIG_FILE).exists():
        raise InputError(
            f"{source}: is in no run folder, which knows where the base lies; export without --merge, and "
            "merge by peft"
        )
    export_merged(source, output, held_in(model_spec(name, place), load_in))
