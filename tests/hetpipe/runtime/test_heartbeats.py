"""Where a thread is, as another sees it."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from tempfile import TemporaryFile

import pytest

from hetpipe.runtime.heartbeats import ThreadPlace
from places import ROOT


class Runner:
    """A thread that stops at one line, and at another once it is told to go on."""

    def __init__(self) -> None:
        self.first, self.second, self.at = threading.Event(), threading.Event(), 0
        self.place: ThreadPlace
        self.thread = threading.Thread(target=self.stop_twice, daemon=True)
        self.thread.start()

    def stop_twice(self) -> None:
        self.place = ThreadPlace()
        self.at = 1
        self.first.wait()
        self.at = 2
        self.second.wait()

    def until(self, at: int) -> None:
        while self.at != at:
            time.sleep(0.001)
        time.sleep(0.05)  # and until it waits


@pytest.fixture
def runner() -> Iterator[Runner]:
    found = Runner()
    yield found
    found.first.set()
    found.second.set()
    found.thread.join()


def test_a_thread_that_rests_is_seen_at_one_place_and_one_that_goes_on_at_another(runner):
    with TemporaryFile() as file:
        runner.until(1)
        first, again = runner.place.now(file), runner.place.now(file)
        assert first is not None and "test_heartbeats.py" in first and " in stop_twice" in first
        assert first == again
        runner.first.set()
        runner.until(2)
        assert runner.place.now(file) != first


def test_the_own_thread_alone_is_seen(runner):
    with TemporaryFile() as file:
        runner.until(1)
        here = ThreadPlace().now(file)
        assert here is not None and "test_the_own_thread" in here and " in stop_twice" not in here


LOOKS = """
import ctypes, sys, threading, time
from tempfile import TemporaryFile
from hetpipe.runtime.heartbeats import ThreadPlace

libc, of_a_thread = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
body, end_s = of_a_thread(lambda _: None), time.monotonic() + 3.0

def come_and_go():
    while time.monotonic() < end_s:
        thread = ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, body, None)
        libc.pthread_join(thread, None)

threads = [threading.Thread(target=come_and_go) for _ in range(2)]
for thread in threads:
    thread.start()
place, looks = ThreadPlace(), 0
with TemporaryFile() as file:
    while time.monotonic() < end_s:
        looks += place.now(file) is not None
print(looks)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads by pthread_create")
def test_looks_beside_threads_of_c_that_come_to_python_and_go():
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert int(done.stdout) > 100
