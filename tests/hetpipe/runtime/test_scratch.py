"""What a killed process leaves is removed by the next one, and what a living one needs is not."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cost_model.errors import InputError
from hetpipe.runtime import scratch
from hetpipe.runtime.scratch import MADE_BEFORE_S, scratch_folder, short_names

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


def test_ranks_are_forked_wherever_temporary_files_go(tmp_path):
    """A socket's path has 107 bytes at most, and TMPDIR may have more."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    environment = {**os.environ, "TMPDIR": str(long)}
    done = subprocess.run(
        [sys.executable, "-c", FORKSERVER], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50
    assert not list(long.iterdir())


def test_without_a_short_place_a_long_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    monkeypatch.setattr(scratch, "_SHORT", (str(tmp_path / "none"),))
    with pytest.raises(InputError, match="set TMPDIR to a folder with a short name"), short_names():
        pass
