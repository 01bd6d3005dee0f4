"""What a rank says of what it does, in memory shared with its launcher (`hetpipe.runtime.rank_watch`).

A thread of each rank looks twice a second where its main thread is, and counts how often that has changed.
The main thread says whether it is within a step, how many are over, and for whom it waits.
"""

import ctypes
import faulthandler
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy as np

LOOK_S = 0.5
"""So often a rank looks where its main thread is, and the launcher at what they saw."""

NOBODY, SEVERAL = -1, -2
"""For whom a rank waits, if it is not one other."""


class Column(IntEnum):
    """What a row of the table holds.

    PHASE: `BETWEEN`, `LATER` or `FIRST`. MOVES: how often the main thread was seen elsewhere than before.
    STEPS: those that are over. PEER: for whom it waits. WAITS: how often it has begun to. BEAT_NS: when the
    thread looked last, on the monotonic clock; 0 before the first time.
    """

    PHASE = 0
    MOVES = 1
    STEPS = 2
    PEER = 3
    WAITS = 4
    BEAT_NS = 5


BETWEEN, LATER, FIRST = range(3)
"""Of steps: a rank is between two, within one, or within the first, which may compile."""

_here: "Heart | None" = None


class Heart:
    """The row of a rank."""

    def __init__(self, path: Path, row: int) -> None:
        """Open the row, and look from now on; to be called in the main thread."""
        table = np.memmap(path, dtype=np.int64, mode="r+").reshape(-1, len(Column))
        self._row = memoryview(table[row])  # as quick as a list, where numpy takes four times as long
        self._row[Column.PEER] = NOBODY
        self._main, self._place = threading.get_ident(), ThreadPlace()
        threading.Thread(target=self._look, daemon=True, name="hetpipe heart").start()

    @contextmanager
    def within_step(self, *, first: bool) -> Iterator[None]:
        """Say that a step is under way; first: one from which is learnt how long a pause may be."""
        self._row[Column.PHASE] = FIRST if first else LATER
        try:
            yield
            self._row[Column.STEPS] += 1
        finally:
            self._row[Column.PHASE] = BETWEEN

    def waits(self, peers: Collection[int], rank: int) -> None:
        """Say that this rank now waits for others; in the main thread alone, others wait beside it."""
        if threading.get_ident() == self._main:
            others = [peer for peer in peers if peer != rank]
            self._row[Column.PEER] = others[0] if len(others) == 1 else SEVERAL
            self._row[Column.WAITS] += 1

    def goes_on(self) -> None:
        """Say that it waits no more."""
        if threading.get_ident() == self._main:
            self._row[Column.PEER] = NOBODY

    def _look(self) -> None:
        before = ""
        with TemporaryFile() as file:
            while True:
                self._row[Column.BEAT_NS] = time.monotonic_ns()
                time.sleep(LOOK_S)
                now = self._place.now(file)
                self._row[Column.MOVES] += now is None or now != before
                before = now or ""


class ThreadPlace:
    """Where the thread that makes this is, as another thread sees it: the line of each of its functions.

    NOTE: two ways to see that ended ranks by signal 11 in CPython 3.11, now and then. `sys._current_frames`
    gives frames that end while they are walked. `faulthandler.dump_traceback` walks all threads, among them
    one that C++ (gloo, which lets go of a tensor) has listed, but not made yet: only 3.12 lists them last.
    So the interpreter is asked for the one thread of which is known that it lives.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        current = ctypes.pythonapi.PyThreadState_Get
        current.restype = ctypes.c_void_p
        self._state = ctypes.c_void_p(current())
        self._dump = getattr(ctypes.pythonapi, "_Py_DumpTraceback", None)  # gone from 3.13 on
        if self._dump is not None:
            self._dump.restype = None

    def now(self, file: BinaryIO) -> str | None:
        """Return where it is, as long as it lives; None where that cannot be told. file: written anew."""
        file.seek(0)
        file.truncate()
        if self._dump is not None:
            self._dump(file.fileno(), self._state)  # during which no thread runs
            file.seek(0)
            return file.read().decode("utf-8", "replace")
        if sys.version_info < (3, 12):
            return None
        faulthandler.dump_traceback(file, all_threads=True)  # of at most 100 threads
        file.seek(0)
        parts = file.read().decode("utf-8", "replace").split("\n\n")
        return next(
            (part for part in parts if f"hread 0x{self._ident:016x} " in part.partition("\n")[0]), None
        )


def begin(path: Path, row: int) -> None:
    """Begin to tell, as a rank, what its main thread does."""
    global _here
    _here = Heart(path, row)


@contextmanager
def within_step(*, first: bool) -> Iterator[None]:
    """Say, in a rank that a launcher watches, that a step is under way; first: as for `Heart.within_step`."""
    if _here is None:
        yield
        return
    with _here.within_step(first=first):
        yield


def waits(peers: Collection[int], rank: int) -> None:
    """Say, in a rank that a launcher watches, that it waits for others from now on."""
    if _here is not None:
        _here.waits(peers, rank)


def goes_on() -> None:
    """Say, in such a rank, that it waits no more."""
    if _here is not None:
        _here.goes_on()
