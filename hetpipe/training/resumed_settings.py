"""The settings that decide what a run computes: kept in checkpoints, compared and inherited on resume."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from cost_model.dtypes import FLOAT32
from cost_model.errors import InputError
from cost_model.strict_files import did_you_mean
from hetpipe.data.task import TrainingTask
from hetpipe.runs.optimizers import OptimizerKind
from hetpipe.runs.settings import Decay, Settings, TaskSettings
from hetpipe.training.checkpoint import Manifest
from partition.plan import Plan

_OF_THE_RUN = (
    "learning_rate", "warmup", "warmup_steps", "decay", "weight_decay", "betas",
    "epsilon", "clip_norm", "data", "pack", "group_by_length", "doc_stride", "optimizer", "momentum", "rho",
)  # fmt: skip
_OLDER: Mapping[str, JsonValue] = {
    "gradient_dtype": FLOAT32,
    "warmup_steps": None,
    "decay": str(Decay.LINEAR),
    "pack": False,
    "group_by_length": False,
    "doc_stride": None,
    "optimizer": str(OptimizerKind.ADAMW),
    "momentum": 0.0,
    "rho": 0.9,
}
"""What runs did whose checkpoints know of nothing else."""

DECIDING = (*_OF_THE_RUN, "total_steps", "global_batch_size", "dtype", "gradient_dtype")
"""Names of all that decides the losses of a run, beside its seed, model and length of samples."""

DATA_HASH = "data_sha256"
_NOTHING: Mapping[str, JsonValue] = {}
_ORDER = ("num_samples", "shuffle", "data_seed")
"""What decides the order of a user's own data, as far as it is known."""


def deciding_settings(settings: TaskSettings, plan: Plan, data_sha256: str = "") -> dict[str, JsonValue]:
    """Return what decides the losses of a run beside its seed, model and length, as a manifest holds it.

    total_steps: the length of the schedule, stated or not. data_sha256: of the texts, "" where nobody knows.
    """
    run = asdict(settings.run)
    found = {key: list(run[key]) if isinstance(run[key], tuple) else run[key] for key in _OF_THE_RUN}
    total = settings.run.total_steps or settings.run.steps
    hashed = {DATA_HASH: data_sha256} if data_sha256 else {}
    return {
        **found,
        "total_steps": total,
        "global_batch_size": plan.global_batch_size,
        "dtype": settings.dtype,
        "gradient_dtype": plan.gradient_dtype,
        **hashed,
    }


def inherited(manifest: Manifest, steps: int) -> dict[str, Any]:
    """Return the settings of the run before as arguments of `Settings`, for those that are not given.

    Its schedule is gone on with where it reaches to the new end.
    """
    before = manifest.settings
    found: dict[str, Any] = {key: before[key] for key in _OF_THE_RUN if key in before}
    found |= {key: tuple(found[key]) for key in ("betas", "data") if key in found}
    if "decay" in found:
        found["decay"] = Decay(found["decay"])
    if "optimizer" in found:
        found["optimizer"] = OptimizerKind(found["optimizer"])
    total = before.get("total_steps")
    if isinstance(total, int) and total >= steps:
        found["total_steps"] = total
    return {**found, "seed": manifest.seed}


@dataclass(frozen=True, slots=True)
class Change:
    """A setting in which a run differs from that of its checkpoint. said: the sentence that tells of it.

    is_needed: whether the run could not reach its end otherwise.
    """

    key: str
    before: JsonValue
    now: JsonValue
    said: str
    is_needed: bool = False

    def to_json(self, step: int) -> dict[str, JsonValue]:
        """Return what the next manifests say of it."""
        return {"step": step, "key": self.key, "before": self.before, "now": self.now}


def changes(
    manifest: Manifest,
    settings: TaskSettings,
    plan: Plan,
    *,
    own: Mapping[str, JsonValue] = _NOTHING,
    data_sha256: str = "",
) -> list[Change]:
    """Return each setting in which a run differs from that of its checkpoint.

    own: what `TrainingTask.own_settings` gives of the next step. data_sha256: of the texts; where it is known
    of both, their places do not count.
    """
    before = {**_OLDER, **manifest.settings} if manifest.settings else {}
    now = {**deciding_settings(settings, plan, data_sha256), **own}
    found = []
    hashes = before.get(DATA_HASH), now.get(DATA_HASH)
    for key in (*DECIDING, *_ORDER):
        if key not in before or key not in now or before[key] == now[key] or key == "total_steps":
            continue
        if key == "data" and all(hashes):
            continue
        said = f"{key} is {_words(now[key])}, before the checkpoint it was {_words(before[key])}"
        found.append(Change(key, before[key], now[key], said))
    if all(hashes) and hashes[0] != hashes[1]:
        short = [str(each)[:12] for each in hashes]
        said = f"data is other text (sha256 {short[1]}) than before the checkpoint ({short[0]})"
        found.append(Change("data", *hashes, said))
    found += _changed_rates(before, now)
    total, mine = before.get("total_steps"), now["total_steps"]
    if isinstance(total, int) and total != mine and not (before.get("own_rates") or now.get("own_rates")):
        said = _schedule_words({**before, "total_steps": total}, settings.run, manifest.step)
        found.append(Change("total_steps", total, mine, said, is_needed=total < settings.run.steps))
    return found


