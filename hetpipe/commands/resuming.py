"""What `run` takes from the run of a checkpoint, and what it refuses to change without being told to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_model.dtypes import FLOAT32, MIXED
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.commands.output import note, warn
from hetpipe.models.names import ModelEntry
from hetpipe.runs.optimizers import OPTIONS, OptimizerKind, check_taken
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings, read_settings

if TYPE_CHECKING:
    from hetpipe.simulation.prediction import Prediction


@dataclass(frozen=True, slots=True)
class RunBefore:
    """What a run has of the one that it goes on with; nothing of that where it begins.

    is_best: whether it was asked for as that, and others came after it. decided: as
    `hetpipe.training.resumed_settings.inherited`. batch: samples a step. settings: where its run folder is
    there. step: of the checkpoint.
    """

    source: Path | None = None
    decided: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None
    gradient_dtype: str = FLOAT32
    sequence_length: int | None = None
    dtype: str | None = None
    is_best: bool = False
    settings: Settings = field(default_factory=lambda: Settings(steps=1))
    step: int = 0

    @classmethod
    def find(
        cls, resume: str, folder: RunFolder | None, root: Path, entry: ModelEntry, steps: int
    ) -> "RunBefore":
        """Return what is there to go on from.

        Raises: InputError if there is nothing, or it is of another model.
        """
        from hetpipe.training.checkpoint import latest as newest
        from hetpipe.training.checkpoint import read_manifest
        from hetpipe.training.checkpoint_owners import check_adapters, check_same
        from hetpipe.training.resumed_settings import inherited
        from hetpipe.training.resumption import find_checkpoint, is_best

        source = find_checkpoint(resume, folder, root, entry.name, tell=warn)
        manifest = read_manifest(source)
        check_adapters(manifest, entry.lora, source)
        check_same(manifest, "model", entry.name, source)
        config = RunFolder(source.parent.parent).config
        batch, dtype = manifest.settings.get("global_batch_size"), manifest.settings.get("dtype")
        return cls(
            source,
            inherited(manifest, steps),
            batch if isinstance(batch, int) else None,
            str(manifest.settings.get("gradient_dtype", FLOAT32)),
            manifest.sequence_length,
            dtype if isinstance(dtype, str) and dtype != MIXED else None,
            is_best(resume) and newest(source.parent) != source,
            _settings_before(config),
            manifest.step,
        )

    def check_data_given(self, option: str) -> None:
        """Check, on several hosts, that no places of texts are taken from a run of another host.

        Raises: InputError if the run before had texts.
        """
        if self.decided.get("data"):
            raise InputError(
                f"{self.source} is of a run with {option}, whose place is each host's own; give {option} on "
                "each host (the texts are compared by hash)"
            )


def starts_again(resume: str | None, folder: RunFolder | None) -> bool:
    """Return whether --resume is of what starts the same command again and again."""
    return resume == "auto" and folder is not None


def begins_anew(resume: str, folder: RunFolder | None) -> bool:
    """Return whether there is nothing to go on from where a run is started again and again; say so."""
    from hetpipe.training.checkpoint import written

    if folder is None or not starts_again(resume, folder) or written(folder.checkpoints):
        return False
    note([f"nothing to resume in {folder.path}: a new run begins"])
    return True


def decided_by(before: RunBefore, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the losses of a run, as arguments of `Settings`: what is given, else as before.

    given: None for what is not.

    Raises: InputError for another optimizer than before, or options that it does not take.
    """
    found = before.decided | {key: value for key, value in given.items() if value is not None}
    kind = found.setdefault("optimizer", OptimizerKind.ADAMW)
    for option in OPTIONS:
        if given.get(option) is not None:
            check_taken(kind, option)
    if before.source is None:
        return {"epsilon": kind.epsilon, **found}
    if (theirs := before.decided.get("optimizer", OptimizerKind.ADAMW)) != kind:
        raise InputError(
            f"{before.source} has the states of {theirs}, and --optimizer is {kind}; leave it out to go on, "
            "or begin a new run with the exported model"
        )
    return found


def _settings_before(config: Path) -> Settings:
    if not config.exists():
        return Settings(steps=1)
    try:
        return read_settings(config)
    except InputError as error:
        raise InputError(
            f"{error}; remove it: the manifest of {config.parent} has what decides the losses, and places of "
            "texts are given anew"
        ) from None


def check_changes(
    entry: ModelEntry,
    run: Settings,
    override: Collection[str],
    profile: ModelProfile,
    prediction: "Prediction",
) -> None:
    """Check that whatever decides the losses is as before the checkpoint, or named by --override.

    Raises: InputError naming which differs, old and new.
    """
    if run.resume_from is None:
        return
    from hetpipe.data.kinds import read_data
    from hetpipe.training.checkpoint import read_manifest
    from hetpipe.training.resumed_settings import changes, check_overridden

    folder, settings = Path(run.resume_from), TaskSettings.of(profile, run)
    _, content = read_data(run.data, entry)
    found = changes(read_manifest(folder), settings, prediction.plan, data_sha256=content.sha256)
    check_overridden(found, override, folder)
