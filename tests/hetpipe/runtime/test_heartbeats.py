"""Where a thread is, as another sees it."""

import threading
import time
from collections.abc import Iterator
from tempfile import TemporaryFile

import pytest

from hetpipe.runtime.heartbeats import place_of


class Runner:
    """A thread that stops at one line, and at another once it is told to go on."""

    def __init__(self) -> None:
        self.first, self.second, self.at = threading.Event(), threading.Event(), 0
        self.thread = threading.Thread(target=self.stop_twice, daemon=True)
        self.thread.start()

    def stop_twice(self) -> None:
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
    ident = runner.thread.ident
    with TemporaryFile() as file:
        runner.until(1)
        first, again = place_of(ident, file), place_of(ident, file)
        assert first is not None and "test_heartbeats.py" in first and " in stop_twice" in first
        assert first == again
        runner.first.set()
        runner.until(2)
        assert place_of(ident, file) != first


def test_the_own_thread_and_one_that_is_none(runner):
    with TemporaryFile() as file:
        here = place_of(threading.get_ident(), file)
        assert here is not None and "test_the_own_thread" in here and " in stop_twice" not in here
        assert place_of(1, file) is None
