"""Pictures of what changed devices would bring."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from cost_model.units import format_seconds
from hetpipe.reporting.colours import BLUE, GREEN, INK, SKY, VERMILION
from hetpipe.reporting.expense_tables import SAMPLES, WhatIfRow, money_of_samples
from hetpipe.reporting.many_pipelines import shown_together
from hetpipe.reporting.plots.device_memory import memory, num_rows
from hetpipe.reporting.plots.picture import Picture
from hetpipe.reporting.plots.plans import longest_s, partition_bars
from hetpipe.reporting.plots.style import BAR, label_rows, legend_above, line_entry, new_axes


def what_if(rows: Sequence[WhatIfRow], ax: Axes | None = None) -> Axes:
    """Draw the speed of the plan of each change, as multiples of today's, the first row; bounds are lines.

    Where today has no plan, speeds are samples per second. At the right stand the step and, where prices are
    known, the cost of 1,000 samples.
    """
    ax = ax or new_axes(height=1.3 + 0.4 * len(rows))
    today_s = rows[0].step_s
    reach, has_bound = 0.0, False
    for row, changed in enumerate(rows):
        figures = changed.plan.predicted if changed.plan is not None else None
        if changed.plan is None or figures is None:
            ax.text(0.01, row, "no plan fits", va="center", fontsize=8, color=INK)
            continue
        unit = figures.samples_per_s * figures.step_s if today_s is None else today_s
        speed = unit / figures.step_s
        better = today_s is None or speed >= 1
        ax.barh(row, speed, BAR, color=BLUE if row == 0 else GREEN if better else SKY, linewidth=0)
        reach = max(reach, speed)
        if figures.bound_s:
            end = unit / figures.bound_s
            ax.plot([end, end], [row - BAR / 2, row + BAR / 2], color=VERMILION, linewidth=1.5, zorder=4)
            reach, has_bound = max(reach, end), True
        text = f"step {format_seconds(figures.step_s)}"
        money = money_of_samples(changed.plan, changed.expenses) if changed.expenses else None
        if money is not None:
            text += f", {money:.3g} for {SAMPLES:,} samples"
        ax.text(1.01, row, text, va="center", fontsize=8, color=INK, transform=ax.get_yaxis_transform())
    label_rows(ax, [row.change for row in rows])
    ax.set_xlim(0, 1.05 * reach or 1.0)
    if today_s is not None:
        ax.axvline(1, color=INK, linewidth=0.8, linestyle=":", zorder=0)
    ax.set_xlabel("predicted samples a second" if today_s is None else "predicted speed; 1 is today's")
    drawn = {to_hex(bar.get_facecolor()).upper() for bar in ax.patches}
    legend = [each for each in ((BLUE, "today"), (GREEN, "faster"), (SKY, "slower")) if each[0] in drawn]
    bound = [line_entry(VERMILION, "no plan on these devices is faster")] if has_bound else []
    legend_above(ax, legend, more=bound)
    return ax


TODAY, CHANGED = "today", "changed"


def changed_plan(
    today: WhatIfRow, changed: WhatIfRow, profile: ModelProfile, clusters: tuple[Cluster, Cluster]
) -> tuple[Axes, ...]:
    """Draw on one page what a change brings: speeds with bounds, cuts before and after, memory after.

    clusters: of today and after the change. Where there is no change, `changed` is `today`; a row without a
    plan has neither cuts nor memory.
    """
    rows = {TODAY: today} if changed is today else {TODAY: today, CHANGED: changed}
    drawn = [
        (replace(row.plan, strategy=name), cluster)
        for (name, row), cluster in zip(rows.items(), clusters, strict=False)
        if row.plan is not None
    ]
    heights = [1.2 + 0.4 * len(rows), *(1.1 + 0.5 * len(shown_together(*each)) for each in drawn)]
    heights += [1.3 + 0.45 * num_rows(plan, profile, of) for plan, of in drawn[-1:]]
    figure = Picture(figsize=(9.0, sum(heights)), layout="constrained")
    axes = tuple(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    what_if([replace(row, change=name) for name, row in rows.items()], axes[0])
    names = [name for plan, _ in drawn for name in plan.device_names]
    end_s = max((longest_s(plan, profile, cluster) for plan, cluster in drawn), default=None)
    for ax, (plan, cluster) in zip(axes[1:], drawn, strict=False):
        partition_bars([plan], profile, cluster, ax, beside=names, end_s=end_s)
    if drawn:
        plan, cluster = drawn[-1]
        memory(plan, profile, cluster, axes[-1])
    return axes
