"""Strategies that were run, side by side: step, bound, memory, and whether their losses agree."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from cost_model.units import format_bytes, format_seconds
from hetpipe.reporting.comparison_tables import least_bound
from hetpipe.reporting.run_tables import run_marks
from hetpipe.reporting.tables import new_table
from hetpipe.runs.measured_rounds import LOSSES_AGREE, MeasuredRounds, losses_apart, must_agree

if TYPE_CHECKING:  # the solver loads NumPy, which a table does not need
    from partition.solver import Outcome


def measured_rounds_tables(
    rounds: Sequence[MeasuredRounds], outcomes: "Sequence[Outcome]", dtype: str, *, details: bool = False
) -> list[RenderableType]:
    """Return the tables of what was run, in the order of the outcomes, of which the last is ours.

    details: memory of every device, not of the fullest one alone.
    """
    late = [each.strategy for each in rounds if any(report.host_overloaded for report in each.reports)]
    busy = [f"host busy or overloaded in runs of {', '.join(late)}; measure again when it is idle"]
    return [
        _steps_table(rounds, outcomes),
        *_bound_sentences(outcomes),
        _memory_table(rounds, details=details),
        *loss_sentences(rounds, dtype),
        *run_marks(rounds[-1].reports[-1]),
        *(busy if late else []),
    ]


def _steps_table(rounds: Sequence[MeasuredRounds], outcomes: "Sequence[Outcome]") -> Table:
    table = new_table()
    table.add_column("strategy", no_wrap=True)
    for title in ("predicted", "measured", "least to most", "error", "over bound", "slower"):
        table.add_column(title, justify="right", no_wrap=True)
    bound = least_bound(outcomes)
    known = {each.strategy: each for each in rounds}
    ours_s = rounds[-1].step_s
    for outcome in outcomes:
        each = known.get(outcome.strategy)
        if each is None:
            table.add_row(outcome.strategy, "does not fit", "", "", "", "", "")
            continue
        seconds = each.step_seconds
        table.add_row(
            each.strategy,
            format_seconds(each.predicted_step_s),
            format_seconds(each.step_s),
            f"{format_seconds(min(seconds))} - {format_seconds(max(seconds))}",
            f"{each.error:+.1%}",
            f"{each.step_s / bound[1] - 1:.1%}" if bound else "",
            f"{each.step_s / ours_s:.2f}" if ours_s else "",
        )
    return table


def _bound_sentences(outcomes: "Sequence[Outcome]") -> list[str]:
    bound = least_bound(outcomes)
    if bound is None:
        return []
    strategy, bound_s = bound
    return [
        f"over bound: over {format_seconds(bound_s)}, the bound of {strategy}; no plan of the kinds of all "
        "these is faster"
    ]


def _memory_table(rounds: Sequence[MeasuredRounds], *, details: bool) -> Table:
    table = new_table("memory of tensors" if details else "the fullest device")
    table.add_column("", no_wrap=True)
    for title in ("predicted", "measured peak", "usable"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in rounds:
        for name, device in each.reports[0].devices.items() if details else [each.fullest]:
            table.add_row(
                each.strategy,
                name,
                format_bytes(device.predicted_bytes),
                "not counted" if device.peak_bytes is None else format_bytes(device.peak_bytes),
                format_bytes(device.usable_bytes),
            )
    return table


def loss_sentences(rounds: Sequence[MeasuredRounds], dtype: str) -> list[str]:
    """Say whether the losses of all strategies agree, step by step, and which ran in the place of others."""
    told = [f"{each.strategy} ran as {each.like}: their plans are equal" for each in rounds if each.like]
    apart = losses_apart(rounds)
    if apart is None:
        return told
    count = sum(each.like is None for each in rounds)
    text = f"losses of {count} plans agree to {apart:.1e} of their size at every step"
    if must_agree(dtype, rounds) and not apart <= LOSSES_AGREE:
        text = (
            f"warning: losses of {count} plans lie {apart:.1e} of their size apart, more than "
            f"{LOSSES_AGREE:.0e}; this is a bug unless the model's results depend on the microbatch"
        )
    return [*told, text]
