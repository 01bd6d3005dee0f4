"""From a plan to a finished run: the run folder, the processes, and what came out."""

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cost_model.cluster import Device
from cost_model.cluster_file import read_cluster
from cost_model.errors import DivergedError, InputError
from cost_model.memory import checkpoint_bytes
from cost_model.profile import ModelProfile, profile_text
from cost_model.strict_files import read_text
from hetpipe.data.kinds import data_sha256, read_data
from hetpipe.data.listened import listening
from hetpipe.data.task import TaskFactory, prepare_data, registered_task
from hetpipe.data.user_task import UserTask
from hetpipe.models.adapters import task_spec
from hetpipe.models.rank_modules import RANKS, modules_of
from hetpipe.program.verification import verify
from hetpipe.runs.identity import run_id_for
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import RunReport
from hetpipe.runs.settings import Settings, TaskSettings, settings_text
from hetpipe.runs.warned import warn_caller
from hetpipe.runtime.compilers import check_compilers
from hetpipe.runtime.gpus import check_here
from hetpipe.runtime.host_staging import Staging
from hetpipe.runtime.processes import Emit, RankGroup, WorkerLostError, run_ranks, under_torchrun
from hetpipe.runtime.rank_threads import rank_threads
from hetpipe.runtime.scratch import scratch_folder
from hetpipe.runtime.stopping import Stopping, signals_heard
from hetpipe.simulation.prediction import Prediction, predict
from hetpipe.training import checkpoint, torchrun
from hetpipe.training.adaptation import Adapt, Adaptation
from hetpipe.training.answered import Answered
from hetpipe.training.checkpoint_damage import damaged_later, put_aside
from hetpipe.training.checkpoint_owners import check_checkpoint
from hetpipe.training.checkpoint_room import room_of
from hetpipe.training.frozen_base import check_stored_base
from hetpipe.training.handover import Handover, Places
from hetpipe.training.other_hosts import OtherHosts
from hetpipe.training.rank import train_rank
from hetpipe.training.recovery import Recovery, Replan
from hetpipe.training.resumed_settings import differences
from partition.plan import Plan
from partition.plan_file import plan_text

LOGGER = logging.getLogger("hetpipe")


