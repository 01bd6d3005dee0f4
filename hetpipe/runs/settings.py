"""How to train: everything of a run that is neither model, cluster nor plan. Stored as config.json."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from cost_model.dtypes import DTYPES, FLOAT32, MIXED
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from cost_model.strict_files import STRICT, check_format, read_json, validate
from hetpipe.program.instructions import Schedule
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.optimizers import OptimizerKind, check_options, num_states
from hetpipe.runs.quantization import check_load_in, load_in_suffix
from partition.plan import Plan

FORMAT = "hetpipe.config/2"
FORMAT_BEFORE = "hetpipe.config/1"
MOST_STEPS = 10**12
LOSS = "loss"
"""What the best checkpoint is found by, where no figure is named."""
DECIDED = ("model", "global_batch_size", "sequence_length", "dtype")
"""What the plan and its profile decide of a run."""


class Clock(StrEnum):
    """What an emulated device charges for an operation."""

    NOMINAL = "nominal"  # the profile's time of the operation, over speed
    CPU = "cpu"  # the CPU seconds that its thread really used, over speed


class Decay(StrEnum):
    """How the learning rate falls after the warm-up."""

    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQRT = "inverse-sqrt"
    CONSTANT = "constant"


class _Decided:
    """A fact that a plan or a profile decides; read from settings it is what their caller stated, or None."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, settings: "Settings | None", owner: type) -> Any:
        return None if settings is None else settings.stated.get(self.name)


