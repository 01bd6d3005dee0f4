"""Runs Python with some arguments in a fork of a process that has the modules loaded, and is in its place.

    python -I -S warm_client.py SOCKET -m hetpipe run ...

The fork has this process's descriptors, folder, environment and namespaces; it is sent the signals that come
here, ends when this process is killed, and this process ends as it does. See `warm_starts`.
"""

import json
import os
import select
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
LOOKS_EVERY_S = 0.05  # whether a signal has come just before this process began to wait


def main(path: str, *arguments: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = {
        "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "pid": os.getpid(),
        "blocked": [int(number) for number in before],
    }  # fmt: skip
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps(request).encode() + b"\n")
    fork, rest = _line(server, b"")
    for number in FORWARDED:
        signal.signal(number, lambda number, _frame: os.kill(fork, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for descriptor in (0, 1, 2):  # the fork's alone: who reads there waits for its end, as if it was this one
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(_line(server, rest)[0])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _line(server: socket.socket, begun: bytes) -> tuple[int, bytes]:
    """Return the number of the next line, and what has come behind it; begun: what has come of it already."""
    while b"\n" not in begun:
        if select.select([server], [], [], LOOKS_EVERY_S)[0]:
            came = server.recv(64)
            if not came:
                raise EOFError("the server has ended")
            begun += came
    line, rest = begun.split(b"\n", 1)
    return int(line), rest


if __name__ == "__main__":
    main(*sys.argv[1:])
