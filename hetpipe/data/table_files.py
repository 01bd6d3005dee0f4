"""Tables of rows as `datasets` and pandas write them, Parquet and Arrow: mapped, and read in parts."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from cost_model.errors import InputError

PARQUET, ARROW = ".parquet", ".arrow"
SUFFIXES = (PARQUET, ARROW)


def is_table(path: Path) -> bool:
    """Return whether a file is called so."""
    return path.suffix.lower() in SUFFIXES


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, by column.

    Raises: InputError if pyarrow, which `datasets` brings, is not installed, or the file cannot be read.
    """
    try:
        arrow = import_module("pyarrow")
    except ImportError:
        raise InputError(
            f"data file {path}: reading it needs pyarrow; pip install datasets, or give .jsonl"
        ) from None
    try:
        for batch in _batches(path, arrow):
            yield from batch.to_pylist()
    # what is no Python text or date ends in a ValueError or an OverflowError
    except (OSError, ValueError, OverflowError, arrow.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"data file {path} cannot be read ({reason}); write it again") from None


def _batches(path: Path, arrow: Any) -> Iterator[Any]:
    """Yield the parts of a file, of which one at a time is held."""
    if path.suffix.lower() == PARQUET:
        with import_module("pyarrow.parquet").ParquetFile(path) as file:
            yield from file.iter_batches()
        return
    with arrow.memory_map(str(path), "r") as source:
        try:
            yield from arrow.ipc.open_stream(source)  # as `datasets` writes them
        except arrow.ArrowInvalid:
            file = arrow.ipc.open_file(source)
            for index in range(file.num_record_batches):
                yield file.get_batch(index)