_STATED: dict[str, Any] = {name: _Decided(name) for name in DECIDED}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a training run: its own facts alone.

    model, global_batch_size, sequence_length, dtype: decided by the plan and its profile, and not held; who
    states them all the same has them compared when training starts (`check_stated`).
    total_steps: length of the learning-rate schedule, None: steps. warmup: its first part, in which the rate
    rises, as a share of it; warmup_steps: in steps, None: as warmup says; decay: the rest.
    every: a checkpoint each so many steps, 0 for none; every_s: one whenever so many seconds have passed
    since the last, 0.0 for none; save: one at the end; keep: so many stay, the newest, and the best, 0: all.
    resume_from: folder of the checkpoint to go on from. run_id: of the run that the folder holds, the same on
    all of its hosts; training gives it, whatever is stated here (`hetpipe.runs.identity`).
    schedule: as asked for, None: `hetpipe.simulation.schedule_selection.default_schedule`. model_folder:
    where a model that is not of the table lies, configuration and weights. lora: of the adapters that are
    trained in place of the model; adapter: the PEFT folder that they begin with, None for new ones. load_in:
    "4bit" or "8bit", in which the matrices of their base are held; None: as they are given.
    eval_data: texts on which the loss is computed beside training, () for none: each eval_every steps, 0:
    never but at the end. patience: training ends after so many such losses in a row without a new least, 0:
    it does not. best: by what the best is found: the loss, or a figure of the task, as accuracy.
    pack: whether a row of `sequence_length` tokens holds several samples, none of which sees another.
    group_by_length: whether the samples of a step are of like length, and filled up to the longest of them.
    doc_stride: the tokens that windows of a long context have in common, None where it is cut.
    optimizer: that of a run, where no task brings its own; momentum, rho: of those that take them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: InitVar[str | None] = _STATED["model"]
    steps: int = 0  # none: refused
    global_batch_size: InitVar[int | None] = _STATED["global_batch_size"]
    sequence_length: InitVar[int | None] = _STATED["sequence_length"]
    total_steps: int | None = None
    seed: int = 0
    learning_rate: float = 1e-4
    warmup: float = 0.1
    warmup_steps: int | None = None
    decay: Decay = Decay.LINEAR
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    dtype: InitVar[str | None] = _STATED["dtype"]
    every: int = 0
    every_s: float = 0.0
    keep: int = 0
    save: bool = True
    clock: Clock = Clock.NOMINAL
    schedule: Schedule | None = None
    data: tuple[str, ...] = ()
    resume_from: str | None = None
    timeout_s: float = 600.0
    model_folder: str | None = None
    lora: LoraSettings | None = None
    adapter: str | None = None
    load_in: str | None = None
    eval_data: tuple[str, ...] = ()
    eval_every: int = 0
    patience: int = 0
    best: str = LOSS
    pack: bool = False
    group_by_length: bool = False
    doc_stride: int | None = None
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    momentum: float = 0.0
    rho: float = 0.9
    run_id: str | None = field(default=None, compare=False)
    stated: Mapping[str, object] = field(init=False, repr=False, compare=False)

    def __post_init__(
        self,
        model: str | None,
        global_batch_size: int | None,
        sequence_length: int | None,
        dtype: str | None,
    ) -> None:
        values = (model, global_batch_size, sequence_length, dtype)
        stated = {key: value for key, value in zip(DECIDED, values, strict=True) if value is not None}
        object.__setattr__(self, "stated", stated)
        if check_load_in(self.load_in) is not None and self.lora is None:
            raise InputError(
                f"weights in {self.load_in} cannot be trained, only adapters beside them; give --lora or "
                "--adapter"
            )
        for name in ("learning_rate", "warmup", "weight_decay", "clip_norm", "timeout_s", "every_s"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"{name} is {getattr(self, name)}; give a finite number")
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}; give at least 1")
        if self.steps > MOST_STEPS:
            raise InputError(f"steps is {self.steps:,}; give at most {MOST_STEPS:,}")
        if self.seed >= 2**63:
            raise InputError(f"seed is {self.seed}; give less than 2**63")
        for name in (
            "learning_rate",
            "weight_decay",
            "every",
            "every_s",
            "keep",
            "seed",
            "eval_every",
            "patience",
        ):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; give zero or more")
        if self.total_steps is not None and self.total_steps < self.steps:
            raise InputError(
                f"total_steps is {self.total_steps}, below steps ({self.steps}); give at least that"
            )
        for name, unset in (("eval_every", 0), ("patience", 0), ("best", LOSS)):
            if (value := getattr(self, name)) != unset and not self.eval_data:
                raise InputError(f"{name} is {value!r}, and there is no eval_data; give it")
        if self.warmup_steps is not None and not 0 <= self.warmup_steps < 2**53:
            raise InputError(f"warmup_steps is {self.warmup_steps}; give zero or more")
        if not 0 <= self.warmup <= 1:
            raise InputError(f"warmup is {self.warmup}; give the share of the steps, in [0, 1]")
        if self.clip_norm <= 0:
            raise InputError(f"clip_norm is {self.clip_norm}; give more than zero (1e30 for no clipping)")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas are {list(self.betas)}; give two numbers in [0, 1)")
        if not 0 < self.epsilon < math.inf:
            raise InputError(f"epsilon is {self.epsilon}; give a finite number above zero")
        if self.doc_stride is not None and self.doc_stride < 0:
            raise InputError(f"doc_stride is {self.doc_stride}; give zero or more")
        if self.pack and self.group_by_length:
            raise InputError(
                "packed rows are all as long, so there is nothing to group by length (--pack and "
                "--group-by-length); leave one out"
            )
        check_options(self.optimizer, learning_rate=self.learning_rate, momentum=self.momentum, rho=self.rho)
        if self.timeout_s <= 0:
            raise InputError(f"timeout_s is {self.timeout_s}; give more than zero seconds")

    @property
    def states_per_parameter(self) -> float:
        """Return the bytes of optimizer states for each byte of a trained parameter."""
        return float(num_states(self.optimizer, self.momentum))

    @property
    def saves(self) -> bool:
        """Return whether the run writes any checkpoint."""
        return self.save or self.every > 0 or self.every_s > 0

    def learning_rate_at(self, step: int) -> float:
        """Return the rate of a step: linear warm-up, then what `decay` says.

        Linear and cosine fall to zero at the end; the inverse square root (Vaswani et al., NeurIPS 2017, 5.3)
        falls with the steps that are done, whenever the end is.
        """
        total = self.total_steps or self.steps
        warmup_steps = self.warmup * total if self.warmup_steps is None else float(self.warmup_steps)
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / (warmup_steps + 1)
        if self.decay is Decay.CONSTANT:
            return self.learning_rate
        if self.decay is Decay.INVERSE_SQRT:
            return self.learning_rate * math.sqrt((warmup_steps + 1) / (step + 1))
        left = (total - step) / max(1.0, total - warmup_steps)
        if self.decay is Decay.COSINE:
            return self.learning_rate * (1 - math.cos(math.pi * left)) / 2
        return self.learning_rate * left

    @classmethod
    def of(cls, plan: Plan, profile: ModelProfile, *, steps: int, **others: Any) -> "Settings":
        """Return settings of a run of this plan with this profile, which `train` takes with no other."""
        return cls(steps=steps, **_decided_by(plan, profile), **others)

    def check_stated(self, plan: Plan, profile: ModelProfile) -> None:
        """Check that a plan and its profile are what the caller stated of them.

        Raises: InputError if they are of another model, batch, length or dtype.
        """
        for key, theirs in _decided_by(plan, profile).items():
            if (mine := self.stated.get(key, theirs)) != theirs:
                raise InputError(
                    f"{key} of the run is {mine!r}, of its plan and profile {theirs!r}; make them agree"
                )

    def to_json(self) -> dict[str, Any]:
        own = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.init}
        return {"format": FORMAT, **own, "lora": self.lora and dataclasses.asdict(self.lora)}


