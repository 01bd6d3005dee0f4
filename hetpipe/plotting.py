"""Pictures of plans, traces and runs. Every function draws on an Axes, its own if none is given."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cost_model.cluster import Cluster
from cost_model.pricing import Prices
from cost_model.profile import ModelProfile
from hetpipe.instructions import Compute, Norm, Pass, Step, Sync
from hetpipe.report import ESTIMATED, describe_device, describe_layers, is_estimated
from hetpipe.trace import Trace
from partition.plan import Pipeline, Plan

if TYPE_CHECKING:  # the solver loads more than a picture needs
    from partition.solver import Outcome

# Okabe and Ito, "Color Universal Design" (2008): told apart by people with any colour vision.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
STAGE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW)
FORWARD, BACKWARD, OPTIMIZER, SYNC = SKY, BLUE, GREEN, ORANGE
IDLE, INK = "#E6E6E6", "#333333"
MIB, GIB = 2**20, 2**30
ROW, BAR = 1.0, 0.76
TEXT_WIDTH = 0.011
"""Share of the axis that a microbatch number of one digit needs."""


def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write a figure as PNG and SVG beside each other, whatever the suffix of path; gives both paths."""
    paths = (path.with_suffix(".png"), path.with_suffix(".svg"))
    for entry in paths:
        figure.savefig(entry, dpi=160, bbox_inches="tight", facecolor="white")
    return paths


