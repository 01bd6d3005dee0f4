"""Which checkpoints are whole, byte by byte, and what becomes of the others."""

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cost_model.errors import InputError
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.training.checkpoint import REMEDY, file_damage, read_manifest, written

MOST_READERS = 8


@dataclass(frozen=True, slots=True)
class NewestWhole:
    """The newest checkpoint of a folder that is whole, and what is wrong with those after it."""

    folder: Path | None
    damage: tuple[str, ...]


def damage_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, None where it is whole.

    All of its files are read; hashing lets other threads go on, and several files are read at a time.
    """
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return str(error).removesuffix(REMEDY)
    files = (*manifest.layers, *manifest.others)
    with ThreadPoolExecutor(min(MOST_READERS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda file: file_damage(folder, file), files)
        return next((damage for damage in found if damage is not None), None)


def newest_whole(root: Path) -> NewestWhole:
    """Return the newest whole checkpoint of a folder of checkpoints, and the damage of later ones."""
    found: list[str] = []
    for _, folder in written(root):
        damage = damage_of(folder)
        if damage is None:
            return NewestWhole(folder, tuple(found))
        found.append(damage)
    return NewestWhole(None, tuple(found))


def damaged_later(folder: RunFolder, done: int, settings: Settings) -> dict[Path, str]:
    """Return the damage of each checkpoint in the folder that is later than where the run begins.

    Raises: InputError if a later one is whole: it would be taken for one of this run.
    """
    damaged: dict[Path, str] = {}
    for step, later in written(folder.checkpoints):
        source = settings.resume_from
        begun = source is not None and Path(source).parent.samefile(folder.checkpoints)
        if step <= (done if begun else 0):
            break
        damage = damage_of(later)
        if damage is None:
            raise InputError(
                f"{later} is of a run before, {step} steps long; go on from it with --resume (resume_from), "
                "remove it, or give another run folder"
            )
        damaged[later] = damage
    return damaged


def put_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that none takes it for one; return its new place.

    Raises: InputError if that cannot be done.
    """
    step = folder.name.removeprefix(".").partition(".")[0]
    aside = folder.with_name(f".{step}.aside-{secrets.token_hex(4)}")
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise InputError(
            f"{folder}: is damaged and cannot be renamed ({error.strerror}); remove it"
        ) from None
    return aside