def _decided_by(plan: Plan, profile: ModelProfile) -> dict[str, Any]:
    decided = (plan.model, plan.global_batch_size, profile.sequence_length, profile.dtype)
    return dict(zip(DECIDED, decided, strict=True))


def check_lengths(settings: Settings, *, compiled: bool) -> None:
    """Check that the steps of a run may be of unlike lengths, where they are.

    Raises: InputError where blocks are compiled.
    """
    if settings.group_by_length and compiled:
        raise InputError(
            "--group-by-length makes steps of many lengths, and --compile compiles blocks for one; leave one "
            "out"
        )


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What a task is made from: a model, the length and dtype of its profile, and the settings of the run.

    loss_chunks, compiled: as in `ModelProfile`.

    Where there is no profile yet, it is what a profiler is to measure.
    """

    model: str
    sequence_length: int = 64
    dtype: str = FLOAT32
    run: Settings = Settings(steps=1)
    loss_chunks: int | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.loss_chunks is not None and self.loss_chunks < 1:
            raise InputError(f"loss_chunks is {self.loss_chunks}; give at least 1")
        if self.sequence_length < 1:
            raise InputError(f"sequence_length is {self.sequence_length}; give at least 1")
        if self.dtype not in (*DTYPES, MIXED):
            raise InputError(f"dtype {self.dtype!r} is not supported; {', '.join(DTYPES)} are")
        check_lengths(self.run, compiled=self.compiled)
        if self.lora is not None and not self.model.endswith(self._suffix):
            held = "" if self.run.load_in is None else f" beside weights in {self.run.load_in}"
            raise InputError(
                f"{self.model!r} is no model with the adapters {self.lora.text}{held}; profile and plan it "
                "with the --lora and the --load-in of the run"
            )

    @classmethod
    def of(cls, profile: ModelProfile, run: Settings) -> "TaskSettings":
        """Return what the task of a run is made from."""
        shape = profile.model, profile.sequence_length, profile.dtype
        return cls(*shape, run, profile.loss_chunks, profile.compiled)

    @property
    def seed(self) -> int:
        """Return the seed of initial weights, dropout and the order of the data."""
        return self.run.seed

    @property
    def data(self) -> tuple[str, ...]:
        """Return the texts to train on, none for those that hetpipe brings."""
        return self.run.data

    @property
    def model_folder(self) -> str | None:
        """Return where a model that is not of the table lies."""
        return self.run.model_folder

    @property
    def lora(self) -> LoraSettings | None:
        """Return the settings of the adapters, None where the model has none."""
        return self.run.lora

    @property
    def base_model(self) -> str:
        """Return the name of the model without adapters, as it is given."""
        return self.model.removesuffix(self._suffix)

    @property
    def _suffix(self) -> str:
        return load_in_suffix(self.run.load_in) + (self.lora.suffix if self.lora else "")


_ADAPTER = TypeAdapter(Settings)


def checked_settings(**values: Any) -> Settings:
    """Return settings from values that may be of wrong types.

    Raises: InputError naming key, value and remedy.
    """
    return validate(_ADAPTER, values, "settings")


def read_settings(path: Path) -> Settings:
    """Read config.json, of this version or of the one before, which repeated plan and profile.

    Raises: InputError naming file, key, value and remedy.
    """
    data = read_json(path)
    if isinstance(data, dict) and data.get("format") == FORMAT_BEFORE:
        own = check_format(data, FORMAT_BEFORE, str(path))
        data = {**{key: value for key, value in own.items() if key not in DECIDED}, "format": FORMAT}
    return validate(_ADAPTER, check_format(data, FORMAT, str(path)), str(path))


def settings_text(settings: Settings) -> str:
    """Return the text of a config.json."""
    return json.dumps(settings.to_json(), indent=1) + "\n"
