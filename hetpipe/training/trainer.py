"""Training from a user's program: a model, data, an optimizer and a loss under any plan."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from cost_model.cluster_file import read_cluster
from cost_model.dtypes import FLOAT32
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.data.task import OptimizerFactory
from hetpipe.data.user_task import Model, own_task
from hetpipe.models.loss import Loss
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import RunReport
from hetpipe.runs.settings import Settings, TaskSettings, checked_settings
from hetpipe.runtime.processes import under_torchrun
from hetpipe.runtime.torch_optimizer import made_of_samples, optimizer_name
from hetpipe.training import checkpoint, torchrun
from hetpipe.training.checkpoint_owners import check_optimizer
from hetpipe.training.resumed_settings import inherited
from hetpipe.training.resumption import find_checkpoint
from hetpipe.training.run import train
from partition.plan import Plan

RUNS = Path("runs")
PROFILE_BUDGET_S = 10.0
"""How long a model without a profile is measured: its plan is made, the times are for the report only."""


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, ICLR 2019), fused; vectors (biases, normalisation) do not decay.

    learning_rate: its highest value; the schedule gives multiples of it.
    """

    name: ClassVar[str] = "AdamW"

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01


class Callback:
    """A listener to a `Trainer`: inherit, and write the methods that you need.

    Called in the process that called `fit`, in the order of the list; training goes on when all have
    returned. True ends training after the step at hand, with a checkpoint unless `save` is False; whatever
    else a method gives does not. An exception ends the ranks and comes out of `fit`.
    """

    def on_step_end(self, metrics: Mapping[str, Any]) -> bool | None:
        """Take a step's line of metrics.jsonl (step from 1, loss, step_s, gradient_norm, ...)."""

    def on_checkpoint(self, step: int, path: Path) -> bool | None:
        """Take, after each complete checkpoint, how many steps are in it, and its folder."""

    def on_end(self, report: RunReport) -> None:
        """Take the report after the last step, once it is written."""


_METHODS = ("on_step_end", "on_checkpoint", "on_end")
_DECIDED = (
    *("steps", "data", "resume_from", "lora", "adapter", "load_in"),
    *("eval_data", "eval_every", "patience"),
    *(field.name for field in fields(AdamW)),
)
"""Settings that follow from what a trainer is given otherwise."""


