"""A signal ends training after the step at hand, with a checkpoint, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.checkpoint import latest, read_manifest
from hetpipe.training.checkpoint_damage import damage_of
from places import ROOT, SUPPORT

pytestmark = pytest.mark.slow

SCRIPT = SUPPORT / "stopping_script.py"
SOON_S = 60.0


def hear_all() -> None:
    """Undo what a shell does to what it starts in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def training(place: Path, *launcher: str, slow_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """Train in a session of its own, until step 3 is over."""
    (place / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), str(place), str(slow_s)],
        env={
            **os.environ,
            "PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(place / "tmp"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_all,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "3":
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def running_in_session(session: int) -> list[str]:
    """Return the names of the processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(rest.split()[3]) == session and rest.split()[0] != "Z":
            found.append(name)
    return found


def check_nothing_is_left(place: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SOON_S
    while left := running_in_session(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not [*(place / "tmp").glob("hetpipe-*"), *(place / "tmp").glob("pymp-*")]
    assert not list(Path("/dev/shm").glob(f"hetpipe-*-{process.pid}-*"))
    with RunFolder(place / "run").locked():
        pass


def check_code(code: int, expected: int, errors: str) -> None:
    """Check how a script ended.

    NOTE: Python ends by the signal itself where nobody takes KeyboardInterrupt, but by 1 where text is
    executed at exit, as by torch, which then imports tabulate, if that is installed.
    """
    if code == 1 and expected == -signal.SIGINT:
        assert errors.rstrip().endswith("\nKeyboardInterrupt"), errors
    else:
        assert code == expected, errors


def check_the_end_is_kept(folder: RunFolder) -> None:
    newest = latest(folder.checkpoints)
    assert newest is not None and damage_of(newest) is None
    assert read_manifest(newest).step == folder.read_metrics()[-1]["step"] >= 3
    assert folder.report.exists()


@pytest.mark.parametrize(
    ("number", "code"),
    # a shell says 130 where a script ends by SIGINT; SIGUSR1 is below, and in test_reused_folders.py
    [
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.exhaustive),
    ],
)
def test_training_ends_after_the_step_with_a_checkpoint(tmp_path, number, code):
    """A scheduler sends its signals to all processes of a job, a terminal to those of a group."""
    with training(tmp_path) as process:
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=SOON_S)
        check_code(process.returncode, code, errors)
        check_nothing_is_left(tmp_path, process)
    check_the_end_is_kept(RunFolder(tmp_path / "run"))


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    with training(tmp_path, slow_s=10 * SOON_S) as process:
        for times in range(2):
            time.sleep(0.5)
            assert process.poll() is None, times
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=SOON_S)
        check_code(process.returncode, -signal.SIGINT, errors)
        check_nothing_is_left(tmp_path, process)
    assert latest(RunFolder(tmp_path / "run").checkpoints) is None


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]
)
def test_torchrun_passes_the_signal_on(tmp_path, number):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with training(tmp_path, *launcher) as process:
        process.send_signal(number)
        process.communicate(timeout=SOON_S)
        assert process.returncode != 0
    check_the_end_is_kept(RunFolder(tmp_path / "run"))


def test_a_signal_to_any_rank_of_torchrun_is_enough(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with training(tmp_path, *launcher) as process:
        os.kill(rank_one(process.pid), signal.SIGUSR1)
        _, errors = process.communicate(timeout=SOON_S)
        assert process.returncode == 1 and "exitcode  : 138" in errors  # rank 0 says why it ended
    check_the_end_is_kept(RunFolder(tmp_path / "run"))


def rank_one(agent: int) -> int:
    """Return the process id of rank 1 under torchrun."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and b"\0RANK=1\0" in b"\0" + (folder / "environ").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"{agent} has started no rank 1")
