"""plot: pictures of a run folder or of a plan."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InfeasibleError, InputError
from cost_model.profile import ModelProfile, read_profile
from cost_model.strict_files import read_text
from cost_model.what_if import without
from hetpipe.commands.inputs import checked_plan
from hetpipe.commands.options import JsonOption, MaybeCluster, with_options
from hetpipe.commands.output import print_json
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.program_text import parse_program
from hetpipe.program.trace import Trace
from hetpipe.reporting.pages import write_page
from hetpipe.runs.run_folder import DEVICE_CLOCKS, MEASURED, PREDICTED, RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.simulation.prediction import Prediction, evaluator, predict, with_bound
from hetpipe.simulation.simulator import simulate
from partition.plan import Plan
from partition.plan_file import read_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from partition.solver import Outcome

PICTURES = (".png", ".svg")
PAGE = ".html"


@with_options
def plot_command(
    path: Annotated[Path, typer.Argument(help="A run folder, or a plan.json.")],
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="The profile of a plan.json.")
    ] = None,
    cluster_file: MaybeCluster = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Folder, or for a plan one file such as plan.png; else beside the data."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw a run or a plan: the step, memory, layers, speed-ups and losses, as PNG, SVG and a page."""
    one_file = output is not None and output.suffix in PICTURES
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; give a run folder, or a plan.json")
    if path.is_dir():
        for option, given in (("--profile", profile_file), ("--cluster", cluster_file)):
            if given is not None:
                raise InputError(f"{path}: a run folder has its own {option[2:]}; leave {option} out")
        if one_file:
            raise InputError(f"-o {output}: a run is several pictures; give a folder")
        if output is not None and output.suffix == PAGE:
            written = [write_page(RunFolder(path), output)]
        else:
            written = plot_run(RunFolder(path), output or path)
    elif profile_file is None or cluster_file is None:
        missing = "--profile" if profile_file is None else "--cluster"
        raise InputError(f"{path}: to draw a plan, {missing} is needed too; or give a run folder")
    else:
        written = _plot_plan_file(path, profile_file, cluster_file, output or path.parent, one_file=one_file)
    if json:
        print_json({"files": [str(picture) for picture in written]})
    else:
        for picture in written:
            typer.echo(str(picture))


def _plot_plan_file(
    path: Path, profile_file: Path, cluster_file: Path, output: Path, *, one_file: bool
) -> list[Path]:
    """Draw a plan.json into one file, or as several pictures into a folder; return what was written."""
    plan, profile, cluster = read_plan(path), read_profile(profile_file), read_cluster(cluster_file)
    plan = checked_plan(plan, profile, cluster)
    prediction = with_bound(predict(plan, profile, cluster), profile, cluster)
    if one_file:
        return plot_overview(plan, prediction, profile, cluster, output)
    written = plot_plan(plan, profile, cluster, prediction.trace, output)
    return written + plot_speedups(prediction.plan, profile, cluster, output)


def check_picture(path: Path) -> None:
    """Check that a path can name a picture.

    Raises: InputError if it has the name of another kind of file, or none.
    """
    if path.suffix not in ("", *PICTURES) or not path.name:
        raise InputError(f"{path}: pictures are written as PNG and SVG; give a name such as step.png")
    if path.parent.exists() and not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written ({path.parent} is no folder); give another place")


