"""Where a run goes on from: the checkpoint that is named, or the newest whole one there is."""

from collections.abc import Callable
from pathlib import Path

from cost_model.errors import InputError
from hetpipe.runs.run_folder import RunFolder, numbered_runs
from hetpipe.runs.settings import Settings
from hetpipe.runs.warned import warn_caller
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint_damage import damage_of, newest_whole

BEST = "best"


def is_best(resume: str | None) -> bool:
    """Return whether the best checkpoint of a run is asked for."""
    return resume is not None and Path(resume).name == BEST and not checkpoint.holds_run(Path(resume))


def _best(folder: RunFolder | None, root: Path, model: str) -> Path:
    """Return the checkpoint with the least held-out loss.

    Raises: InputError if there is none, or it is damaged.
    """
    begun = folder is not None and checkpoint.written(folder.checkpoints)
    runs = (folder,) if folder is not None and begun else numbered_runs(root, model)
    for run in runs:
        found = checkpoint.best(run.checkpoints)
        if found is not None:
            if damage := damage_of(found):
                raise InputError(f"{damage}; it is the best one; choose another checkpoint")
            return found
    where = str(runs[0].path) if len(runs) == 1 else f"any run of {model!r} in {root}"
    raise InputError(
        f"nothing to resume: no checkpoint of {where} has a held-out loss; did it run with --eval-data?"
    )


def find_checkpoint(
    resume: str,
    folder: RunFolder | None,
    root: Path,
    model: str,
    *,
    tell: Callable[[str], None] = warn_caller,
) -> Path:
    """Return the checkpoint to go on from; "auto": the newest of the run folder, else of the newest run.

    "best": the one with the least held-out loss, of the run folder where it holds checkpoints, else of the
    newest run that has one; of a run that is named, RUN/best.

    Of a run the newest whole one is taken; tell: takes a sentence for each that is newer and damaged.

    Raises: InputError if there is none, or the one that is named is damaged.
    """
    if resume == BEST or (Path(resume).name == BEST and checkpoint.holds_run(Path(resume).parent)):
        named = folder if resume == BEST else RunFolder(Path(resume).parent)
        return _best(named, root, model)
    if resume != "auto":
        path = Path(resume)
        if checkpoint.holds_run(path):
            return find_checkpoint("auto", RunFolder(path), root, model, tell=tell)
        if damage := damage_of(path):
            whole = newest_whole(path.parent).folder
            found = "choose another checkpoint" if whole is None else f"the newest whole one is {whole}"
            raise InputError(f"{damage}; {found}")
        return path
    runs = (folder,) if folder is not None else numbered_runs(root, model)
    if not runs:
        raise InputError(f"nothing to resume: {root} holds no run of {model!r}; leave --resume out to begin")
    for run in runs:
        if not checkpoint.written(run.checkpoints):
            continue
        with run.locked():
            checkpoint.discard_unfinished(run.checkpoints)
            newest = newest_whole(run.checkpoints)
        if newest.folder is None:
            raise InputError(
                f"nothing to resume: {newest.damage[0]}, and no checkpoint of {run.path} is whole; begin in "
                "another folder, or give a checkpoint of another run"
            )
        for damage in newest.damage:
            tell(f"{damage}; going on from {newest.folder.name}, the newest whole one")
        return newest.folder
    where = str(runs[0].path) if len(runs) == 1 else f"{len(runs)} runs of {model!r} in {root}"
    raise InputError(
        f"nothing to resume: no complete checkpoint in {where}; did it run with --no-save, or end before its "
        "first one (--every)?"
    )


def steps_done(settings: Settings) -> int:
    """Return the steps that a run need not do any more."""
    return 0 if settings.resume_from is None else checkpoint.read_manifest(Path(settings.resume_from)).step
