"""From what the ranks measured to report.json and trace.json."""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cost_model.cluster import is_emulated
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, read_profile
from hetpipe.models.chain import ChainModel
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.quantized_weights import dense, matrix_held
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Program
from hetpipe.program.trace import Event, Trace, chrome_trace
from hetpipe.runs.run_folder import DEVICE_CLOCKS, MEASURED, PREDICTED, RunFolder
from hetpipe.runs.run_report import DeviceReport, RunReport, StageReport, read_recoveries, report_text
from hetpipe.runs.settings import Settings
from hetpipe.runtime.step_outcome import StepOutcome
from hetpipe.simulation.shared_network import shared_step_s
from hetpipe.training.evaluated import Evaluated
from hetpipe.training.handover import Places
from partition.estimates.plan_memory import memory_on
from partition.plan import Plan

ROUNDING = 1e-4
"""How far norms of the same parameter on a GPU and on a CPU may be apart, relative."""


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What one rank measured in a run; outcomes of its last steps only.

    load: (wall seconds, CPU seconds of the host, CPU seconds of this rank) of the timed steps.
    shared: of each parameter that other ranks own too, at the end. on_gpu: where they are. reserved_bytes and
    driver_bytes: see `DeviceReport`. clock: `CommonClock.figures` at the end.
    """

    peak_bytes: float | None
    outcomes: tuple[StepOutcome, ...]
    load: tuple[float, float, float]
    shared: dict[str, "SharedParameter"]
    on_gpu: bool
    reserved_bytes: float | None = None
    driver_bytes: float | None = None
    clock: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def to_json(self) -> dict[str, Any]:
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return plain | {
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "shared": {name: [value.sha256, value.norm] for name, value in self.shared.items()},
        }

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> "RankSummary":
        """Return the summary that `to_json` was made of."""
        return cls(**data | {
            "outcomes": tuple(map(StepOutcome.of_json, data["outcomes"])),
            "load": tuple(data["load"]),
            "clock": tuple(data["clock"]),
            "shared": {name: SharedParameter(*value) for name, value in data["shared"].items()},
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several ranks own: sha256 of its bytes, and its Euclidean norm."""

    sha256: str
    norm: float

    @classmethod
    def of(cls, value: Tensor) -> "SharedParameter":
        matrix = matrix_held(value)
        if matrix is not None:
            return cls(matrix.sha256(), float(torch.linalg.vector_norm(dense(value, torch.float32))))
        here = value.detach().cpu().contiguous()
        data = here.view(-1).view(torch.uint8).numpy().tobytes()
        return cls(
            hashlib.sha256(data).hexdigest(), float(torch.linalg.vector_norm(here, dtype=torch.float64))
        )


def shared_parameters(program: Program, chain: ChainModel, model: LayerModel) -> dict[str, SharedParameter]:
    """Return what to compare of each parameter here that has several owners."""
    owners: dict[str, int] = {}
    for name in program.device_names:
        held = {info.name for layer in program.plan.layers_of(name) for info in chain.parameters(layer)}
        for parameter in held:
            owners[parameter] = owners.get(parameter, 0) + 1
    return {
        name: SharedParameter.of(value) for name, value in model.held_parameters().items() if owners[name] > 1
    }


@dataclass(frozen=True, slots=True)
class Measurements:
    """What a run measured: each rank, in their order, and the seconds of every step.

    wall_s: of each step with all that lay between it and the one before. num_skipped: steps that changed
    nothing; num_spikes: of the loss (`LossWatch`). places: whose loads are of one host. slow: what was told
    of slow devices. evaluated: of held-out texts, None without any.
    """

    summaries: Sequence[RankSummary]
    step_s: tuple[float, ...]
    wall_s: tuple[float, ...]
    num_skipped: int
    num_spikes: int
    places: Places
    slow: tuple[str, ...] = ()
    evaluated: Evaluated | None = None


def write_results(
    folder: RunFolder, settings: Settings, costs: ProgramCosts, predicted: Trace, measured: Measurements
) -> None:
    """Write report.json, trace.json with the predicted step and the last measured one, and report.html.

    Where devices are emulated, the latter is there by the host's clock and by theirs.
    """
    from hetpipe.reporting.pages import write_page  # loads tables, which ranks need at their end alone

    last = [summary.outcomes[-1] for summary in measured.summaries]

    def trace(events: Iterable[Event]) -> Trace:
        ordered = sorted(events, key=lambda event: (event.rank, event.start_s, event.end_s))
        return Trace(predicted.device_names, tuple(ordered))

    traces = [(PREDICTED, predicted), (MEASURED, trace(e for each in last for e in each.measured_events))]
    if any(each.host_events for each in last):
        traces.append((DEVICE_CLOCKS, trace(event for each in last for event in each.events)))
    clocks = [summary.clock for summary in measured.summaries]
    folder.write(folder.trace, chrome_trace(traces, clocks))
    folder.write(folder.report, report_text(_report(folder, settings, costs, predicted, measured)))
    write_page(folder)


