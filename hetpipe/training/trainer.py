"""Training from a user's program: a model, data, an optimizer and a loss under any plan."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cost_model.cluster_file import read_cluster
from cost_model.dtypes import dtype_named
from cost_model.errors import InputError
from cost_model.known_clusters import cluster_path
from cost_model.profile import ModelProfile
from cost_model.units import format_seconds
from hetpipe.data.task import OptimizerFactory
from hetpipe.data.user_task import Model, own_task
from hetpipe.models.loss import Loss
from hetpipe.models.rank_modules import RANKS
from hetpipe.reporting.lost_reader import go_on_in, reader_outlived
from hetpipe.reporting.progress import step_bar
from hetpipe.reporting.run_tables import run_marks
from hetpipe.reporting.tables import show
from hetpipe.runs.metric_sinks import Sinks, checked_sinks, run_facts
from hetpipe.runs.run_folder import RunFolder, check_empty
from hetpipe.runs.run_report import RunReport
from hetpipe.runs.settings import Settings, checked_settings
from hetpipe.runs.warned import warn_caller
from hetpipe.runtime.processes import leave_if_read_by_a_rank, under_torchrun
from hetpipe.runtime.rank_server import server_ahead
from hetpipe.simulation.prediction import Prediction
from hetpipe.training import checkpoint, torchrun
from hetpipe.training.callbacks import Callback, Callbacks
from hetpipe.training.checkpoint_owners import check_optimizer
from hetpipe.training.checkpoint_weights import export_huggingface, load_weights
from hetpipe.training.given_optimizer import AdamW, checked_optimizer, whole_states
from hetpipe.training.own_planning import OwnPlanning, checked_batch_size, checked_name, name_of
from hetpipe.training.resumed_settings import inherited
from hetpipe.training.resumption import find_checkpoint, steps_done
from hetpipe.training.run import train_predicted, verified_prediction
from hetpipe.training.trained_model import TrainedModel
from partition.plan import Plan

RUNS = Path("runs")
MOST_RESTARTS = 3
"""How often in a row a run under a plan of its own goes on after a loss without coming further."""

GIVEN = "given to the trainer"
"""Stands in the settings for held-out samples that are no texts."""


_DECIDED = (
    *("steps", "data", "resume_from", "run_id", "lora", "adapter", "load_in"),
    "eval_data",
    *(field.name for field in fields(AdamW)),
)
"""Settings that follow from what a trainer is given otherwise."""


class Trainer:
    """A user's model, trained on all devices of a cluster, one process per device; owns the run folder.

    model, data, loss: as `own_task` takes them; a module keeps its own weights and is not changed.
    optimizer: `AdamW`, or a function that makes a torch.optim.Optimizer of a list of parameters, as
    functools.partial(torch.optim.SGD, lr=0.1). It is called on every rank with the parameters there, where
    states are sharded (zero 1 to 3) with those whose states it owns; it must treat each by itself (no LBFGS).
    """

    def __init__(
        self,
        model: Model,
        data: object,
        optimizer: AdamW | OptimizerFactory,
        loss: Loss,
        *,
        cluster: Path | str,
        batch_size: int | None = None,
        plan: Plan | None = None,
        profile: ModelProfile | None = None,
        name: str | None = None,
        folder: Path | str | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        rate_schedule: Callable[[int], float] | None = None,
        count_terms: Callable[[torch.Tensor], int] | None = None,
        shuffle: bool = True,
        eval_data: object = None,
        example: object = None,
        shrunk: Callable[[], nn.Module] | None = None,
        dtype: str | None = None,
        log: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """Check everything that can be checked without training.

        cluster: the cluster file. batch_size: samples a step, of all devices together. plan: of the model's
        layers; None: the best that is found, when training starts. profile: of this model on the cluster;
        None: measured when training starts, or read from the cache. name: under which the run is called; that
        of the plan or profile, else of the model's class. folder: the run folder; None: a new one under
        runs/. progress: whether plan, progress and result are printed. rate_schedule: step from 0 -> multiple
        of the learning rate; None: a linear warm-up over the first tenth of the steps (`warmup`), then a
        decay. count_terms, shuffle, example, shrunk: as `own_task` takes them. eval_data: data of which the
        loss is computed beside training, in whole batches: each `eval_every` steps and at the end. dtype: of
        the measurement, as --dtype names it, float32 if not given; with a profile that of the profile. log:
        "tensorboard", "mlflow", "wandb": where the metrics of each step are sent beside the run folder.
        settings: those of `Settings` that are left: seed, clip_norm, warmup, total_steps, every, save,
        eval_every, patience, schedule, clock, timeout_s.

        Raises: InputError naming what cannot be used and why.
        """
        self._callbacks = Callbacks(callbacks)
        _check_kinds(model, plan, cluster, rate_schedule)
        rates, factory, self._optimizer_name = checked_optimizer(optimizer)
        self._whole_states, self._resident_states = whole_states(optimizer), factory is not None
        batch = checked_batch_size(batch_size, plan)
        self._cluster = cluster_path(cluster)
        read_cluster(self._cluster)
        self._log = checked_sinks(log)
        self.plan = plan
        self.profile = profile
        self.folder = None if folder is None else RunFolder(Path(folder))
        self._model, self._progress = model, progress
        self._task = own_task(
            model,
            data,
            loss,
            count_terms=count_terms,
            shuffle=shuffle,
            shrunk=shrunk,
            make_optimizer=factory,
            rate_schedule=rate_schedule,
            eval_data=eval_data,
            eval_batch=batch,
            example=example,
        )
        self._loss, self._count_terms, self._eval_data = loss, count_terms, eval_data
        self._check_settings(settings)
        known = profile if plan is None else plan
        found = name_of(model) if known is None else known.model
        called = checked_name(found if name is None else name)
        dtype = None if dtype is None else dtype_named(dtype)
        self._planning = OwnPlanning(self._cluster, self._task, called, batch, dtype, quiet=not progress)
        stated = {"sequence_length": self._task.sequence_length, "dtype": dtype}
        held_out = {} if eval_data is None else {"eval_data": (GIVEN,)}
        self._settings = {**settings, **rates, **stated, **held_out}
        self._settings_for(steps=max(1, settings.get("total_steps") or 1))  # refused now, not after planning
        if plan is not None and plan.num_layers != self._task.num_layers:
            raise InputError(
                f"the plan is for {plan.num_layers} layers, the model has {self._task.num_layers}; plan for "
                "this model"
            )
        self._plans = plan is None

    @reader_outlived()
    def fit(self, steps: int | None = None, *, resume_from: Path | str | None = None) -> RunReport:
        """Train to the end of step `steps`, or until a callback ends it; return the report.

        A checkpoint of the end is in the run folder then (`checkpoint`), unless `save` is False. Where the
        plan is not a given one, a run that loses a device goes on without it.

        steps: None: once through the data, the last samples being those of a whole step.
        resume_from: a checkpoint, or a run folder whose newest is taken, to go on from. Settings that are not
        given are those of its run; of each that differs, and of the options of an optimizer, a warning tells.

        Under torchrun every process runs the script; `fit` comes back on rank 0 only, the other processes
        end with the training.

        Raises: InputError or InfeasibleError before anything is written, if the run cannot work;
        WorkerLostError if a process fails.
        """
        leave_if_read_by_a_rank()
        if under_torchrun() and os.environ["RANK"] != "0":
            torchrun.follow(self._task)
        steps = self._once_through() if steps is None else steps
        before: dict[str, Any] = {}
        source = None
        if resume_from is not None:
            source = find_checkpoint(str(resume_from), self.folder, RUNS, self._planning.name)
            manifest = checkpoint.read_manifest(source)
            check_optimizer(manifest, self._optimizer_name, source)
            before = {**inherited(manifest, steps), "data": (), "resume_from": str(source)}
        settings = self._settings_for(steps, before)
        self._callbacks.began(source)
        with nullcontext() if under_torchrun() else server_ahead(RANKS):
            report = self._train(settings, self._predict(settings))
        if self._progress and self.folder is not None:
            show([f"{report.steps} steps, {_step_sentence(report)}", *run_marks(report)])
            show([f"run folder: {self.folder.path}"])
        self._callbacks.ended(report)
        return report

    def prepare(self) -> Prediction:
        """Measure and plan, where that is not done yet, and return what is predicted; train nothing.

        `profile` and `plan` are there afterwards.

        Raises: InputError or InfeasibleError if the plan cannot run there.
        """
        leave_if_read_by_a_rank()
        return self._predict(self._settings_for(steps=1))

    def _predict(self, settings: Settings) -> Prediction:
        if self.profile is None:
            self.profile = self._planning.measure(self.plan)
        elif self.plan is None and self.profile.model != self._planning.name:
            raise InputError(
                f"the profile is of {self.profile.model!r}, the run is called {self._planning.name!r}; give "
                f"name={self.profile.model!r}"
            )
        profile = self._profile_of_optimizer()
        if self.plan is None:
            self.plan = self._planning.plan(profile)
        settings.check_stated(self.plan, profile)
        return verified_prediction(settings, self._cluster, profile, self.plan)

    def _profile_of_optimizer(self) -> ModelProfile:
        assert self.profile is not None
        return replace(self.profile, whole_states=self._whole_states, resident_states=self._resident_states)

    def _once_through(self) -> int:
        count = self._task.num_samples
        if count is None:
            raise InputError("the data are a function, which has no end; give the steps: fit(steps=100)")
        return max(1, -(-count // self._planning.batch_size))

    def _train(self, settings: Settings, prediction: Prediction) -> RunReport:
        profile, made = self._profile_of_optimizer(), self.folder is None
        folder = self.folder = self.folder or RunFolder.create(RUNS, prediction.plan.model)
        go_on_in(folder.path)
        if self._progress:
            show([plan_sentence(prediction)])
        try:
            facts = run_facts(settings, prediction.plan, profile)
            with (
                step_bar(settings.steps, steps_done(settings), quiet=not self._progress) as shown,
                Sinks(self._log, folder, facts, warn_caller) as sinks,
            ):

                def on_event(event: dict[str, Any]) -> bool:
                    shown(event)
                    return self._callbacks.told(event)

                return train_predicted(
                    settings,
                    self._cluster,
                    profile,
                    prediction,
                    folder,
                    on_event=sinks.of_events(on_event),
                    make_task=self._task,
                    max_restarts=MOST_RESTARTS if self._plans else 0,
                    replan=self._planning.replan(profile, settings) if self._plans else None,
                )
        finally:
            if made and not any(folder.path.iterdir()):  # refused before anything was written
                folder.path.rmdir()
                self.folder = None

    @property
    def checkpoint(self) -> Path | None:
        """Return the run folder's newest complete checkpoint, for `hetpipe.load_weights`, or None."""
        return None if self.folder is None else checkpoint.latest(self.folder.checkpoints)

    def save_pretrained(self, target: Path | str) -> None:
        """Write the trained model of transformers, or its adapters of peft, as a folder that these load.

        The weights are those of `checkpoint`; the model that was given is not changed.

        Raises: InputError if there is no checkpoint, it is no such model, or the folder is not empty.
        """
        source, model, target = self._trained_in(), self._own_model(), Path(target)
        check_empty(target, "another")
        if not hasattr(model, "save_pretrained"):
            raise InputError(
                f"a {type(model).__name__} has no save_pretrained, as models of transformers have; "
                "hetpipe.load_weights(trainer.checkpoint, model) fills any model"
            )
        export_huggingface(source, target, model)

    def evaluate(self, data: object = None) -> float:
        """Return the loss of all samples of data with the trained weights, as training would count it.

        It is computed in this process, so the whole model has to fit there. data: None: `eval_data`.

        Raises: InputError if there is no checkpoint, or there are no such data.
        """
        data = self._eval_data if data is None else data
        if data is None:
            raise InputError("there are no data to evaluate on; give some, or eval_data to the trainer")
        model = self._trained_model()
        return model.mean_loss(data, self._planning.batch_size, self._loss, self._count_terms)

    def predict(self, data: object) -> torch.Tensor:
        """Return what the trained model gives for the samples of data, in their order; labels do not matter.

        It is computed in this process, as `evaluate`.

        Raises: InputError if there is no checkpoint, or the data have no length.
        """
        outputs = self._trained_model().outputs(data, self._planning.batch_size)
        return torch.cat([output.cpu() for output, _ in outputs])

    def _trained_model(self) -> TrainedModel:
        model = self._own_model()
        load_weights(self._trained_in(), model)
        assert self.profile is not None  # a run has one
        return TrainedModel(model, self.profile.dtype)

    def _trained_in(self) -> Path:
        if self.checkpoint is None:
            raise InputError("there is no checkpoint of a trained model; fit first, without save=False")
        return self.checkpoint

    def _own_model(self) -> nn.Module:
        return copy.deepcopy(self._model) if isinstance(self._model, nn.Module) else self._model()

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        known = [field.name for field in fields(Settings) if field.init and field.name not in _DECIDED]
        unknown = sorted(settings.keys() - set(known))
        if unknown:
            raise InputError(f"there is no setting {unknown[0]!r}; there are {', '.join(known)}")

    def _settings_for(self, steps: int, before: Mapping[str, Any] | None = None) -> Settings:
        """Return the settings of a run; before: what is not given is that of the run that it goes on with."""
        return checked_settings(**{**(before or {}), **self._settings, "steps": steps})


