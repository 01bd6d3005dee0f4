"""What a page says of a run, as data for its script: text, tables, events, series."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from rich.table import Table

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, read_profile
from cost_model.strict_files import read_text
from cost_model.units import format_bytes, format_seconds
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Direction,
    Gather,
    Norm,
    Pass,
    Reduce,
    Step,
    Sync,
    Transfer,
)
from hetpipe.program.program_text import parse_program
from hetpipe.program.trace import Event, Trace
from hetpipe.reporting.idle_time import channel_of, exchange_words
from hetpipe.reporting.many_pipelines import alike, shown_devices
from hetpipe.reporting.memory_tables import memory_uses
from hetpipe.reporting.run_tables import recovery_sentences, run_report_tables
from hetpipe.reporting.tables import bound_sentence, device_labels, new_table, plan_sentences, plan_table
from hetpipe.runs.run_folder import (
    DEVICE_CLOCKS,
    MEASURED,
    PREDICTED,
    MetricsRow,
    RunFolder,
    figure_text,
    held_out_figures,
)
from hetpipe.runs.run_report import RunReport, read_recoveries, read_report
from hetpipe.simulation.simulator import simulate
from partition.estimates.plan_memory import HostUse, host_uses
from partition.plan import Plan
from partition.plan_file import read_plan

MOST_EVENTS = 40_000
"""Events of a step that a page draws; more make it slow, and are in trace.json alone."""
MOST_POINTS = 2_000
"""Points of a curve."""
LATE_STEPS = 20
"""Steps whose busy time is shown."""

_TITLES = {
    PREDICTED: "predicted",
    MEASURED: "measured, by the wall clock",
    DEVICE_CLOCKS: "measured, by the clocks of emulated devices",
}
_SERIES = ("loss", "eval_loss", "samples_per_s", "step_s", "wall_s", "learning_rate", "gradient_norm")


def page_data(folder: RunFolder) -> dict[str, Any]:
    """Return all that a page shows of a run: of one that goes on, what is there.

    Raises: InputError if it is no run folder, or one of its files is damaged.
    """
    if not folder.is_run():
        raise InputError(f"{folder.path}: no run folder, it holds no plan.json and program.txt")
    plan, profile, cluster = (
        read_plan(folder.plan),
        read_profile(folder.profile),
        read_cluster(folder.cluster),
    )
    costs = ProgramCosts(parse_program(read_text(folder.program), plan), profile, cluster)
    traces = {
        name: trace for name, trace in folder.read_traces().items() if trace.device_names == plan.device_names
    }
    predicted = traces.get(PREDICTED) or simulate(costs)
    report = read_report(folder.report) if folder.report.exists() else None
    shown = {PREDICTED: predicted, **{name: traces[name] for name in _TITLES if name in traces}}
    return {
        "name": folder.path.absolute().name,
        "title": f"{plan.model} on {cluster.name}, {plan.global_batch_size} samples a step",
        "sentences": plan_sentences(plan, profile, cluster),
        "bound": "" if plan.predicted is None else bound_sentence(plan.predicted, details=True),
        "stages": table_data(plan_table(plan, profile, cluster)),
        "predicted": {"step_s": predicted.makespan_s, "bubble": predicted.bubble},
        "timelines": _timelines(shown, plan, profile, cluster),
        "exchanges": exchange_words(event for trace in shown.values() for event in trace.events),
        "memory": _memory(plan, profile, cluster, report),
        "links": table_data(_links(costs, predicted)),
        **_results(report, folder),
        **live_data(folder.read_metrics(), plan.device_names, tokens_of_sample(folder, profile)),
    }


def tokens_of_sample(folder: RunFolder, profile: ModelProfile) -> int:
    """Return how many tokens a sample of a run has; 0 where it has none, such as an image."""
    length = profile.sequence_length
    return 0 if length == 1 or folder.image_processor.exists() else length


def live_data(rows: Sequence[MetricsRow], devices: Sequence[str], num_tokens: int) -> dict[str, Any]:
    """Return what changes while a run goes on: curves, figures of the last steps, what was lost.

    num_tokens: of a sample; 0: rates are of samples.
    """
    kept = _thinned(rows)
    last = rows[-LATE_STEPS:]
    return {
        "steps": [row["step"] for row in kept],
        "series": {
            name: [row.get(name) for row in kept] for name in _SERIES if any(name in row for row in kept)
        },
        "figures": {
            name: [row.get(f"eval_{name}") for row in kept]
            for name in dict.fromkeys(name for row in kept for name in held_out_figures(row))
        },
        "last_figures": {
            name: figure_text(name, value)
            for row in rows
            for name, value in held_out_figures(row).items()  # the last that there is, of each
        },
        "rate": "tokens/s" if num_tokens else "samples/s",
        "rates": [_rate(row, num_tokens or 1) for row in kept],
        "thinned": len(kept) < len(rows),
        "devices": _devices(last, devices),
        "notes": _notes(rows),
    }


def table_data(table: Table) -> dict[str, Any]:
    """Return a table of text: titles, which columns are numbers, rows."""
    columns = table.columns
    return {
        "titles": [str(column.header) for column in columns],
        "numbers": [column.justify == "right" for column in columns],
        "rows": [list(row) for row in zip(*(map(str, column.cells) for column in columns), strict=True)],
    }


def _results(report: RunReport | None, folder: RunFolder) -> dict[str, Any]:
    """Return the tables and sentences of a run that is over; of one that is not, what it has lost so far."""
    if report is None:
        lost = recovery_sentences(read_recoveries(folder.recoveries))
        return {"results": [], "marks": lost, "report": None}
    parts = run_report_tables(report)
    return {
        "results": [table_data(part) for part in parts if isinstance(part, Table)],
        "marks": [part for part in parts if isinstance(part, str)],
        "report": {
            "step_s": report.measured_step_s,
            "bubble": report.measured_bubble,
            "error": report.step_error,
        },
    }


def _timelines(
    traces: Mapping[str, Trace], plan: Plan, profile: ModelProfile, cluster: Cluster
) -> list[dict[str, Any]]:
    labels = device_labels(plan, profile, cluster)
    rows = {rank: row for row, rank in enumerate(labels)}
    shown = []
    for name, trace in traces.items():
        events = [event for event in trace.events if event.rank in rows]
        many = len(events) > MOST_EVENTS
        shown.append(
            {
                "title": _TITLES[name],
                "step_s": trace.makespan_s,
                "labels": list(labels.values()),
                "idle": [1 - trace.busy_s(rank) / trace.makespan_s for rank in rows],
                "events": [] if many else [_event(event, rows[event.rank]) for event in events],
                "num_events": len(events),
            }
        )
    return shown


def _event(event: Event, row: int) -> list[Any]:
    """Return row, kind, words, number in the bar, start and seconds, in microseconds."""
    instruction, number = event.instruction, ""
    match instruction:
        case Compute():
            kind = "forward" if instruction.op is Pass.FORWARD else "backward"
            number = str(instruction.microbatch)
        case Transfer():
            kind = "message"
        case Step():
            kind = "optimizer"
        case Sync() | Norm() | Broadcast() | Reduce() | Gather():
            kind = "sync"
    start_us, taken_us = round(event.start_s * 1e6, 1), round(event.duration_s * 1e6, 1)
    return [row, kind, str(instruction), number, start_us, taken_us]


def _memory(
    plan: Plan, profile: ModelProfile, cluster: Cluster, report: RunReport | None
) -> list[dict[str, Any]]:
    found, shown = [], shown_devices(plan, cluster)
    for name, use in memory_uses(plan, profile, cluster).items():
        if name not in shown:
            continue
        measured = None if report is None else report.devices.get(name)
        parts = {key.removesuffix("_bytes"): value for key, value in asdict(use).items()}
        usable = parts.pop("usable")
        found.append(
            {
                "device": f"{name}{alike(shown[name])}",
                "parts": [[part, value, format_bytes(value)] for part, value in parts.items() if value],
                "total": use.total_bytes,
                "usable": usable,
                "peak": None if measured is None else measured.peak_bytes,
                "text": format_bytes(use.total_bytes),
                "usable_text": format_bytes(usable),
                "peak_text": None
                if measured is None or measured.peak_bytes is None
                else format_bytes(measured.peak_bytes),
            }
        )
    return found + [_host_memory(node, use) for node, use in host_uses(plan, profile, cluster).items()]


def _host_memory(node: str, use: HostUse) -> dict[str, Any]:
    """Return what a plan keeps in the memory of a host, as of a device."""
    parts = (
        ("frozen", use.frozen_bytes),
        ("state", use.state_bytes),
        ("activation", use.saved_bytes),
        ("trained", use.fetched_bytes),
    )
    return {
        "device": f"{node}, memory of the host",
        "parts": [[part, value, format_bytes(value)] for part, value in parts if value],
        "total": use.total_bytes,
        "usable": use.capacity_bytes,
        "peak": None,
        "text": format_bytes(use.total_bytes),
        "usable_text": format_bytes(use.capacity_bytes),
        "peak_text": None,
    }


def _links(costs: ProgramCosts, predicted: Trace) -> Table:
    """Return, for each direction of each link, its messages of a step and how long they occupy it."""
    table = new_table("from", "to", "link")
    for title in ("messages a step", "bytes each", "each takes", "of the step"):
        table.add_column(title, justify="right")
    sends: dict[tuple[int, int, int], list[Event]] = {}
    for event in predicted.events:
        sent = event.instruction
        if isinstance(sent, Transfer) and sent.direction is Direction.SEND:
            taker = costs.program.rank_of(sent.pipeline, sent.peer_stage)
            sends.setdefault((event.rank, taker, sent.boundary), []).append(event)
    names = costs.program.device_names
    for (giver, taker, _), events in sorted(sends.items()):
        seconds = [event.duration_s for event in events]
        sizes = [
            costs.transfer_bytes(event.instruction)
            for event in events
            if isinstance(event.instruction, Transfer)
        ]
        table.add_row(
            names[giver],
            names[taker],
            channel_of(costs, events[0]),
            str(len(events)),
            format_bytes(max(sizes)),
            format_seconds(max(seconds)),
            f"{_covered(events) / predicted.makespan_s:.0%}",
        )
    return table


def _covered(events: Iterable[Event]) -> float:
    """Return the seconds in which at least one of these events goes on."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted((event.start_s, event.end_s) for event in events):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _thinned(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Return every so many rows, with those that stand out, that were held against other texts, the last."""
    each = -(-len(rows) // MOST_POINTS)
    if each <= 1:
        return list(rows)
    return [
        row
        for index, row in enumerate(rows)
        if index % each == 0 or index == len(rows) - 1 or row.get("spike") or "eval_loss" in row
    ]


def _rate(row: MetricsRow, factor: int) -> float | None:
    rate = row.get("samples_per_s")
    return rate * factor if isinstance(rate, float | int) else None


def _devices(rows: Sequence[MetricsRow], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the busy share of each device in the last steps, less those under another plan."""
    shares: list[list[float]] = []
    for row in reversed(rows):
        busy_s, step_s = row.get("busy_s"), row.get("step_s")
        if not isinstance(busy_s, list) or len(busy_s) != len(names) or not step_s:
            break
        shares.append([min(1.0, seconds / step_s) for seconds in busy_s])
    if not shares:
        return []
    means = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
    slow = rows[-1].get("slow", {})
    return [
        {"device": name, "busy": mean, "slow": slow.get(name), "steps": len(shares)}
        for name, mean in zip(names, means, strict=True)
    ]


def _notes(rows: Sequence[MetricsRow]) -> list[str]:
    """Say what a reader of the curves is to know: steps that changed nothing, losses that stood out."""
    counts: list[tuple[str, Callable[[MetricsRow], bool]]] = [
        ("changed nothing, since a gradient was not finite", lambda row: row.get("finite") is False),
        ("had a loss that stood out", lambda row: bool(row.get("spike"))),
    ]
    told = []
    for words, holds in counts:
        steps = [row["step"] for row in rows if holds(row)]
        if steps:
            told.append(f"{len(steps)} of {len(rows)} steps {words}, the last {steps[-1]}")
    back = sum(later["step"] <= earlier["step"] for earlier, later in pairwise(rows))
    return told + ([f"{back} times steps were done again"] if back else [])
