"""Pictures of plans: cuts, memory, speed, and all of it on one page."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cost_model.cluster import Cluster
from cost_model.layer_costs import Prices
from cost_model.profile import ModelProfile
from cost_model.units import format_bytes
from hetpipe.program.trace import Trace
from hetpipe.reporting.colours import BLACK, BLUE, INK, SKY, VERMILION
from hetpipe.reporting.comparison_tables import least_bound
from hetpipe.reporting.many_pipelines import alike, shown_together
from hetpipe.reporting.plots.device_memory import memory, num_rows
from hetpipe.reporting.plots.picture import Picture
from hetpipe.reporting.plots.style import (
    BAR,
    STAGE_COLOURS,
    TEXT_WIDTH,
    label_rows,
    legend_above,
    line_entry,
    new_axes,
    shortened,
)
from hetpipe.reporting.plots.timeline import gantt, stage_labels
from hetpipe.reporting.tables import ESTIMATED, is_estimated
from partition.plan import Pipeline, Plan

if TYPE_CHECKING:  # the solver loads more than a picture needs
    from partition.solver import Outcome

MOST_REASON = 100
"""Characters of why there is no plan, in the place of a bar."""


def partition_bars(
    plans: Sequence[Plan],
    profile: ModelProfile,
    cluster: Cluster,
    ax: Axes | None = None,
    *,
    beside: Iterable[str] = (),
    end_s: float | None = None,
) -> Axes:
    """Draw where the cuts are: each layer as wide as its time, coloured by device or kind.

    One row per pipeline, with its share of the samples, plans in the order given (an even split above for
    contrast); of many pipelines one row for all alike. Times are those of one sample, forward and backward.
    Colours stand for devices, or for kinds where these are too many; narrow stages go without a name. beside:
    devices of another such picture, in which those of this one are to have the same colours; end_s: end of
    the time axis.
    """
    groups = [(plan, numbers) for plan in plans for numbers in shown_together(plan, cluster)]
    rows = [plan.pipelines[numbers[0]] for plan, numbers in groups]
    ax = ax or new_axes(height=1.0 + 0.62 * len(rows))
    prices = Prices(profile)
    names = sorted({name for plan in plans for name in plan.device_names})
    kinds = {name: cluster.device(name).kind for name in names}
    coloured = sorted({*names, *beside})
    keys = {name: name for name in names} if len(coloured) <= len(STAGE_COLOURS) else kinds
    shown = coloured if len(coloured) <= len(STAGE_COLOURS) else list(dict.fromkeys(keys.values()))
    texts = {
        name: f"{name} ({ESTIMATED})" if is_estimated(profile, kind) else name for name, kind in kinds.items()
    }
    colours = {name: STAGE_COLOURS[shown.index(key) % len(STAGE_COLOURS)] for name, key in keys.items()}
    seconds = [_layers_s(pipeline, prices, cluster) for pipeline in rows]
    widest = end_s or max(sum(map(sum, stages)) for stages in seconds) or 1.0
    for row, pipeline in enumerate(rows):
        _pipeline_bar(ax, row, pipeline, seconds[row], texts, colours, widest)
    label_rows(ax, [_pipeline_label(plan, numbers) for plan, numbers in groups])
    ax.set_xlim(0, widest)
    ax.set_xlabel("seconds for one sample, forward and backward, on the stage's device")
    entries = {key: (colours[name], key) for name, key in keys.items()}
    legend_above(ax, list(entries.values()), min(7, len(entries)))
    return ax


def longest_s(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Return the seconds of the longest bar that `partition_bars` draws of a plan."""
    prices = Prices(profile)
    return max(sum(map(sum, _layers_s(pipeline, prices, cluster))) for pipeline in plan.pipelines)


def _layers_s(pipeline: Pipeline, prices: Prices, cluster: Cluster) -> list[list[float]]:
    """Return the seconds of each layer of each stage, for one sample."""
    samples = pipeline.microbatch_size
    return [
        [
            (
                prices.forward_s(device, layer, layer + 1, samples)
                + prices.backward_s(device, layer, layer + 1, samples, recompute=stage.recompute)
            )
            / samples
            for layer in range(*stage.layers)
        ]
        for stage in pipeline.stages
        for device in [cluster.device(stage.device)]
    ]


def _pipeline_label(plan: Plan, numbers: Sequence[int]) -> str:
    """Return strategy, number and samples of a pipeline, and how many more its row stands for."""
    if len(plan.pipelines) == 1:
        return plan.strategy
    shares = f"{plan.pipelines[numbers[0]].num_samples} of {plan.global_batch_size} samples"
    return f"{plan.strategy}, pipeline {numbers[0]}\n{shares}{alike(len(numbers) - 1)}"


def _pipeline_bar(
    ax: Axes,
    row: int,
    pipeline: Pipeline,
    seconds: Sequence[Sequence[float]],
    names: Mapping[str, str],
    colours: Mapping[str, str],
    widest: float,
) -> None:
    start = 0.0
    for stage, widths in zip(pipeline.stages, seconds, strict=True):
        colour, begin = colours[stage.device], start
        for width in widths:
            ax.barh(row, width, BAR, start, color=colour, edgecolor="white", linewidth=0.6)
            start += width
        ink = BLACK if sum(to_rgb(colour)) > 1.3 else "white"
        share, count = (start - begin) / widest, str(stage.num_layers)
        layers = f"\n{count} layer{'s' * (stage.num_layers > 1)}"
        named, beside = stage.device + layers, f"{stage.device}\n{count}"
        tries = (names[stage.device] + layers, named, beside, stage.device, count)
        text = next((label for label in tries if share > TEXT_WIDTH * _width(label)), None)
        if text is not None:
            middle, behind = (begin + start) / 2, {"facecolor": colour, "edgecolor": "none", "pad": 0.6}
            ax.text(middle, row, text, ha="center", va="center", fontsize=7, color=ink, bbox=behind)


