"""Pictures of plans: cuts, memory, speed, and all of it on one page."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cost_model.cluster import Cluster
from cost_model.layer_costs import Prices
from cost_model.profile import ModelProfile
from cost_model.units import format_bytes
from hetpipe.program.trace import Trace
from hetpipe.reporting.colours import (
    BLACK,
    BLUE,
    FROZEN,
    GREEN,
    IDLE,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
)
from hetpipe.reporting.memory_tables import memory_uses, mostly_frozen
from hetpipe.reporting.plots.style import (
    BAR,
    GIB,
    MIB,
    STAGE_COLOURS,
    TEXT_WIDTH,
    dot_entry,
    label_rows,
    legend_above,
    line_entry,
    new_axes,
)
from hetpipe.reporting.plots.timeline import gantt, stage_labels
from hetpipe.reporting.tables import ESTIMATED, describe_device, is_estimated
from partition.estimates.plan_memory import memory_on
from partition.plan import Pipeline, Plan

SMALL_USE = 0.25
"""Of the capacity: where less is used, only a part of it is drawn."""

if TYPE_CHECKING:  # the solver loads more than a picture needs
    from partition.solver import Outcome


def memory(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    ax: Axes | None = None,
    *,
    measured_bytes: Mapping[str, float] | None = None,
) -> Axes:
    """Draw the memory of each device, term by term, against its capacity; measured peaks as dots.

    At the right stands what is needed of what a plan may fill. Where that is a small part of the capacity on
    all devices, the picture ends soon after it, and says so.
    """
    names = plan.device_names
    ax = ax or new_axes(height=1.3 + 0.45 * len(names))
    terms = (
        ("parameters", "parameter_bytes", BLUE),
        ("gradients", "gradient_bytes", SKY),
        ("optimizer", "optimizer_bytes", GREEN),
        ("activations in flight", "saved_bytes", ORANGE),
        ("boundary buffers", "boundary_bytes", YELLOW),
        ("workspace", "workspace_bytes", PURPLE),
    )
    frozen = memory_uses(plan, profile, cluster) if mostly_frozen(profile) else {}
    needs = {name: memory_on(plan, profile, cluster.device(name)) for name in names}
    peaks_bytes = {name: bytes_ for name, bytes_ in (measured_bytes or {}).items() if name in names}
    shown_bytes, is_cut = _memory_axis(
        max(*(need.total_bytes for need in needs.values()), *peaks_bytes.values(), 0.0),
        max(cluster.device(name).memory_bytes for name in names),
    )
    small = shown_bytes < 2 * GIB
    has_driver = any(cluster.device(name).driver_bytes for name in names)
    unit = MIB if small else GIB
    for row, name in enumerate(names):
        device = cluster.device(name)
        need = needs[name]
        used = f"{format_bytes(need.total_bytes)} of {format_bytes(device.usable_bytes)}"
        ax.text(1.01, row, used, va="center", fontsize=8, color=INK, transform=ax.get_yaxis_transform())
        ax.barh(row, device.memory_bytes / unit, BAR, color="white", edgecolor=INK, linewidth=0.8)
        usable, reserve = device.usable_bytes / unit, device.reserve_bytes / unit
        driver = device.driver_bytes / unit
        ax.barh(row, driver, BAR, usable, color=IDLE, hatch="...", edgecolor="#AAAAAA", linewidth=0)
        ax.barh(row, reserve, BAR, usable + driver, color=IDLE, hatch="///", edgecolor="#AAAAAA", linewidth=0)
        start = 0.0
        for _, field, colour in terms:
            width = getattr(need, field) / unit
            ax.barh(row, width, BAR * 0.8, start, color=colour, linewidth=0)
            start += width
        if frozen:  # the first part of the parameters
            ax.barh(row, frozen[name].frozen_bytes / unit, BAR * 0.8, color=FROZEN, linewidth=0)
    legend = [(colour, label) for label, _, colour in terms] + [
        (IDLE, "driver (dots), reserve" if has_driver else "reserve")
    ]
    if frozen:
        legend[:1] = [(FROZEN, "frozen parameters"), (BLUE, "trained parameters")]
    dots = []
    if peaks_bytes:
        peaks = [peak / unit for peak in peaks_bytes.values()]
        rows = [names.index(name) for name in peaks_bytes]
        ax.plot(peaks, rows, "o", color=VERMILION, markeredgecolor="white", zorder=3)
        dots = [dot_entry(VERMILION, "measured peak")]
    label_rows(ax, [f"{name}  {describe_device(cluster.device(name))}" for name in names])
    ax.set_xlim(0, shown_bytes / unit if is_cut else None)
    end = "devices have far more than is drawn" if is_cut else "frame: capacity"
    ax.set_xlabel(f"{'MiB' if small else 'GiB'} ({end})")
    legend_above(ax, legend, num_columns=4, more=dots)
    return ax


def _memory_axis(used_bytes: float, capacity_bytes: float) -> tuple[float, bool]:
    """Return how many bytes are drawn, and whether that is less than a device has."""
    if used_bytes > SMALL_USE * capacity_bytes or not used_bytes:
        return capacity_bytes, False
    return 1.15 * used_bytes, True


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
    contrast); times are those of one sample, forward and backward. Colours stand for devices, or for kinds
    where these are too many; narrow stages go without a name. beside: devices of another such picture, in
    which those of this one are to have the same colours; end_s: end of the time axis.
    """
    rows = [(plan, pipeline) for plan in plans for pipeline in plan.pipelines]
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
    seconds = [_layers_s(pipeline, prices, cluster) for _, pipeline in rows]
    widest = end_s or max(sum(map(sum, stages)) for stages in seconds)
    for row, (_, pipeline) in enumerate(rows):
        _pipeline_bar(ax, row, pipeline, seconds[row], texts, colours, widest)
    counts: dict[str, int] = {}
    labels = []
    for plan, pipeline in rows:
        number = counts[plan.strategy] = counts.get(plan.strategy, -1) + 1
        shares = f", pipeline {number}\n{pipeline.num_samples} of {plan.global_batch_size} samples"
        labels.append(plan.strategy + (shares if len(plan.pipelines) > 1 else ""))
    label_rows(ax, labels)
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
    if bound_s := figures[ours].bound_s if ours in figures else None:
        reach = max(reach, others[best] / bound_s)
        ax.axvline(others[best] / bound_s, color=VERMILION, linewidth=1.5, zorder=0)
        lines.append(line_entry(VERMILION, f"no plan is faster: bound of {ours}"))
    ax.set_xlim(0, 1.2 * reach)
    ax.set_xlabel(f"speed; 1 is the best of the other strategies, {best}")
    legend_above(ax, legend, more=lines)
    return ax


def _misfit(outcome: "Outcome") -> str:
    if not outcome.missing_bytes or outcome.device is None:
        return "does not fit"
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
    rows = sum(len(plan.pipelines) for plan in bars), len(outcomes), *2 * [len(plan.device_names)]
    heights = [1.2 + 0.45 * count for count in rows]
    figure = Figure(figsize=(9.0, sum(heights)), layout=ConstrainedLayoutEngine(hspace=0.06))
    cuts, speed, filled, step = figure.subplots(4, 1, height_ratios=heights)
    partition_bars(bars, profile, cluster, cuts)
    speedups(outcomes, ax=speed)
    memory(plan, profile, cluster, filled)
    gantt(trace, step, labels=stage_labels(plan, profile, cluster))
    return cuts, speed, filled, step
