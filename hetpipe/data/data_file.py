"""A file of data, or one line that says why it cannot be read."""

from pathlib import Path

from cost_model.errors import InputError


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises: InputError if it is missing, not a file, or empty.
    """
    name = f"data file {path}"
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{name} does not exist; give the path of a file") from error
    except IsADirectoryError as error:
        raise InputError(f"{name} is a folder; give the files in it") from error
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror}); check its permissions") from error
    if not content.strip():
        raise InputError(f"{name} is empty; give a file with data")
    return content


def read_text_file(path: Path) -> str:
    """Return the text of a file, without a mark of its byte order.

    Raises: InputError if it is missing, not a file, empty or not UTF-8.
    """
    try:
        return read_file(path).decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"data file {path} is not UTF-8 at byte {error.start:,}; convert it to UTF-8"
        ) from error
