"""Tests that measure time run alone, also where others run side by side (`pytest -n 2`).

Each test takes its turn through two locked files, the door and the room. Whoever enters passes the door,
which one holds at a time; then most share the room, and a test marked `alone` has it for itself. It waits
inside the door until the room is empty, so that nobody enters before it.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOM = "HETPIPE_TEST_ROOM"
"""Names the folder of the locks to the processes that run tests side by side; not set, there is one alone."""


@contextlib.contextmanager
def new_room() -> Iterator[Path]:
    """Make the room for the processes that are started from now on."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-test-room-") as folder:
        os.environ[ROOM] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[ROOM]


@contextlib.contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Wait for the turn of a test, and hold the room until its end: alone, or beside others."""
    folder = os.environ.get(ROOM)
    if folder is None:
        yield
        return
    with contextlib.ExitStack() as room:
        with _locked(Path(folder, "door"), fcntl.LOCK_EX):
            room.enter_context(_locked(Path(folder, "room"), fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also for the processes that inherited the file