def save_picture(ax: "Axes", path: Path) -> list[Path]:
    """Write the figure of an Axes as PNG and SVG.

    Raises: InputError if it cannot be written.
    """
    from matplotlib.figure import Figure

    from hetpipe.reporting.plots import save

    figure = ax.figure
    assert isinstance(figure, Figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return list(save(figure, path))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def plot_plan(plan: Plan, profile: ModelProfile, cluster: Cluster, trace: Trace, folder: Path) -> list[Path]:
    """Draw the predicted step, the memory and the layers of a plan into a folder."""
    from hetpipe.reporting import plots

    labels = plots.stage_labels(plan, profile, cluster)
    pictures = {
        "step": plots.gantt(trace, labels=labels),
        "memory": plots.memory(plan, profile, cluster),
        "layers": plots.partition_bars(_beside_even(plan, profile, cluster), profile, cluster),
    }
    of = plots.plan_title(plan, cluster)
    return [
        file for name, ax in pictures.items() for file in save_picture(plots.title(ax, of), folder / name)
    ]


def plot_overview(
    plan: Plan, prediction: Prediction, profile: ModelProfile, cluster: Cluster, path: Path
) -> list[Path]:
    """Draw a plan on one page, beside the plain strategies."""
    from hetpipe.reporting import plots

    outcomes = beside_others(prediction.plan, profile, cluster)
    axes = plots.overview(plan, outcomes, prediction.trace, profile, cluster)
    return save_picture(plots.title(axes[0], plots.plan_title(plan, cluster)), path)


def plot_speedups(plan: Plan, profile: ModelProfile, cluster: Cluster, folder: Path) -> list[Path]:
    """Draw the speed of a plan beside that of the plain strategies into a folder."""
    from hetpipe.reporting import plots

    ax = plots.speedups(beside_others(plan, profile, cluster))
    return save_picture(plots.title(ax, plots.plan_title(plan, cluster)), folder / "speed-ups")


def beside_others(plan: Plan, profile: ModelProfile, cluster: Cluster) -> "list[Outcome]":
    """Return the outcomes of the plain strategies with their figures, then the plan, which has its own."""
    from partition.baselines.catalogue import WELL_KNOWN
    from partition.problem import problem_of
    from partition.solver import Outcome

    unknown = [device.name for device in cluster.devices if device.kind not in profile.kinds]
    problem = problem_of(
        profile, without(cluster, unknown), plan.global_batch_size, gradient_dtype=plan.gradient_dtype
    )
    evaluate = evaluator(profile, cluster)
    outcomes = []
    for name, strategy in WELL_KNOWN.items():
        try:
            plain = strategy(problem, evaluate)
        except (InfeasibleError, InputError) as error:
            outcomes.append(Outcome.without_plan(name, error))
        else:
            outcomes.append(Outcome(name, dataclasses.replace(plain, predicted=evaluate(plain))))
    own = plan.strategy if plan.strategy not in WELL_KNOWN else f"{plan.strategy}, this plan"
    return [*outcomes, Outcome(own, plan)]


def plot_run(run: RunFolder, folder: Path) -> list[Path]:
    """Draw what a run folder holds into a folder: as much of it as there is.

    Raises: InputError if it is no run folder.
    """
    from hetpipe.reporting import plots

    if not run.plan.exists():
        raise InputError(f"{run.path}: no run folder, it holds no {run.plan.name}")
    plan, profile, cluster = read_plan(run.plan), read_profile(run.profile), read_cluster(run.cluster)
    program = parse_program(read_text(run.program), plan)
    plan = checked_plan(plan, profile, cluster)
    predicted = simulate(ProgramCosts(program, profile, cluster))
    written = plot_plan(plan, profile, cluster, predicted, folder)
    of = plots.plan_title(plan, cluster)
    report = read_report(run.report) if run.report.exists() else None
    traces = run.read_traces()
    if MEASURED in traces and PREDICTED in traces:
        above, _ = plots.predicted_and_measured(
            traces[PREDICTED],
            traces[MEASURED],
            labels=plots.stage_labels(plan, profile, cluster),
            device_clocks=traces.get(DEVICE_CLOCKS),
            median_s=None if report is None else report.measured_step_s,
        )
        written += save_picture(plots.title(above, of), folder / "predicted-and-measured")
    if report is not None:
        devices = report.devices
        peaks = {name: device.peak_bytes for name, device in devices.items() if device.peak_bytes is not None}
        ax = plots.memory(plan, profile, cluster, measured_bytes=peaks)
        save_picture(plots.title(ax, of), folder / "memory")
    if metrics := run.read_metrics():
        written += save_picture(plots.title(plots.losses(metrics), of), folder / "loss")
    return [*written, write_page(run, folder / run.page.name)]


def _beside_even(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[Plan]:
    """Return an even split for contrast where it fits, then the plan."""
    from partition.baselines.layer_splits import gpipe_even
    from partition.problem import problem_of

    size = plan.pipelines[0].microbatch_size
    try:
        even = gpipe_even(problem_of(profile, cluster, plan.global_batch_size, size))
    except (InfeasibleError, InputError):
        return [plan]
    return [even, plan]
