"""Folders that go with the process that made them or, if it was killed, when the next one is made."""

import fcntl
import functools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import current_process
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

from cost_model.errors import InputError

MADE_BEFORE_S = 60.0
"""A folder that is younger may be one that is not locked yet."""
_NAME = re.compile(r"hetpipe-[a-z]+-\d+-\w+")
_SHARED_MEMORY = Path("/dev/shm")
_SHORT = (_SHARED_MEMORY, Path("/tmp"), Path("/var/tmp"))
_LONGEST_PARENT = 107 - len("/hetpipe-sockets-1234567-abcdefgh/pymp-abcdefgh/listener-abcdefgh")
"""Of what the path of a socket may have; see unix(7)."""


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


@functools.cache
def place_sockets() -> None:
    """Let the sockets of multiprocessing lie in a folder that is locked as long as this process lives.

    Its own `pymp-` folder bears no lock by which one could tell whether anybody uses it, and stays for ever
    where its process is killed. The folder is in shared memory, or another place with a short name, where the
    path of the usual place is too long for that of a socket. Nothing is changed where multiprocessing has its
    own already.

    Raises: InputError if no place with a short name can be written to.
    """
    if current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        return
    usual = Path(tempfile.gettempdir())
    places = (path for path in (usual, *_SHORT) if len(os.fsencode(path)) <= _LONGEST_PARENT)
    short = [path for path in places if os.access(path, os.W_OK)]
    if not short:
        raise InputError(
            f"TMPDIR is {usual}, too long a name for sockets in there, and {', '.join(map(str, _SHORT))} "
            "cannot be written to; set TMPDIR to a folder with a short name"
        )
    parent, before = short[0], tempfile.tempdir
    remove_left_over(parent)
    name = tempfile.mkdtemp(prefix=f"hetpipe-sockets-{os.getpid()}-", dir=parent)
    _lock(os.open(name, os.O_RDONLY))  # never closed: it is this process's
    tempfile.tempdir = name
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = before
    Finalize(None, shutil.rmtree, args=(name,), kwargs={"ignore_errors": True}, exitpriority=-200)


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
