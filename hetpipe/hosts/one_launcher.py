"""Several processes on one host of which one launches: the others wait for its end, and end alike.

They meet at a socket that has a name and no file (abstract, unix(7)): nothing is left behind, whoever is
killed. Each side is told by the kernel which user the other is.
"""

import contextlib
import hashlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from cost_model.errors import InputError
from hetpipe.runtime.processes import WorkerLostError
from hetpipe.runtime.stopping import ASKING

COMING_S = 60.0
"""So long do processes of one host wait for one another: they were started together."""
AGAIN_S = 0.2
_USER = struct.Struct("3i")  # struct ucred: process, user, group
_CODE = struct.Struct("!i")


def waiting_place(job: str) -> str:
    """Return the name of the socket at which the processes of a job on this host meet."""
    whole = f"{job}\0{socket.gethostname()}\0{os.getuid()}"
    return f"\0hetpipe-{hashlib.sha256(whole.encode()).hexdigest()}"


@contextlib.contextmanager
def launching(job: str, others: int, code_of: Callable[[BaseException], int]) -> Iterator[None]:
    """Let so many other processes of this host wait for the end of what is done, and tell them its exit code.

    code_of: gives the exit code of an error. One that comes late is waited for, so that it learns the end.

    Raises: InputError if there is such a place already.
    """
    with contextlib.ExitStack() as ends:
        waiting: list[socket.socket] = []
        listening = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listening.bind(waiting_place(job))
        except OSError:
            raise InputError(
                "two processes of this host say that they are its first (local rank 0); start hetpipe once "
                "on each host"
            ) from None
        listening.listen(others)
        taking = threading.Thread(target=_take, args=(listening, others, waiting), daemon=True)
        taking.start()
        code = 0
        try:
            yield
        except BaseException as error:
            code = code_of(error)
            raise
        finally:
            taking.join(COMING_S)
            for one in list(waiting):
                with contextlib.suppress(OSError):
                    one.sendall(_CODE.pack(code))
                one.close()


def _take(listening: socket.socket, others: int, waiting: list[socket.socket]) -> None:
    while len(waiting) < others:
        try:
            one, _ = listening.accept()
        except OSError:  # closed
            return
        if _user(one) == os.getuid():
            waiting.append(one)
        else:
            one.close()


def launchers_code(job: str) -> int:
    """Wait, as another process of this host, for the end of the one that launches; return its exit code.

    Signals are left to it from when it is there: a scheduler sends them to all.

    Raises: WorkerLostError if it is not there, or is killed.
    """
    end_s = time.monotonic() + COMING_S
    while True:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            one.connect(waiting_place(job))
            break
        except OSError:
            one.close()
        if time.monotonic() > end_s:
            raise WorkerLostError(
                f"the first process of this host (local rank 0), which launches, did not come within "
                f"{COMING_S:.0f} s"
            )
        time.sleep(AGAIN_S)
    with one, _signals_left():
        if _user(one) != os.getuid():
            raise WorkerLostError("another user takes the place of this host's launcher; start again")
        said = one.recv(_CODE.size)
    if len(said) < _CODE.size:
        raise WorkerLostError("the launcher of this host (local rank 0) is gone")
    return int(_CODE.unpack(said)[0])


@contextlib.contextmanager
def _signals_left() -> Iterator[None]:
    """Leave signals to the launcher."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _user(one: socket.socket) -> int:
    """Return who is at the other end."""
    return int(_USER.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))[1])
