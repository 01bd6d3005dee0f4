"""JSON lines, and tables with such rows: an object each, with its place for what is said of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from cost_model.strict_files import each_once
from hetpipe.data.data_file import read_file
from hetpipe.data.long_texts import text_lines
from hetpipe.data.table_files import is_table, rows_of

SUFFIX = ".jsonl"


def has_rows(path: Path) -> bool:
    """Return whether a file is called as one of JSON lines, or a table."""
    return path.suffix.lower() == SUFFIX or is_table(path)


def json_lines(path: Path, forms: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line that is not empty; forms: what to give, in a sentence.

    Of a table, of each row; columns without a value in it are left out.

    Raises: InputError naming the line that is no object or has a key twice with unlike values, or if the
    file cannot be read.
    """
    if is_table(path):
        yield from _rows(path, forms)
        return
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        place = f"data file {path}, line {number}"
        try:
            data = json.loads(line, object_pairs_hook=each_once)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{place}: not JSON ({error}); give an object a line, or call texts .txt"
            ) from None
        if not isinstance(data, dict):
            raise InputError(f"{place}: a {type(data).__name__}; give an object with {forms}")
        check_whole(line, data, place)
        yield place, data


def check_whole(text: str, data: object, place: str) -> None:
    """Check that JSON text has no half of a pair of surrogates, which is no text that could be written.

    data: what was read from it.

    Raises: InputError naming the half.
    """
    if "\\u" not in text:
        return
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = str(error.object)[error.start].encode("ascii", "backslashreplace").decode()
        raise InputError(
            f"{place}: {half} is half a character; take it out, or write the other half"
        ) from None


def first_line(path: Path) -> dict[str, Any]:
    """Return the object of the first line or row; {} of a file that is called or begins otherwise."""
    if not has_rows(path):
        return {}
    if is_table(path):
        return next((row for _, row in _rows(path, "rows")), {}) if path.is_file() else {}
    try:
        with path.open(encoding="utf-8-sig") as file:
            data = json.loads(next((line for line in file if line.strip()), "{}"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _rows(path: Path, forms: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        read_file(path)  # says why
    number = 0
    for number, row in enumerate(rows_of(path), start=1):
        yield (
            f"data file {path}, row {number}",
            {key: value for key, value in row.items() if value is not None},
        )
    if not number:
        raise InputError(f"data file {path} has no rows; give some with {forms}")


def text_of(data: dict[str, Any], key: str, place: str) -> str:
    """Return the text under a key.

    Raises: InputError if there is none.
    """
    value = data.get(key)
    if not isinstance(value, str):
        raise InputError(f'{place}: "{key}" is {shown(value)}; give a text')
    return value


def shown(value: object) -> str:
    """Return a value as a line shows it, not too long; bytes and dates, which tables have, as Python does."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
