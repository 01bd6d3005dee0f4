"""A command in a terminal of 80 columns and 24 lines, as a person at it sees what it prints."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS, LINES = 80, 24
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07)")
_SIZES = ("COLUMNS", "LINES", "TERMINAL_WIDTH", "NO_COLOR")


def lines_in_terminal(
    command: Sequence[str | Path],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    until: str | None = None,
    patience_s: float = 300.0,
) -> list[str]:
    """Return the lines of a command's output in a terminal, without colours; its errors go to no terminal.

    until: what is printed before the command is interrupted, as by Ctrl-C. The command is to end well, and
    never to be silent for longer than patience_s.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    given = os.environ if variables is None else variables
    environment = {name: text for name, text in given.items() if name not in _SIZES} | {"TERM": "xterm"}
    shown = b""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=errors
        ) as process,
    ):
        os.close(theirs)
        try:
            while chunk := _read(ours, patience_s):
                shown += chunk
                if until is not None and until.encode() in shown:
                    until = None
                    process.send_signal(signal.SIGINT)
            code = process.wait(patience_s)
        finally:
            process.kill()
            os.close(ours)
        errors.seek(0)
        assert code == 0, errors.read().decode()
    return [line.rstrip() for line in _CONTROL.sub("", shown.decode()).splitlines()]


def _read(terminal: int, patience_s: float) -> bytes:
    """Return what is printed next; nothing once all who could print have ended."""
    ready, _, _ = select.select([terminal], [], [], patience_s)
    assert ready, f"nothing was printed for {patience_s:g} seconds"
    try:
        return os.read(terminal, 65536)
    except OSError:  # what Linux says at the end
        return b""
