"""Folders that go with the process that made them or, if it was killed, when the next one is made."""

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cost_model.errors import InputError

MADE_BEFORE_S = 60.0
"""A folder that is younger may be one that is not locked yet."""
_NAME = re.compile(r"hetpipe-[a-z]+-\d+-\w+")
_SHARED_MEMORY = Path("/dev/shm")
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")
_MOST_SOCKET_BYTES, _SOCKET_BYTES = 107, len("/pymp-12345678/listener-12345678")


@contextmanager
def scratch_folder(purpose: str, *, in_memory: bool = False) -> Iterator[Path]:
    """Make a folder, named after its purpose and this process, and remove it in the end.

    It is locked as long as this process lives: what was left by one that was killed is removed here.
    in_memory: in shared memory, where the host has that; else where temporary files go.
    """
    shared = in_memory and os.access(_SHARED_MEMORY, os.W_OK)
    parent = _SHARED_MEMORY if shared else Path(tempfile.gettempdir())
    remove_left_over(parent)
    with tempfile.TemporaryDirectory(prefix=f"hetpipe-{purpose}-{os.getpid()}-", dir=parent) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            _lock(descriptor)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_left_over(parent: Path) -> None:
    """Remove the folders of this user in there whose process is gone."""
    for found in os.scandir(parent):
        if not _NAME.fullmatch(found.name) or not found.is_dir(follow_symlinks=False):
            continue
        try:
            facts = found.stat(follow_symlinks=False)
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < MADE_BEFORE_S:
                continue
            descriptor = os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # another process was faster
            continue
        try:
            if _lock(descriptor):
                shutil.rmtree(found.path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Return whether nobody else holds the lock of the open folder; this process does then."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def short_names() -> Iterator[None]:
    """Have Python's own sockets made where their paths are short enough, whatever TMPDIR is.

    The server that forks ranks listens at TMPDIR/pymp-*/listener-*, and a socket's path may have 107 bytes
    (unix(7)).

    Raises: InputError if no folder with a short name can be written to.
    """
    given = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) + _SOCKET_BYTES > _MOST_SOCKET_BYTES:
        short = next((folder for folder in _SHORT if os.access(folder, os.W_OK)), None)
        if short is None:
            raise InputError(
                f"TMPDIR is {tempfile.gettempdir()}, too long a name for sockets in there, and "
                f"{', '.join(_SHORT)} cannot be written to; set TMPDIR to a folder with a short name"
            )
        tempfile.tempdir = short
    try:
        yield
    finally:
        tempfile.tempdir = given
