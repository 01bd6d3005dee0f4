"""Pictures of plans, traces and runs. Every function draws on an Axes, its own if none is given."""

from hetpipe.reporting.colours import BACKWARD, BLUE, FORWARD, OPTIMIZER, VERMILION
from hetpipe.reporting.plots.cost_fronts import cost_front
from hetpipe.reporting.plots.device_memory import memory
from hetpipe.reporting.plots.memory_shares import memory_shares, speeds_and_memory
from hetpipe.reporting.plots.plans import overview, partition_bars, plan_title, speedups, subject
from hetpipe.reporting.plots.runs import losses, predictions, step_seconds
from hetpipe.reporting.plots.style import STAGE_COLOURS, as_png, figure_of, new_axes, save, save_pages, title
from hetpipe.reporting.plots.timeline import beside_even, gantt, predicted_and_measured, stage_labels
from hetpipe.reporting.plots.what_if import changed_plan, what_if

__all__ = [
    "BACKWARD",
    "BLUE",
    "FORWARD",
    "OPTIMIZER",
    "STAGE_COLOURS",
    "VERMILION",
    "as_png",
    "beside_even",
    "changed_plan",
    "cost_front",
    "figure_of",
    "gantt",
    "losses",
    "memory",
    "memory_shares",
    "new_axes",
    "overview",
    "partition_bars",
    "plan_title",
    "predicted_and_measured",
    "predictions",
    "save",
    "save_pages",
    "speeds_and_memory",
    "speedups",
    "stage_labels",
    "step_seconds",
    "subject",
    "title",
    "what_if",
]