def _check_kinds(model: object, plan: object, cluster: object, rate_schedule: object) -> None:
    """Refuse what is no argument of its name."""
    if isinstance(model, Plan):
        raise InputError("the model is a Plan; give model, data, optimizer, loss, and plan=... by name")
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"the plan is a {type(plan).__name__}; give a Plan, as hetpipe.read_plan reads it")
    if not isinstance(cluster, str | Path):
        raise InputError(f"the cluster is a {type(cluster).__name__}; give the path of a cluster file")
    if rate_schedule is not None and not callable(rate_schedule):
        raise InputError(
            f"rate_schedule is {rate_schedule!r}; give a function: step -> multiple of the learning rate"
        )


def plan_sentence(prediction: Prediction) -> str:
    """Say in a line what a plan does."""
    plan = prediction.plan
    stages = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    many = "1 pipeline" if len(plan.pipelines) == 1 else f"{len(plan.pipelines)} pipelines"
    of = "1 stage" if stages == 1 else f"{stages} stages"
    names = plan.device_names
    devices = ", ".join(names) if len(names) <= 4 else f"{len(names)} devices"
    return (
        f"{plan.model}: {many} with {of} on {devices}; predicted {format_seconds(prediction.step_s)} a step"
    )


def _step_sentence(report: RunReport) -> str:
    return (
        f"predicted {format_seconds(report.predicted_step_s)}, measured "
        f"{format_seconds(report.measured_step_s)} a step"
    )
