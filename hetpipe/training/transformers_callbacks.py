"""Callbacks written for transformers' Trainer, told of what a run of ours does."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from cost_model.errors import InputError
from hetpipe.training.callbacks import Callback
from hetpipe.training.checkpoint import Manifest, read_manifest

_ASKS = {
    "should_save": "save_steps",
    "should_evaluate": "eval_steps",
    "should_epoch_stop": "max_steps",
}
"""What a callback may ask for in the midst of a run, and the argument that decides it here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Intervals:
    """Each how many steps there is something to tell; 0 for never. epoch: the steps of one."""

    epoch: int
    logging: int
    logs_first: bool


class TransformersCallbacks(Callback):
    """Tells callbacks of transformers of steps, logs, evaluations and checkpoints; owns their state.

    They get no model: its weights are on the ranks. given: the TrainingArguments; others: what each is called
    with by name beside.
    """

    def __init__(
        self,
        listeners: Sequence[TrainerCallback],
        given: Any,
        state: TrainerState,
        intervals: Intervals,
        others: Mapping[str, Any],
    ) -> None:
        self.state, self.control = state, TrainerControl()
        self._listeners, self._given, self._intervals, self._others = listeners, given, intervals, others
        self._losses: list[float] = []

    def on_begin(self, source: Path | None) -> None:
        if source is not None:
            self._go_on(source, read_manifest(source))
        self._call("on_train_begin")
        self._call("on_epoch_begin")
        self._call("on_step_begin")

    def _go_on(self, source: Path, manifest: Manifest) -> None:
        """Take the state that a run had at a checkpoint: its logs, and what was best when held out."""
        state, step = self.state, manifest.step
        state.global_step, state.epoch = step, step / self._intervals.epoch
        if (kept := source / TRAINER_STATE_NAME).exists():
            before = TrainerState.load_from_json(str(kept))
            state.log_history = [row for row in before.log_history if row["step"] <= step]
        held_out = manifest.evaluated
        if self._given.metric_for_best_model is not None and held_out is not None and held_out.best_step:
            state.best_metric, state.best_global_step = held_out.best_loss, held_out.best_step
            best = source.parent / f"step-{held_out.best_step:06d}"
            state.best_model_checkpoint = str(best) if best.is_dir() else None

    def on_step_end(self, metrics: Mapping[str, Any]) -> bool:
        state, step = self.state, metrics["step"]
        state.global_step, state.epoch = step, step / self._intervals.epoch
        self._losses.append(metrics["loss"])
        self._call("on_step_end")
        every = self._intervals.logging
        due = (every and step % every == 0) or (step == 1 and self._intervals.logs_first)
        if due or self.control.should_log:
            self.control.should_log = False
            self._log(
                {
                    "loss": math.fsum(self._losses) / len(self._losses),
                    "grad_norm": metrics["gradient_norm"],
                    "learning_rate": metrics["learning_rate"],
                }
            )
            self._losses = []
        if step % self._intervals.epoch == 0:
            self._call("on_epoch_end")
        if "eval_loss" in metrics:
            self._evaluated(metrics)
        if step < state.max_steps and not self.control.should_training_stop:
            if step % self._intervals.epoch == 0:
                self._call("on_epoch_begin")
            self._call("on_step_begin")
        return bool(self.control.should_training_stop)

    def on_checkpoint(self, step: int, path: Path) -> bool:
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(path)
        self._call("on_save")
        if path.is_dir():  # as transformers does, for `_go_on`
            self.state.save_to_json(str(path / TRAINER_STATE_NAME))
        return bool(self.control.should_training_stop)

    def end(self, metrics: Mapping[str, float]) -> None:
        """Tell that training has ended, and what of it is logged at last."""
        self._log(dict(metrics))
        self._call("on_train_end")

    def _evaluated(self, metrics: Mapping[str, Any]) -> None:
        state = self.state
        found = {"eval_loss": metrics["eval_loss"], "eval_runtime": metrics["eval_s"]}
        self._log(found)
        self._call("on_evaluate", metrics=found)
        if self._given.metric_for_best_model is not None and metrics["best"]:
            state.best_metric, state.best_global_step = metrics["eval_loss"], metrics["step"]

    def _log(self, logs: dict[str, float]) -> None:
        logs = {**logs, "epoch": self.state.epoch or 0.0}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)

    def _call(self, event: str, **others: Any) -> None:
        for listener in self._listeners:
            answer = getattr(listener, event)(self._given, self.state, self.control, **self._others, **others)
            control = self.control if answer is None else answer
            for name, argument in _ASKS.items():
                if getattr(control, name):
                    raise InputError(
                        f"callback {type(listener).__name__} sets {name}, which is decided before the run "
                        f"begins; give {argument}"
                    )
            self.control = control
