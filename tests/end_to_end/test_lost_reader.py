"""A run whose output has lost its reader goes on without it; one whose terminal is closed keeps its model."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from cost_model.profile import profile_text
from hetpipe.reporting.lost_reader import go_on_in, reader_outlived
from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.checkpoint import latest
from hetpipe.training.trainer import Callback
from partition.plan_file import plan_text
from runs import CPU_CLUSTER, chain_plan, made_up_profile
from shell import Shell
from trainers import trainer

MODEL = "bert-tiny"
SOON_S = 60.0
NOTE = "note: the output has no reader any more; the run goes on without it, in"
IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which whoever runs the tests may ignore, as nohup does
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from hetpipe.cli import main
sys.exit(main())
"""
"""A process whose terminal is its standard input."""


@pytest.fixture
def words(hetpipe: Shell) -> list[str]:
    """What follows the name of the program."""
    hetpipe.write("cluster.toml", CPU_CLUSTER)
    hetpipe.write("profile.json", profile_text(made_up_profile(MODEL)))
    hetpipe.write("plan.json", plan_text(chain_plan(MODEL, [0, 4, 8], 16)))
    files = "--cluster cluster.toml --profile profile.json --plan plan.json"
    return f"run --model {MODEL} {files} --total-steps 900 --run-folder mine".split()


def test_what_only_prints_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch):
    with _pipe_without_a_reader(monkeypatch), pytest.raises(BrokenPipeError), reader_outlived():
        print("one", flush=True)
        print("two", flush=True)


def test_what_goes_on_says_once_where(monkeypatch, capsys):
    with _pipe_without_a_reader(monkeypatch), reader_outlived():
        print("one", flush=True)
        for _ in range(2):
            go_on_in(Path("mine"))
            print("two", flush=True)
    assert capsys.readouterr().err == f"{NOTE} mine\n"


def _pipe_without_a_reader(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


class _Told(Callback):
    """Prints the number of each step."""

    def on_step_end(self, metrics: Mapping[str, object]) -> None:
        print(metrics["step"], flush=True)


@pytest.mark.slow
def test_a_script_trains_to_the_end_without_a_reader(tmp_path, monkeypatch, capsys):
    with _pipe_without_a_reader(monkeypatch):
        assert trainer(tmp_path, callbacks=[_Told()], save=True).fit(3).steps == 3
    assert capsys.readouterr().err == f"{NOTE} {tmp_path / 'run'}\n"


@pytest.mark.slow
@pytest.mark.parametrize("lines", [0, 1])
def test_a_run_whose_output_is_cut_trains_to_the_end(hetpipe: Shell, words: list[str], lines: int):
    command = [sys.executable, "-m", "hetpipe", *words, "--steps", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        for _ in range(lines):
            run.stdout.readline()
        run.stdout.close()
        errors = run.stderr.read()
        assert run.wait(SOON_S) == 0, errors
    assert [line for line in errors.splitlines() if "reader" in line] == [f"{NOTE} mine"]
    newest = latest(RunFolder(Path("mine")).checkpoints)
    assert newest is not None and newest.name == "step-000004"


@pytest.mark.slow
def test_a_closed_terminal_ends_a_run_after_the_step_with_a_checkpoint(hetpipe: Shell, words: list[str]):
    folder = RunFolder(Path("mine"))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, *words, "--steps", "900", "--quiet"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        deadline = time.monotonic() + SOON_S
        while not folder.metrics.exists() or folder.metrics.read_text().count("\n") < 3:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.close(ours)
        assert run.wait(SOON_S) == 129
    newest = latest(folder.checkpoints)
    assert newest is not None
    assert int(newest.name.removeprefix("step-")) == folder.read_metrics()[-1]["step"]
