"""plot: pictures of a run, of a plan, or of several runs beside each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.commands.given_plan import check_devices, checked_plan, profile_of_plan
from hetpipe.commands.options import (
    JsonOption,
    MaybeCluster,
    ModelOption,
    ProfileOptions,
    SequenceOption,
    with_options,
)
from hetpipe.commands.output import print_json
from hetpipe.commands.pictures import (
    PDF,
    SUFFIXES,
    day_of,
    overview_picture,
    pictures_of_runs,
    plan_pictures,
    run_pictures,
    save_pages,
    save_picture,
    save_pictures,
    speed_picture,
)
from hetpipe.reporting.pages import write_page
from hetpipe.runs.run_folder import RunFolder
from hetpipe.simulation.prediction import predict, with_bound
from partition.plan import Plan
from partition.plan_file import read_plan

PAGE = ".html"


@with_options
def plot_command(
    *,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="A run folder, several, a folder of run folders, or a plan.json."
        ),
    ],
    cluster_file: MaybeCluster = None,
    model: ModelOption = None,
    sequence_length: SequenceOption = None,
    options: ProfileOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Folder, one file such as pictures.pdf, for a plan plan.png; else beside the data.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw a run or a plan: step, memory, layers, speed-ups, losses; or several runs, side by side."""
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder; give a run folder, or a plan.json")
    if len(paths) == 1 and not paths[0].is_dir():
        (path,) = paths
        if cluster_file is None or (model is None and options.profile_file is None):
            missing = "--cluster" if cluster_file is None else "--profile or --model"
            raise InputError(f"{path}: to draw a plan, {missing} is needed too; or give a run folder")
        plan, cluster = read_plan(path), read_cluster(cluster_file)
        check_devices(plan, cluster, path)
        profile = profile_of_plan(model, cluster, sequence_length, options, quiet=json)
        written = _plot_plan(path, plan, profile, cluster, output or path.parent)
    else:
        _check_own(paths[0], model, cluster_file, options, sequence_length)
        written = _plot_runs(paths, output)
    if json:
        print_json({"files": [str(picture) for picture in written]})
    else:
        for picture in written:
            typer.echo(str(picture))


def _check_own(
    path: Path, model: str | None, cluster_file: Path | None, options: ProfileOptions, length: int | None
) -> None:
    """Check that nothing is given that a run folder has itself.

    Raises: InputError if something is.
    """
    for option, given in (
        ("--profile", options.profile_file is not None),
        ("--cluster", cluster_file is not None),
        ("--model", model is not None),
    ):
        if given:
            raise InputError(f"{path}: a run folder has its own {option[2:]}; leave {option} out")
    if options != ProfileOptions() or length is not None:
        raise InputError(f"{path}: a run folder has its own profile; leave out what says how to measure one")


def _plot_plan(path: Path, plan: Plan, profile: ModelProfile, cluster: Cluster, output: Path) -> list[Path]:
    """Draw the plan of a file into one picture, or several into a folder; return what was written."""
    plan, day = checked_plan(plan, profile, cluster, path), day_of(path)
    prediction = with_bound(predict(plan, profile, cluster), profile, cluster)
    if output.suffix in SUFFIXES:
        return save_picture(overview_picture(plan, prediction, profile, cluster, day), output)
    pictures = plan_pictures(plan, profile, cluster, prediction.trace, day)
    pictures["speed-ups"] = speed_picture(prediction.plan, profile, cluster, day)
    return save_pictures(pictures, output)


def _plot_runs(paths: Sequence[Path], output: Path | None) -> list[Path]:
    """Draw one run, or several beside each other; return what was written."""
    runs = _run_folders(paths)
    one_file = output is not None and output.suffix in (*SUFFIXES, PAGE)
    if output is not None and one_file and output.suffix != PDF and (output.suffix != PAGE or len(runs) > 1):
        whose = "a run is" if len(runs) == 1 else "runs are"
        raise InputError(f"-o {output}: {whose} several pictures; give a folder, or a file such as run.pdf")
    if output is not None and output.suffix == PAGE:
        return [write_page(runs[0], output)]
    pictures = run_pictures(runs[0]) if len(runs) == 1 else pictures_of_runs(runs)
    if output is not None and output.suffix == PDF:
        return save_pages(pictures.values(), output)
    if len(runs) > 1:
        return save_pictures(pictures, output or _parent_of(runs))
    folder = output or runs[0].path
    return [*save_pictures(pictures, folder), write_page(runs[0], folder / runs[0].page.name)]


def _run_folders(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the run folders given; those within, of one folder that is none itself.

    Raises: InputError if one of them is no run folder.
    """
    if len(paths) == 1 and not RunFolder(paths[0]).is_run():
        within = sorted(path for path in paths[0].iterdir() if RunFolder(path).is_run())
        if within:
            return [RunFolder(path) for path in within]
    runs = [RunFolder(path) for path in paths]
    for run in runs:
        if not run.is_run():
            raise InputError(f"{run.path}: no run folder, it holds no {run.plan.name} and {run.program.name}")
    return runs


def _parent_of(runs: Sequence[RunFolder]) -> Path:
    """Return the folder that run folders lie in; the current one, where that differs."""
    parents = {run.path.parent for run in runs}
    return parents.pop() if len(parents) == 1 else Path()
