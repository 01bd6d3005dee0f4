"""Pictures of a step: predicted, measured, beside an even split."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from cost_model.units import format_seconds
from hetpipe.program.instructions import Compute, Exchange, Pass, Step
from hetpipe.program.trace import Event, Trace
from hetpipe.reporting.colours import BACKWARD, BLACK, FORWARD, IDLE, INK, OPTIMIZER, SYNC
from hetpipe.reporting.idle_time import exchange_words
from hetpipe.reporting.plots.picture import Picture
from hetpipe.reporting.plots.style import (
    BAR,
    LONGEST_LABEL,
    ROW,
    TEXT_WIDTH,
    figure_of,
    label_rows,
    legend_above,
    legend_below,
    new_axes,
    title,
)
from hetpipe.reporting.tables import describe_layers, device_labels
from partition.plan import Plan

Labels = Sequence[str] | Mapping[int, str]
"""Of the rows of a step: of all ranks, or by rank of those that are drawn."""
EDGE, EDGED = 0.4, 0.006
"""Points of the edge of a bar; the share of the axis from which a bar has one."""


def gantt(
    trace: Trace,
    ax: Axes | None = None,
    *,
    labels: Labels | None = None,
    end_s: float | None = None,
    legend: bool = True,
) -> Axes:
    """Draw a step, a row per device: forwards light, backwards dark, idle grey with its share at the right.

    labels: of the rows, the device names if left out; by rank, those ranks alone are drawn. end_s: end of the
    time axis.
    """
    rows = _rows(trace, labels)
    ax = ax or new_axes(height=1.3 + 0.42 * len(rows))
    end_s = end_s or trace.makespan_s
    right_of_axes = ax.get_yaxis_transform()
    events: dict[int, list[Event]] = {rank: [] for rank in rows}
    for event in trace.events:
        if event.rank in events:
            events[event.rank].append(event)
    for row, rank in enumerate(rows):
        ax.barh(row * ROW, trace.makespan_s, BAR, color=IDLE, linewidth=0)
        _gantt_row(ax, events[rank], end_s, y=row * ROW)
        idle = f"{1 - trace.busy_s(rank) / trace.makespan_s:.0%} idle"
        ax.text(1.01, row * ROW, idle, va="center", fontsize=8, color=INK, transform=right_of_axes)
    label_rows(ax, list(rows.values()))
    ax.set_xlim(0, end_s)
    ax.set_xlabel("seconds")
    if legend:
        legend_above(ax, _entries(trace.events))
    return ax


def _rows(trace: Trace, labels: Labels | None) -> dict[int, str]:
    """Return the labels of the rows that are drawn, by rank, from the top down."""
    return dict(labels) if isinstance(labels, Mapping) else dict(enumerate(labels or trace.device_names))


def _gantt_row(ax: Axes, events: Iterable[Event], end_s: float, y: float) -> None:
    for event in events:
        instruction, width = event.instruction, event.duration_s
        edge = EDGE if width > EDGED * end_s else 0.0  # white on both sides of a narrow bar looks idle
        if isinstance(instruction, Compute):
            forward = instruction.op is Pass.FORWARD
            colour = FORWARD if forward else BACKWARD
            ax.barh(y, width, BAR, event.start_s, color=colour, edgecolor="white", linewidth=edge)
            text = str(instruction.microbatch)
            if width > end_s * TEXT_WIDTH * (0.5 + 0.5 * len(text)):
                ink = BLACK if forward else "white"
                middle = event.start_s + width / 2
                ax.text(middle, y, text, ha="center", va="center", fontsize=7, color=ink)
        elif isinstance(instruction, Step):
            ax.barh(y, width, BAR, event.start_s, color=OPTIMIZER, edgecolor="white", linewidth=edge)
        elif isinstance(instruction, Exchange):  # beside the computation, so a thin line below it
            ax.barh(y + BAR / 2 + 0.05, max(width, end_s / 1000), 0.1, event.start_s, color=SYNC, linewidth=0)


def _entries(events: Iterable[Event]) -> list[tuple[str, str]]:
    """Return what a legend says of the colours of a step."""
    return [
        (FORWARD, "forward"),
        (BACKWARD, "backward"),
        (OPTIMIZER, "optimizer step"),
        (SYNC, exchange_words(events)),
        (IDLE, "idle"),
    ]


def predicted_and_measured(
    predicted: Trace,
    measured: Trace,
    *,
    labels: Labels | None = None,
    device_clocks: Trace | None = None,
    median_s: float | None = None,
) -> tuple[Axes, Axes]:
    """Draw the predicted step above the measured one, on one time axis, with the step time's error.

    device_clocks: the measured step by the clocks of emulated devices, drawn below under that name. median_s:
    of the steps of a run by the clock of its host, which the error is of; else that of the step drawn.
    """
    panels = {"predicted": predicted, "measured, wall clock": measured}
    if device_clocks is not None:
        panels["device clocks"] = device_clocks
    axes = _above_each_other(list(panels.values()), [labels] * len(panels))
    for ax, name in zip(axes, panels, strict=True):
        ax.set_ylabel(name, fontsize=8)
    legend_above(axes[0], _entries(measured.events))
    title(axes[0], _errors_text(predicted.makespan_s, measured.makespan_s, median_s))
    return axes[0], axes[1]


def beside_even(
    even: Trace,
    trace: Trace,
    *,
    even_labels: Labels | None = None,
    labels: Labels | None = None,
) -> tuple[Axes, Axes]:
    """Draw the step of an even split above that of a plan, on one time axis, with the seconds of both."""
    above, below = _above_each_other([even, trace], [even_labels, labels])
    faster = f"{even.makespan_s / trace.makespan_s:.2f} times as fast"
    for ax, text in (
        (above, f"as many layers on each device: predicted {format_seconds(even.makespan_s)} a step"),
        (below, f"this plan: predicted {format_seconds(trace.makespan_s)} a step, {faster}"),
    ):
        ax.set_title(text, fontsize=10, loc="left", fontweight="bold")
    legend_below(figure_of(above), _entries([*even.events, *trace.events]))
    return above, below


def _above_each_other(traces: Sequence[Trace], labels: Sequence[Labels | None]) -> list[Axes]:
    """Draw steps on one time axis, each with a line where it ends."""
    rows = [len(_rows(trace, texts)) for trace, texts in zip(traces, labels, strict=True)]
    figure = Picture(figsize=(9.0, 0.8 + 0.4 * len(rows) + 0.42 * sum(rows)), layout="constrained")
    axes = list(figure.subplots(len(traces), 1, sharex=True, height_ratios=rows))
    end_s = max(trace.makespan_s for trace in traces)
    for ax, trace, texts in zip(axes, traces, labels, strict=True):
        gantt(trace, ax, labels=texts, end_s=end_s, legend=False)
        ax.axvline(trace.makespan_s, color=INK, linewidth=0.8, linestyle=":")
        if ax is not axes[-1]:
            ax.set_xlabel("")
    return axes


def _errors_text(predicted_s: float, last_s: float, median_s: float | None) -> str:
    """Return what a step was predicted and measured to take, as the tables of a run say it."""
    measured_s = last_s if median_s is None else median_s
    text = f"step: predicted {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}"
    text += f" ({measured_s / predicted_s - 1:+.1%})"
    return text if median_s is None else f"{text}, the median; drawn is the last, {format_seconds(last_s)}"


def stage_labels(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[int, str]:
    """Return labels for the rows of a gantt, by rank: device, speed and layers, as `device_labels` says them.

    Layers with too many names for a line are the first and the last; those with too long ones go by number.
    """
    labels = {}
    for rank, (device, layers) in device_labels(plan, profile, cluster).items():
        if len(layers) > LONGEST_LABEL:
            layers = _in_a_line(plan.layers_of(plan.device_names[rank]), profile)
        labels[rank] = f"{device}\n{layers}"
    return labels


def _in_a_line(layers: Sequence[int], profile: ModelProfile) -> str:
    names = [profile.layers[layer].name for layer in layers]
    ends = f"{names[0]} to {names[-1]}, {len(names)} layers"
    numbers = describe_layers([f"layer {layer}" for layer in layers])
    return ends if len(ends) <= LONGEST_LABEL else f"{numbers} of {profile.num_layers}"
