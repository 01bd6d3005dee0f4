"""The metrics of a run, sent step by step to what people look at them with: TensorBoard, MLflow, W&B."""

import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from cost_model.strict_files import did_you_mean
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from partition.plan import Plan

PROJECT = "hetpipe"
"""What runs are gathered under: the project of W&B, the experiment of MLflow."""

Answer = TypeVar("Answer")

MOST_SAID = 300
"""Characters of an error of others."""


class SinkKind(StrEnum):
    """Who takes the metrics; each is the name of its package."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


_INSTALLED_BY = {
    SinkKind.TENSORBOARD: "tensorboard",
    SinkKind.MLFLOW: "mlflow-skinny",
    SinkKind.WANDB: "wandb",
}


class Sink(Protocol):
    """Takes the metrics of a run, opened for it."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take what a step measured."""

    def close(self, *, failed: bool) -> None:
        """End it; failed: whether the run did."""


def check_installed(kind: SinkKind) -> None:
    """Check that a sink can be opened.

    Raises: InputError if its package is not installed.
    """
    if importlib.util.find_spec(str(kind)) is None:
        raise InputError(
            f"--log {kind} needs a package that is not installed; pip install {_INSTALLED_BY[kind]}"
        )


def checked_sinks(names: Iterable[str]) -> tuple[SinkKind, ...]:
    """Return the sinks of these names, each once.

    >>> checked_sinks(["tensorboard"])
    (<SinkKind.TENSORBOARD: 'tensorboard'>,)

    Raises: InputError for a name that is none, or a sink whose package is not installed.
    """
    known = [str(kind) for kind in SinkKind]
    for name in names:
        if name not in known:
            raise InputError(f"metrics cannot be sent to {name!r}; {did_you_mean(name, known)}")
        check_installed(SinkKind(name))
    return tuple(dict.fromkeys(map(SinkKind, names)))


class Sinks:
    """All sinks of a run, opened with its first step: of a run that is refused nothing is sent.

    One that fails, such as a server that cannot be reached, is told of and left; training goes on.

    facts: what is to be known of the run, such as its settings; text and numbers. warn: takes a sentence.
    """

    def __init__(
        self,
        kinds: tuple[SinkKind, ...],
        folder: RunFolder,
        facts: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._folder, self._facts, self._warn = folder, facts, warn
        self._sinks: dict[SinkKind, Sink | None] = dict.fromkeys(kinds)

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, sink in tuple(self._sinks.items()):
            if sink is not None:
                self._try(name, partial(sink.close, failed=error is not None))

    def of_events(self, on_event: Callable[[dict[str, Any]], Answer]) -> Callable[[dict[str, Any]], Answer]:
        """Return what takes the events of a run, sends the metrics of each step, and passes all on."""
        if not self._sinks:
            return on_event

        def told(event: dict[str, Any]) -> Answer:
            if event.get("event") == "step":
                self._write(event)
            return on_event(event)

        return told

    def _write(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        values = {
            name: float(value)
            for name, value in event.items()
            if name not in ("event", "step") and isinstance(value, int | float) and math.isfinite(value)
        }
        for name in tuple(self._sinks):
            self._try(name, partial(self._write_to, name, step, values))

    def _write_to(self, name: SinkKind, step: int, values: Mapping[str, float]) -> None:
        sink = self._sinks[name]
        if sink is None:
            sink = self._sinks[name] = _SINKS[name](self._folder, self._facts, step)
        sink.write(step, values)

    def _try(self, name: SinkKind, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a library of others raises
            del self._sinks[name]
            said = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"--log {name}: {said[:MOST_SAID]}; metrics are not sent there any more")


def run_facts(settings: Settings, plan: Plan, profile: ModelProfile) -> dict[str, str | float]:
    """Return what sinks are told of a run: its settings, and what plan and profile decide."""
    facts = {
        "model": plan.model,
        "strategy": plan.strategy,
        "devices": " ".join(plan.device_names),
        "global_batch_size": plan.global_batch_size,
        "sequence_length": profile.sequence_length,
        "dtype": profile.dtype,
        **settings.to_json(),
    }
    return {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in facts.items()
        if value is not None and name != "format"
    }


class _TensorBoard:
    """Event files in a folder "tensorboard" of the run folder."""

    def __init__(self, folder: RunFolder, facts: Mapping[str, Any], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder.path / "tensorboard"))
        # a run that goes on replaces what one before it had sent of later steps
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write all values of a step as one event."""
        rows = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=rows)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self, *, failed: bool) -> None:
        """Write what is still in memory."""
        self._writer.close()


class _MLflow:
    """A run of an experiment, where MLFLOW_TRACKING_URI says."""

    def __init__(self, folder: RunFolder, facts: Mapping[str, Any], step: int) -> None:
        import mlflow

        self._mlflow = mlflow
        if mlflow.active_run() is None:
            mlflow.set_experiment(PROJECT)
        self._run = mlflow.start_run(run_name=folder.path.absolute().name, nested=True)
        mlflow.log_params(dict(facts))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def close(self, *, failed: bool) -> None:
        """End the run there."""
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class _WandB:
    """A run of Weights & Biases, as its own variables say where: WANDB_MODE, WANDB_PROJECT, ..."""

    def __init__(self, folder: RunFolder, facts: Mapping[str, Any], step: int) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.path.absolute().name,
            dir=str(folder.path),
            config=dict(facts),
        )
        # its own count of steps never goes back, and a run that lost a device does
        self._run.define_metric("*", step_metric="trained_step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log({**values, "trained_step": step})

    def close(self, *, failed: bool) -> None:
        """Send what is left, and end the run there."""
        self._run.finish(exit_code=int(failed))


_SINKS: Mapping[SinkKind, Callable[[RunFolder, Mapping[str, Any], int], Sink]] = {
    SinkKind.TENSORBOARD: _TensorBoard,
    SinkKind.MLFLOW: _MLflow,
    SinkKind.WANDB: _WandB,
}
