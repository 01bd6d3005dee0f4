"""A run folder that is there already, is in use, or cannot be; callbacks that take long; ends by a signal."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

from cost_model.errors import InputError
from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.trainer import Callback
from trainers import Recorder, trainer

pytestmark = pytest.mark.slow


def test_checkpoints_of_a_run_before_are_not_taken_for_this_ones(tmp_path):
    trainer(tmp_path, save=True).fit(4)
    run = RunFolder(tmp_path / "run")
    before = run.read_metrics()
    for seed, steps in ((0, 2), (7, 6)):
        with pytest.raises(
            InputError, match=r"step-000004 is of a run before, 4 steps long; go on from it with"
        ):
            trainer(tmp_path, save=True, seed=seed).fit(steps)
    assert run.read_metrics() == before  # nothing was touched
    recorder = Recorder()
    with pytest.warns(UserWarning, match="total_steps is 6, before the checkpoint it was 4: the next step's"):
        trainer(tmp_path, save=True, callbacks=[recorder], total_steps=6).fit(6, resume_from=run.path)
    assert [entry["step"] for entry in recorder.metrics] == [5, 6]
    with pytest.raises(InputError, match="step-000006 is of a run before"):
        trainer(tmp_path, save=True).fit(5, resume_from=run.checkpoints / "step-000004")


def test_a_folder_in_use_is_refused(tmp_path):
    run = RunFolder(tmp_path / "run")
    with run.locked(), pytest.raises(InputError, match="another run is writing there; wait for it, or give"):
        trainer(tmp_path).fit(1)
    assert not run.path.exists()  # made for the lock, and empty
    trainer(tmp_path).fit(1)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/run"):
        with pytest.raises(InputError, match="no run folder can be made there"):
            trainer(tmp_path, folder=tmp_path / place).fit(1)


class Slow(Callback):
    """Takes long after the first step."""

    def on_step_end(self, metrics: Mapping[str, Any]) -> None:
        time.sleep(8.0 if metrics["step"] == 1 else 0.0)


def test_ranks_wait_for_a_callback_longer_than_for_each_other(tmp_path):
    recorder = Recorder()
    trainer(tmp_path, callbacks=[Slow(), recorder], timeout_s=5.0).fit(2)
    assert [entry["step"] for entry in recorder.metrics] == [1, 2]


SCRIPT = """
import sys, time
from hetpipe.runtime.stopping import signals_heard
from hetpipe.runs.run_folder import RunFolder
from pathlib import Path
with RunFolder(Path(sys.argv[1])).locked(), signals_heard():
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(tmp_path, number):
    place = tmp_path / "run"
    command = [sys.executable, "-c", SCRIPT, str(place)]

    def hear_it() -> None:
        signal.signal(number, signal.SIG_DFL)  # under nohup it would be ignored, as it should

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_it) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert place.exists()
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    assert not place.exists()
