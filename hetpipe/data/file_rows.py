"""Rows of files, each a sample: held where they are few, else read anew each time they are asked for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from hetpipe.data.file_states import FileStates, is_long
from hetpipe.data.listened import work

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class FileRows(Generic[Row]):
    """Rows in the order of their files.

    again: gives them from the beginning. held: all of them, None where they are read anew. files: as they
    were, where rows are read from them each time.
    """

    again: Callable[[], Iterator[Row]] = field(compare=False)
    held: tuple[Row, ...] | None
    files: FileStates

    @classmethod
    def of(cls, paths: Sequence[Path], again: Callable[[], Iterator[Row]]) -> "FileRows[Row]":
        """Return the rows of files, or of none; `again` raises what is wrong with one of them."""
        if is_long(paths):
            return cls(again, None, FileStates.of(paths))
        return cls(again, tuple(again()), FileStates(()))

    def __iter__(self) -> Iterator[Row]:
        return self.again() if self.held is None else iter(self.held)

    @contextmanager
    def read_once(self, what: str) -> Iterator[None]:
        """Tell of one reading inside how far it is, where files are read; what: for what.

        Raises: InputError if a file was changed since the first one.
        """
        with work(what, self.files.num_bytes):
            yield
        self.files.check_unchanged()
