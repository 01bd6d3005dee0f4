"""Pictures of a step, predicted and measured, and of the losses of a run."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from cost_model.units import format_seconds
from hetpipe.program.instructions import Compute, Exchange, Pass, Reduce, Step, Sync
from hetpipe.program.trace import Trace
from hetpipe.reporting.colours import BACKWARD, BLACK, BLUE, FORWARD, IDLE, INK, OPTIMIZER, SYNC
from hetpipe.reporting.plots.style import (
    BAR,
    ROW,
    TEXT_WIDTH,
    label_rows,
    legend_above,
    new_axes,
    strip,
    title,
)
from hetpipe.reporting.tables import device_labels
from partition.plan import Plan


def gantt(
    trace: Trace, ax: Axes | None = None, *, labels: Sequence[str] | None = None, end_s: float | None = None
) -> Axes:
    """Draw a step, a row per device: forwards light, backwards dark, idle grey with its share at the right.

    labels: of the rows, the device names if left out; end_s: end of the time axis.
    """
    ax = ax or new_axes(height=1.3 + 0.42 * len(trace.device_names))
    names = trace.device_names
    end_s = end_s or trace.makespan_s
    right_of_axes = ax.get_yaxis_transform()
    for row in range(len(names)):
        _gantt_row(ax, trace, row, end_s, y=row * ROW)
        idle = f"{1 - trace.busy_s(row) / trace.makespan_s:.0%} idle"
        ax.text(1.01, row * ROW, idle, va="center", fontsize=8, color=INK, transform=right_of_axes)
    label_rows(ax, list(labels or names))
    ax.set_xlim(0, end_s)
    ax.set_xlabel("seconds")
    _gantt_legend(ax, trace.events)
    return ax


def _gantt_row(ax: Axes, trace: Trace, rank: int, end_s: float, y: float) -> None:
    ax.barh(y, trace.makespan_s, BAR, color=IDLE, linewidth=0)
    for event in (entry for entry in trace.events if entry.rank == rank):
        instruction, width = event.instruction, event.duration_s
        if isinstance(instruction, Compute):
            forward = instruction.op is Pass.FORWARD
            colour = FORWARD if forward else BACKWARD
            ax.barh(y, width, BAR, event.start_s, color=colour, edgecolor="white", linewidth=0.4)
            text = str(instruction.microbatch)
            if width > end_s * TEXT_WIDTH * (0.5 + 0.5 * len(text)):
                ink = BLACK if forward else "white"
                middle = event.start_s + width / 2
                ax.text(middle, y, text, ha="center", va="center", fontsize=7, color=ink)
        elif isinstance(instruction, Step):
            ax.barh(y, width, BAR, event.start_s, color=OPTIMIZER, edgecolor="white", linewidth=0.4)
        elif isinstance(instruction, Exchange):  # beside the computation, so a thin line below it
            ax.barh(y + BAR / 2 + 0.05, max(width, end_s / 1000), 0.1, event.start_s, color=SYNC, linewidth=0)


def _gantt_legend(ax: Axes, events: Iterable[Any]) -> None:
    has_sync = any(isinstance(event.instruction, Sync | Reduce) for event in events)
    labelled_colours = [
        (FORWARD, "forward"),
        (BACKWARD, "backward"),
        (OPTIMIZER, "optimizer step"),
        (SYNC, "gradient sync, norm" if has_sync else "norm"),
        (IDLE, "idle"),
    ]
    legend_above(ax, labelled_colours)


def predicted_and_measured(
    predicted: Trace,
    measured: Trace,
    *,
    labels: Sequence[str] | None = None,
    device_clocks: Trace | None = None,
    median_s: float | None = None,
) -> tuple[Axes, Axes]:
    """Draw the predicted step above the measured one, on one time axis, with the step time's error.

    device_clocks: the measured step by the clocks of emulated devices, drawn below under that name. median_s:
    of the steps of a run by the clock of its host, which the error is of; else that of the step drawn.
    """
    panels = [("predicted", predicted), ("measured, wall clock", measured)]
    if device_clocks is not None:
        panels.append(("device clocks", device_clocks))
    rows = len(predicted.device_names)
    figure = Figure(figsize=(9.0, 0.8 + len(panels) * (0.4 + 0.42 * rows)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    end_s = max(trace.makespan_s for _, trace in panels)
    for ax, (name, trace) in zip(axes, panels, strict=True):
        gantt(trace, ax, labels=labels, end_s=end_s)
        ax.axvline(trace.makespan_s, color=INK, linewidth=0.8, linestyle=":")
        ax.set_ylabel(name, fontsize=8)
        if ax is not axes[0]:
            ax.get_legend().remove()
        if ax is not axes[-1]:
            ax.set_xlabel("")
    title(axes[0], _errors_text(predicted.makespan_s, measured.makespan_s, median_s))
    return axes[0], axes[1]


def _errors_text(predicted_s: float, last_s: float, median_s: float | None) -> str:
    """Return what a step was predicted and measured to take, as the tables of a run say it."""
    measured_s = last_s if median_s is None else median_s
    text = f"step: predicted {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}"
    text += f" ({measured_s / predicted_s - 1:+.1%})"
    return text if median_s is None else f"{text}, the median; drawn is the last, {format_seconds(last_s)}"


def stage_labels(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[str]:
    """Return labels for the rows of a gantt: device, speed and layers."""
    return ["\n".join(lines) for lines in device_labels(plan, profile, cluster)]


def losses(metrics: Sequence[Mapping[str, Any]], ax: Axes | None = None, *, label: str | None = None) -> Axes:
    """Draw the loss of each step of metrics.jsonl."""
    ax = ax or new_axes()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    points = [(row["step"], row["loss"]) for row in metrics if row.get("loss") is not None]
    ax.plot(
        [step for step, _ in points],
        [loss for _, loss in points],
        color=BLUE if label is None else None,
        label=label,
        linewidth=1.4,
        marker="." if len(points) < 40 else None,
    )
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.grid(axis="y", color=IDLE, linewidth=0.6)
    strip(ax)
    if label is not None:
        ax.legend(frameon=False, fontsize=8)
    return ax
