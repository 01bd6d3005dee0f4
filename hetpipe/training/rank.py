"""One rank of a training run, which reads the run folder, trains, and reports."""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cost_model.cluster import Device
from cost_model.cluster_file import read_cluster
from cost_model.profile import read_profile
from cost_model.strict_files import read_text
from hetpipe.data.task import TaskFactory, TrainingTask
from hetpipe.models.mixed_precision import kept_casts, lowered_dtype, set_products, weight_dtype
from hetpipe.models.partial_model import LayerModel
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.program_text import parse_program
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings, read_settings
from hetpipe.runtime.accelerators import has_peaks, memory_figures, restart_peaks
from hetpipe.runtime.byte_counter import ByteCounter, counter_on
from hetpipe.runtime.device_room import check_room
from hetpipe.runtime.emulated_links import Board
from hetpipe.runtime.executor import Executor
from hetpipe.runtime.heartbeats import within_step
from hetpipe.runtime.host_load import HostLoad
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.processes import Emit
from hetpipe.runtime.rank_setup import (
    RankLayers,
    check_weights,
    executor_of,
    microbatches,
    pace_of,
    torch_device,
)
from hetpipe.runtime.step_outcome import StepOutcome
from hetpipe.runtime.stopping import Stopping
from hetpipe.runtime.torch_optimizer import optimizer_of, options_of
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint_copies import Copies, Hosts
from hetpipe.training.checkpoint_owners import load_checkpoint
from hetpipe.training.checkpoint_writer import CheckpointWriter, Written
from hetpipe.training.common_clock import CommonClock
from hetpipe.training.evaluation import Evaluation
from hetpipe.training.handover import Handover
from hetpipe.training.loss_watch import LossWatch
from hetpipe.training.meeting import LEAD_S, WAIT, from_first, gather, keep_alive, same_on_all_ranks
from hetpipe.training.rank_data import RankData
from hetpipe.training.rank_results import (
    Measurements,
    RankSummary,
    add_metrics,
    shared_parameters,
    write_results,
)
from hetpipe.training.resumed_settings import all_changes, option_differences
from hetpipe.training.slow_devices import SlowWatch
from hetpipe.training.slow_links import LinkWatch
from partition.estimates.plan_memory import memory_on
from partition.plan_file import read_plan

KEPT_STEPS = 100
"""A rank keeps the events of so many steps, the last ones: a run may have millions."""


class Asked(Flag):
    """What shall follow a step, as the rank that reports knows it and tells the others."""

    STOP = auto()
    SAVE = auto()


def train_rank(
    folder: str,
    make_task: TaskFactory,
    handover: str,
    *,
    rank: int,
    emit: Emit,
    stopping: Stopping | None = None,
) -> None:
    """Train as one rank of the program in a run folder; one rank emits metrics and writes the results.

    handover: folder of what the process that planned hands over (`Handover.fill`). stopping: what signals
    have asked of this process, where nobody answers them for it.

    Raises: InputError if the ranks read different programs.
    """
    run = _Run.open(RunFolder(Path(folder)), make_task, Handover(Path(handover)), rank, emit)
    run.stopping = stopping or Stopping()
    try:
        run.train()
    finally:
        run.close()


