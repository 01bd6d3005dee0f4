"""The checkpoint that a rank has under way: copied to host memory, then written while training goes on."""

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from cost_model.errors import InputError
from hetpipe.data.task import TrainingTask
from hetpipe.models.huggingface_folder import TOKENIZER_CONFIG_FILE
from hetpipe.models.partial_model import LayerModel
from hetpipe.program.instructions import Program
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import TaskSettings
from hetpipe.runtime.loss_scale import LossScale
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.torch_optimizer import options_of
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint_copies import Copies
from hetpipe.training.checkpoint_owners import home_layers, written_by
from hetpipe.training.checkpoint_room import free_host_bytes
from hetpipe.training.evaluated import Evaluated
from hetpipe.training.frozen_base import base_hashes, weights_as_given
from hetpipe.training.joined_parts import JoinedParts
from hetpipe.training.meeting import all_done, gather
from hetpipe.training.resumed_settings import deciding_settings

EMPTY: Mapping[str, Mapping[str, Tensor]] = {}
MOST_OF_HOST = 0.9
"""Of the free memory of the host: what copies of all ranks may take."""


LESS_URGENT = 10
"""Added to what `nice` gives: a tenth of the time of a core that another thread wants."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer's file is to hold: parameters and the states of the optimizer, by name.

    joined: both, of parameters of which several ranks own a range; copies already.
    """

    parameters: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    joined: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def changing(self) -> dict[str, Tensor]:
        """Return what the next step changes, by name: all but frozen parameters."""
        trained = {name: value for name, value in self.parameters.items() if value.requires_grad}
        return {**trained, **self.states}


@dataclass(frozen=True, slots=True)
class Written:
    """A complete checkpoint. in_background: whether training went on meanwhile."""

    step: int
    path: Path
    in_background: bool


_Files = tuple[dict[int, checkpoint.LayerFile], dict[str, str]]
"""What a rank wrote: its layers' files, and the hashes of the base that it holds."""


@dataclass(slots=True)
class _UnderWay:
    """A checkpoint that is being written: first all ranks write their layers, then one completes it."""

    step: int
    folder: Path
    manifest: dict[str, Any]
    in_background: bool
    work: Future[Any]
    completing: bool = False


