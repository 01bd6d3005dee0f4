"""What if, money and energy as tables and sentences."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from cost_model.cluster import Cluster, Device
from cost_model.expenses import Expenses, Objective
from cost_model.units import format_number, format_seconds
from hetpipe.reporting.tables import few_names, in_units, new_table
from partition.plan import Plan

if TYPE_CHECKING:  # the solver loads NumPy, which a table does not need
    from partition.explanation.pareto import Choice, CostedPlan, Front

J_PER_WH = 3600.0
_SETS, _SOME_SETS = "sets of devices", "sets of devices (of more, thinned out)"
SAMPLES = 1000
"""Money and energy are shown for so many samples: a step alone is too small a number."""


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """A change of the cluster with the plan on it, or the reason why there is none."""

    change: str
    plan: Plan | None
    expenses: Expenses | None = None
    reason: str | None = None

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step."""
        return self.plan.predicted.step_s if self.plan is not None and self.plan.predicted else None

    def to_json(self, today_s: float | None) -> dict[str, Any]:
        """Return the row as data; today_s: the step without any change."""
        figures = self.plan.predicted if self.plan is not None else None
        gain = today_s / figures.step_s - 1 if figures and figures.step_s and today_s is not None else None
        return {
            "change": self.change,
            "reason": self.reason,
            "predicted_step_s": figures and figures.step_s,
            "samples_per_s": figures and figures.samples_per_s,
            "gain": gain,
            "bound_s": figures and figures.bound_s,
            **expense_json(self.plan, self.expenses),
            "plan": self.plan and self.plan.to_json(),
        }


def expense_json(plan: Plan | None, used: Expenses | None) -> dict[str, float | None]:
    """Return what a plan takes: money and watts of its devices, and by 1,000 samples."""
    return {
        "per_hour": None if used is None else used.per_hour,
        "watts": None if used is None else used.watts,
        "money_per_1000_samples": None if plan is None or used is None else money_of_samples(plan, used),
        "wh_per_1000_samples": None if plan is None or used is None else watt_hours_of_samples(plan, used),
    }


def money_of_samples(plan: Plan, used: Expenses) -> float | None:
    """Return the money for 1,000 samples; None where a price is not known."""
    return used.money(_seconds_of_samples(plan))


def watt_hours_of_samples(plan: Plan, used: Expenses) -> float | None:
    """Return the watt-hours for 1,000 samples; None where the watts of a device are not known."""
    joules = used.energy_j(_seconds_of_samples(plan))
    return None if joules is None else joules / J_PER_WH


