"""Pictures of plans by step, money and energy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from cost_model.cluster import Cluster
from cost_model.expenses import Objective
from hetpipe.reporting.colours import BLUE, IDLE, INK
from hetpipe.reporting.expense_tables import SAMPLES, devices_text, money_of_samples, watt_hours_of_samples
from hetpipe.reporting.plots.picture import Picture
from hetpipe.reporting.plots.style import strip

if TYPE_CHECKING:  # the solver loads more than a picture needs
    from partition.explanation.pareto import CostedPlan, Front

_LABELS = {Objective.MONEY: f"cost of {SAMPLES:,} samples", Objective.ENERGY: f"Wh for {SAMPLES:,} samples"}


def cost_front(front: "Front", cluster: Cluster) -> list[Axes]:
    """Draw the plans of a front, step against money and against energy, those that are known.

    A line joins the plans that no other beats in the two of a panel; the rest of the front is hollow. Numbers
    are those of the rows of `front_table`.
    """
    shown = [objective for objective in front.objectives if objective in _LABELS]
    figure = Picture(figsize=(7.0, 0.4 + 3.4 * len(shown)), layout="constrained")
    panels = [figure.add_subplot(len(shown), 1, row + 1) for row in range(len(shown))]
    for ax, objective in zip(panels, shown, strict=True):
        _panel(ax, front.plans, objective)
    key = (
        f"{number}  {devices_text(costed.plan.device_names, cluster)}"
        for number, costed in enumerate(front.plans, start=1)
    )
    panels[0].text(1.02, 1.0, "\n".join(key), transform=panels[0].transAxes, fontsize=7, color=INK, va="top")
    panels[-1].set_xlabel("step in seconds")
    return panels


def _panel(ax: Axes, plans: "Sequence[CostedPlan]", objective: Objective) -> None:
    points = [(costed.step_s, _value(costed, objective)) for costed in plans]
    best = [
        (step_s, value)
        for index, (step_s, value) in enumerate(points)
        if all(value < earlier for _, earlier in points[:index])
    ]
    ax.step(*zip(*best, strict=True), where="post", color=BLUE, linewidth=1.0, alpha=0.5)
    for number, point in enumerate(points, start=1):
        ax.plot(*point, "o", color=BLUE, markerfacecolor=BLUE if point in best else "white", markersize=6)
        ax.annotate(str(number), point, (5, 4), textcoords="offset points", fontsize=7, color=INK)
    ax.set_ylabel(_LABELS[objective])
    ax.margins(x=0.06, y=0.12)
    ax.grid(color=IDLE, linewidth=0.6)
    strip(ax)


def _value(costed: "CostedPlan", objective: Objective) -> float:
    of_samples = money_of_samples if objective is Objective.MONEY else watt_hours_of_samples
    value = of_samples(costed.plan, costed.expenses)
    assert value is not None  # a front has objectives that are known of all devices
    return value
