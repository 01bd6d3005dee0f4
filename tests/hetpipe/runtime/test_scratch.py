"""What a killed process leaves is removed by the next one, and what a living one needs is not."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
