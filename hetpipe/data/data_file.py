"""A file of data, or one line that says why it cannot be read."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from cost_model.errors import InputError
from hetpipe.data.long_texts import LongText, is_empty, not_utf8, opened
from hetpipe.data.table_files import is_table


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Give the files by their full paths, of a folder those in it, by name; hidden ones and folders are left.

    Of what `datasets` saved (`save_to_disk`) the tables alone.

    Raises: InputError for a folder without files, or several data sets in one.
    """
    for path in map(Path.resolve, paths):
        if not path.is_dir():
            yield path
            continue
        if (path / "dataset_dict.json").is_file():
            parts = sorted(each.name for each in path.iterdir() if each.is_dir())
            raise InputError(
                f"data folder {path} holds several data sets ({', '.join(parts)}); give one of them, as "
                f"{path / parts[0] if parts else path}"
            )
        found = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
        if any(each.name == "dataset_info.json" for each in found):
            found = [each for each in found if is_table(each)]
        if not found:
            raise InputError(f"data folder {path} holds no files; give one that does")
        yield from found


def check_regular(path: Path) -> None:
    """Check that what is there is a file or a folder: data are read more than once, a pipe gives them once.

    Raises: InputError if it is something else; that nothing is there is said by who reads it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(
            f"data file {path} is a pipe or a device, which cannot be read more than once; write its content "
            "to a file"
        )


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises: InputError if it is missing, not a file, or empty.
    """
    with opened(path) as file:
        content = file.read()
    if not content.strip():
        raise is_empty(path)
    return content


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, as Python's `open` has them, of which one at a time is held.

    Other marks that Unicode has for the end of a line or a page (U+2028, U+0085, a form feed) are content.

    Raises: InputError as `read_text_file`.
    """
    decoder, rest = io.IncrementalNewlineDecoder(None, translate=True), ""
    for block in LongText(path).blocks():
        *lines, rest = (rest + decoder.decode(block)).split("\n")
        yield from lines
    *lines, rest = (rest + decoder.decode("", final=True)).split("\n")
    yield from lines
    if rest:
        yield rest


def read_text_file(path: Path) -> str:
    """Return the text of a file, without a mark of its byte order.

    Raises: InputError if it is missing, not a file, empty or not UTF-8.
    """
    try:
        return read_file(path).decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.start) from error