def prepare(
    folder: RunFolder,
    settings: Settings,
    cluster_file: Path,
    profile: ModelProfile,
    prediction: Prediction,
    *,
    own_data: bool = False,
    adapters_alone: bool = False,
    own: UserTask | None = None,
    local: Sequence[int] | None = None,
    tell: Callable[[str], None] = warn_caller,
) -> None:
    """Check everything, then fill the run folder.

    prediction: of a verified program. own_data: the task brings its data, no corpus is read. adapters_alone:
    as for `room_of`. own: the task, where a user has made it. Each of the `differences` is told. local: the
    ranks of this host, None for all.

    Raises: InputError or InfeasibleError before anything is written, if the run cannot work.
    """
    task_settings = TaskSettings.of(profile, settings)
    devices = prediction.costs.devices
    here = devices if local is None else [devices[rank] for rank in local]
    if profile.compiled:
        check_compilers(here)
    check_here(here, "give a --plan of devices that are here")
    vocabulary, done = None, 0
    if settings.resume_from is not None:
        source = Path(settings.resume_from)
        manifest = checkpoint.read_manifest(source)
        check_checkpoint(manifest, task_settings, source)
        check_stored_base(manifest.base, task_settings, source)
        done = manifest.step
        vocabulary = source / checkpoint.VOCABULARY_FILE
    damaged = damaged_later(folder, done, settings)
    room_of(folder, settings, profile, adapters_alone=adapters_alone).check()
    if settings.resume_from is not None:
        sha256 = "" if own_data else read_data(settings.data, task_spec(task_settings))[1].sha256
        for told in differences(
            manifest, task_settings, prediction.plan, data_sha256=sha256,
            own={} if own is None else own.own_settings(done),
        ):  # fmt: skip
            tell(told)
    for later, damage in damaged.items():
        tell(f"{damage}; it is kept as {put_aside(later).name}")
    cluster_text = read_text(cluster_file)
    fresh = not folder.path.exists() or not any(folder.path.iterdir())
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if not own_data:
            for told in prepare_data(folder, task_settings, vocabulary, plan=prediction.plan):
                tell(told)
        folder.begin_after(done)  # what is refused leaves what the run before told
        folder.write(folder.cluster, cluster_text)
        folder.write(folder.profile, profile_text(profile))
        folder.write(folder.plan, plan_text(prediction.plan))
        folder.write(folder.program, prediction.program.text)
        folder.write(folder.config, settings_text(settings))
    except BaseException:
        if fresh:  # nothing half-written
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def train(
    settings: Settings,
    cluster_file: Path,
    profile: ModelProfile,
    plan: Plan,
    folder: RunFolder,
    *,
    on_event: Emit = lambda event: None,
    make_task: TaskFactory | None = None,
) -> RunReport:
    """Train the model of a plan on this host, one process per device; return the report.

    on_event: called with {"event": "step", "step": ..., "loss": ..., ...} after each step, and with {"event":
    "checkpoint", "step": ..., "path": ...} after each checkpoint; True ends training there. While long texts
    are read it is called with {"event": "progress", "done": share, "what": ...}.
    make_task: for a model of your own: an `UserTask`, or an importable function that gives its
    `TrainingTask`.

    Warns of settings that differ from those of the run before; logs, as "hetpipe", devices that became slow.

    Raises: InputError, InfeasibleError if the run cannot work; WorkerLostError if a process fails;
    DivergedError if loss or gradients stay without finite values, the checkpoint before named;
    KeyboardInterrupt at SIGINT, SystemExit at SIGTERM and SIGUSR1, after a checkpoint.
    """
    settings.check_stated(plan, profile)
    prediction = verified_prediction(settings, cluster_file, profile, plan)
    return train_predicted(
        settings, cluster_file, profile, prediction, folder, on_event=on_event, make_task=make_task
    )


def verified_prediction(
    settings: Settings, cluster_file: Path, profile: ModelProfile, plan: Plan
) -> Prediction:
    """Return the prediction of a plan under the schedule of the settings, its program verified.

    Raises: InputError or InfeasibleError if the plan cannot run there.
    """
    cluster = read_cluster(cluster_file)
    prediction = predict(plan, profile, cluster, settings.schedule)
    verify(prediction.program, profile, cluster)
    return prediction


