"""What a killed process leaves is removed by the next one, and what a living one needs is not."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpipe.runtime.scratch import MADE_BEFORE_S, scratch_folder

SCRIPT = """
import time
from hetpipe.runtime.scratch import scratch_folder
with scratch_folder("run") as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", SCRIPT]
    old = time.time() - 2 * MADE_BEFORE_S
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        for name in ("hetpipe-run-1-young", "hetpipe-other", "elsewhere"):
            (tmp_path / name).mkdir()
        (tmp_path / "hetpipe-run-2-link").symlink_to(tmp_path / "elsewhere")
        (left / "board").write_text("")
        os.utime(left, (old, old))
        with scratch_folder("run"):
            assert left.exists()  # its process lives
        process.send_signal(signal.SIGKILL)
    assert left.exists()
    with scratch_folder("store") as mine:
        assert mine.parent == tmp_path and not left.exists()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"hetpipe-run-1-young", "hetpipe-other", "elsewhere", "hetpipe-run-2-link"}


SOCKETS = """
import os, sys, time
from multiprocessing.connection import arbitrary_address
from hetpipe.runtime.scratch import place_sockets
place_sockets()
place_sockets()
print(arbitrary_address("AF_UNIX"), flush=True)
time.sleep(60 if len(sys.argv) > 1 else 0)
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """Give a folder whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_the_sockets_of_a_killed_launcher_are_removed_by_the_next(short):
    environment = {**os.environ, "TMPDIR": str(short)}
    command = [sys.executable, "-c", SOCKETS]
    old = time.time() - 2 * MADE_BEFORE_S

    def start_another() -> set[str]:
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return {path.name for path in short.iterdir()}

    assert start_another() == set()  # a process that ends takes them with it
    with subprocess.Popen([*command, "waits"], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        made = Path(process.stdout.readline().strip()).parent.parent
        assert made.parent == short and made.name.startswith(f"hetpipe-sockets-{process.pid}-")
        os.utime(made, (old, old))
        assert start_another() == {made.name}  # its process lives
        process.send_signal(signal.SIGKILL)
    assert start_another() == set()


def test_where_a_path_would_be_too_long_sockets_are_in_shared_memory(tmp_path):
    place = tmp_path / ("long" * 20)
    place.mkdir()
    environment = {**os.environ, "TMPDIR": str(place)}
    command = [sys.executable, "-c", SOCKETS]
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    made = Path(found).parent.parent
    assert made.parent == Path("/dev/shm") and not made.exists()  # gone with its process
    assert list(place.iterdir()) == []
