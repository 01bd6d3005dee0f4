"""Runs as tables and sentences for people: predicted beside measured."""

import statistics
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from cost_model.units import format_bytes, format_number, format_seconds
from hetpipe.reporting.driver_memory import beyond_tensors
from hetpipe.reporting.tables import gradient_sentences, new_table
from hetpipe.runs.run_folder import figure_text
from hetpipe.runs.run_report import (
    LARGE_BETWEEN,
    OVERLOADED_CORES,
    OVERLOADED_SHARE,
    RecoveryReport,
    RunReport,
)
from hetpipe.runs.settings import LOSS, Clock

MOST_SLOW = 8
"""Sentences on slow devices and links that are repeated after a run."""
EMULATION_NOTE = (
    "compute time of emulated devices is predicted by construction; order, hops, contention, bubbles, sync "
    "and step are what is tested"
)


def run_report_tables(report: RunReport) -> list[RenderableType]:
    """Return the tables after a run, predicted and measured, and what they can and cannot show."""
    times = new_table(f"{report.strategy}, {report.schedule}, {report.steps} steps")
    for title in ("predicted", "measured", "error"):
        times.add_column(title, justify="right", no_wrap=True)
    times.add_row("step", *_errors(report.predicted_step_s, report.measured_step_s, report.step_error))
    if report.shared_step_s is not None:
        errors = _errors(report.shared_step_s, report.measured_step_s, report.shared_error)
        times.add_row("step, sharing the network", *errors)
    if report.samples_per_s:
        rates = report.predicted_samples_per_s, report.samples_per_s
        error = f"{rates[1] / rates[0] - 1:+.1%}" if rates[0] else ""
        times.add_row("samples/s, wall clock", format_number(rates[0], 4), format_number(rates[1], 4), error)
    several = any(stage.pipeline for stage in report.stages)
    for stage in report.stages:
        name = f"{stage.pipeline}.{stage.stage}" if several else str(stage.stage)
        times.add_row(
            f"stage {name} on {stage.device}, busy",
            *_errors(stage.predicted_busy_s, stage.measured_busy_s, stage.error),
        )
    times.add_row("bubble", f"{report.predicted_bubble:.1%}", f"{report.measured_bubble:.1%}", "")
    return [times, *_memory_tables(report), *run_marks(report)]


def _memory_tables(report: RunReport) -> list[Table]:
    """Return the memory of tensors; of GPUs, that of allocator and driver in a table of their own."""
    memory = new_table("memory of")
    for title in ("predicted", "measured peak", "usable"):
        memory.add_column(title, justify="right", no_wrap=True)
    for device, found in report.devices.items():
        memory.add_row(
            device,
            format_bytes(found.predicted_bytes),
            "not counted" if found.peak_bytes is None else format_bytes(found.peak_bytes),
            format_bytes(found.usable_bytes),
        )
    rows = beyond_tensors(report)
    beyond = new_table("beyond tensors, of")
    for title in ("reserved", "driver, planned", "driver, measured"):
        beyond.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        beyond.add_row(*row)
    return [memory, beyond] if rows else [memory]


def _errors(predicted_s: float, measured_s: float, error: float) -> tuple[str, str, str]:
    return format_seconds(predicted_s), format_seconds(measured_s), f"{error:+.1%}"


def run_marks(report: RunReport) -> list[str]:
    """Say what is to be known beside the figures of a run."""
    marks = gradient_sentences(report.gradient_dtype)
    marks += _held_out_sentences(report)
    if report.emulated and report.clock == Clock.NOMINAL:
        marks.append(f"note: {EMULATION_NOTE}")
    if abs(report.between_steps) > LARGE_BETWEEN:
        marks.append(
            f"between steps: data, meetings, callbacks and checkpoints added {report.between_steps:.1%} to "
            f"the steps; {format_number(report.samples_per_s, 4)} samples/s by the wall clock, "
            f"{format_number(report.samples_per_s * (1 + report.between_steps), 4)} within steps"
        )
    if report.host_overloaded:
        marks.append(_overload_sentence(report))
    if report.loss_spikes:
        steps = "step" if report.loss_spikes == 1 else "steps"
        marks.append(
            f'losses: that of {report.loss_spikes} {steps} stood out ("spike" in metrics.jsonl says which)'
        )
    marks += _slow_sentences(report.slow_devices)
    marks += recovery_sentences(report.recoveries)
    if not report.owners_agree:
        marks.append("warning: parameters with several owners differ between them; this is a bug")
    return marks