def add_metrics(folder: RunFolder, metrics: Mapping[str, Any]) -> None:
    """Add the line of a step to metrics.jsonl; numbers that are not finite are null.

    Raises: InputError if it cannot be written.
    """
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in metrics.items()
    }
    try:
        with open(folder.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")
    except OSError as error:
        raise InputError(
            f"{folder.metrics}: cannot be written ({error.strerror}); make room there, and go on "
            "with --resume"
        ) from error


def _report(
    folder: RunFolder, settings: Settings, costs: ProgramCosts, predicted: Trace, measured: Measurements
) -> RunReport:
    plan, summaries, step_s = costs.program.plan, measured.summaries, measured.step_s
    timed_s, clock_s = step_s[1:] or step_s, measured.wall_s[1:] or measured.wall_s
    timed = slice(-min(len(timed_s), len(summaries[0].outcomes)), None)
    traces = _timed_traces(predicted.device_names, summaries, timed)
    bubbles = [trace.bubble_of(seconds) for trace, seconds in zip(traces, timed_s[timed], strict=True)]
    wall_s, host_s = summaries[measured.places.first].load[:2]
    foreign_s = host_s - sum(summaries[rank].load[2] for rank in measured.places.local)
    names = {name for summary in summaries for name in summary.shared}
    return RunReport(
        model=plan.model,
        strategy=plan.strategy,
        clock=str(settings.clock),
        emulated=any(is_emulated(device.kind) for device in costs.devices),
        steps=len(step_s),
        predicted_step_s=predicted.makespan_s,
        measured_step_s=statistics.median(timed_s),
        step_s_all=step_s,
        predicted_bubble=predicted.bubble,
        measured_bubble=statistics.median(bubbles),
        foreign_cores=max(0.0, foreign_s / wall_s) if wall_s else 0.0,
        stages=_stage_reports(plan, predicted, traces),
        devices=_device_reports(costs, read_profile(folder.profile), summaries, timed),
        shared_parameters=len(names),
        owners_agree=all(owners_agree(name, summaries) for name in names),
        schedule=costs.program.schedule,
        global_batch_size=plan.global_batch_size,
        samples_per_s=plan.global_batch_size * len(clock_s) / sum(clock_s),
        between_steps=sum(clock_s) / sum(timed_s) - 1,
        gradient_dtype=plan.gradient_dtype,
        skipped_steps=measured.num_skipped,
        loss_spikes=measured.num_spikes,
        slow_devices=measured.slow,
        recoveries=read_recoveries(folder.recoveries),
        shared_step_s=shared_step_s(costs) if len(measured.places.local) < len(summaries) else None,
        **_held_out(measured.evaluated),
    )


def _held_out(evaluated: Evaluated | None) -> dict[str, Any]:
    """Return what the report says of held-out texts."""
    if evaluated is None:
        return {}
    return {
        "eval_loss": evaluated.loss,
        "best_eval_loss": evaluated.best_loss,
        "best_eval_step": evaluated.best_step,
        "eval_figures": evaluated.figures,
        "best_eval_figures": evaluated.best_figures,
        "best_eval_by": evaluated.by,
    }


def _stage_reports(plan: Plan, predicted: Trace, traces: Sequence[Trace]) -> tuple[StageReport, ...]:
    """Return the busy seconds of each stage: predicted, and the median of the timed steps."""
    measured_s = [trace.stage_busy_s() for trace in traces]
    return tuple(
        StageReport(
            pipeline=pipeline,
            stage=stage,
            device=plan.pipelines[pipeline].stages[stage].device,
            predicted_busy_s=busy_s,
            measured_busy_s=statistics.median(stage_s[pipeline, stage] for stage_s in measured_s),
        )
        for (pipeline, stage), busy_s in predicted.stage_busy_s().items()
    )


def _device_reports(
    costs: ProgramCosts, profile: ModelProfile, summaries: Sequence[RankSummary], timed: slice
) -> dict[str, DeviceReport]:
    """Return the memory of each device by name, and how far it was over the time that it is to take."""
    devices = {}
    for device, summary in zip(costs.devices, summaries, strict=True):
        busy_s = sum(outcome.busy_s for outcome in summary.outcomes[timed])
        over_s = sum(outcome.over_budget_s for outcome in summary.outcomes[timed])
        devices[device.name] = DeviceReport(
            predicted_bytes=memory_on(costs.program.plan, profile, device).total_bytes,
            peak_bytes=summary.peak_bytes,
            usable_bytes=device.usable_bytes,
            memory_bytes=device.memory_bytes,
            over_budget=over_s / busy_s if busy_s else 0.0,
            reserved_bytes=summary.reserved_bytes,
            driver_bytes=summary.driver_bytes,
            planned_driver_bytes=device.driver_bytes,
        )
    return devices


def owners_agree(name: str, summaries: Sequence[RankSummary]) -> bool:
    """Return whether the owners of a parameter have the same at the end: bit by bit on GPUs, and on CPUs.

    Between GPUs and CPUs to rounding, since torch's AdamW rounds differently on both.
    """
    owned = [(summary.on_gpu, summary.shared[name]) for summary in summaries if name in summary.shared]
    for on_gpu in (True, False):
        if len({parameter.sha256 for place, parameter in owned if place is on_gpu}) > 1:
            return False
    if len({parameter.sha256 for _, parameter in owned}) == 1:
        return True
    norms = [parameter.norm for _, parameter in owned]
    return max(norms) - min(norms) <= ROUNDING * max(norms)


def _timed_traces(names: tuple[str, ...], summaries: Sequence[RankSummary], timed: slice) -> list[Trace]:
    by_step = zip(*(summary.outcomes[timed] for summary in summaries), strict=True)
    return [
        Trace(names, tuple(event for outcome in outcomes for event in outcome.events)) for outcomes in by_step
    ]
