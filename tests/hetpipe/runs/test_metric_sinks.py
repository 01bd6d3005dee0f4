"""Metrics sent to TensorBoard, MLflow and W&B: what these read back is what the run measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.runs import metric_sinks
from hetpipe.runs.metric_sinks import SinkKind, Sinks, check_installed
from hetpipe.runs.run_folder import RunFolder

SEND = """
import sys
from pathlib import Path
from hetpipe.runs.metric_sinks import SinkKind, Sinks
from hetpipe.runs.run_folder import RunFolder

facts = {"model": "bert-tiny", "seed": 3}
with Sinks((SinkKind(sys.argv[1]),), RunFolder(Path("runs/one")), facts, print) as sinks:
    passed = []
    told = sinks.of_events(passed.append)
    for step, loss in ((1, 5.0), (2, float("nan")), (3, 3.0), (2, 4.0)):  # a device is lost after the third
        told({"event": "step", "step": step, "loss": loss, "finite": True, "slow": {"a": 2.0}})
    told({"event": "checkpoint", "step": 2})
    assert len(passed) == 5
"""


def sent(kind: str, folder: Path, **variables: str) -> None:
    """Send four steps from a process of its own: these libraries keep threads and files."""
    (folder / "runs" / "one").mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **variables}
    found = subprocess.run(
        [sys.executable, "-c", SEND, kind],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "not sent there any more" not in found.stdout


@pytest.mark.slow
def test_tensorboard_reads_what_was_sent(tmp_path: Path):
    sent("tensorboard", tmp_path)
    code = (
        "import json; from tensorboard.backend.event_processing import event_accumulator\n"
        "found = event_accumulator.EventAccumulator('runs/one/tensorboard'); found.Reload()\n"
        "print(json.dumps({tag: [(each.step, each.value) for each in found.Scalars(tag)]"
        " for tag in found.Tags()['scalars']}))"
    )
    read = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = json.loads(read.stdout)
    assert found["loss"] == [[1, 5.0], [3, 3.0], [2, 4.0]]
    assert found["finite"] == [[1, 1.0], [2, 1.0], [3, 1.0], [2, 1.0]]
    assert set(found) == {"loss", "finite"}


@pytest.mark.slow
def test_mlflow_reads_what_was_sent(tmp_path: Path):
    uri = (tmp_path / "mlruns").as_uri()
    sent("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
    code = (
        "import json, sys, mlflow\n"
        "client = mlflow.MlflowClient(sys.argv[1])\n"
        "(run,) = client.search_runs([client.get_experiment_by_name('hetpipe').experiment_id])\n"
        "losses = client.get_metric_history(run.info.run_id, 'loss')\n"
        "print(json.dumps([run.info.run_name, run.info.status, run.data.params,"
        " sorted((each.step, each.value) for each in losses)]))"
    )
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
    command = [sys.executable, "-c", code, uri]
    read = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    name, status, facts, losses = json.loads(read.stdout.splitlines()[-1])
    assert (name, status) == ("one", "FINISHED")
    assert facts == {"model": "bert-tiny", "seed": "3"}
    assert losses == [[1, 5.0], [2, 4.0], [3, 3.0]]


@pytest.mark.slow
def test_wandb_keeps_what_was_sent(tmp_path: Path):
    sent("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true", HOME=str(tmp_path))
    (record,) = (tmp_path / "runs" / "one").glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"trained_step" in content
    assert b"bert-tiny" in content
    assert content.count(b"loss") >= 3


def test_one_that_fails_is_left_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Failing:
        def __init__(self, *of: object) -> None:
            self.closed = False

        def write(self, step: int, values: object) -> None:
            if step == 2:
                raise ConnectionError("nobody\nis there")

        def close(self, *, failed: bool) -> None:
            raise AssertionError

    monkeypatch.setattr(metric_sinks, "_SINKS", {SinkKind.MLFLOW: Failing})
    said: list[str] = []
    passed: list[int] = []
    with Sinks((SinkKind.MLFLOW,), RunFolder(tmp_path), {}, said.append) as sinks:
        told = sinks.of_events(lambda event: passed.append(event["step"]))
        for step in (1, 2, 3):
            told({"event": "step", "step": step, "loss": 1.0})
    assert passed == [1, 2, 3]
    assert said == ["--log mlflow: nobody is there; metrics are not sent there any more"]


def test_a_sink_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"--log mlflow needs a package .*; pip install mlflow-skinny"):
        check_installed(SinkKind.MLFLOW)


@pytest.mark.slow
def test_a_run_sends_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(
        '[network]\nbandwidth = "1 GB/s"\nlatency = "0 s"\n[[nodes]]\nname = "n"\n'
        'devices = [{ kind = "emulated", speed = 0.5, memory = "1 GiB" }]\n'
    )
    line = "run --model bert-tiny --cluster cluster.toml --steps 2 --sequence-length 16 --profile-budget 1 -q"
    assert cli.main([*line.split(), "--no-save", "--run-folder", "mine", "--log", "tensorboard"]) == 0
    run = RunFolder(tmp_path / "mine")
    (events,) = (run.path / "tensorboard").iterdir()
    assert b"samples_per_s" in events.read_bytes()
    assert 'log = ["tensorboard"]\n' in run.job.read_text()
    assert cli.main([*line.split(), "--log", "tensorbored"]) == 2
    assert "'tensorbored' is not one of" in capsys.readouterr().err