def _slow_sentences(told: Sequence[str]) -> list[str]:
    """Repeat what was told of slow devices and links, of many changes the first and the last."""
    sentences = [f"slow: {text}" for text in told]
    left = len(sentences) - MOST_SLOW
    if left <= 1:
        return sentences
    half = MOST_SLOW // 2
    return [*sentences[:half], f"slow: {left} more changes (slow_devices in report.json)", *sentences[-half:]]


def _held_out_sentences(report: RunReport) -> list[str]:
    """Say the last loss and figures of held-out data, and those at the step of the best, by what that is."""
    if report.best_eval_loss is None:
        return []
    last = "not finite" if report.eval_loss is None else f"{report.eval_loss:.4f}"
    figures = {name: figure_text(name, value) for name, value in report.eval_figures.items()}
    best = {name: figure_text(name, value) for name, value in report.best_eval_figures.items()}
    best[LOSS] = f"{report.best_eval_loss:.4f}"
    sentences = []
    for name, text in {LOSS: last, **figures}.items():
        if name == report.best_eval_by:
            text += f", best {best[name]} after step {report.best_eval_step}"
        elif name in best:
            text += f", {best[name]} at the best {report.best_eval_by}"
        sentences.append(f"held-out {name} {text}")
    return sentences


def recovery_sentences(recoveries: Sequence[RecoveryReport]) -> list[str]:
    """Say how often a run went on by itself, what that took, and how often a host was let in again."""
    lost = [found for found in recoveries if found.kind != "joined"]
    told = []
    if lost:
        told.append(
            f"losses: {len(lost)}, {_typical('noticed after', [found.noticed_after_s for found in lost])}, "
            f"{_typical('trained again after', [found.again_s for found in lost])}; "
            f"{sum(found.steps_repeated for found in lost)} steps were done again (recoveries.jsonl)"
        )
    if joined := [found for found in recoveries if found.kind == "joined"]:
        again = _typical("trained again after", [found.again_s for found in joined])
        told.append(f"hosts let in again: {len(joined)}, {again} (recoveries.jsonl)")
    return told


def _typical(what: str, seconds: Sequence[float | None]) -> str:
    """Return the median, and the most where there are several."""
    known = sorted(found for found in seconds if found is not None)
    if not known:
        return f"{what} a time that is not known"
    most = f" ({known[-1]:.1f} s at most)" if len(known) > 1 else ""
    return f"{what} {statistics.median(known):.1f} s{most}"


def _overload_sentence(report: RunReport) -> str:
    """Say what disturbed the emulation: lateness, other processes, or both; and what that means."""
    late = max(device.over_budget for device in report.devices.values())
    others = f"other processes used {report.foreign_cores:.2f} cores"
    if late <= OVERLOADED_SHARE:
        return f"host busy: {others}, but operations were late by {late:.1%} at most"
    also = f", {others}" if report.foreign_cores > OVERLOADED_CORES else ""
    return (
        f"host overloaded: operations took up to {late:.1%} longer than they may{also}; do not trust the "
        "measured times"
    )


def measured_table(reports: Sequence[RunReport]) -> Table:
    """Show plans that were run, side by side; the speed-up is that of the last one over each."""
    table = new_table()
    table.add_column("strategy", no_wrap=True)
    titles = ("predicted step", "measured step", "error", "speed-up of the last")
    for title in (*titles, "samples/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(
            report.strategy,
            *_errors(report.predicted_step_s, report.measured_step_s, report.step_error),
            f"{report.measured_step_s / reports[-1].measured_step_s:.2f}",
            format_number(report.samples_per_s, 4) if report.samples_per_s else "",
        )
    return table
