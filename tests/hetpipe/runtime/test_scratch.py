"""What a killed process leaves is removed by the next one, and what a living one needs is not."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import current_process
from pathlib import Path

import pytest

from cost_model.errors import InputError
from hetpipe.runtime import scratch
from hetpipe.runtime.scratch import MADE_BEFORE_S, place_sockets, scratch_folder

SCRIPT = """
import time
from hetpipe.runtime.scratch import scratch_folder
with scratch_folder("run") as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


FORKSERVER = """
from multiprocessing import forkserver
from hetpipe.runtime.stopping import start_deaf_forkserver
start_deaf_forkserver()
print(len(forkserver._forkserver._forkserver_address))
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


def test_ranks_are_forked_wherever_temporary_files_go(tmp_path):
    """A socket's path has 107 bytes at most, and TMPDIR may have more."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    environment = {**os.environ, "TMPDIR": str(long)}
    done = subprocess.run(
        [sys.executable, "-c", FORKSERVER], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 107
    assert not list(long.iterdir())


def test_without_a_short_place_a_long_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    monkeypatch.setattr(scratch, "_SHORT", (tmp_path / "none",))
    monkeypatch.setitem(current_process()._config, "tempdir", None)
    with pytest.raises(InputError, match="set TMPDIR to a folder with a short name"):
        place_sockets.__wrapped__()
