"""One of several processes of a host launches, and the others end as it does."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cost_model.errors import InputError
from hetpipe.hosts import one_launcher
from hetpipe.hosts.one_launcher import launchers_code, launching
from hetpipe.runtime.processes import WorkerLostError
from places import ROOT

LAUNCHER = """
import os, sys
from hetpipe.hosts.one_launcher import launching
with launching("killed", 1, lambda error: 1):
    print("here", flush=True)
    sys.stdin.read()
"""


def test_the_others_end_with_its_code():
    with ThreadPoolExecutor(2) as others:
        waiting = [others.submit(launchers_code, "job") for _ in range(2)]
        with pytest.raises(ZeroDivisionError), launching("job", 2, lambda error: 7):
            raise ZeroDivisionError
        assert [each.result(10.0) for each in waiting] == [7, 7]
        waiting = [others.submit(launchers_code, "job")]
        with launching("job", 1, lambda error: 7):
            pass
        assert waiting[0].result(10.0) == 0


def test_one_that_comes_late_learns_the_code_too():
    def come_late() -> int:
        time.sleep(0.3)
        return launchers_code("late")

    with ThreadPoolExecutor(1) as others:
        waiting = others.submit(come_late)
        with pytest.raises(InputError), launching("late", 1, lambda error: 2):
            raise InputError("refused at once")
        assert waiting.result(10.0) == 2


def test_a_launcher_that_is_killed_is_an_error():
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    threading.Timer(0.3, process.kill).start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(WorkerLostError, match=r"the launcher of this host .* is gone"):
        launchers_code("killed")
    assert signal.getsignal(signal.SIGTERM) == before
    process.communicate()


def test_one_that_never_comes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(one_launcher, "COMING_S", 0.1)
    with pytest.raises(WorkerLostError, match="did not come within"):
        launchers_code("nobody")
    with launching("alone", 1, lambda error: 0):
        pass


def test_two_first_processes_are_refused():
    with (
        launching("twice", 0, lambda error: 0),
        pytest.raises(InputError, match="local rank 0"),
        launching("twice", 0, lambda error: 0),
    ):
        pass
