"""The server that forks ranks: started when the first rank is, or ahead of it, to load what ranks need."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from typing import Any

from hetpipe.runtime.stopping import start_deaf_forkserver

ENDS_WITH_PARENT = "hetpipe.runtime.ends_with_parent"
_METHOD = "forkserver"


class _Use:
    """Whether the server that runs has been asked for ranks."""

    ranks = False


def rank_context(preload: Sequence[str]) -> Any:
    """Return the context of multiprocessing in which ranks start; where servers can fork, one runs then.

    preload: modules that a server loads which is started now.
    """
    if _METHOD not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    _start(preload)
    _Use.ranks = True
    return multiprocessing.get_context(_METHOD)


@contextlib.contextmanager
def server_ahead(preload: Sequence[str]) -> Iterator[None]:
    """Have the server load modules meanwhile; it is ended afterwards if no rank was asked for.

    Where a server runs already, this changes nothing; nor in another thread than the main one, since the
    server ends with the thread that started it, nor in a rank that reads its script.
    """
    can = _METHOD in multiprocessing.get_all_start_methods() and not is_read_by_a_rank()
    if not can or _runs() or threading.current_thread() is not threading.main_thread():
        yield
        return
    _Use.ranks = False
    _start((ENDS_WITH_PARENT, *preload))
    try:
        yield
    finally:
        if not _Use.ranks:
            _kill()


def is_read_by_a_rank() -> bool:
    """Return whether this process, about to be a rank, reads the script that starts ranks."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


@contextlib.contextmanager
def main_as_ranks_see_it() -> Iterator[None]:
    """Let ranks that are started here not read a script which is in no file, as one from stdin is."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or os.path.isfile(path):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


def _runs() -> bool:
    return forkserver._forkserver._forkserver_pid is not None  # type: ignore[attr-defined]


def _start(preload: Sequence[str]) -> None:
    context = multiprocessing.get_context(_METHOD)
    context.set_forkserver_preload([name for name in preload if name != "__main__"])
    with environment_at_start():
        start_deaf_forkserver()


def _kill() -> None:
    """End the server in the midst of loading; asked to end, it would load all of it first."""
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextlib.contextmanager
def environment_at_start() -> Iterator[None]:
    """Set what the server that forks the ranks starts with, where the user has not set it.

    No parallel region there: the ranks set their own number of threads. And a module that asks for GPUs when
    it is loaded does not start CUDA, which would be lost to the ranks.
    """
    added = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    added = {name: value for name, value in added.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when the thread that forked or started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
