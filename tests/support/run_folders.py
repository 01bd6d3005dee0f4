"""Run folders as a run leaves them, made up in no time."""

import json
from pathlib import Path
from typing import Any

from cost_model.profile import profile_text
from hetpipe.program.trace import chrome_trace
from hetpipe.runs.run_folder import MEASURED, PREDICTED, RunFolder
from hetpipe.runs.run_report import DeviceReport, RunReport, StageReport, report_text
from hetpipe.simulation.prediction import predict
from hetpipe.simulation.schedule_selection import lower
from partition.plan_file import plan_text
from small_case import CLUSTER_TOML, small_cluster, small_plan, small_profile


def made_up_run(folder: Path, *, cluster_name: str | None = None, ended: bool = True) -> RunFolder:
    """A run of the small case; cluster_name: as JSON writes it. ended: with report and trace."""
    run, profile, cluster = RunFolder(folder), small_profile(), small_cluster()
    predicted = predict(small_plan(num_samples=3), profile, cluster)
    text = CLUSTER_TOML if cluster_name is None else f"name = {json.dumps(cluster_name)}\n{CLUSTER_TOML}"
    run.write(run.cluster, text)
    run.write(run.profile, profile_text(profile))
    run.write(run.plan, plan_text(predicted.plan))
    run.write(run.program, lower(predicted.plan, profile, cluster).text)
    if ended:
        run.write(run.trace, chrome_trace([(PREDICTED, predicted.trace), (MEASURED, predicted.trace)]))
        run.write(run.report, report_text(report_of(predicted.trace.makespan_s)))
    return run


def report_of(step_s: float) -> RunReport:
    """A step that took a tenth longer than predicted, on devices that held as much as planned."""
    return RunReport(
        model="small", strategy="manual", clock="wall", emulated=False, steps=3,
        predicted_step_s=step_s, measured_step_s=1.1 * step_s,
        step_s_all=(2 * step_s, 1.1 * step_s, 1.1 * step_s),
        predicted_bubble=0.25, measured_bubble=0.3, foreign_cores=0.0,
        stages=(StageReport(0, 0, "a/0", 1.0, 1.1), StageReport(0, 1, "b/0", 1.0, 1.2)),
        devices={name: DeviceReport(100.0, 90.0, 200.0, 250.0, 0.0) for name in ("a/0", "b/0")},
    )  # fmt: skip


def add_steps(run: RunFolder, count: int, **more: Any) -> None:
    """Add lines to metrics.jsonl, as of steps that went on."""
    before = len(run.read_metrics())
    with open(run.metrics, "a", encoding="utf-8") as file:
        for step in range(before + 1, before + count + 1):
            row = {
                "step": step, "loss": 5.0 / step, "step_s": 2.0, "wall_s": 2.5, "samples_per_s": 4.0,
                "learning_rate": 1e-3, "finite": True, "spike": False, "busy_s": [1.5, 1.0], **more,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