def train_predicted(
    settings: Settings,
    cluster_file: Path,
    profile: ModelProfile,
    prediction: Prediction,
    folder: RunFolder,
    *,
    on_event: Emit = lambda event: None,
    make_task: TaskFactory | None = None,
    tell: Callable[[str], None] = warn_caller,
    notice: Callable[[str], None] = LOGGER.warning,
    on_signal: Callable[[str], None] = lambda name: None,
    max_restarts: int = 0,
    replan: Replan | None = None,
    adapt: Adapt | None = None,
    hosts: OtherHosts | None = None,
) -> RunReport:
    """Train as `train` does, what was predicted and verified before; return the report.

    tell: takes the sentences of which `train` warns. notice: those on slow devices, which no change of the
    caller's code would spare it. on_signal: takes the name of a signal after which training ends with the
    step at hand, and a checkpoint unless `save` is False. max_restarts, replan: see `Recovery`; a run under
    torchrun is restarted by its agent alone. adapt: see `Adaptation`. hosts: who start other hosts' ranks.

    Raises: InputError, InfeasibleError as `prepare`; WorkerLostError if a process fails.
    """
    most = 0 if under_torchrun() and hosts is None else max_restarts
    recovery = Recovery(folder, prediction, most, replan, tell, last_step=settings.steps)
    if hosts is not None:
        recovery.replan = None if replan is None else _with_leader(replan, hosts)
        recovery.missing, recovery.returned = hosts.missing, hosts.returned
        hosts.take_back(_no_way_back(settings, recovery))
    begun_from = None if settings.resume_from is None else Path(settings.resume_from)
    with folder.locked(), signals_heard(on_signal, outlives_terminal=True) as stopping, ExitStack() as ends:
        settings = replace(settings, run_id=run_id_for(folder, begun_from))
        _tidy(folder, begun_from)
        ends.callback(_tidy, folder, begun_from)
        moved = checkpoint_bytes(profile, frozen=settings.lora is None)
        adaptation = Adaptation(settings.steps, moved, adapt, notice)
        if recovery.replan is not None:
            recovery.replan = adaptation.replanned(recovery.replan)
        answered = Answered(on_event, tell, stopping, settings, recovery, adaptation, hosts)
        prepared = _Preparation(settings, cluster_file, profile, folder, make_task, hosts)
        with listening(lambda done, what: on_event({"event": "progress", "done": done, "what": what})):
            prepared.fill(prediction, tell)
        if begun_from is None:
            folder.recoveries.unlink(missing_ok=True)  # of a run before
        if isinstance(make_task, UserTask):
            ends.callback(make_task.remove_weights, folder)
            make_task.write_weights(folder)
        while True:
            try:
                adaptation.begin()
                prepared.train(recovery.prediction, answered, stopping)
                new, joins = adaptation.take(), answered.takes_joining()
                if stopping.asked or answered.over or not (new or joins):
                    break
                if new is not None:
                    recovery.prediction, source = new, checkpoint.latest(folder.checkpoints)
                if joins:
                    source = recovery.join(begun_from).source
            except WorkerLostError as error:
                answered.end()
                restart = recovery.restart(error, begun_from)
                _wait(restart.wait_s, stopping)
                source = restart.source
            prepared.settings = replace(settings, resume_from=None if source is None else str(source))
            prepared.fill(recovery.prediction, lambda told: None)
        recovery.finish()
        answered.end()
        if answered.diverged is not None:
            raise DivergedError(_divergence(answered.diverged, folder))
        if not answered.complete:
            stopping.end()
    return adaptation.completed(folder)


@dataclass(slots=True)
class _Preparation:
    """What the attempts of a run share: all but the plan, and where each goes on from.

    texts: hashes of those of the first attempt, by option; none where the task brings its data.
    """

    settings: Settings
    cluster_file: Path
    profile: ModelProfile
    folder: RunFolder
    make_task: TaskFactory | None
    hosts: OtherHosts | None
    texts: dict[str, str] = field(default_factory=dict)

    def local(self, prediction: Prediction) -> tuple[int, ...] | None:
        """Return the ranks that this host starts, None where there are no others."""
        return None if self.hosts is None else self.hosts.local(prediction.costs.devices)

    def fill(self, prediction: Prediction, tell: Callable[[str], None]) -> None:
        """Fill the run folder for an attempt.

        Raises: InputError as `prepare`, and for other texts than those of the first attempt.
        """
        own = self.make_task if isinstance(self.make_task, UserTask) else None
        prepare(
            self.folder, self.settings, self.cluster_file, self.profile, prediction,
            own_data=self.make_task is not None,
            adapters_alone=own is not None and own.has_adapters,
            own=own, local=self.local(prediction), tell=tell,
        )  # fmt: skip
        for option, place in self._places().items():
            found = data_sha256(place)
            if self.texts.setdefault(option, found) != found:
                raise InputError(
                    f"the texts of {option} were changed since training began; put them back, and go on from "
                    "the last checkpoint with --resume"
                )

    def _places(self) -> dict[str, Path]:
        """Return where the texts of each option lie in the run folder."""
        if self.make_task is not None:
            return {}
        held_out = {"--eval-data": self.folder.held_out} if self.settings.eval_data else {}
        return {"--data": self.folder.path, **held_out}

    def train(self, prediction: Prediction, answered: Answered, stopping: Stopping) -> None:
        """Train by the run folder until all ranks have ended, or one is lost."""
        with scratch_folder("run", in_memory=True) as handed:
            devices, local = prediction.costs.devices, self.local(prediction)
            settings = TaskSettings.of(self.profile, self.settings)
            group = rank_group(devices, settings, local, plan=prediction.plan)
            Handover.fill(handed, prediction.costs, prediction.trace, Places.of(local))
            arguments = (str(self.folder.path), self.make_task or registered_task, str(handed))
            if self.hosts is not None:
                self.hosts.train(self.folder, str(handed), group, answered, stopping)
            elif under_torchrun():
                torchrun.lead(*arguments, group, answered, stopping)
            else:
                run_ranks(train_rank, arguments, group, answered)