class Trainer:
    """A user's model, trained under a plan, one process per device; owns the run folder.

    plan: of the model's layers, under the name by which the run is called.
    model, data, loss: as `own_task` takes them; a module keeps its own weights and is not changed.
    optimizer: `AdamW`, or a function that makes a torch.optim.Optimizer of a list of parameters, as
    functools.partial(torch.optim.SGD, lr=0.1). It is called on every rank with the parameters there, under
    zero 1 with those whose states the rank owns, so it must treat each by itself (not LBFGS).
    """

    def __init__(
        self,
        plan: Plan,
        model: Model,
        data: object,
        optimizer: AdamW | OptimizerFactory,
        loss: Loss,
        *,
        cluster: Path | str,
        profile: ModelProfile | None = None,
        folder: Path | str | None = None,
        callbacks: Sequence[Callback] = (),
        rate_schedule: Callable[[int], float] | None = None,
        count_terms: Callable[[torch.Tensor], int] | None = None,
        shuffle: bool = True,
        shrunk: Callable[[], nn.Module] | None = None,
        dtype: str | None = None,
        **settings: Any,
    ) -> None:
        """Check everything that can be checked without training.

        cluster: the cluster file. profile: of this model on it; None: measured when training starts.
        folder: the run folder; None: a new one under runs/. rate_schedule: step from 0 -> multiple of the
        learning rate; None: a linear warm-up over the first tenth of the steps (`warmup`), then a decay.
        count_terms, shuffle, shrunk: as `own_task` takes them. dtype: of the measurement, float32 where it is
        not given; with a profile that of the profile. settings: those of `Settings` that are left: seed,
        clip_norm, warmup, total_steps, every, save, schedule, clock, timeout_s.

        Raises: InputError naming what cannot be used and why.
        """
        for callback in callbacks:
            if not any(callable(getattr(callback, method, None)) for method in _METHODS):
                raise InputError(
                    f"a callback is a {type(callback).__name__} without any of {', '.join(_METHODS)}; "
                    "inherit from hetpipe.Callback"
                )
        rates, factory, self._optimizer_name = _checked(optimizer)
        if not isinstance(plan, Plan):
            raise InputError(
                f"the plan is a {type(plan).__name__}; give a Plan, as hetpipe.read_plan reads it"
            )
        if not isinstance(cluster, str | Path):
            raise InputError(f"the cluster is a {type(cluster).__name__}; give the path of a cluster file")
        if rate_schedule is not None and not callable(rate_schedule):
            raise InputError(
                f"rate_schedule is {rate_schedule!r}; give a function: step -> multiple of the learning rate"
            )
        self.plan = plan
        self.callbacks = tuple(callbacks)
        self.folder = None if folder is None else RunFolder(Path(folder))
        self._cluster = Path(cluster)
        self._profile = profile
        self._task = own_task(
            model,
            data,
            loss,
            count_terms=count_terms,
            shuffle=shuffle,
            shrunk=shrunk,
            make_optimizer=factory,
            rate_schedule=rate_schedule,
        )
        self._check_settings(settings)
        self._measured = TaskSettings(plan.model, self._task.sequence_length, dtype or FLOAT32)
        stated = {"sequence_length": self._measured.sequence_length, "dtype": dtype}
        self._settings = {**settings, **rates, **stated}
        self._settings_for(steps=max(1, settings.get("total_steps") or 1))  # refused now, not after planning
        if plan.num_layers != self._task.num_layers:
            raise InputError(
                f"the plan is for {plan.num_layers} layers, the model has {self._task.num_layers}; plan for "
                "this model"
            )

    def fit(self, steps: int, *, resume_from: Path | str | None = None) -> RunReport:
        """Train to the end of step `steps`, or until a callback ends it; return the report.

        A checkpoint of the end is in the run folder then (`checkpoint`), unless `save` is False.

        resume_from: a checkpoint, or a run folder whose newest is taken, to go on from. Settings that are not
        given are those of its run; of each that differs, and of the options of an optimizer, a warning tells.

        Under torchrun every process runs the script; `fit` comes back on rank 0 only, the other processes
        end with the training.

        Raises: InputError or InfeasibleError before anything is written, if the run cannot work;
        WorkerLostError if a process fails.
        """
        if under_torchrun() and os.environ["RANK"] != "0":
            torchrun.follow(self._task)
        before: dict[str, Any] = {}
        if resume_from is not None:
            source = find_checkpoint(str(resume_from), self.folder, RUNS, self.plan.model)
            manifest = checkpoint.read_manifest(source)
            check_optimizer(manifest, self._optimizer_name, source)
            before = {**inherited(manifest, steps), "data": (), "resume_from": str(source)}
        settings = self._settings_for(steps, before)
        if self._profile is None:
            self._profile = self._measure()
        report = self._train(settings, self._profile)
        for callback in self.callbacks:
            getattr(callback, "on_end", _ignore)(report)
        return report

    def _train(self, settings: Settings, profile: ModelProfile) -> RunReport:
        made = self.folder is None
        folder = self.folder = self.folder or RunFolder.create(RUNS, self.plan.model)
        try:
            return train(
                settings,
                self._cluster,
                profile,
                self.plan,
                folder,
                on_event=self._on_event,
                make_task=self._task,
            )
        finally:
            if made and not any(folder.path.iterdir()):  # refused before anything was written
                folder.path.rmdir()
                self.folder = None

    @property
    def checkpoint(self) -> Path | None:
        """Return the run folder's newest complete checkpoint, for `hetpipe.load_weights`, or None."""
        return None if self.folder is None else checkpoint.latest(self.folder.checkpoints)

    def _measure(self) -> ModelProfile:
        return profile_model(
            self._measured.model,
            read_cluster(self._cluster),
            self._measured.sequence_length,
            dtype=self._measured.dtype,
            budget_s=PROFILE_BUDGET_S,
            microbatch_sizes=sorted({pipeline.microbatch_size for pipeline in self.plan.pipelines}),
            task=self._task,
        )

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        known = [field.name for field in fields(Settings) if field.init and field.name not in _DECIDED]
        unknown = sorted(settings.keys() - set(known))
        if unknown:
            raise InputError(f"there is no setting {unknown[0]!r}; there are {', '.join(known)}")

    def _settings_for(self, steps: int, before: Mapping[str, Any] | None = None) -> Settings:
        """Return the settings of a run; before: what is not given is that of the run that it goes on with."""
        return checked_settings(**{**(before or {}), **self._settings, "steps": steps})

    def _on_event(self, event: Mapping[str, Any]) -> bool:
        """Tell the callbacks; return whether one of them ends training."""
        answers: list[object] = []
        for callback in self.callbacks:
            if event["event"] == "step":
                metrics = {key: value for key, value in event.items() if key != "event"}
                answers.append(getattr(callback, "on_step_end", _ignore)(metrics))
            elif event["event"] == "checkpoint":
                path = Path(event["path"])
                answers.append(getattr(callback, "on_checkpoint", _ignore)(event["step"], path))
        return any(answer is True for answer in answers)


def _ignore(*_: object) -> None:
    """Stand for a method that a callback does not have."""


def _checked(
    optimizer: AdamW | OptimizerFactory,
) -> tuple[dict[str, Any], OptimizerFactory | None, str]:
    """Return hyper-parameters for the settings; the factory, if it is one; and the optimizer's name."""
    if isinstance(optimizer, AdamW):
        return {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}, None, AdamW.name
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__} of parameters in this process, the ranks have "
            "their own; give what makes one, as functools.partial(torch.optim.SGD, lr=0.1)"
        )
    if not callable(optimizer):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__}; give hetpipe.AdamW(...) or what makes an "
            "optimizer of a list of parameters"
        )
    try:
        made = made_of_samples(optimizer)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the optimizer factory fails: {str(error).partition(chr(10))[0]}") from None
    if isinstance(made, torch.optim.LBFGS):
        raise InputError(
            "LBFGS looks at all parameters at once, and each rank has some; give another optimizer"
        )
    return {"learning_rate": float(made.param_groups[0]["lr"])}, optimizer, optimizer_name(made)
