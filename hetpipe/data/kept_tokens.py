"""Tokens of long texts, kept in the cache, so that a text is split into tokens once for all runs."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

from cost_model.errors import InputError
from cost_model.strict_files import canonical_sha256, write_atomically
from hetpipe.data.dataset import ENDS_FILE, TOKENS_FILE, TOKENS_HEADER, replacing
from hetpipe.data.file_states import FileStates
from hetpipe.runs.cache import texts_folder
from hetpipe.runs.kept_texts import KEPT_FILE, KNOWN_SUFFIX, UNFINISHED

FORM = 2
"""Of what is kept: another way to cut texts has another number."""

SETTLED_S = 2.0
"""A file that was written less long ago may change without a sign: its times are no finer everywhere."""


def known_sha256(files: FileStates) -> str | None:
    """Return the hash that files in this state had when they were read and checked; None if unknown."""
    try:
        return str(json.loads(_known(files).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_sha256(files: FileStates, sha256: str, begun_s: float) -> None:
    """Keep the hash of files in this state, unless one was too new to be sure of when reading it began."""
    if begun_s - files.newest_s < SETTLED_S:
        return
    with suppress(OSError):
        path = _known(files)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"sha256": sha256}) + "\n")


def _known(files: FileStates) -> Path:
    return texts_folder() / f"{canonical_sha256([FORM, list(map(list, files.states))])[:24]}{KNOWN_SUFFIX}"


def kept_tokens(
    sha256: str, files: Sequence[Path], vocabulary: Tokenizer, separator: int, write: Callable[[Path], None]
) -> tuple[Path, bool]:
    """Return the folder of the tokens of texts, and whether it was there; `write` fills it where it was not.

    sha256: of the texts, in files. separator: the token that ends a text.

    Raises: OSError if the cache cannot be written.
    """
    decided = [
        FORM, sha256, hashlib.sha256(vocabulary.to_str().encode()).hexdigest(),
        separator, version("tokenizers"),
    ]  # fmt: skip
    folder = texts_folder() / canonical_sha256(decided)[:24]
    if all((folder / name).is_file() for name in (KEPT_FILE, TOKENS_FILE, ENDS_FILE, TOKENS_HEADER)):
        with suppress(OSError):
            os.utime(folder / KEPT_FILE)  # when it was taken last
        return folder, True
    shutil.rmtree(folder, ignore_errors=True)  # what is left of one that was half removed
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{secrets.token_hex(4)}")
    unfinished.mkdir(parents=True)
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # `KeptText.remove` leaves it
        write(unfinished)
        write_atomically(unfinished / KEPT_FILE, json.dumps({"files": list(map(str, files))}) + "\n")
        with suppress(OSError):  # another run has been as far
            unfinished.rename(folder)
    finally:
        os.close(descriptor)
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder, False


def take(folder: Path, place: Path, names: Sequence[str]) -> None:
    """Have the files of the cache in another folder: under a second name, or copied to another file system.

    So they stay there when the cache is emptied. The header comes last.
    """
    (place / TOKENS_HEADER).unlink(missing_ok=True)
    for name in (*names, TOKENS_HEADER):
        linked = place / f".{name}.link-{secrets.token_hex(4)}"
        try:
            os.link(folder / name, linked)
        except OSError:
            with (folder / name).open("rb") as source, replacing(place / name) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            continue
        (place / name).unlink(missing_ok=True)  # a rename onto the same file would leave both names
        linked.rename(place / name)


@contextmanager
def refused_without_room(folder: Path) -> Iterator[None]:
    """Say in one line that tokens cannot be written.

    Raises: InputError in place of OSError.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"tokens of the texts cannot be written below {folder} ({error.strerror}); make room there "
            "(hetpipe cache --clear), or name a folder on another disk (XDG_CACHE_HOME, --run-folder)"
        ) from None
