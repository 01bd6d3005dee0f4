"""What listens to a trainer is told in order, may end training, and costs no checkpoint where it fails."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from hetpipe.program.instructions import Schedule
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import read_settings
from hetpipe.training import checkpoint
from hetpipe.training.trainer import Callback
from trainers import BATCH, Recorder, trainer


@pytest.mark.slow
def test_callbacks_are_told_in_order(tmp_path):
    first, second = Recorder(), Recorder()
    options = {"every": 2, "save": True, "schedule": Schedule.GPIPE}
    report = trainer(tmp_path, callbacks=[first, second], **options).fit(3)
    assert first.told == second.told
    assert [step for event, step in first.told if event == "step"] == [1, 2, 3]
    # files are written while training goes on: a checkpoint is told of some time after its step
    assert [step for event, step in first.told if event == "checkpoint"] == [2, 3]
    assert first.told.index(("checkpoint", 2)) > first.told.index(("step", 2))
    assert first.told[-2:] == [("checkpoint", 3), ("end", 3)]
    assert report.steps == 3
    assert read_settings(RunFolder(tmp_path / "run").config).schedule is Schedule.GPIPE
    entries = RunFolder(tmp_path / "run").read_metrics()
    assert [dict(entry) for entry in first.metrics] == list(entries)
    assert entries[0].keys() >= {"loss", "step_s", "gradient_norm", "learning_rate", "samples_per_s"}
    for entry in entries:  # by the wall clock, in which also lies what is between steps
        assert entry["samples_per_s"] == pytest.approx(BATCH / entry["wall_s"])
        assert entry["wall_s"] > entry["step_s"]
    assert first.paths == [tmp_path / "run" / "checkpoints" / f"step-00000{step}" for step in (2, 3)]
    assert all(
        checkpoint.read_manifest(path).step == step for path, step in zip(first.paths, (2, 3), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "checkpoint"])
def test_a_callback_ends_training(tmp_path, where):
    other = Recorder()
    stopping = Recorder(stop_at=2) if where == "step" else Recorder(stop_at_checkpoint=2)
    made = trainer(tmp_path, callbacks=[stopping, other], save=True, every=0 if where == "step" else 1)
    report = made.fit(1000)
    done = report.steps
    assert done == 2 if where == "step" else 2 <= done < 1000
    assert done == len(RunFolder(tmp_path / "run").read_metrics())
    assert [event for event in other.told if event[0] == "step"] == [("step", n + 1) for n in range(done)]
    assert other.told[-2:] == [("checkpoint", done), ("end", done)]
    assert made.checkpoint == other.paths[-1]


class Failing(Callback):
    def on_step_end(self, metrics: Mapping[str, Any]) -> None:
        raise ZeroDivisionError("in a callback")


@pytest.mark.slow
def test_what_a_callback_raises_comes_out(tmp_path):
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        trainer(tmp_path, callbacks=[Failing()]).fit(3)


class FailingLater(Callback):
    def on_step_end(self, metrics: Mapping[str, Any]) -> None:
        time.sleep(0.5)  # so that files of the step before are written
        if metrics["step"] == 3:
            raise ZeroDivisionError("in a callback")


@pytest.mark.slow
def test_checkpoints_under_way_outlive_what_a_callback_raises(tmp_path):
    told = Recorder()
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        trainer(tmp_path, callbacks=[FailingLater(), told], every=1, save=True).fit(6)
    found = [step for step, _ in checkpoint.written(RunFolder(tmp_path / "run").checkpoints)]
    assert found == [3, 2, 1]
    assert [metrics["step"] for metrics in told.metrics] == [1, 2]
