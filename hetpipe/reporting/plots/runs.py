"""Pictures of runs beside each other: losses, and steps as predicted and as measured."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from cost_model.units import format_seconds
from hetpipe.reporting.colours import BLUE, IDLE, INK, VERMILION
from hetpipe.reporting.plots.style import STAGE_COLOURS, dot_entry, legend_above, new_axes, strip
from hetpipe.runs.run_report import RunReport

FEW_STEPS = 40
WINDOWS = 20
"""Into so many parts the steps of a curve are cut; a mean is over a part to each side."""
CLOSE = 0.1
WIDE = 3.0
"""Steps that differ by more than this ratio are drawn on logarithmic axes."""
MEAN = "mean over neighbouring steps"
MARGIN = 1.15
MOST_NAMES = 12


def losses(metrics: Sequence[Mapping[str, Any]], ax: Axes | None = None, *, label: str | None = None) -> Axes:
    """Draw the loss of each step of metrics.jsonl, and that of held-out texts as dots.

    Many steps are faint behind means over their neighbours. label: of one run among several on the axes.
    """
    ax = ax or new_axes()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    colour = BLUE if label is None else STAGE_COLOURS[_num_runs(ax) % len(STAGE_COLOURS)]
    points = [(row["step"], row["loss"]) for row in metrics if row.get("loss") is not None]
    steps, values = [step for step, _ in points], [loss for _, loss in points]
    if few := len(points) < FEW_STEPS:
        ax.plot(steps, values, color=colour, label=label or "_", linewidth=1.4, marker=".")
    else:
        ax.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35, label="_" if label else "each step")
        ax.plot(steps, smoothed(values), color=colour, linewidth=1.6, label=label or MEAN)
    held_out = [(row["step"], row["eval_loss"]) for row in metrics if row.get("eval_loss") is not None]
    if held_out:
        text = f"{label}, held out" if label else "held out"
        dots = ax.plot(*zip(*held_out, strict=True), "o", label=text, markerfacecolor="white", markersize=5)
        dots[0].set_color(colour if label else VERMILION)
    ax.set_xlabel("step" if few or label is None else f"step; strong lines: {MEAN}")
    ax.set_ylabel("loss")
    ax.grid(axis="y", color=IDLE, linewidth=0.6)
    strip(ax)
    if label or held_out or not few:
        ax.legend(frameon=False, fontsize=8)
    return ax


def _num_runs(ax: Axes) -> int:
    return len({line.get_color() for line in ax.lines})


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours, as many before as behind, so that nothing lags.

    There are fewer neighbours at the ends; what is not finite is left out.

    >>> smoothed([1.0, 2.0, 6.0, 4.0])
    [1.0, 3.0, 4.0, 4.0]
    """
    most = max(1, len(values) // WINDOWS)
    means = []
    for place, value in enumerate(values):
        reach = min(most, place, len(values) - 1 - place)
        around = [near for near in values[place - reach : place + reach + 1] if isfinite(near)]
        means.append(sum(around) / len(around) if around else value)
    return means


def step_seconds(reports: Mapping[str, RunReport], ax: Axes | None = None) -> Axes:
    """Draw the seconds of every step of runs, by name, as dots, and what each was predicted as a line.

    The first step of a run, which its figures leave out, is hollow.
    """
    ax = ax or new_axes(height=3.4)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    entries = []
    for place, (name, report) in enumerate(reports.items()):
        colour, seconds = STAGE_COLOURS[place % len(STAGE_COLOURS)], report.step_s_all
        ax.axhline(report.predicted_step_s, color=colour, linewidth=1.0, zorder=1)
        ax.plot([1], seconds[:1], "o", color=colour, markerfacecolor="white")
        ax.plot(range(2, len(seconds) + 1), seconds[1:], "o", color=colour)
        entries.append(dot_entry(colour, f"{name}, predicted {format_seconds(report.predicted_step_s)}"))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("step; lines: predicted, hollow: the first, which is not counted")
    ax.set_ylabel("seconds, by the wall clock")
    strip(ax)
    legend_above(ax, [], num_columns=min(3, len(entries)), more=entries)
    return ax


def predictions(reports: Mapping[str, RunReport], ax: Axes | None = None) -> Axes:
    """Draw the measured step of each run, by name, against the predicted one; on the line both are equal.

    Runs whose host was overloaded are hollow: theirs is no measurement of emulated devices. Names are left
    out where there are many.
    """
    ax = ax or new_axes(width=7.0, height=5.2)
    points = {name: (report.predicted_step_s, report.measured_step_s) for name, report in reports.items()}
    ends = [min(map(min, points.values())), max(map(max, points.values()))]
    low, high = ends[0] / MARGIN, ends[1] * MARGIN
    if ends[0] * WIDE < ends[1]:
        ax.set_xscale("log", subs=[])
        ax.set_yscale("log", subs=[])
    ax.fill_between(
        [low, high], [low * (1 - CLOSE), high * (1 - CLOSE)], [low * (1 + CLOSE), high * (1 + CLOSE)],
        color=IDLE, linewidth=0, zorder=0,
    )  # fmt: skip
    ax.plot([low, high], [low, high], color=INK, linewidth=0.8, zorder=1)
    for name, point in points.items():
        report = reports[name]
        ax.plot(*point, "o", color=BLUE, markerfacecolor="white" if report.host_overloaded else BLUE)
    for axis, scale in ((ax.xaxis, ax.set_xlim), (ax.yaxis, ax.set_ylim)):
        scale(low, high)
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
        if ax.get_xscale() == "log":
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    if len(points) <= MOST_NAMES:
        _name_runs(ax, {f"{name}  {reports[name].step_error:+.1%}": point for name, point in points.items()})
    ax.set_xlabel("predicted step")
    ax.set_ylabel("measured step, median by the wall clock")
    strip(ax)
    dots = [dot_entry(BLUE, "run")]
    if any(report.host_overloaded for report in reports.values()):
        dots.append(dot_entry(BLUE, "run on an overloaded host", face="white"))
    legend_above(ax, [(IDLE, f"within {CLOSE:.0%} of the prediction")], more=dots)
    return ax


def _name_runs(ax: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write a name beside each point, on the side where there is more room, and none over another."""
    to_axes = ax.transData + ax.transAxes.inverted()
    places = {text: to_axes.transform(point) for text, point in points.items()}
    for is_right in (False, True):
        side = [text for text in places if (places[text][0] > 0.5) == is_right]
        heights = apart([float(places[text][1]) for text in side])
        for text, height in zip(side, heights, strict=True):
            x, y = places[text]
            moved = {"arrowstyle": "-", "color": INK, "linewidth": 0.5} if abs(height - y) > 0.001 else None
            ax.annotate(
                text, points[text], (x - 0.02 if is_right else x + 0.02, height), textcoords="axes fraction",
                ha="right" if is_right else "left", va="center", fontsize=7, color=INK, arrowprops=moved,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=1.5,
            )  # fmt: skip


def apart(heights: Sequence[float], gap: float = 0.035) -> list[float]:
    """Return heights in [0, 1] so far apart that labels do not overlap, in the same order from below.

    >>> [round(height, 3) for height in apart([0.9, 0.5, 0.51])]
    [0.9, 0.5, 0.535]
    """
    found, least = dict.fromkeys(range(len(heights)), 0.0), 0.0
    for place in sorted(found, key=heights.__getitem__):
        found[place] = max(heights[place], least)
        least = found[place] + gap
    most = 1.0
    for place in sorted(found, key=heights.__getitem__, reverse=True):
        found[place] = min(found[place], most)
        most = found[place] - gap
    return list(found.values())