@dataclass(slots=True)
class _Run:
    """The state of one rank between steps: where in the data it is, and what was measured so far."""

    folder: RunFolder
    handover: Handover
    task_settings: TaskSettings
    costs: ProgramCosts
    rank: int
    task: TrainingTask
    model: LayerModel
    optimizer: Optimizer
    executor: Executor
    board: Board | None
    device: Device
    place: torch.device
    emit: Emit
    data: RankData
    need_bytes: float
    writer: CheckpointWriter
    clock: CommonClock
    slow: SlowWatch  # sees anything on the rank that reports alone
    links: LinkWatch
    evaluation: Evaluation | None
    step: int = 0
    samples_seen: int = 0
    watch: LossWatch = field(default_factory=LossWatch)
    load: HostLoad = field(default_factory=HostLoad)
    stopping: Stopping = field(default_factory=Stopping)
    outcomes: deque[StepOutcome] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    step_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0  # when the step before was over on all ranks
    saved_s: float = 0.0  # when the last checkpoint was begun
    put_off: bool = False  # a checkpoint that was due while steps changed nothing
    all_written: bool = False  # whether all ranks had done what the one under way asks of them
    peak_bytes: float | None = None
    reserved_bytes: float | None = None
    driver_bytes: float | None = None

    @classmethod
    def open(
        cls, folder: RunFolder, make_task: TaskFactory, handover: Handover, rank: int, emit: Emit
    ) -> "_Run":
        cluster, profile = read_cluster(folder.cluster), read_profile(folder.profile)
        settings = read_settings(folder.config)
        task_settings = TaskSettings.of(profile, settings)
        program = parse_program(read_text(folder.program), read_plan(folder.plan))
        same_on_all_ranks(program.sha256)
        costs = ProgramCosts(program, profile, cluster)
        device = cluster.device(program.device_names[rank])
        place = torch_device(device)
        task = make_task(folder, task_settings)
        profile.check_layers(task.chain.layer_names)
        precision = profile.dtype_of(device.kind)
        set_products(precision, place)
        dtype, lowered = weight_dtype(precision), lowered_dtype(precision)
        check_weights(profile, task.chain)
        layers = RankLayers.of(
            program, rank, task.chain, settings.seed, place, dtype, lowered, compiled=profile.compiled
        )
        optimizer = optimizer_of(task, layers.stepped, layers.counted, settings, layers.offloaded)
        board, first = handover.board(costs), handover.places().first
        hosts = Hosts.of(handover.places())
        links = LinkWatch.of(costs, rank, hosts.lowest, handover.predicted if rank == first else None)
        executor = executor_of(
            costs, rank, layers, task.loss_of(layers.model, profile.loss_chunks), optimizer,
            seed=settings.seed, pace=pace_of(device, settings.clock, place), timeout_s=settings.timeout_s,
            board=board, times=links.times,
        )  # fmt: skip
        clock = CommonClock.of_all(first)
        copies = Copies(hosts, rank)
        writer = CheckpointWriter(folder, task_settings, task, program, rank, layers.model, optimizer, copies)
        count = program.plan.global_batch_size
        step, seen, source = 0, 0, None if settings.resume_from is None else Path(settings.resume_from)
        if source is not None:
            step, seen = load_checkpoint(source, task_settings, task, layers.model, optimizer)
            manifest = checkpoint.read_manifest(source)
            if rank == first and task.make_optimizer is not None:
                made = options_of(task.make_optimizer)
                for told in option_differences(manifest, made, settings.learning_rate):
                    emit({"event": "told", "text": told})
            if executor.loss_scale is not None:
                executor.loss_scale = manifest.loss_scale or executor.loss_scale
            writer.changes = all_changes(manifest, task_settings, program.plan, task)
        evaluation = Evaluation.of(task, program, rank, place, executor, settings.best)
        if evaluation is not None and source is not None:
            evaluation.go_on(manifest.evaluated, emit if rank == first else None)
        return cls(
            folder, handover, task_settings, costs, rank, task, layers.model, optimizer, executor, board,
            device, place, emit, RankData(task, program, rank, place, seen + (settings.steps - step) * count),
            memory_on(program.plan, profile, device).total_bytes, writer, clock,
            SlowWatch.of(
                program, handover.planned_busy_s() if rank == clock.first else (),
                [device.kind for device in costs.devices],
            ),
            links, evaluation, step, seen,
        )  # fmt: skip

    @property
    def settings(self) -> Settings:
        """Return the settings of the run."""
        return self.task_settings.run

    @property
    def reports(self) -> bool:
        """Return whether this rank emits and writes what all measured."""
        return self.rank == self.clock.first

    def close(self) -> None:
        self.data.close()
        if self.board is not None:
            self.board.close()
        self.writer.close()

    def train(self) -> None:
        load = self.load
        first, self.saved_s = self.step, time.monotonic()
        self.ended_s = self.clock.common_s(self.saved_s)
        for step in range(first, self.settings.steps):
            if step == first + 1:
                load.lap()  # the first step is not timed
            self.step = step
            asked = self._one_step(counted=step == first)
            if self.all_written:
                asked |= self._told_of(self.writer.go_on())
            done = step + 1
            every = self.settings.every
            last = Asked.STOP in asked or done == self.settings.steps
            if step == first and self.settings.saves:
                for name in self.optimizer.parameters:
                    self.optimizer.states(name)  # what cannot be saved is refused now, not in the end
                if self.settings.every or self.settings.every_s:
                    self.writer.make_memory()
            if self.watch.diverged:
                break
            due = self.put_off or Asked.SAVE in asked or (every > 0 and done % every == 0)
            self.put_off = due and self.watch.skipped_in_a_row > 1
            if (due and not self.put_off) or (last and self.settings.save):
                with load.left_out():
                    last |= Asked.STOP in self._written_out()
                    self.saved_s = time.monotonic()
                    evaluated = None if self.evaluation is None else self.evaluation.evaluated
                    self.writer.begin(done, self.samples_seen, self.executor.loss_scale, evaluated)
            if last:
                break
        with load.left_out():
            self._written_out()
        summary = RankSummary(
            peak_bytes=None if self.settings.group_by_length else self.peak_bytes,
            outcomes=tuple(self.outcomes),
            load=load.lap(),
            shared=shared_parameters(self.costs.program, self.task.chain, self.model),
            on_gpu=self.device.is_gpu,
            reserved_bytes=None if self.settings.group_by_length else self.reserved_bytes,
            driver_bytes=self.driver_bytes,
            clock=self.clock.figures,
        )
        summaries = gather(summary.to_json())
        if self.reports and self.outcomes:
            measured = Measurements(
                tuple(map(RankSummary.of_json, summaries)),
                tuple(self.step_s),
                tuple(self.wall_s),
                self.watch.num_skipped,
                self.watch.num_spikes,
                self.handover.places(),
                (*self.slow.told, *self.links.told),
                None if self.evaluation is None else self.evaluation.evaluated,
            )
            write_results(self.folder, self.settings, self.costs, self.handover.predicted(), measured)
        if self.watch.diverged:
            self._tell({"event": "diverged", "step": self.step + 1, "skipped": self.watch.skipped_in_a_row})

    def _written_out(self) -> Asked:
        """Wait for the checkpoint under way, and tell of it; return what is asked for then."""
        return self._told_of(self.writer.finish())

    def _told_of(self, written: Written | None) -> Asked:
        """Tell of a complete checkpoint, on all ranks; return what is asked for then."""
        if written is None:
            return Asked(0)
        event = {"event": "checkpoint", "step": written.step, "path": str(written.path)}
        return self._tell({**event, "in_background": written.in_background})

    def _one_step(self, *, counted: bool) -> Asked:
        """Run one step, on every rank; return what shall follow."""
        count = self.costs.program.plan.global_batch_size
        data = self.data.step(self.samples_seen)
        self.task.chain.know_boundaries(data.any_inputs)
        microbatch = microbatches(self.costs.program, self.step, data.by_pipeline, data.weight)
        if counted:
            self.executor.rehearse(microbatch, self.task.chain.layer_names)
            self.driver_bytes = check_room(self.device, self.place, self.need_bytes)
        self.executor.prepare()
        counter = self._counter() if counted else None
        if counted:
            restart_peaks(self.place)  # what loading needed is no part of a step
        context: AbstractContextManager[Any] = counter if counter is not None else nullcontext()
        start_s = self.clock.own_s(self.clock.start_s())
        with context, kept_casts(), within_step(first=counted):
            outcome = self.executor.step(
                self.step,
                microbatch,
                start_s=start_s,
                learning_rate=self.task.learning_rate(self.settings, self.step),
                clip_norm=self.settings.clip_norm,
            )
        if counter is not None:
            self.peak_bytes = float(counter.peak_bytes)
        elif counted and (figures := memory_figures(self.place)) is not None:
            self.peak_bytes = figures.peak_allocated_bytes if has_peaks(self.place) else None
            self.reserved_bytes = figures.peak_reserved_bytes
        self.samples_seen += count
        if self.outcomes:  # of the last step alone is drawn when what was by the host's clock
            self.outcomes[-1] = replace(self.outcomes[-1], host_events=())
        self.outcomes.append(outcome)
        return self._record(outcome, count)

    def _counter(self) -> ByteCounter | None:
        states, gradients = self.optimizer.state_tensors(), self.executor.gradient_buffers()
        held = (*self.model.held_tensors(), *self.model.kept_arguments(), *states, *gradients)
        return counter_on(self.device, held, (*self.optimizer.host_tensors(), *self.model.host_tensors))

    def _record(self, outcome: StepOutcome, num_samples: int) -> Asked:
        self.stopping.begun = True
        is_spike = self.watch.see(outcome)
        start_s, own_end_s = self.clock.common_s(outcome.start_s), self.clock.common_s(outcome.end_s)
        signal, sent = self.stopping.number, self.links.mine(outcome.start_s)
        mine = [own_end_s, outcome.busy_s, signal, self.writer.is_done, self.clock.is_due, sent]
        ends_s, busy_s, numbers, written, due, messages = zip(*gather(mine), strict=True)
        end_s, self.all_written = max(ends_s), all(written)
        if any(due):
            self.clock.compare()
        asked = Asked(0)
        if signals := [number for number in numbers if number is not None]:
            asked, self.stopping.number = Asked.STOP, signals[0]
        step_s, wall_s, self.ended_s = end_s - start_s, end_s - self.ended_s, end_s
        self.step_s.append(step_s)
        self.wall_s.append(wall_s)
        held_out, asked = self._evaluate(asked)
        if not self.reports:
            return asked | self._tell({})
        metrics = {
            "step": self.step + 1,
            "loss": outcome.loss,
            "samples_per_s": num_samples / wall_s,
            "step_s": step_s,
            "wall_s": wall_s,
            "bubble": 1 - sum(busy_s) / (len(busy_s) * step_s),
            "learning_rate": self.task.learning_rate(self.settings, self.step),
            "gradient_norm": outcome.gradient_norm,
            "finite": outcome.finite,
            "spike": is_spike,
            "samples_seen": self.samples_seen,
        }
        if outcome.loss_scale is not None:
            metrics["loss_scale"] = outcome.loss_scale
        metrics |= held_out
        slow = self.slow.events(self.step + 1, busy_s) if len(self.step_s) > 1 else []
        slow += self.links.events(self.step + 1, messages, self.clock.lead_s - LEAD_S)
        metrics |= {"busy_s": list(busy_s)} | self.slow.now() | self.links.now()
        add_metrics(self.folder, metrics)
        ending = self.evaluation.ending(self.settings) if held_out and self.evaluation else []
        return asked | self._tell({"event": "step", **metrics}, *slow, *ending)

    def _evaluate(self, asked: Asked) -> tuple[dict[str, Any], Asked]:
        """Compute the held-out loss, if it is due; return what it says, and what is asked for then."""
        evaluation, step = self.evaluation, self.step + 1
        if evaluation is None or Asked.STOP in asked or self.watch.diverged:
            return {}, asked
        if not evaluation.is_due(self.settings, step):
            return {}, asked
        with self.load.left_out():
            found = evaluation.run(step, self.settings)
            self.ended_s = max(gather(self.clock.common_s(time.monotonic())))
        if found["best"] and self.settings.save:
            asked |= Asked.SAVE
        return found, asked | (Asked.STOP if evaluation.ending(self.settings) else Asked(0))

    def _tell(self, *events: dict[str, Any]) -> Asked:
        """Emit the events of the rank that reports; return on all ranks what they ask for."""
        if not dist.is_initialized():
            return self._asked(*events)
        answer = WAIT
        if self.reports:
            with keep_alive(self.settings.timeout_s / 3, self.clock.first):
                answer = self._asked(*events).value
        while (found := from_first(answer, self.clock.first)) == WAIT:
            pass
        return Asked(found)

    def _asked(self, *events: dict[str, Any]) -> Asked:
        asked = Asked.STOP if list(map(self.emit, events)).count(True) else Asked(0)
        every_s = self.settings.every_s
        if every_s and events[0]["event"] == "step" and time.monotonic() - self.saved_s >= every_s:
            asked |= Asked.SAVE
        return asked