def new_axes(width: float = 9.0, height: float = 3.0) -> Axes:
    """Axes of a new figure that no window knows of (works without a display, leaks nothing)."""
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def gantt(
    trace: Trace, ax: Axes | None = None, *, labels: Sequence[str] | None = None, end_s: float | None = None
) -> Axes:
    """One step, one row per device: forwards light, backwards dark, idle grey with its share at the right.

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
    _rows(ax, list(labels or names))
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
        elif isinstance(instruction, Sync | Norm):  # beside the computation, so a thin line below it
            ax.barh(y + BAR / 2 + 0.05, max(width, end_s / 1000), 0.1, event.start_s, color=SYNC, linewidth=0)


def _rows(ax: Axes, labels: Sequence[str]) -> None:
    ax.set_yticks([row * ROW for row in range(len(labels))], labels, fontsize=8)
    ax.set_ylim((len(labels) - 0.4) * ROW, -0.6 * ROW)
    ax.tick_params(axis="y", length=0)
    _bare(ax)


def _bare(ax: Axes) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _gantt_legend(ax: Axes, events: Iterable[Any]) -> None:
    has_sync = any(isinstance(event.instruction, Sync) for event in events)
    entries = [
        (FORWARD, "forward"),
        (BACKWARD, "backward"),
        (OPTIMIZER, "optimizer step"),
        (SYNC, "gradient sync, norm" if has_sync else "norm"),
        (IDLE, "idle"),
    ]
    _legend_above(ax, entries)


def _legend_above(ax: Axes, entries: Sequence[tuple[str, str]], num_columns: int | None = None) -> None:
    ax.legend(
        handles=[Patch(facecolor=colour, label=label) for colour, label in entries],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=num_columns or len(entries),
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
        handlelength=1.2,
    )


def predicted_and_measured(
    predicted: Trace, measured: Trace, *, labels: Sequence[str] | None = None
) -> tuple[Axes, Axes]:
    """The predicted step above the measured one, on one time axis, with the error of the step time."""
    rows = len(predicted.device_names)
    figure = Figure(figsize=(9.0, 1.6 + 0.84 * rows), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    end_s = max(predicted.makespan_s, measured.makespan_s)
    for ax, name, trace in ((above, "predicted", predicted), (below, "measured", measured)):
        gantt(trace, ax, labels=labels, end_s=end_s)
        ax.axvline(trace.makespan_s, color=INK, linewidth=0.8, linestyle=":")
        ax.set_ylabel(name)
    error = measured.makespan_s / predicted.makespan_s - 1
    above.set_xlabel("")
    below.get_legend().remove()
    figure.suptitle(
        f"predicted {predicted.makespan_s:.3g} s, measured {measured.makespan_s:.3g} s ({error:+.1%})",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    return above, below


def stage_labels(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[str]:
    """Labels for the rows of a gantt: device, speed and layers."""
    labels = []
    for name in plan.device_names:
        device = cluster.device(name)
        layers = describe_layers([profile.layers[layer].name for layer in plan.layers_of(name)])
        labels.append(f"{device.name}  {describe_device(device, profile)}\n{layers}")
    return labels


def memory(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    ax: Axes | None = None,
    *,
    measured_bytes: Mapping[str, float] | None = None,
) -> Axes:
    """Memory of each device, term by term, against its capacity; measured peaks as dots."""
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
    small = max(cluster.device(name).memory_bytes for name in names) < 2 * GIB
    unit = MIB if small else GIB
    for row, name in enumerate(names):
        device, need = cluster.device(name), plan.memory(profile, name)
        ax.barh(row, device.memory_bytes / unit, BAR, color="white", edgecolor=INK, linewidth=0.8)
        usable, reserve = device.usable_bytes / unit, device.reserve_bytes / unit
        ax.barh(row, reserve, BAR, usable, color=IDLE, hatch="///", edgecolor="#AAAAAA", linewidth=0)
        start = 0.0
        for _, field, colour in terms:
            width = getattr(need, field) / unit
            ax.barh(row, width, BAR * 0.8, start, color=colour, linewidth=0)
            start += width
    legend = [(colour, label) for label, _, colour in terms] + [(IDLE, "reserve")]
    if measured_bytes:
        rows = [row for row, name in enumerate(names) if name in measured_bytes]
        peaks = [measured_bytes[names[row]] / unit for row in rows]
        ax.plot(peaks, rows, "o", color=VERMILION, markeredgecolor="white", zorder=3)
        legend.append((VERMILION, "measured peak (dot)"))
    _rows(ax, [f"{name}  {describe_device(cluster.device(name))}" for name in names])
    ax.set_xlim(left=0)
    ax.set_xlabel(f"{'MiB' if small else 'GiB'} (frame: capacity)")
    _legend_above(ax, legend, num_columns=4)
    return ax


def partition_bars(
    plans: Sequence[Plan], profile: ModelProfile, cluster: Cluster, ax: Axes | None = None
) -> Axes:
    """Where the cuts are: each layer as wide as its time on its device, coloured by stage.

    One row per pipeline, plans in the order given (an even split above for contrast); times are those of one
    sample, forward and backward.
    """
    rows = [(plan, entry) for plan in plans for entry in plan.pipelines]
    ax = ax or new_axes(height=1.0 + 0.62 * len(rows))
    prices = Prices(profile)
    widest = max(_pipeline_bar(ax, row, *rows[row], prices, cluster) for row in range(len(rows)))
    counts: dict[str, int] = {}
    labels = []
    for plan, _ in rows:
        number = counts[plan.strategy] = counts.get(plan.strategy, -1) + 1
        labels.append(f"{plan.strategy}, {number}" if len(plan.pipelines) > 1 else plan.strategy)
    _rows(ax, labels)
    ax.set_xlim(0, widest)
    ax.set_xlabel("seconds for one sample, forward and backward, on the stage's device")
    return ax


def _pipeline_bar(
    ax: Axes, row: int, plan: Plan, pipeline: Pipeline, prices: Prices, cluster: Cluster
) -> float:
    """Draw one pipeline; gives where it ends."""
    start, samples = 0.0, pipeline.microbatch_size
    for index, stage in enumerate(pipeline.stages):
        device, begin = cluster.device(stage.device), start
        colour = STAGE_COLOURS[index % len(STAGE_COLOURS)]
        for layer in range(*stage.layers):
            seconds = prices.forward_s(device, layer, layer + 1, samples)
            seconds += prices.backward_s(device, layer, layer + 1, samples, recompute=stage.recompute)
            width = seconds / samples
            ax.barh(row, width, BAR, start, color=colour, edgecolor="white", linewidth=0.6)
            start += width
        ink = BLACK if sum(to_rgb(colour)) > 1.3 else "white"
        name = stage.device
        mark = f" ({ESTIMATED})" if is_estimated(prices.profile, device.kind) else ""
        text = f"{name}{mark}\n{stage.num_layers} layer{'s' * (stage.num_layers > 1)}"
        ax.annotate(
            text, ((begin + start) / 2, row), ha="center", va="center", fontsize=7, color=ink, clip_on=True
        )
    return start


def speedups(
    outcomes: "Sequence[Outcome]", measured: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """Speed of each strategy as a multiple of the best of the others than "auto".

    measured: step seconds by strategy, for those that were run; their bars are dark, with a line where the
    prediction was, and the best of the others is sought among them.
    """
    ax = ax or new_axes(height=1.3 + 0.34 * len(outcomes))
    predicted = {
        outcome.strategy: outcome.plan.predicted.step_s
        for outcome in outcomes
        if outcome.plan is not None and outcome.plan.predicted is not None
    }
    measured = {name: step_s for name, step_s in (measured or {}).items() if name in predicted}
    candidates = measured or predicted
    others = {name: step_s for name, step_s in candidates.items() if name != "auto"} or candidates
    if not others:
        raise ValueError("no strategy fits; there is no speed to draw")
    best = min(others, key=lambda name: others[name])
    for row, outcome in enumerate(outcomes):
        name = outcome.strategy
        if name not in predicted:
            ax.text(0.01, row, "does not fit", va="center", fontsize=8, color=INK)
            continue
        expected = others[best] / predicted[name]
        value = others[best] / measured[name] if name in measured else expected
        ax.barh(row, value, BAR, color=BLUE if name in measured else SKY, linewidth=0)
        label = f" {value:.2f}"
        if name in measured:
            ax.plot([expected, expected], [row - BAR / 2, row + BAR / 2], color=BLACK, linewidth=1.5)
            label += f" (predicted {expected:.2f})"
        ax.text(max(value, expected), row, label, va="center", fontsize=8, color=INK)
    _rows(ax, [outcome.strategy for outcome in outcomes])
    ax.axvline(1, color=INK, linewidth=0.8, linestyle=":", zorder=0)
    ax.set_xlim(right=1.25 * ax.get_xlim()[1])
    ax.set_xlabel(f"speed ({best} = 1)")
    _legend_above(ax, [(BLUE, "measured"), (SKY, "predicted")] if measured else [(SKY, "predicted")])
    return ax


def losses(metrics: Sequence[Mapping[str, Any]], ax: Axes | None = None, *, label: str | None = None) -> Axes:
    """The loss of each step of metrics.jsonl."""
    ax = ax or new_axes()
    points = [(entry["step"], entry["loss"]) for entry in metrics if entry.get("loss") is not None]
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
    _bare(ax)
    if label is not None:
        ax.legend(frameon=False, fontsize=8)
    return ax
