"""The files that a verb is given to train on: found, and read through before anything slow is done."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cost_model.errors import InputError
from cost_model.units import format_bytes
from hetpipe.commands.output import warn
from hetpipe.models.names import ModelEntry
from hetpipe.reporting.progress import bar_if_long

HELD_BYTES_PER_BYTE = 3.0
"""Of the memory that a file takes which is held whole: as it is, as what is in it, and as what is written."""


def given_place(text: str) -> Path:
    """Return the path that a word of the command line or of a run file says; "" would be the current folder.

    Raises: InputError for no word at all.
    """
    if not text:
        raise InputError("is empty; give a path, or . for the current folder")
    return Path(text)


def readable_texts(data: Iterable[Path], entry: ModelEntry) -> tuple[Path, ...]:
    """Return the files by their full paths; refused before anything is measured.

    Raises: InputError if they cannot be read, or are of no kind that the model learns from.
    """
    given = tuple(data)
    if not given:
        return ()
    from hetpipe.data.data_file import files_of
    from hetpipe.data.kinds import read_data
    from hetpipe.data.listened import listening

    files = tuple(files_of(given))
    _warn_of_memory(files, entry)
    with bar_if_long("data") as report, listening(report):
        read_data(files, entry)
    return files


def _warn_of_memory(files: Sequence[Path], entry: ModelEntry) -> None:
    """Warn of files that are held whole, and may take more memory than is free.

    Raises: InputError if they are of no kind that the model learns from.
    """
    from hetpipe.data.kinds import held_bytes

    held = held_bytes(files, entry)
    if not held:
        return
    from hetpipe.training.checkpoint_room import free_host_bytes

    needed, free = HELD_BYTES_PER_BYTE * held, free_host_bytes()
    if needed > free:
        warn(
            f"{format_bytes(held)} of data are held in memory, which may take {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free; give less of them, or a host with more"
        )


def warn_of_learned(data: Sequence[str], held_out: Sequence[str]) -> None:
    """Warn of a file that is held out and trained on: its figures say nothing of others."""
    both = sorted({*data} & {*held_out})
    if both:
        warn(f"{both[0]} is held out and trained on, too, so that its figures say nothing of other data")