def _with_leader(replan: Replan, hosts: OtherHosts) -> Replan:
    """Return what plans as before, and raises InputError for a plan without a device of this host."""

    def planned(lost: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
        prediction = replan(lost, room_bytes)
        hosts.local(prediction.costs.devices)
        return prediction

    return planned


def _no_way_back(settings: Settings, recovery: Recovery) -> str:
    """Return why a host that was lost is not let into the run again; "" if it is."""
    if recovery.replan is None:
        return "--plan is not planned anew"
    if not (settings.save or settings.every or settings.every_s):
        return "the run writes no checkpoint from which all could go on (--no-save)"
    return "--max-restarts is 0" if recovery.most <= 0 else ""


def _tidy(folder: RunFolder, source: Path | None) -> None:
    """Remove what became no checkpoint, and takes the room of one, unless the run goes on from just that."""
    if source is None or not source.name.startswith("."):
        checkpoint.tidy(folder.checkpoints)


def _wait(wait_s: float, stopping: Stopping) -> None:
    """Wait before a restart; end at once if a signal has asked for it: there is nothing to finish."""
    end_s = time.monotonic() + wait_s
    while not stopping.asked and time.monotonic() < end_s:
        time.sleep(0.1)
    stopping.end()


def _divergence(event: Mapping[str, Any], folder: RunFolder) -> str:
    """Say that a run diverged, and where it can go on from."""
    first = event["step"] - event["skipped"]
    good = next((found for step, found in checkpoint.written(folder.checkpoints) if step <= first), None)
    rest = "there is no checkpoint from before" if good is None else f"--resume {good} goes on from before"
    return (
        f"training diverged: loss or gradients of the last {event['skipped']} steps were not finite, which "
        f"changed nothing; {rest}, lower --learning-rate"
    )


def rank_group(
    devices: Sequence[Device],
    settings: TaskSettings,
    local: Sequence[int] | None = None,
    *,
    plan: Plan | None = None,
) -> RankGroup:
    """Return a process per device, with its threads (`rank_threads`), NCCL between those with a GPU.

    local: the ranks that share this host's cores, None for all. plan: what they run.

    Raises: InputError for GPUs beside emulated devices.
    """
    try:
        preload = modules_of(settings, devices)
    except InputError:  # a model of the user's own
        preload = RANKS
    return RankGroup(
        tuple(device.name for device in devices),
        rank_threads(devices, local, plan),
        backend=Staging.of(devices).backend,
        preload=preload,
        timeout_s=settings.run.timeout_s,
        parts=() if plan is None else tuple(parts_of(plan, device.name) for device in devices),
    )


def parts_of(plan: Plan, device: str) -> str:
    """Return what runs on a device, in words: "layers 3 to 5"."""
    layers = plan.layers_of(device)
    return f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"


def measure(
    settings: Settings, cluster_file: Path, profile: ModelProfile, plan: Plan, *, keep: Path | None = None
) -> RunReport:
    """Run a plan for settings.steps steps in a folder that is thrown away; the first step is not timed.

    No checkpoint is written, whatever the settings say. keep: a folder to move the run's to instead.
    """
    settings = replace(settings, save=False, every=0, every_s=0.0)
    with scratch_folder("measure") as place:
        folder = RunFolder(place / "run")
        report = train(settings, cluster_file, profile, plan, folder)
        if keep is not None:
            shutil.copytree(folder.path, keep, dirs_exist_ok=True)
        return report
