"""Output that has no reader any more, as behind `| head` or of a closed terminal: training goes on."""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO)
"""What writing gives where a pipe has no reader, and where a terminal was closed."""
_STREAMS = ("stdout", "stderr")


class _Outliving:
    """A stream that drops what is written once its reader has gone; all else is that of the stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.is_lost = stream, False
        self._place: Path | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self.stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def go_on_in(self, place: Path) -> None:
        """Let it be said, if the reader has gone or when it does, that the run goes on in a folder."""
        is_new, self._place = self._place is None, place
        if self.is_lost and is_new:
            self._say()

    @property
    def goes_on(self) -> bool:
        """Whether what was asked for is more than what is printed here."""
        return self._place is not None

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if not self.is_lost:
                self._lose()

    def _lose(self) -> None:
        """Let nothing fail any more: neither later, nor what is still held when the process ends."""
        self.is_lost = True
        with suppress(OSError, ValueError):  # a stream without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.stream.flush()
        if self._place is not None:
            self._say()

    def _say(self) -> None:
        if sys.stderr is not cast(TextIO, self):
            text = "the output has no reader any more; the run goes on without it, in"
            sys.stderr.write(f"note: {text} {self._place}\n")


@contextmanager
def reader_outlived() -> Iterator[None]:
    """Let nothing that is printed here end what is done here, once a folder is named by `go_on_in`.

    Raises: BrokenPipeError in the end, if stdout has lost its reader and no folder was named.
    """
    found = {name: getattr(sys, name) for name in _STREAMS}
    streams = {
        name: _Outliving(stream)
        for name, stream in found.items()
        if stream is not None and not isinstance(stream, _Outliving)
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
        for stream in streams.values():
            stream.flush()
    finally:
        for name, stream in streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
    if (printed := streams.get("stdout")) is not None and printed.is_lost and not printed.goes_on:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def go_on_in(place: Path) -> None:
    """Say, where the output loses its reader or has lost it, that the run goes on in this folder."""
    for stream in (getattr(sys, name) for name in _STREAMS):
        if isinstance(stream, _Outliving):
            stream.go_on_in(place)
