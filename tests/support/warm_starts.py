"""Commands in Python that do not load torch and transformers anew: each is a fork of a process that has them.

Most of the time of a short `hetpipe run` is that of loading modules, twice: in the command, and in the
server that forks its ranks. Here both are forks of the server that the process that runs tests has for its
ranks. What they do from their first line on, their descriptors, signals, namespaces and exit codes are those
of a command that was started as usual.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import multiprocessing
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from hetpipe.runtime.rank_server import die_with_parent, environment_at_start
from hetpipe.runtime.stopping import start_deaf_forkserver

CLIENT = Path(__file__).with_name("warm_client.py")
NAMESPACES = ("net", "uts", "mnt")
WORKS_HERE = sys.platform == "linux" and hasattr(os, "pidfd_open")


def warm_python() -> list[str]:
    """Return what to begin a command with in place of `python`, for `-m name ...` or `script.py ...`."""
    if not WORKS_HERE:
        return [sys.executable]
    return [sys.executable, "-I", "-S", str(CLIENT), _server()]


@functools.cache
def _server() -> str:
    """Start what forks, as a fork of the server for ranks, which has all modules; return its socket."""
    folder = tempfile.TemporaryDirectory(prefix="hetpipe-test-warm-")
    atexit.register(folder.cleanup)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    ready, end = context.Pipe(duplex=False)
    path = os.path.join(folder.name, "socket")
    with environment_at_start():  # NOTE: a pool of threads of OpenMP there would be lost to what it forks
        start_deaf_forkserver()
    context.Process(target=_serve, args=(path, end), daemon=True).start()
    end.close()
    ready.recv()
    return path


def _serve(path: str, ready: Any) -> None:
    """Fork for each who connects, until the process that runs tests has ended."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    ready.send(None)
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ, None)
    watched.register(parent.sentinel, selectors.EVENT_READ, None)
    while True:
        for key, _ in watched.select():
            if key.fileobj == parent.sentinel:
                os._exit(0)
            if key.fileobj is listener:
                client, _ = listener.accept()
                pid = _fork(client)
                client.sendall(b"%d\n" % pid)
                ended = os.pidfd_open(pid)
                watched.register(ended, selectors.EVENT_READ, (client, pid, ended))
                watched.register(client, selectors.EVENT_READ, (client, pid, ended))
                continue
            client, pid, ended = key.data
            if client.fileno() < 0:
                continue  # both at once
            if key.fileobj is client:  # it was killed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError):
                client.sendall(b"%d\n" % status)
            watched.unregister(ended)
            watched.unregister(client)
            os.close(ended)
            client.close()


def _fork(client: socket.socket) -> int:
    """Return the process that does what a client asks for; in it, do that and end."""
    _, descriptors, *_ = socket.recv_fds(client, 1, 3)
    with client.makefile() as lines:
        request = json.loads(lines.readline())
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        try:
            _take_place(request, descriptors)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        _run(request["arguments"])
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _take_place(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Be where the client is, with what it has, and nothing of the processes that this is a fork of."""
    for kind in NAMESPACES:
        _enter(f"/proc/{request['pid']}/ns/{kind}", f"/proc/self/ns/{kind}")
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False, errors=errors)  # noqa: SIM115
        for number, mode, errors in ((0, "r", None), (1, "w", None), (2, "w", "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _forget_server()
    _later_server()


def _enter(theirs: str, ours: str) -> None:
    if os.readlink(theirs) == os.readlink(ours):
        return
    with open(theirs, "rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns", theirs)


def _forget_server() -> None:
    """Be a main process that has not started another yet."""
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    subclasses = multiprocessing.process.BaseProcess.__subclasses__()
    (main,) = (found for found in subclasses if found.__name__ == "_MainProcess")
    multiprocessing.process._current_process = main()  # type: ignore[attr-defined]
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    forkserver._forkserver.__init__()  # type: ignore[attr-defined,misc]
    resource_tracker._resource_tracker.__init__()  # type: ignore[attr-defined,misc]


def _later_server() -> None:
    """Fork what becomes the server for ranks once that is asked for, in place of a new interpreter.

    Now, while there are no threads; a child of this process, as the other would be.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_server(theirs)
    theirs.close()
    as_usual = util.spawnv_passfds

    def spawnv_passfds(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        command = os.fsdecode(args[-1])
        if "forkserver import main" not in command or ours.fileno() < 0:
            return as_usual(path, args, passfds)
        said = {
            "command": command, "numbers": list(passfds), "environment": dict(os.environ),
            "folder": os.getcwd(),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }  # fmt: skip
        socket.send_fds(ours, [b" "], list(passfds))
        ours.sendall(json.dumps(said).encode() + b"\n")
        ours.close()
        return pid

    util.spawnv_passfds = spawnv_passfds


def _become_server(asked: socket.socket) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    _, descriptors, *_ = socket.recv_fds(asked, 1, 8)
    line = asked.makefile().readline()
    if not line:
        os._exit(0)
    said = json.loads(line)
    high = [os.dup2(descriptor, 500 + index) for index, descriptor in enumerate(descriptors)]
    os.closerange(3, 500)
    for descriptor, number in zip(high, said["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(said["folder"])
    os.environ.clear()
    os.environ.update(said["environment"])
    signal.pthread_sigmask(signal.SIG_SETMASK, said["blocked"])
    try:
        exec(said["command"], {"__name__": "__main__"})
    except SystemExit:
        os._exit(0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(1)


def _run(arguments: Sequence[str]) -> NoReturn:
    """Run what stands behind `python`, and end as it would."""
    code: Any = 0
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)