def _width(text: str) -> int:
    return max(map(len, text.split("\n")))


def speedups(
    outcomes: "Sequence[Outcome]", measured: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """Draw each strategy's speed over the best of all but the last, and the bound as a line.

    measured: step seconds by strategy, for those that were run; their bars are dark, with a line where the
    prediction was.
    """
    ax = ax or new_axes(height=1.3 + 0.34 * len(outcomes))
    figures = {
        outcome.strategy: outcome.plan.predicted
        for outcome in outcomes
        if outcome.plan is not None and outcome.plan.predicted is not None
    }
    predicted = {name: found.step_s for name, found in figures.items()}
    measured = {name: step_s for name, step_s in (measured or {}).items() if name in predicted}
    candidates = predicted | measured
    ours = outcomes[-1].strategy
    others = {name: step_s for name, step_s in candidates.items() if name != ours} or candidates
    if not others:
        raise ValueError("no strategy fits; there is no speed to draw")
    best = min(others, key=lambda name: others[name])
    for row, outcome in enumerate(outcomes):
        name = outcome.strategy
        if name not in predicted:
            ax.text(0.01, row, _misfit(outcome), va="center", fontsize=8, color=INK, zorder=5)
            continue
        expected = others[best] / predicted[name]
        value = others[best] / measured[name] if name in measured else expected
        ax.barh(row, value, BAR, color=BLUE if name in measured else SKY, linewidth=0)
        label = f"{value:.2f}"
        if name in measured:
            ends = [row - BAR / 2, row + BAR / 2]
            ax.plot([expected, expected], ends, color=BLACK, linewidth=1.5, zorder=4)
            label += f" (predicted {expected:.2f})"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # no line goes through a number
        ax.annotate(
            label, (max(value, expected), row), (4, 0), textcoords="offset points",
            va="center", fontsize=8, color=INK, bbox=behind,
        )  # fmt: skip
    label_rows(ax, [outcome.strategy for outcome in outcomes])
    ax.axvline(1, color=INK, linewidth=0.8, linestyle=":", zorder=0)
    legend = [(BLUE, "measured")] if measured else []
    legend += [(SKY, "predicted")] if predicted.keys() - measured.keys() else []
    lines = [line_entry(BLACK, "predicted of what was measured")] if measured else []
    reach = ax.get_xlim()[1]
    if bound := least_bound(outcomes):
        bounded, bound_s = bound
        reach = max(reach, others[best] / bound_s)
        ax.axvline(others[best] / bound_s, color=VERMILION, linewidth=1.5, zorder=0)
        lines.append(line_entry(VERMILION, f"no plan is faster: bound of {bounded}"))
    ax.set_xlim(0, 1.2 * reach)
    ax.set_xlabel(f"speed; 1 is the best of the other strategies, {best}")
    legend_above(ax, legend, more=lines)
    return ax


def _misfit(outcome: "Outcome") -> str:
    if not outcome.missing_bytes or outcome.device is None:
        return shortened((outcome.reason or "no plan").partition(";")[0], MOST_REASON)
    return f"does not fit: {format_bytes(outcome.missing_bytes)} too little on {outcome.device}"


def plan_title(plan: Plan, cluster: Cluster, day: date) -> str:
    """Return what a picture of a plan is of: model, batch, strategy, cluster, and the day it is from."""
    used, there = len(plan.device_names), len(cluster.devices)
    devices = f"{there}" if used == there else f"{used} of {there}"
    on = f"{plan.strategy}, on {devices} device{'s' * (there > 1)} of {cluster.name!r}"
    return subject(plan.model, plan.global_batch_size, on, day)


def subject(model: str, global_batch_size: int, on: str, day: date) -> str:
    """Return the title that pictures share; on: what they are of, such as a plan and a cluster."""
    return f"{model}, {global_batch_size} samples a step, {on}, {day}"


def overview(
    plan: Plan,
    outcomes: "Sequence[Outcome]",
    trace: Trace,
    profile: ModelProfile,
    cluster: Cluster,
) -> tuple[Axes, ...]:
    """Draw a plan on one page: cuts beside the even split, speed, memory, the predicted step.

    outcomes: of the strategies to compare with, the plan's own last; an even split among them is drawn.
    """
    even = [
        outcome.plan for outcome in outcomes if outcome.strategy == "gpipe-even" and outcome.plan is not None
    ]
    bars = [*even, plan]
    labels = stage_labels(plan, profile, cluster)
    num_bars = sum(len(shown_together(each, cluster)) for each in bars)
    rows = num_bars, len(outcomes), num_rows(plan, profile, cluster), len(labels)
    heights = [1.2 + 0.45 * count for count in rows]
    figure = Picture(figsize=(9.0, sum(heights)), layout=ConstrainedLayoutEngine(hspace=0.06))
    cuts, speed, filled, step = figure.subplots(4, 1, height_ratios=heights)
    partition_bars(bars, profile, cluster, cuts)
    speedups(outcomes, ax=speed)
    memory(plan, profile, cluster, filled)
    gantt(trace, step, labels=labels)
    return cuts, speed, filled, step
