"""The settings that decide what a run computes: kept in checkpoints, compared and inherited on resume."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import JsonValue

from cost_model.dtypes import FLOAT32
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.training.checkpoint import Manifest
from partition.plan import Plan

_OF_THE_RUN = ("learning_rate", "warmup", "weight_decay", "betas", "epsilon", "clip_norm", "data")


def deciding_settings(settings: TaskSettings, plan: Plan) -> dict[str, JsonValue]:
    """Return what decides the losses of a run beside its seed, model and length, as a manifest holds it.

    total_steps: the length of the schedule, stated or not.
    """
    run = asdict(settings.run)
    found = {key: list(run[key]) if isinstance(run[key], tuple) else run[key] for key in _OF_THE_RUN}
    total = settings.run.total_steps or settings.run.steps
    return {
        **found,
        "total_steps": total,
        "global_batch_size": plan.global_batch_size,
        "dtype": settings.dtype,
        "gradient_dtype": plan.gradient_dtype,
    }


def inherited(manifest: Manifest, steps: int) -> dict[str, Any]:
    """Return the settings of the run before as arguments of `Settings`, for those that are not given.

    Its schedule is gone on with where it reaches to the new end.
    """
    before = manifest.settings
    found: dict[str, Any] = {key: before[key] for key in _OF_THE_RUN if key in before}
    found |= {key: tuple(found[key]) for key in ("betas", "data") if key in found}
    total = before.get("total_steps")
    if isinstance(total, int) and total >= steps:
        found["total_steps"] = total
    return {**found, "seed": manifest.seed}


def differences(
    manifest: Manifest, settings: TaskSettings, plan: Plan, *, own_schedule: bool = False
) -> list[str]:
    """Return a sentence for each setting in which a run differs from that of its checkpoint.

    own_schedule: the rates are of a function, which no manifest holds.
    """
    before = {"gradient_dtype": FLOAT32, **manifest.settings}  # older checkpoints know no other
    now = deciding_settings(settings, plan)
    told = [
        f"{key} is {_words(now[key])}, before the checkpoint it was {_words(before[key])}"
        for key in now
        if key in before and before[key] != now[key] and key != "total_steps"
    ]
    if "total_steps" in before and before["total_steps"] != now["total_steps"] and not own_schedule:
        told.append(_schedule_words(before, settings.run, manifest.step))
    return told


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
        steps=before["total_steps"], learning_rate=before["learning_rate"], warmup=before["warmup"]
    )
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
