"""Texts that are read in pieces, so that one of any length takes little memory."""

import codecs
import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cost_model.errors import InputError
from hetpipe.data.listened import was_read

BLOCK_BYTES = 1 << 18
LONGEST_LINE = 1 << 18
"""Characters of a line that a vocabulary is trained on at once; a longer one is cut, at spaces."""

LONGEST_PIECE = 1 << 17
"""Characters of a text that are split into tokens at once; a longer one is cut, where tokens begin anyway."""

_LINE, _WORD = re.compile(r"(?<=\S\n)(?=\w)"), re.compile(r"(?<=\w)(?=\s)|(?<=\S)(?= \w)")

_MARK = "\ufeff"
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz")
"""Ends of the names of files that have to be unpacked first."""


@dataclass(frozen=True, slots=True)
class LongText:
    """A text file as one document, read anew each time it is asked for."""

    path: Path

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its text, without a mark of their order."""
        with opened(self.path) as file:
            marked = file.read(3) == _MARK.encode()
        return self.path.stat().st_size - 3 * marked

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks.

        Raises: InputError as `hetpipe.data.data_file.read_text_file`.
        """
        decoder, begun, has_content = codecs.getincrementaldecoder("utf-8")(), 0, False
        with opened(self.path) as file:
            while True:
                block = file.read(BLOCK_BYTES)
                before = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise not_utf8(self.path, begun - before + error.start) from None
                if begun == 0:
                    text = text.removeprefix(_MARK)
                has_content = has_content or bool(text.strip())
                begun += len(block)
                was_read(len(block))
                yield text
                if not block:
                    break
        if not has_content:
            raise is_empty(self.path)


Document = str | LongText


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, of which one at a time is held, without the newline that ends them.

    Raises: InputError as `hetpipe.data.data_file.read_text_file`.
    """
    begun, has_content = 0, False
    with opened(path) as file:
        for raw in file:
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(path, begun + error.start) from None
            if begun == 0:
                line = line.removeprefix(_MARK)
            begun += len(raw)
            has_content = has_content or bool(line.strip())
            was_read(len(raw))
            yield line.removesuffix("\n")
    if not has_content:
        raise is_empty(path)


def lines_in(blocks: Iterable[str]) -> Iterator[str]:
    r"""Yield the lines of a text, with what ends them, wherever its blocks begin.

    They are those of `str.splitlines`, but that one of more than `LONGEST_LINE` characters is cut where a
    word begins, if one does in the second half of what is cut off.

    >>> list(lines_in(["The shi", "p sails.\r", "\nFar"]))
    ['The ship sails.\r\n', 'Far']
    """
    rest = ""
    for block in blocks:
        *lines, rest = (rest + block).splitlines(keepends=True) or [""]
        for line in lines:
            yield from _cut(line)
        *pieces, rest = _cut(rest)  # the last line may go on
        yield from pieces
    if rest:
        yield rest


def pieces_in(blocks: Iterable[str]) -> Iterator[str]:
    r"""Yield a text in pieces of at most `LONGEST_PIECE` characters, wherever its blocks begin.

    A piece ends where a line begins right behind another one, else where a word ends: there tokenizers
    begin a token, too. Both are looked for in the second half of what is cut off.

    >>> list(pieces_in(["The shi", "p sails.\n\nFar"]))
    ['The ship sails.\n\nFar']
    """
    rest = ""
    for block in blocks:
        rest, begin = rest + block, 0
        while len(rest) - begin > LONGEST_PIECE:
            piece = _piece_at_the_begin(rest[begin : begin + LONGEST_PIECE])
            yield piece
            begin += len(piece)
        rest = rest[begin:]
    yield rest


def _piece_at_the_begin(text: str) -> str:
    for pattern in (_LINE, _WORD):
        places = [found.start() for found in pattern.finditer(text, LONGEST_PIECE // 2)]
        if places:
            return text[: places[-1]]
    return text


def _cut(line: str) -> list[str]:
    found = []
    while len(line) > LONGEST_LINE:
        place = line.rfind(" ", LONGEST_LINE // 2, LONGEST_LINE)
        place = place if place > 0 else LONGEST_LINE
        found.append(line[:place])
        line = line[place:]
    return [*found, line]


class _DataFile(io.FileIO):
    """A file that says itself why it cannot be read: what goes wrong beside it is no error of its disk."""

    def readinto(self, buffer: Any) -> int | None:
        """Read into a buffer; return the bytes read."""
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise self._unread(error) from error

    def readall(self) -> bytes:
        """Return all that is left."""
        try:
            return super().readall()
        except OSError as error:
            raise self._unread(error) from error

    def _unread(self, error: OSError) -> InputError:
        return InputError(f"data file {self.name} cannot be read ({error.strerror}); check its disk")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of data.

    Raises: InputError if it is missing, or not a file that can be read, then or later.
    """
    name = f"data file {path}"
    try:
        file = io.BufferedReader(_DataFile(path))
    except FileNotFoundError as error:
        raise InputError(f"{name} does not exist; give the path of a file") from error
    except IsADirectoryError as error:
        raise InputError(f"{name} is a folder; give the files in it") from error
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror}); check its permissions") from error
    with file:
        yield file


def is_empty(path: Path) -> InputError:
    """Return what says that there is nothing in a file."""
    return InputError(f"data file {path} is empty; give a file with data")


def not_utf8(path: Path, place: int) -> InputError:
    """Return what says where a file is no text."""
    remedy = "unpack it" if path.suffix.lower() in PACKED else "convert it to UTF-8"
    return InputError(f"data file {path} is not UTF-8 at byte {place:,}; {remedy}")
