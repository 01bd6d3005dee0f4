"""Strategies side by side as a table and sentences: how fast each is, which do not fit, what ours gains."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from cost_model.units import format_bytes, format_number, format_seconds
from hetpipe.reporting.tables import in_units, new_table
from partition.plan import Plan

if TYPE_CHECKING:  # the solver loads NumPy, which a table does not need
    from partition.explanation.gains import Gain
    from partition.solver import Outcome

NOTHING = 0.005
"""A gain of less than this share is none."""


def comparison_table(outcomes: "Sequence[Outcome]", ours: Plan | None) -> Table:
    """Show the strategies side by side, with our speed-up over each; why some do not fit stands below it."""
    table = new_table()
    table.add_column("strategy", no_wrap=True)
    for title in ("predicted step", "samples/s", "speed-up of ours"):
        table.add_column(title, justify="right", no_wrap=True)
    best = ours.predicted.step_s if ours is not None and ours.predicted is not None else None
    for outcome in outcomes:
        figures = outcome.plan.predicted if outcome.plan is not None else None
        if figures is None:
            table.add_row(outcome.strategy, "does not fit", "", "")
            continue
        speed_up = f"{figures.step_s / best:.2f}" if best else ""
        step, rate = format_seconds(figures.step_s), format_number(figures.samples_per_s, 4)
        table.add_row(outcome.strategy, step, rate, speed_up)
    return table


def least_bound(outcomes: "Sequence[Outcome]") -> tuple[str, float] | None:
    """Return (strategy, seconds) of the least bound of the plans, of which the last is ours.

    The bound of a plan speaks of those of its kind: as many states of it sharded, as much of it on hosts. No
    plan of all these kinds together is faster than the least of their bounds. None where ours has none.
    """
    bounds = {
        outcome.strategy: outcome.plan.predicted.bound_s
        for outcome in reversed(outcomes)
        if outcome.plan is not None and outcome.plan.predicted is not None and outcome.plan.predicted.bound_s
    }
    return min(bounds.items(), key=lambda known: known[1]) if outcomes[-1].strategy in bounds else None


def forced_sentences(*, forced: bool) -> list[str]:
    """Say what a comparison is not, where a part of the plan was decided by the user."""
    return ["what is forced (--pin, --pipelines, --max-devices) is so for auto alone"] if forced else []


def misfit_sentences(outcomes: "Sequence[Outcome]", *, details: bool = False) -> list[str]:
    """Say why strategies do not fit, those with the same reason together.

    details: the whole reason of each, with layers and remedy.
    """
    misfits = [outcome for outcome in outcomes if outcome.plan is None]
    if details:
        return [f"{_whole_reason(outcome)}" for outcome in misfits]
    groups: dict[str, list[str]] = {}
    for outcome in misfits:
        groups.setdefault(_short_reason(outcome), []).append(outcome.strategy)
    return [f"{', '.join(names)}: {reason}" for reason, names in groups.items()]


def _short_reason(outcome: "Outcome") -> str:
    if outcome.missing_bytes and outcome.device is not None:
        return f"{format_bytes(outcome.missing_bytes)} too little on {outcome.device}"
    return in_units(str(outcome.reason)).removeprefix(f"{outcome.strategy}: ")


def _whole_reason(outcome: "Outcome") -> str:
    reason = in_units(str(outcome.reason))
    return reason if reason.startswith(f"{outcome.strategy}: ") else f"{outcome.strategy}: {reason}"


def gain_sentence(gain: "Gain") -> str:
    """Say where the speed-up of ours over the best other strategy comes from."""
    if gain.total is None or gain.memory is None:
        return (
            "no other strategy fits: that there is a plan is the gain of memory; with ample memory auto "
            f"would be {gain.balance:.2f} times as fast as the best of them"
        )
    other = f"the best other strategy that fits, {gain.over}"
    if abs(gain.total - 1) < NOTHING:
        return f"auto is as fast as {other}"
    return (
        f"auto is {gain.total:.2f} times as fast as {other}: {gain.balance:.2f} by balance of computation "
        f"(as with ample memory) times {gain.memory:.2f} by memory"
    )
