"""The run file that a run leaves in its folder: `hetpipe run FOLDER/job.toml` repeats the run."""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cost_model.dtypes import lacks_units
from cost_model.profile import ModelProfile
from hetpipe.runs.metric_sinks import SinkKind
from hetpipe.runs.optimizers import OPTIONS
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import LOSS, Settings, TaskSettings

HEAD = "# hetpipe run {} repeats this run, from its beginning, in a new run folder.\n"


def job_text(
    folder: RunFolder,
    settings: Settings,
    profile: ModelProfile,
    max_restarts: int,
    log: Sequence[SinkKind] = (),
) -> str:
    """Return the text of job.toml: the run's own cluster, profile and plan, and all its settings."""
    model = settings.model_folder or TaskSettings.of(profile, settings).base_model
    options: dict[str, Any] = {
        "model": str(Path(model).resolve()) if settings.model_folder else model,
        **{name: str(getattr(folder, name).resolve()) for name in ("cluster", "profile", "plan")},
        "steps": settings.steps,
        "total_steps": settings.total_steps or settings.steps,
        "seed": settings.seed,
        "learning_rate": settings.learning_rate,
        "warmup_steps": settings.warmup_steps,
        "decay": str(settings.decay),
        "weight_decay": settings.weight_decay,
        "clip_norm": settings.clip_norm,
        "data": list(settings.data) or None,
        "pack": settings.pack or None,
        "group_by_length": settings.group_by_length or None,
        "doc_stride": settings.doc_stride,
        **_optimizer(settings),
        "eval_data": list(settings.eval_data) or None,
        "eval_every": settings.eval_every or None,
        "patience": settings.patience or None,
        "best": None if settings.best == LOSS else settings.best,
        "every": f"{settings.every_s!r} s" if settings.every_s else str(settings.every),
        "keep": settings.keep,
        "save": settings.save,
        "clock": str(settings.clock),
        "schedule": None if settings.schedule is None else str(settings.schedule),
        "timeout": f"{settings.timeout_s!r} s",
        "max_restarts": max_restarts,
        "log": [str(kind) for kind in log] or None,
        "allow_slow": any(lacks_units(dtype, kind) for kind, dtype in profile.dtypes.items()) or None,
    }
    lines = [f"{name} = {_toml(value)}\n" for name, value in options.items() if value is not None]
    return "".join((HEAD.format(shlex.quote(str(folder.job))), *lines, *_adapters(settings)))


def _optimizer(settings: Settings) -> dict[str, Any]:
    """Return the optimizer of a run, with the options that it takes."""
    options = {
        "betas": ",".join(map(repr, settings.betas)),
        "momentum": settings.momentum,
        "rho": settings.rho,
        "epsilon": settings.epsilon,
    }
    taken = {name: value for name, value in options.items() if settings.optimizer in OPTIONS[name]}
    return {"optimizer": str(settings.optimizer), **taken}


def _adapters(settings: Settings) -> list[str]:
    """Return the [lora] table of a run with adapters."""
    lora = settings.lora
    if lora is None:
        return []
    if settings.adapter is not None:
        table: dict[str, Any] = {"adapter": str(Path(settings.adapter).resolve())}
    else:
        table = {"r": lora.r, "alpha": lora.alpha, "dropout": lora.dropout, "targets": list(lora.targets)}
        table |= {"rslora": True} if lora.rslora else {}
    if settings.load_in is not None:
        table["load_in"] = settings.load_in
    return ["\n[lora]\n", *(f"{name} = {_toml(value)}\n" for name, value in table.items())]


def _toml(value: Any) -> str:
    """Return a value as TOML writes it, whose strings are those of JSON but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def leaving_job(
    on_event: Callable[[dict[str, Any]], None], folder: RunFolder, text: str | None
) -> Callable[[dict[str, Any]], None]:
    """Write job.toml when a run has begun: nothing is written of one that is refused.

    text: None of several hosts, whose run no such file repeats; one of a run before goes then.
    """
    left = [text]

    def told(event: dict[str, Any]) -> None:
        if left and event["event"] != "progress":
            if (found := left.pop()) is None:
                folder.job.unlink(missing_ok=True)
            else:
                folder.write(folder.job, found)
        on_event(event)

    return told
