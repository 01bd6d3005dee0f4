"""Commands that are forks of a server are as commands that are started as usual."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warm_starts import WORKS_HERE, warm_python

SCRIPT = """
import os, sys, time
print(sys.argv[1:], os.getcwd(), os.environ["SAID"], input(), __name__, os.getpid(), flush=True)
print("to stderr", file=sys.stderr)
def main():
    while sys.argv[1] == "wait":
        time.sleep(0.01)  # not for a signal, which may have come just before
    if sys.argv[1] == "raise":
        raise KeyError("torn")
    if sys.argv[1] == "say":
        sys.exit("why")
    sys.exit(int(sys.argv[1]))
main()
"""
COMMANDS = {"as usual": lambda: [sys.executable], "forked": warm_python}

pytestmark = pytest.mark.skipif(not WORKS_HERE, reason="forks are told of by Linux")


def started(folder: Path, command: list[str], *more: str) -> "subprocess.Popen[str]":
    (folder / "script.py").write_text(SCRIPT)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, "script.py", *more], cwd=folder, env={**os.environ, "SAID": "here"}, stdin=pipe,
        stdout=pipe, stderr=pipe, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write("a line\n")
    process.stdin.flush()
    return process


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_what_it_is_given_and_how_it_ends(tmp_path: Path, command: str):
    python = COMMANDS[command]()
    for word, code, last in (
        ("0", 0, "to stderr"), ("3", 3, "to stderr"), ("raise", 1, "KeyError: 'torn'"), ("say", 1, "why")
    ):  # fmt: skip
        process = started(tmp_path, python, word, "more")
        out, err = process.communicate(timeout=60)
        assert out.startswith(f"{[word, 'more']} {tmp_path} here a line __main__ "), err
        assert (process.returncode, err.splitlines()[-1]) == (code, last)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_ends_it(tmp_path: Path, command: str, number: signal.Signals):
    process = started(tmp_path, COMMANDS[command](), "wait")
    assert process.stdout is not None
    pid = int(process.stdout.readline().split()[-1])
    assert is_there(pid)
    process.send_signal(number)
    assert process.wait(60) == -number
    end_s = time.monotonic() + 60
    while is_there(pid):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    process.communicate()