def _changed_rates(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the change of a function of rates, of which manifests hold whether it is and its next rate."""
    was, has = before.get("own_rates"), now.get("own_rates")
    if was is None or has is None:
        return []
    if was != has:
        here, there = ("", " not") if has else (" not", "")
        said = f"rate_schedule is{here} given, before the checkpoint it was{there}"
        return [Change("rate_schedule", was, has, said)]
    old, new = before.get("next_rate"), now.get("next_rate")
    if not (isinstance(old, float) and isinstance(new, float)) or math.isclose(old, new, rel_tol=1e-9):
        return []
    said = f"rate_schedule is {new:g} in the next step, before the checkpoint it was {old:g}"
    return [Change("rate_schedule", old, new, said)]


def all_changes(
    manifest: Manifest, settings: TaskSettings, plan: Plan, task: TrainingTask
) -> tuple[dict[str, JsonValue], ...]:
    """Return the changes of settings up to a checkpoint and after it, as manifests hold them."""
    own = task.own_settings(manifest.step)
    found = changes(manifest, settings, plan, own=own, data_sha256=task.data_sha256)
    return (*manifest.changes, *(change.to_json(manifest.step) for change in found))


def check_overridden(found: Sequence[Change], override: Collection[str], source: Path) -> None:
    """Check that what a run changes was asked to be changed.

    override: names of settings.

    Raises: InputError naming each that was not: which, old and new.
    """
    refused = [change for change in found if not change.is_needed and change.key not in override]
    if refused:
        options = ",".join(change.key.replace("_", "-") for change in refused)
        raise InputError(
            f"{source}: {'; '.join(change.said for change in refused)}; leave out what says so to go on as "
            f"before, or give --override {options} to change it"
        )


def overridden(words: Sequence[str]) -> frozenset[str]:
    """Return the names of the settings that --override gives.

    >>> sorted(overridden(["learning-rate,betas"]))
    ['betas', 'learning_rate']

    Raises: InputError for what is no such setting.
    """
    found = [word.strip() for text in words for word in text.split(",")]
    known = [key.replace("_", "-") for key in DECIDING if key != "optimizer"]  # whose states differ
    for word in found:
        if word not in known:
            raise InputError(f"--override {word!r} is nothing that can be; {did_you_mean(word, known)}")
    return frozenset(word.replace("-", "_") for word in found)


def differences(
    manifest: Manifest,
    settings: TaskSettings,
    plan: Plan,
    *,
    own: Mapping[str, JsonValue] = _NOTHING,
    data_sha256: str = "",
) -> list[str]:
    """Return a sentence for each of the `changes`."""
    found = changes(manifest, settings, plan, own=own, data_sha256=data_sha256)
    return [change.said for change in found]


def option_differences(manifest: Manifest, options: list[JsonValue], rate: float) -> list[str]:
    """Return a sentence for each option of an optimizer's groups that was another before the checkpoint.

    options: by group, of what the user's factory makes; [] for AdamW, whose options are settings. rate: the
    learning rate of the settings, of which `differences` tells.
    """
    before = manifest.optimizer.get("options")
    if not isinstance(before, list) or not before:
        return []
    name = str(manifest.optimizer.get("name")).rpartition(".")[2]
    rates = manifest.settings.get("learning_rate"), rate
    if len(before) != len(options):
        return [f"{name} has {len(options)} groups of parameters, before the checkpoint it had {len(before)}"]
    told = []
    for group, (old, new) in enumerate(zip(before, options, strict=True)):
        where = name if len(before) == 1 else f"group {group} of {name}"
        assert isinstance(old, dict) and isinstance(new, dict)
        for key in new:
            is_told = key == "lr" and (old.get(key), new[key]) == rates
            if key in old and old[key] != new[key] and not is_told:
                change = f"is {_words(new[key])}, before the checkpoint it was {_words(old[key])}"
                told.append(f"{key} of {where} {change}")
    return told


def _schedule_words(before: Mapping[str, Any], run: Settings, step: int) -> str:
    """Say what another length of the schedule does to the rate of the next step."""
    planned = Settings(
        steps=before["total_steps"], learning_rate=before["learning_rate"], warmup=before["warmup"],
        warmup_steps=before["warmup_steps"], decay=Decay(before["decay"]),
    )  # fmt: skip
    was = planned.learning_rate_at(min(step, before["total_steps"]))
    return (
        f"total_steps is {run.total_steps or run.steps}, before the checkpoint it was "
        f"{before['total_steps']}: the next step's learning rate is {run.learning_rate_at(step):.3g} and not "
        f"{was:.3g}"
    )


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