def _seconds_of_samples(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s * SAMPLES / plan.global_batch_size


def what_if_table(rows: Sequence[WhatIfRow]) -> Table:
    """Show each change beside the cluster of today, the first row: step, gain, bound, money and energy."""
    money, energy = _known(rows)
    table = new_table("what if")
    titles = ["step", "samples/s", "gain", "bound"]
    titles += ["cost/1,000"] * money + ["Wh/1,000"] * energy
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    today_s = rows[0].step_s
    for row in rows:
        if row.plan is None or row.plan.predicted is None or row.expenses is None:
            table.add_row(row.change, "no plan")
            continue
        figures = row.plan.predicted
        gain = ""
        if today_s is not None and row is not rows[0] and figures.step_s > 0:
            gain = f"{today_s / figures.step_s - 1:+.1%}"
        table.add_row(
            row.change,
            format_seconds(figures.step_s),
            format_number(figures.samples_per_s, 4),
            gain,
            "" if figures.bound_s is None else format_seconds(figures.bound_s),
            *([_number(money_of_samples(row.plan, row.expenses))] * money),
            *([_number(watt_hours_of_samples(row.plan, row.expenses))] * energy),
        )
    return table


def _known(rows: Sequence[WhatIfRow]) -> tuple[bool, bool]:
    """Return whether the price and the watts of any row are known."""
    expenses = [row.expenses for row in rows if row.expenses]
    return any(each.per_hour is not None for each in expenses), any(
        each.watts is not None for each in expenses
    )


def what_if_sentences(rows: Sequence[WhatIfRow]) -> list[str]:
    """Say what the columns are, where that is not plain."""
    sentences = ["gain: samples/s over today's; bound: no plan can be faster (--proof-seconds 5: closer)"]
    if any(_known(rows)):
        sentences[0] += "; 1,000: samples"
    for what, known in (
        ("price_per_hour", [row.expenses.per_hour for row in rows if row.expenses]),
        ("watts", [row.expenses.watts for row in rows if row.expenses]),
    ):
        if None in known and any(value is not None for value in known):
            sentences.append(f"empty where `{what}` of a device that is used is not known")
    return sentences + [f"{row.change}: {in_units(row.reason)}" for row in rows if row.reason is not None]


def unknown_sentences(devices: Iterable[Device], shown: "Iterable[WhatIfRow | CostedPlan]") -> list[str]:
    """Say why there are no costs, or no energy, where only some of the devices have a price, or watts."""
    devices, used = list(devices), [each.expenses for each in shown if each.expenses is not None]
    sentences = []
    for what, key, known in (
        ("cost", "price_per_hour", any(each.per_hour is not None for each in used)),
        ("energy", "watts", any(each.watts is not None for each in used)),
    ):
        lacking = list(dict.fromkeys(device.name for device in devices if getattr(device, key) is None))
        given = any(getattr(device, key) is not None for device in devices)
        if given and lacking and not known:
            sentences.append(f"no {what} is shown: `{key}` of {few_names(lacking, 1)} is not known")
    return sentences


def front_table(front: "Front", cluster: Cluster) -> Table:
    """Show the plans of a front, the fastest first."""
    table = new_table("", "devices")
    money, energy = Objective.MONEY in front.objectives, Objective.ENERGY in front.objectives
    titles = ["step", *(["cost/h", "cost/1,000"] * money), *(["Wh/1,000"] * energy)]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for number, costed in enumerate(front.plans, start=1):
        used, plan = costed.expenses, costed.plan
        table.add_row(
            str(number),
            devices_text(plan.device_names, cluster),
            format_seconds(costed.step_s),
            *([_number(used.per_hour), _number(money_of_samples(plan, used))] * money),
            *([_number(watt_hours_of_samples(plan, used))] * energy),
        )
    return table


def front_sentence(front: "Front") -> str:
    """Say how many sets of devices were planned for, and what the others could add."""
    sets = _SETS if front.complete else _SOME_SETS
    text = f"planned for {front.planned} of {front.num_sets} {sets}; by their bounds the others "
    if front.within <= 1:
        return f"{text}cannot hold a better plan"
    return f"{text}can be better than each plan above in some column by {front.within - 1:.1%} at most"


def choice_sentences(choice: "Choice") -> list[str]:
    """Say what the chosen plan takes, and what is known about plans with less."""
    best = choice.best
    parts = []
    if best.expenses.per_hour is not None:
        parts.append(f"{_number(best.expenses.per_hour)} an hour")
        parts.append(f"{_number(money_of_samples(best.plan, best.expenses))} for {SAMPLES:,} samples")
    if best.expenses.watts is not None:
        parts.append(f"{_number(best.expenses.watts)} W")
        parts.append(f"{_number(watt_hours_of_samples(best.plan, best.expenses))} Wh for {SAMPLES:,} samples")
    sets = _SETS if choice.least is not None else _SOME_SETS
    rest = "none of the others can be better" if choice.finished else "others might be better"
    sentences = [
        f"the devices used take {', '.join(parts)}" if parts else "",
        f"planned for {choice.planned} of {choice.num_sets} {sets} within the limits, {rest}",
    ]
    if choice.least:
        gap = best.of(choice.objective) / choice.least - 1
        sentences.append(
            f"no plan within the limits takes less than {1 / (1 + gap):.1%} of this {choice.objective}; "
            f"gap {gap:.1%}"
        )
    return [sentence for sentence in sentences if sentence]


def devices_text(names: Collection[str], cluster: Cluster) -> str:
    """Return how many devices of which kind these are, such as "2 V100, 1 T4", in the cluster's order.

    The speed stands there where the cluster has the kind in several: "1 emulated, 2 emulated x 0.5".
    """
    speeds = {(device.kind, device.speed) for device in cluster.devices}
    several = {kind for kind, count in Counter(kind for kind, _ in speeds).items() if count > 1}
    counts = Counter(
        f"{device.kind} x {device.speed:g}" if device.kind in several and device.speed != 1 else device.kind
        for device in cluster.devices
        if device.name in names
    )
    return ", ".join(f"{count} {text}" for text, count in counts.items())


def costed_json(costed: "CostedPlan") -> dict[str, Any]:
    """Return a plan of a front as data."""
    return {
        "devices": list(costed.plan.device_names),
        "predicted_step_s": costed.step_s,
        **expense_json(costed.plan, costed.expenses),
        "plan": costed.plan.to_json(),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
