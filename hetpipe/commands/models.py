"""profile, check, export: verbs about a model."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from cost_model.catalogue import Accelerator, accelerator
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, profile_text
from cost_model.strict_files import read_json
from hetpipe.commands import profiles
from hetpipe.commands.common import (
    MODEL_HELP,
    AllowSlowOption,
    BudgetOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    SequenceOption,
    note,
    print_json,
    write_output,
)
from hetpipe.models.huggingface_folder import described
from hetpipe.models.names import model_entry
from hetpipe.profiling.profile_cache import MICROBATCH_SIZES
from hetpipe.reporting.tables import estimate_sentences, profile_table, show
from hetpipe.runs.run_folder import RunFolder

CHECK_FAILED = 4
DEFAULT_SIZES = ",".join(map(str, MICROBATCH_SIZES))

RequiredModel = Annotated[str, typer.Option("--model", help=MODEL_HELP)]


def profile_command(
    files: Annotated[list[Path] | None, typer.Argument(help="Profiles to --merge.")] = None,
    model: ModelOption = None,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="The cluster.toml.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile here.")] = None,
    sequence_length: SequenceOption = 64,
    dtype: DtypeOption = None,
    allow_slow_bf16: AllowSlowOption = False,
    profile_budget: BudgetOption = 60.0,
    microbatch_sizes: Annotated[
        str, typer.Option("--microbatch-sizes", help='Such as 1,2,4; "auto": up to the largest that fits.')
    ] = DEFAULT_SIZES,
    merge: Annotated[bool, typer.Option("--merge", help="Join the profiles of several hosts.")] = False,
    run: Annotated[
        Path | None, typer.Option("--from-run", help="Correct the profile of this run by what it measured.")
    ] = None,
    show_layers: Annotated[bool, typer.Option("--show", help="Print the layers as a table.")] = False,
    estimate: Annotated[
        list[str] | None,
        typer.Option(help="Add a kind that is not at hand, estimated; may be given several times."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure a model's layers on each kind of device of the cluster, or merge or correct profiles."""
    targets = {kind: accelerator(kind) for kind in estimate or ()}
    if merge and run is not None:
        raise InputError("--merge and --from-run exclude each other; do one after the other")
    if files and not merge:
        raise InputError(f"{files[0]}: to join profiles, give --merge")
    if merge:
        profile = profiles.merge_files(files or [])
    elif run is not None:
        profile = profiles.from_run(run)
    else:
        sizes = profiles.parse_sizes(microbatch_sizes)
        profile = profiles.measure(
            model, cluster, sequence_length, sizes,
            dtype=dtype, allow_slow=allow_slow_bf16, budget_s=profile_budget, quiet=json,
            estimated=targets,
        )  # fmt: skip
    profile = _with_estimates(profile, targets)
    if output is not None:
        write_output(output, profile_text(profile))
    estimates = estimate_sentences(profile, profile.kinds)
    if json:
        print_json(profile.to_json())
        note(estimates)
        return
    if show_layers:
        show([profile_table(profile), *profiles.link_sentences(profile)])
    for sentence in (*profiles.precision_sentences(profile), *estimates):
        typer.echo(sentence)
    where = f"; wrote {output}" if output is not None else ""
    typer.echo(f"{profile.model}: {profile.num_layers} layers on {', '.join(profile.kinds)}{where}")


def _with_estimates(profile: ModelProfile, targets: Mapping[str, Accelerator]) -> ModelProfile:
    """The profile with estimated kinds added.

    Raises: InputError if a kind was measured, or no measured kind is in the catalogue to estimate from.
    """
    if not targets:
        return profile
    from cost_model.roofline import estimate_kind, nearest_kind

    for kind, device in targets.items():
        if kind in profile.kinds:
            raise InputError(f"{kind!r} was measured; leave out --estimate {kind}")
        estimated = estimate_kind(profile, nearest_kind(profile, device), device)
        profile = dataclasses.replace(profile, kinds={**profile.kinds, kind: estimated})
    return profile


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
