"""Pictures of plans, traces and runs. Every function draws on an Axes, its own if none is given."""

from hetpipe.reporting.colours import BACKWARD, BLUE, FORWARD, OPTIMIZER, VERMILION
from hetpipe.reporting.plots.cost_fronts import cost_front
from hetpipe.reporting.plots.plans import memory, overview, partition_bars, plan_title, speedups
from hetpipe.reporting.plots.style import STAGE_COLOURS, new_axes, save, title
from hetpipe.reporting.plots.timeline import gantt, losses, predicted_and_measured, stage_labels

__all__ = [
    "BACKWARD",
    "BLUE",
    "FORWARD",
    "OPTIMIZER",
    "STAGE_COLOURS",
    "VERMILION",
    "cost_front",
    "gantt",
    "losses",
    "memory",
    "new_axes",
    "overview",
    "partition_bars",
    "plan_title",
    "predicted_and_measured",
    "save",
    "speedups",
    "stage_labels",
    "title",
]
