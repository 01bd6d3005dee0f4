"""How to train: everything of a run that is neither model, cluster nor plan. Stored as config.json."""

import dataclasses
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from cost_model.dtypes import DTYPES
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from cost_model.strict_files import STRICT, check_format, read_json, validate
from hetpipe.program.instructions import Schedule
from partition.plan import Plan

FORMAT = "hetpipe.config/1"


class Clock(StrEnum):
    """What an emulated device charges for an operation."""

    NOMINAL = "nominal"  # the profile's time of the operation, over speed
    CPU = "cpu"  # the CPU seconds that its thread really used, over speed


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a training run.

    model, global_batch_size, sequence_length, dtype: those of the plan and its profile, which decide them
    (`of`, `check_agrees`); a profiler, which has no plan, is told here what to measure.
    total_steps: length of the learning-rate schedule, None: steps. every: a checkpoint each so many steps,
    0 for none; save: one at the end. resume_from: folder of the checkpoint to go on from. schedule: as asked
    for, None: `hetpipe.simulation.schedule_selection.default_schedule`. model_folder: where a model that is
    not of the table lies, configuration and weights.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: str
    steps: int
    global_batch_size: int = 16
    sequence_length: int = 64
    total_steps: int | None = None
    seed: int = 0
    learning_rate: float = 1e-4
    warmup: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    dtype: str = "float32"
    every: int = 0
    save: bool = True
    clock: Clock = Clock.NOMINAL
    schedule: Schedule | None = None
    data: tuple[str, ...] = ()
    resume_from: str | None = None
    timeout_s: float = 600.0
    model_folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "warmup", "weight_decay", "clip_norm", "timeout_s"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"{name} is {getattr(self, name)}; give a finite number")
        for name in ("steps", "global_batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.seed >= 2**63:
            raise InputError(f"seed is {self.seed}; give less than 2**63")
        for name in ("learning_rate", "weight_decay", "every", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; give zero or more")
        if self.total_steps is not None and self.total_steps < self.steps:
            raise InputError(
                f"total_steps is {self.total_steps}, below steps ({self.steps}); give at least that"
            )
        if not 0 <= self.warmup <= 1:
            raise InputError(f"warmup is {self.warmup}; give the share of the steps, in [0, 1]")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r} is not supported; {', '.join(DTYPES)} are")
        if self.clip_norm <= 0:
            raise InputError(f"clip_norm is {self.clip_norm}; give more than zero (1e30 for no clipping)")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas are {list(self.betas)}; give two numbers in [0, 1)")
        if not 0 < self.epsilon < math.inf:
            raise InputError(f"epsilon is {self.epsilon}; give a finite number above zero")
        if self.timeout_s <= 0:
            raise InputError(f"timeout_s is {self.timeout_s}; give more than zero seconds")

    def learning_rate_at(self, step: int) -> float:
        """Return the rate of a step: linear warm-up over the first share, then linear decay to zero."""
        total = self.total_steps or self.steps
        warmup_steps = self.warmup * total
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / (warmup_steps + 1)
        return self.learning_rate * (total - step) / max(1.0, total - warmup_steps)

    @classmethod
    def of(cls, plan: Plan, profile: ModelProfile, *, steps: int, **others: Any) -> "Settings":
        """Return settings with the model and batch of a plan, and the length and dtype of its profile."""
        return cls(
            model=plan.model,
            steps=steps,
            global_batch_size=plan.global_batch_size,
            sequence_length=profile.sequence_length,
            dtype=profile.dtype,
            **others,
        )

    def check_agrees(self, plan: Plan, profile: ModelProfile) -> None:
        """Check that a plan and its profile are for these settings.

        Raises: InputError if they are of another model, batch, length or dtype.
        """
        for key, theirs in (
            ("model", plan.model),
            ("global_batch_size", plan.global_batch_size),
            ("sequence_length", profile.sequence_length),
            ("dtype", profile.dtype),
        ):
            if (mine := getattr(self, key)) != theirs:
                raise InputError(
                    f"{key} of the run is {mine!r}, of its plan and profile {theirs!r}; make them agree"
                )

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}


_ADAPTER = TypeAdapter(Settings)


def checked_settings(**values: Any) -> Settings:
    """Return settings from values that may be of wrong types.

    Raises: InputError naming key, value and remedy.
    """
    return validate(_ADAPTER, values, "settings")


def read_settings(path: Path) -> Settings:
    """Read config.json.

    Raises: InputError naming file, key, value and remedy.
    """
    return validate(_ADAPTER, check_format(read_json(path), FORMAT, str(path)), str(path))


def settings_text(settings: Settings) -> str:
    """Return the text of a config.json."""
    return json.dumps(settings.to_json(), indent=1) + "\n"