def _yield_to_others() -> None:
    """Let this thread have what threads that compute leave: it has until the next checkpoint."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            this = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, this, os.getpriority(os.PRIO_PROCESS, this) + LESS_URGENT)


@dataclass(slots=True)
class CheckpointWriter:
    """Writes the checkpoints of a rank, one at a time; owns the thread that writes, and the copies.

    `begin`, `go_on` and `finish` are called on all ranks together.
    """

    folder: RunFolder
    settings: TaskSettings
    task: TrainingTask
    program: Program
    rank: int
    model: LayerModel
    optimizer: Optimizer
    copies: Copies
    changes: tuple[dict[str, JsonValue], ...] = ()  # of settings, in the runs that led here
    _under_way: _UnderWay | None = None
    _copies: dict[str, Tensor] = field(default_factory=dict)
    _parts: JoinedParts = field(init=False)
    _made: Future[None] | None = None  # the memory of the copies, where it is made before it is needed
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "checkpoint", initializer=_yield_to_others)
    )

    def __post_init__(self) -> None:
        self._parts = JoinedParts(
            self.program, self.rank, self.task.chain, self.optimizer, self.settings.run.timeout_s
        )

    def make_memory(self) -> None:
        """Have the memory of the copies made beside training, before the first checkpoint needs it.

        Pages that are new cost ten times what copying into known ones does. Called on all ranks together.
        """
        layers = self._layers()
        if self._has_room(layers):
            self._made = self._thread.submit(self._make_memory, layers)

    def begin(
        self,
        step: int,
        samples_seen: int,
        loss_scale: LossScale | None,
        evaluated: Evaluated | None = None,
    ) -> None:
        """Begin to write the state after `step` steps; on return training may change it.

        Where host memory has no room for a copy, it is written before this returns.
        """
        assert self._under_way is None
        lowest = self.copies.hosts.lowest[self.rank]
        folder = Path(gather(self._made_folder(step) if self.rank == lowest else "")[lowest])
        layers = self._layers(self._parts.join())
        if self._made is not None:
            self._made.result()
        in_background = self._has_room(layers)
        if in_background:
            layers = {index: self._copied(layer) for index, layer in layers.items()}
        manifest = {
            "model": self.settings.model,
            "step": step,
            "samples_seen": samples_seen,
            "seed": self.settings.seed,
            "sequence_length": self.settings.sequence_length,
            "vocabulary_sha256": self.task.vocabulary_sha256,
            "torch_version": str(torch.__version__),
            "optimizer": {
                "name": self.optimizer.name,
                "steps": self.optimizer.num_steps,
                "options": [] if self.task.make_optimizer is None else options_of(self.task.make_optimizer),
            },
            "plan": self.program.plan.to_json(),
            "lora": self.settings.lora,
            "loss_scale": loss_scale,
            "settings": {
                **deciding_settings(self.settings, self.program.plan, self.task.data_sha256),
                **self.task.own_settings(step),
            },
            "changes": self.changes,
            "evaluated": evaluated,
            "best": evaluated is not None and evaluated.best_step == step,
        }
        work = self._thread.submit(self._write, step, folder, layers)
        self._under_way = _UnderWay(step, folder, manifest, in_background, work)
        while not in_background and not self._is_met():
            pass

    @property
    def is_done(self) -> bool:
        """Whether this rank has nothing to do before `go_on`.

        Raises: InputError if what it had to write could not be.
        """
        if self._under_way is None:
            return True
        done = self._under_way.work.done()
        if done:
            self._under_way.work.result()
        return done

    def go_on(self) -> Written | None:
        """Take the next step to a complete checkpoint, once all ranks are done; return it if that was all."""
        now = self._under_way
        if now is None:
            return None
        if now.completing:
            self._under_way = None
            self.copies.leave(now.folder)
            return Written(now.step, now.folder.with_name(f"step-{now.step:06d}"), now.in_background)
        own, base = now.work.result()
        rows = gather([[[layer, asdict(file)] for layer, file in own.items()], base])
        written = [
            ({layer: checkpoint.LayerFile(**file) for layer, file in files}, base) for files, base in rows
        ]
        now.completing = True
        now.work = self._thread.submit(self._complete, now, written)
        return None

    def finish(self) -> Written | None:
        """Wait for the checkpoint under way, however long it takes; return it, None if there is none."""
        written = None
        while self._under_way is not None and written is None:
            if self._is_met():
                written = self.go_on()
        return written

    def _is_met(self) -> bool:
        """Wait for a while, less than a meeting may take; return whether all ranks are done."""
        assert self._under_way is not None
        return all_done(self._under_way.work, self.settings.run.timeout_s / 3)

    def close(self) -> None:
        """Let the thread end, once nothing is under way."""
        self._thread.shutdown(wait=False)

    def _made_folder(self, step: int) -> str:
        with self._refused(step):
            return str(checkpoint.begin(self.folder.checkpoints, step))

    @contextmanager
    def _refused(self, step: int) -> Iterator[None]:
        """Say in one line what could not be written."""
        try:
            yield
        except OSError as error:
            is_first = checkpoint.latest(self.folder.checkpoints) is None
            rest = "begin again: none is there" if is_first else "go on with --resume from the one before"
            raise InputError(
                f"{self.folder.checkpoints}: the checkpoint of step {step} cannot be written "
                f"({error.strerror or error}); make room there, and {rest}"
            ) from error

    def _layers(self, joined: Mapping[str, Mapping[str, Tensor]] = EMPTY) -> dict[int, _Layer]:
        """Return the layers that this rank writes, as they are at this moment.

        joined: parameters of which several ranks own a range; left out where they are not given.
        """
        homes, cut = home_layers(self.task.chain), self._parts.names
        layers = {}
        for layer in written_by(self.program.plan, self.program.device_names[self.rank]):
            held = {
                name: value
                for name, value in self.model.parameters_of(layer).items()
                if homes[name] == layer and name not in self.task.chain.base and name not in cut
            }
            states = {key: state for name in held for key, state in self.optimizer.states(name).items()}
            whole = {
                name + rest: tensor
                for name, tensors in joined.items()
                if homes[name] == layer
                for rest, tensor in tensors.items()
            }
            layers[layer] = _Layer(held, states, whole)
        return layers

    def _has_room(self, layers: Mapping[int, _Layer]) -> bool:
        """Return, on all ranks, whether the host has room for the copies of all that are not made yet.

        Ranges of layers that are not joined yet are to have theirs beside them.
        """
        needed = self._parts.missing_bytes + sum(
            value.nbytes
            for layer in layers.values()
            for name, value in layer.changing.items()
            if name not in self._copies
        )
        room = gather([needed, free_host_bytes()])
        return bool(sum(needed for needed, _ in room) <= MOST_OF_HOST * min(free for _, free in room))

    def _make_memory(self, layers: Mapping[int, _Layer]) -> None:
        for layer in layers.values():
            for name, value in layer.changing.items():
                self._copies[name] = torch.zeros(value.shape, dtype=value.dtype)

    def _copied(self, layer: _Layer) -> _Layer:
        """Return the layer with copies, in memory of the host that is used again, of what changes."""
        for name, value in layer.changing.items():
            if name not in self._copies:
                self._copies[name] = torch.empty(value.shape, dtype=value.dtype)
            self._copies[name].copy_(value.detach())
        parameters = {name: self._copies.get(name, value) for name, value in layer.parameters.items()}
        return _Layer(parameters, {name: self._copies[name] for name in layer.states}, layer.joined)

    def _write(self, step: int, folder: Path, layers: Mapping[int, _Layer]) -> _Files:
        """Write the files of this rank's layers; return them, and the hashes of the base here."""
        chain, seed = self.task.chain, self.settings.seed
        files = {}
        for index, layer in layers.items():
            weights = weights_as_given(chain, index, layer.parameters, seed)
            with self._refused(step):
                tensors = weights | dict(layer.states) | dict(layer.joined)
                files[index] = checkpoint.write_layer(folder, index, tensors)
        return files, base_hashes(chain, self.model, seed)

    def _complete(self, now: _UnderWay, written: Sequence[_Files]) -> None:
        """Turn what all ranks wrote into a checkpoint, and remove what is to go for it.

        Where there are several hosts, on two of them: see `checkpoint_copies`.
        """
        with self._refused(now.step):
            self.copies.exchange(now.folder, [own for own, _ in written])
        if self.rank not in self.copies.hosts.completing:
            return
        files = {layer: file for part, _ in written for layer, file in part.items()}
        manifest = checkpoint.Manifest(
            **now.manifest,
            layers=tuple(files[layer] for layer in sorted(files)),
            base={name: sha256 for _, part in written for name, sha256 in sorted(part.items())},
        )
        kept = {
            checkpoint.VOCABULARY_FILE: self.folder.vocabulary,
            checkpoint.CONFIG_FILE: self.folder.model_config,
            checkpoint.CHAT_TEMPLATE_FILE: self.folder.chat_template,
            checkpoint.PROCESSOR_FILE: self.folder.image_processor,
            TOKENIZER_CONFIG_FILE: self.folder.tokenizer_config,
        }
        with self._refused(now.step):
            checkpoint.commit(
                now.folder, manifest, {name: path for name, path in kept.items() if path.exists()}
            )
        if self.settings.run.keep:
            checkpoint.keep_newest(self.folder.checkpoints, self.settings.run.keep)
