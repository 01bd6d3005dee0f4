"""The picture of how full strategies make each device, alone and below that of their speeds."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from cost_model.cluster import Cluster
from cost_model.units import format_bytes
from hetpipe.reporting.colours import BLACK, BLUE, IDLE, INK, VERMILION
from hetpipe.reporting.plots.picture import Picture
from hetpipe.reporting.plots.plans import speedups
from hetpipe.reporting.plots.style import BAR, label_rows, new_axes

if TYPE_CHECKING:  # the solver loads more than a picture needs
    from partition.solver import Outcome

MOST_COLUMNS, MOST_NAMES = 8, 40
"""Of so many devices each field has room for its text; of so many there is room for their names."""
DARK = 0.6
"""From this share on a field is so dark that its text is white."""
ROW_HEIGHT, TWO_LINES = 0.3, 0.42
"""Inches of a row, of one line and of two."""

Peaks = Mapping[str, Mapping[str, float]]
"""Bytes at their measured peak, by strategy and device."""


def memory_shares(
    outcomes: "Sequence[Outcome]", cluster: Cluster, ax: Axes | None = None, *, measured: Peaks | None = None
) -> Axes:
    """Draw how full each strategy's plan makes each device: a row for a strategy, a column for a device.

    The darker, the fuller, of what a plan may fill; empty: not used. Of a strategy that does not fit stands
    how much is missing, and on which device.

    measured: of strategies that were run; the prediction stands below.
    """
    measured = measured or {}
    ax = ax or new_axes(height=0.9 + (TWO_LINES if measured else ROW_HEIGHT) * len(outcomes))
    devices = cluster.devices
    has_text = len(devices) <= MOST_COLUMNS
    for row, outcome in enumerate(outcomes):
        if outcome.plan is None or outcome.plan.predicted is None:
            _misfit(ax, row, outcome, [device.name for device in devices])
            continue
        for column, device in enumerate(devices):
            figures = outcome.plan.predicted.devices.get(device.name)
            if figures is None:
                continue
            peak = measured.get(outcome.strategy, {}).get(device.name)
            num_bytes = figures.memory_bytes if peak is None else peak
            share = num_bytes / device.usable_bytes
            ax.barh(
                row, 0.96, BAR, column + 0.02, color=BLUE, alpha=0.08 + 0.85 * min(1.0, share), linewidth=0
            )
            if has_text:
                text = f"{format_bytes(num_bytes)}, {share:.0%}"
                if peak is not None:
                    text += f"\nplan {format_bytes(figures.memory_bytes)}"
                ink = "white" if share > DARK else BLACK
                ax.text(column + 0.5, row, text, ha="center", va="center", fontsize=7, color=ink)
    label_rows(ax, [outcome.strategy for outcome in outcomes])
    ax.set_xlim(0, len(devices))
    named = range(0, len(devices), -(-len(devices) // MOST_NAMES))
    places = [column + 0.5 for column in named]
    titles = [
        f"{device.name}\n{format_bytes(device.usable_bytes)}" if has_text else device.name
        for device in map(devices.__getitem__, named)
    ]
    ax.set_xticks(places, titles, fontsize=8, rotation=0 if has_text else 90)
    ax.xaxis.tick_top()
    ax.tick_params(axis="x", length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def speeds_and_memory(
    outcomes: "Sequence[Outcome]", cluster: Cluster, seconds: Mapping[str, float], measured: Peaks
) -> tuple[Axes, Axes]:
    """Draw the `speedups` of strategies above their `memory_shares`.

    seconds: measured ones of a step, by strategy.
    """
    heights = 1.3 + 0.34 * len(outcomes), 0.9 + TWO_LINES * len(outcomes)
    figure = Picture(figsize=(9.0, sum(heights)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    return (
        speedups(outcomes, seconds, above),
        memory_shares(outcomes, cluster, below, measured=measured),
    )


def _misfit(ax: Axes, row: int, outcome: "Outcome", names: Sequence[str]) -> None:
    """Say of a strategy without a plan what is missing where, as far as memory is the reason."""
    ax.barh(row, len(names), BAR, color=IDLE, alpha=0.5, linewidth=0)
    if outcome.device not in names or not outcome.missing_bytes:
        ax.text(len(names) / 2, row, "no plan", ha="center", va="center", fontsize=7, color=INK)
        return
    column = names.index(outcome.device)
    ax.barh(row, 0.96, BAR, column + 0.02, color="white", edgecolor=VERMILION, linewidth=1.2)
    if len(names) <= MOST_COLUMNS:
        text = f"{format_bytes(outcome.missing_bytes)} too little"
        ax.text(column + 0.5, row, text, ha="center", va="center", fontsize=7, color=VERMILION)
