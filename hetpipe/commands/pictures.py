"""The pictures of plans and runs, by name, and how they are written."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, read_profile
from cost_model.strict_files import read_text
from hetpipe.commands.given_plan import checked_plan
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.program_text import parse_program
from hetpipe.program.trace import Trace
from hetpipe.reporting.plain_strategies import beside_others, even_split
from hetpipe.runs.run_folder import DEVICE_CLOCKS, MEASURED, PREDICTED, RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.simulation.prediction import Prediction, simulate_plan
from hetpipe.simulation.simulator import simulate
from partition.plan import Plan
from partition.plan_file import read_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PDF = ".pdf"
SUFFIXES = (".png", ".svg", PDF)


def check_picture(path: Path) -> None:
    """Check that a path can name a picture.

    Raises: InputError if it has the name of another kind of file, or none.
    """
    if path.suffix not in ("", *SUFFIXES) or not path.name:
        raise InputError(f"{path}: pictures are PNG and SVG, or PDF; give a name such as step.png")
    if path.parent.exists() and not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written ({path.parent} is no folder); give another place")


def save_picture(ax: "Axes", path: Path) -> list[Path]:
    """Write the figure of an Axes as PNG and SVG, or as PDF where the path says so.

    Raises: InputError if it cannot be written.
    """
    return save_pages([ax], path) if path.suffix == PDF else save_pictures({path.name: ax}, path.parent)


def save_pictures(pictures: "Mapping[str, Axes]", folder: Path) -> list[Path]:
    """Write pictures by name into a folder, each as PNG and SVG.

    Raises: InputError if that cannot be done.
    """
    from hetpipe.reporting import plots

    written: list[Path] = []
    for name, ax in pictures.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written += plots.save(plots.figure_of(ax), folder / name)
        except OSError as error:
            raise InputError(f"{folder / name}: cannot be written ({error.strerror})") from None
    return written


def save_pages(pictures: "Iterable[Axes]", path: Path) -> list[Path]:
    """Write pictures as the pages of a PDF.

    Raises: InputError if it cannot be written.
    """
    from hetpipe.reporting import plots

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plots.save_pages([plots.figure_of(ax) for ax in pictures], path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    return [path]


def day_of(path: Path) -> date:
    """Return the day on which a file was written."""
    return date.fromtimestamp(path.stat().st_mtime)


def plan_pictures(
    plan: Plan, profile: ModelProfile, cluster: Cluster, trace: Trace, day: date
) -> "dict[str, Axes]":
    """Draw the predicted step of a plan, alone and beside an even split, the memory and the layers."""
    from hetpipe.reporting import plots

    labels = plots.stage_labels(plan, profile, cluster)
    even = even_split(plan, profile, cluster)
    pictures = {
        "step": plots.gantt(trace, labels=labels),
        "memory": plots.memory(plan, profile, cluster),
        "layers": plots.partition_bars([plan] if even is None else [even, plan], profile, cluster),
    }
    if even is not None:
        even_labels = plots.stage_labels(even, profile, cluster)
        even_trace = simulate_plan(even, profile, cluster)
        pictures["beside-even"], _ = plots.beside_even(
            even_trace, trace, even_labels=even_labels, labels=labels
        )
    of = plots.plan_title(plan, cluster, day)
    return {name: plots.title(ax, of) for name, ax in pictures.items()}


def speed_picture(plan: Plan, profile: ModelProfile, cluster: Cluster, day: date) -> "Axes":
    """Draw the speed of a plan beside that of the plain strategies."""
    from hetpipe.reporting import plots

    _check_takes_time(None if plan.predicted is None else plan.predicted.step_s)
    ax = plots.speedups(beside_others(plan, profile, cluster))
    return plots.title(ax, plots.plan_title(plan, cluster, day))


def overview_picture(
    plan: Plan, prediction: Prediction, profile: ModelProfile, cluster: Cluster, day: date
) -> "Axes":
    """Draw a plan on one page, beside the plain strategies."""
    from hetpipe.reporting import plots

    _check_takes_time(prediction.step_s)
    outcomes = beside_others(prediction.plan, profile, cluster)
    axes = plots.overview(plan, outcomes, prediction.trace, profile, cluster)
    return plots.title(axes[0], plots.plan_title(plan, cluster, day))


def _check_takes_time(step_s: float | None) -> None:
    if step_s == 0:
        raise InputError("a step takes no time, of which there is nothing to draw; give a profile with times")


def run_pictures(run: RunFolder) -> "dict[str, Axes]":
    """Draw what a run folder holds: as much of it as there is."""
    from hetpipe.reporting import plots

    plan, profile, cluster = read_plan(run.plan), read_profile(run.profile), read_cluster(run.cluster)
    program = parse_program(read_text(run.program), plan)
    plan = checked_plan(plan, profile, cluster, run.plan)
    day = day_of(next(path for path in (run.metrics, run.plan) if path.exists()))
    pictures = plan_pictures(plan, profile, cluster, simulate(ProgramCosts(program, profile, cluster)), day)
    report = read_report(run.report) if run.report.exists() else None
    traces = {
        name: trace for name, trace in run.read_traces().items() if trace.device_names == plan.device_names
    }
    measured: dict[str, Axes] = {}
    if MEASURED in traces and PREDICTED in traces:
        measured["predicted-and-measured"], _ = plots.predicted_and_measured(
            traces[PREDICTED],
            traces[MEASURED],
            labels=plots.stage_labels(plan, profile, cluster),
            device_clocks=traces.get(DEVICE_CLOCKS),
            median_s=None if report is None else report.measured_step_s,
        )
    if report is not None:
        devices = report.devices
        peaks = {name: device.peak_bytes for name, device in devices.items() if device.peak_bytes is not None}
        measured["memory"] = plots.memory(plan, profile, cluster, measured_bytes=peaks)
    if metrics := run.read_metrics():
        measured["loss"] = plots.losses(metrics)
    of = plots.plan_title(plan, cluster, day)
    return pictures | {name: plots.title(ax, of) for name, ax in measured.items()}


def pictures_of_runs(runs: Sequence[RunFolder]) -> "dict[str, Axes]":
    """Draw the losses of several runs on the same axes, and the measured steps against the predicted ones.

    Raises: InputError if none of them has done a step.
    """
    from hetpipe.reporting import plots

    names = [run.path.name for run in runs]
    if len(set(names)) < len(names):  # those of several places
        names = [str(run.path) for run in runs]
    metrics = {name: run.read_metrics() for name, run in zip(names, runs, strict=True)}
    if not any(metrics.values()):
        raise InputError(f"{', '.join(names)}: no step has been done; there is nothing to draw")
    losses = plots.new_axes(height=4.0)
    for name, rows in metrics.items():
        if rows:
            plots.losses(rows, losses, label=name)
    days = [day_of(run.metrics) for run in runs if run.metrics.exists()]
    models = _models_text([read_plan(run.plan).model for run in runs])
    of = f"{len(runs)} runs, {models}, {_days_text(days)}"
    pictures = {"losses": losses}
    reports = {
        name: read_report(run.report) for name, run in zip(names, runs, strict=True) if run.report.exists()
    }
    if reports:
        pictures["predictions"] = plots.predictions(reports)
    return {name: plots.title(ax, of) for name, ax in pictures.items()}


def _models_text(models: Sequence[str]) -> str:
    different = sorted(set(models))
    return ", ".join(different) if len(different) <= 3 else f"{len(different)} models"


def _days_text(days: Sequence[date]) -> str:
    return str(days[0]) if len(set(days)) == 1 else f"{min(days)} to {max(days)}"
