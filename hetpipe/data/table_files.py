"""Tables of rows as `datasets` and pandas write them, Parquet and Arrow: mapped, and read in parts."""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from cost_model.errors import InputError

PARQUET, ARROW = ".parquet", ".arrow"
SUFFIXES = (PARQUET, ARROW)
_NO_LABEL = -1  # as `datasets` has it


class FileLabel(str):
    """The name that a file has for a label, and the number that it writes for it."""

    number: int

    def __new__(cls, name: str, number: int) -> "FileLabel":
        """Return the name, which knows its number."""
        found = super().__new__(cls, name)
        found.number = number
        return found


def is_table(path: Path) -> bool:
    """Return whether a file is called so."""
    return path.suffix.lower() in SUFFIXES


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, by column; labels whose names the file tells as these, None where none is.

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
            names = _label_names(batch.schema.metadata)
            for row in batch.to_pylist():
                for column in names.keys() & row.keys():
                    row[column] = _named(row[column], names[column])
                yield row
    # what is no Python text or date ends in a ValueError or an OverflowError
    except (OSError, ValueError, OverflowError, arrow.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"data file {path} cannot be read ({reason}); write it again") from None


def _label_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """Return the names of the labels of each column that has such, alone or in a list, as `datasets` says."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return {column: names for column, said in features.items() if (names := _names_in(said))}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _names_in(said: Any) -> list[str]:
    if isinstance(said, list):  # as older versions tell of lists
        return _names_in(said[0]) if said else []
    if not isinstance(said, dict):
        return []
    return list(said["names"]) if said.get("_type") == "ClassLabel" else _names_in(said.get("feature"))


def _named(value: Any, names: list[str]) -> Any:
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    if not isinstance(value, int) or value >= len(names) or value < _NO_LABEL:
        return value  # of which is said that it is no label
    return None if value == _NO_LABEL else FileLabel(names[value], value)


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
