"""A run keeps its model: the checkpoint of its end, the room that it needs, and what is gone on from."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import checkpoints
import user_tasks
from cost_model.errors import InputError
from cost_model.memory import checkpoint_bytes
from cost_model.profile import profile_text
from hetpipe.commands.training import RunStart, train_shown
from hetpipe.models.huggingface import model_spec
from hetpipe.models.names import ModelEntry
from hetpipe.models.tasks import Task
from hetpipe.reporting.progress import step_bar
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.runs.settings import Settings, read_settings, settings_text
from hetpipe.training import checkpoint_weights
from hetpipe.training.checkpoint import read_manifest
from hetpipe.training.checkpoint_room import Room, num_checkpoints
from partition.plan_file import plan_text
from runs import CPU_CLUSTER, chain_plan, made_up_profile
from shell import Result, Shell
from small_case import small_profile
from trainers import Recorder, trainer

MODEL = "bert-tiny"
Run = Callable[[str], Result]


@pytest.mark.parametrize(
    ("every", "save", "done", "expected"),
    [
        (0, True, 0, 1),
        (0, False, 0, 0),
        (4, True, 0, 3),  # 4, 8 and the end, 10
        (4, False, 0, 2),
        (5, True, 0, 2),  # 5 and the end, which is one of them
        (4, True, 8, 1),
        (4, False, 8, 0),
        (1, True, 10, 0),  # nothing is trained
    ],
)
def test_checkpoints_are_counted_before_they_are_written(every, save, done, expected):
    settings = Settings(MODEL, 10, every=every, save=save)
    assert num_checkpoints(settings, done) == expected
    assert num_checkpoints(replace(settings, keep=1), done) == min(2, expected)
    assert num_checkpoints(replace(settings, every_s=60.0), done) == expected + (done < 10)


def test_a_checkpoint_is_all_weights_and_two_states_of_the_trained_ones():
    # layers of 400, 200, 200 and 300 bytes; 40 are not trained, 250 of the last are tied to the first
    assert checkpoint_bytes(small_profile()) == 850 + 2 * 810


def test_no_room_for_a_single_checkpoint_is_refused():
    room = Room(Path("runs/x"), 2, 3 * 2**30, 2**30, every=True)
    with pytest.raises(InputError) as caught:
        room.check()
    assert str(caught.value) == (
        "runs/x: a checkpoint takes 3.00 GiB, and 1.00 GiB are free there; make room, give another "
        "--run-folder (folder), or keep no model: --no-save --every 0 (save=False)"
    )
    assert room.shortage is None
    replace(room, num_checkpoints=0).check()


def test_room_for_some_of_the_checkpoints_is_a_warning():
    room = Room(Path("runs/x"), 4, 2**30, 3.5 * 2**30)
    room.check()
    assert room.shortage is not None and "4 checkpoints of 1.00 GiB each, and 3.50 GiB free" in room.shortage
    assert "stops after 3 of them" in room.shortage
    for enough in (replace(room, num_checkpoints=3), replace(room, checkpoint_bytes=0.0)):
        enough.check()
        assert enough.shortage is None


def test_settings_keep_the_model_unless_they_say_otherwise(tmp_path):
    assert Settings(MODEL, 1).save is True
    path = tmp_path / "config.json"
    path.write_text(settings_text(Settings(MODEL, 1, save=False)))
    assert read_settings(path).save is False


@pytest.fixture
def run(hetpipe: Shell) -> Run:
    """`hetpipe run` of bert-tiny on two CPU devices, with a profile that nobody measured."""
    hetpipe.write("cluster.toml", CPU_CLUSTER)
    hetpipe.write("profile.json", profile_text(made_up_profile(MODEL)))
    hetpipe.write("plan.json", plan_text(chain_plan(MODEL, [0, 4, 8], 16)))
    line = f"run --model {MODEL} --cluster cluster.toml --profile profile.json --plan plan.json"
    return lambda options: hetpipe(f"{line} --total-steps 9 {options}")


def test_no_room_is_refused_before_anything_is_written(hetpipe, run, monkeypatch):
    free = SimpleNamespace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: free)
    result = run("--steps 2")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "runs/bert-tiny-001: a checkpoint takes" in result.err and "1.00 MiB are free" in result.err
    assert result.err.endswith("--run-folder (folder), or keep no model: --no-save (save=False)\n")
    assert not (hetpipe.folder / "runs").exists()


@pytest.mark.parametrize("every", ["often", "-1", "1.5", "10 minutes", "9" * 5000])
def test_how_often_is_a_number_of_steps_or_a_time(run, every):
    result = run(f"--steps 2 --every '{every}'")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.endswith("; give steps, such as 50, or a time, such as 10min; 0 for none\n")


@pytest.mark.parametrize("timeout", ["never", "1 ns", "0 s", "-1 s", "1e9 s", "31000000", "1e400 s"])
def test_how_long_a_rank_waits_is_a_time(run, timeout):
    result = run(f"--steps 2 --timeout '{timeout}'")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"--timeout is {timeout!r}" in result.err and result.err.endswith(", such as 2min\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--eval-every 2", "--eval-every is 2, and there is no text for it; give --eval-data"),
        ("--patience 2", "--patience is 2, and there is no text for it; give --eval-data"),
        ("--eval-data none.txt", "none.txt does not exist; give the path of a file"),
        (
            "--override betas",
            "--override is of what a run before had; give --resume with it, or leave it out",
        ),
        ("--betas 0.9", "--betas is '0.9'; give two numbers, such as 0.9,0.999"),
        ("--clip-norm 0", "clip_norm is 0.0; give more than zero (1e30 for no clipping)"),
    ],
)
def test_options_of_learning_that_cannot_be_are_one_line(run, options, words):
    result = run(f"--steps 2 {options}")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert words in result.err


@pytest.mark.slow
def test_how_long_a_rank_waits_is_remembered(run):
    config = RunFolder(Path("mine")).config
    for options, expected in [
        ("--steps 1 --timeout 2min", 120.0),
        ("--steps 2 --resume auto", 120.0),
        ("--steps 3 --resume auto --timeout 45s", 45.0),
    ]:
        result = run(f"{options} --run-folder mine -q")
        assert result.code == 0, result.err
        assert read_settings(config).timeout_s == expected


def test_a_log_file_hears_of_a_step_each_half_minute(monkeypatch, capsys):
    """Steps of ten seconds, of which a tenth of the run are a hundred."""
    seconds = iter(range(0, 10000, 10))
    monkeypatch.setattr("hetpipe.reporting.progress.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    step = {"event": "step", "loss": 1.0, "samples_per_s": 2.0, "bubble": 0.5}
    with step_bar(1000, 0, quiet=False) as on_event:
        for number in range(1, 13):
            on_event({**step, "step": number})
    told = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(told) >= 2 and all(3 <= later - earlier <= 4 for earlier, later in pairwise(told))


@pytest.mark.slow
def test_the_newest_are_kept_by_steps_or_by_time_also_after_a_resume(run):
    """A millisecond is over after each step, an hour after none."""
    folder = RunFolder(Path("mine"))

    def kept(options: str) -> list[str]:
        result = run(f"{options} --run-folder mine -q")
        assert result.code == 0, result.err
        return [entry.name[-1] for entry in sorted(folder.checkpoints.iterdir())]

    assert kept("--steps 3 --every 1ms --keep 2") == ["2", "3"]
    assert kept("--steps 5 --resume auto") == ["4", "5"]  # both are remembered
    assert kept("--steps 7 --resume auto --every 1h") == ["5", "7"]
    assert kept("--steps 9 --resume auto --every 1 --keep 0") == ["5", "7", "8", "9"]


@pytest.mark.slow
def test_room_for_some_is_said_before_training(run, monkeypatch):
    free = SimpleNamespace(free=int(1.5 * checkpoint_bytes(made_up_profile(MODEL))))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: free)
    result = run("--steps 2 --every 1 -q")
    assert result.code == 0
    assert "warning: runs/bert-tiny-001: 2 checkpoints of" in result.err


@pytest.mark.slow
def test_a_plain_run_keeps_a_model_that_can_be_exported(hetpipe, run):
    result = run("--steps 2")
    assert result.code == 0, result.err
    source = "runs/bert-tiny-001/checkpoints/step-000002"
    export = "hetpipe export runs/bert-tiny-001 -o my-model"
    assert result.out.splitlines()[-2:] == [f"model: {source}", f"next: {export}"]
    written = sum(path.stat().st_size for path in (hetpipe.folder / source).glob("layer-*"))
    assert written == pytest.approx(checkpoint_bytes(made_up_profile(MODEL)), rel=0.02)
    checkpoint_weights.load_weights(Path(source), model_spec(MODEL).build())
    assert hetpipe(export.removeprefix("hetpipe ")).code == 0
    assert (hetpipe.folder / "my-model" / "model.safetensors").exists()
    again = run("--steps 2 --resume auto")
    assert again.code == 2 and "is at step 2, the run ends at step 2; raise --steps" in again.err
    queued = run("--steps 2 --resume auto --run-folder runs/bert-tiny-001")  # the same line, again and again
    done = f"note: {source}: step 2 of 2 is done, nothing is left to do; raise --steps for more"
    assert (queued.code, queued.out, queued.err.split()) == (0, "", done.split())
    assert read_report(RunFolder(Path("runs/bert-tiny-001")).report).steps == 2


@pytest.mark.slow
def test_what_was_best_when_held_out_is_named_and_exported(hetpipe, run):
    hetpipe.write("train.txt", "to be or not to be, that is the question. " * 400)
    hetpipe.write("held.txt", "whether it is nobler in the mind to suffer the slings and arrows. " * 20)
    learning = "--learning-rate 0.05 --warmup-steps 0 --decay constant --clip-norm 1e30"
    result = run(f"--steps 9 {learning} --data train.txt --eval-data held.txt --eval-every 1 --keep 1 -q")
    assert result.code == 0, result.err
    folder = RunFolder(Path("runs/bert-tiny-001"))
    losses = {row["step"]: row["eval_loss"] for row in folder.read_metrics()}
    step = min(losses, key=lambda each: losses[each])
    assert step < 9
    export = "hetpipe export runs/bert-tiny-001/best -o best"
    assert f"best when held out was step-{step:06d}: {export.replace('-o best', '-o my-model')}" in result.out
    assert hetpipe(export.removeprefix("hetpipe ")).code == 0
    expected = model_spec(MODEL).build()
    checkpoint_weights.load_weights(folder.checkpoints / f"step-{step:06d}", expected)
    found = load_file(hetpipe.folder / "best" / "model.safetensors")
    name, weight = max(expected.named_parameters(), key=lambda named: named[1].numel())
    assert torch.equal(found[name], weight)
    assert hetpipe("export runs/bert-tiny-001 -o end").code == 0
    assert not torch.equal(load_file(hetpipe.folder / "end" / "model.safetensors")[name], weight)


@pytest.mark.slow
def test_no_save_keeps_none_and_export_says_so(hetpipe, run):
    result = run("--steps 1 --no-save")
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == "model: not kept (--no-save)"
    folder = RunFolder(Path("runs/bert-tiny-001"))
    assert folder.report.exists() and not folder.checkpoints.exists()
    refused = hetpipe("export runs/bert-tiny-001 -o my-model")
    assert refused.code == 2
    assert refused.err == (
        "error: runs/bert-tiny-001: holds no complete checkpoint; train without --no-save, to the end\n"
    )
    best = hetpipe("export runs/bert-tiny-001/best -o my-model")
    assert best.code == 2 and "no checkpoint of runs/bert-tiny-001 was held against other data" in best.err
    nothing = run("--steps 2 --resume runs/bert-tiny-001")
    assert nothing.code == 2
    assert "nothing to resume: no complete checkpoint in runs/bert-tiny-001; did it run" in nothing.err
    partly = run("--steps 3 --no-save --every 2 --json")
    assert partly.json["checkpoint"] == "runs/bert-tiny-002/checkpoints/step-000002"


@pytest.mark.slow
def test_resume_auto_takes_the_newest_run_with_a_checkpoint(run):
    first = run("--steps 2 --every 1 --json --learning-rate 0.0003 --seed 4")
    assert first.json["checkpoint"] == "runs/bert-tiny-001/checkpoints/step-000002"
    assert run("--steps 1 --no-save --json").json["checkpoint"] is None
    result = run("--steps 4 --resume auto --json")
    assert result.code == 0, result.err
    assert "going on from runs/bert-tiny-001/checkpoints/step-000002" in result.err
    assert result.json["run_folder"] == "runs/bert-tiny-001"
    kept = Path("runs/bert-tiny-001")
    # --every is that of the run before, and so is what decides the losses
    assert [entry.name[-1] for entry in sorted((kept / "checkpoints").iterdir())] == ["1", "2", "3", "4"]
    config: dict[str, Any] = json.loads((kept / "config.json").read_text())
    assert (config["every"], config["save"]) == (1, True)
    assert (config["learning_rate"], config["seed"], config["total_steps"]) == (0.0003, 4, 9)
    assert "before the checkpoint" not in result.err
    other = run("--steps 6 --resume auto --every 0 --json --learning-rate 0.001")
    assert (other.code, other.err.count("before the checkpoint")) == (2, 1)
    assert other.err.endswith("or give --override learning-rate to change it\n")
    other = run("--steps 6 --resume auto --every 0 --json --learning-rate 0.001 --override learning-rate")
    assert other.code == 0
    changed = read_manifest(kept / "checkpoints" / "step-000006").changes
    assert changed == ({"step": 4, "key": "learning_rate", "before": 0.0003, "now": 0.001},)
    assert "note: learning_rate is 0.001, before the checkpoint it was 0.0003\n" in other.err
    assert not (kept / "checkpoints" / "step-000005").exists()
    shutil.rmtree(kept)
    nothing = run("--steps 4 --resume auto")
    assert nothing.code == 2
    assert "nothing to resume: no complete checkpoint in runs/bert-tiny-002; did it run" in nothing.err


class Terminal(io.StringIO):
    """A terminal on which nobody looks."""

    def isatty(self) -> bool:
        return True


def test_the_bar_of_a_resumed_run_begins_at_the_steps_that_are_done(tmp_path, monkeypatch):
    folder, terminal = RunFolder(tmp_path), Terminal()
    source = checkpoints.save(folder.checkpoints, step=6)
    folder.metrics.write_text("")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("hetpipe.training.run.train_predicted", lambda *_, **__: None)
    monkeypatch.setattr("hetpipe.commands.training.check_changes", lambda *_: None)
    settings = Settings("toy", 9, resume_from=str(source))
    start = RunStart(ModelEntry("toy", Task.MASKED_LM, ""), folder, settings)
    train_shown(start, tmp_path, small_profile(), None, replan=None, quiet=False)
    assert "6/9" in terminal.getvalue() and "0/9" not in terminal.getvalue()


@pytest.mark.slow
def test_one_command_begins_a_run_and_goes_on_with_it(run):
    for code, words in (
        (0, "nothing to resume in mine: a new run begins"),
        (0, "step-000001: step 1 of 1 is done, nothing is left to do"),
    ):
        result = run("--steps 1 --resume auto --run-folder mine")
        assert result.code == code and words in result.err


@pytest.mark.slow
def test_a_run_goes_on_beside_a_damaged_checkpoint(run):
    """One bit of the newest is flipped: it is named and kept aside, and the same losses come again."""
    assert run("--steps 2 --every 1 --run-folder mine -q").code == 0
    folder = RunFolder(Path("mine"))
    losses = [entry["loss"] for entry in folder.read_metrics()]
    damaged = folder.checkpoints / "step-000002" / "layer-003.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    refused = run(f"--steps 3 --resume {damaged.parent}")
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "the newest whole one is mine/checkpoints/step-000001" in refused.err
    result = run("--steps 2 --resume auto --run-folder mine -q")
    assert result.code == 0, result.err
    told = [line for line in result.err.splitlines() if str(damaged) in line]
    assert told[0].startswith("warning: ") and told[0].endswith(
        "; going on from step-000001, the newest whole one"
    )
    assert "; it is kept as .step-000002.aside-" in told[1]
    assert [entry["loss"] for entry in folder.read_metrics()] == losses
    names = sorted(path.name.partition("-")[0] for path in folder.checkpoints.iterdir())
    assert names == [".step", "step", "step"]
    folder.config.write_text("{")
    refused = run("--steps 3 --resume mine -q")
    assert refused.code == 2 and "config.json: not JSON" in refused.err and "remove it" in refused.err
    folder.config.unlink()
    assert run("--steps 3 --resume mine -q").code == 0  # the advice leads on


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_names_what_is_good(run):
    """The first step takes the weights beyond float32, so that none after it is finite."""
    result = run("--steps 40 --total-steps 40 --learning-rate 1e38 --every 1 --run-folder mine -q")
    assert result.code == 4
    assert result.err.splitlines()[-1] == (
        "error: training diverged: loss or gradients of the last 10 steps were not finite, which changed "
        "nothing; --resume mine/checkpoints/step-000001 goes on from before, lower --learning-rate"
    )
    folder = RunFolder(Path("mine"))
    steps = folder.read_metrics()
    assert [entry["finite"] for entry in steps] == [True] + [False] * 10
    assert [entry["spike"] for entry in steps] == [False] + [True] * 10
    report = read_report(folder.report)
    assert (report.steps, report.skipped_steps, report.loss_spikes) == (11, 10, 10)
    # of steps that change nothing the first alone is kept, so that --keep loses none that is good
    assert sorted(path.name[-1] for path in folder.checkpoints.iterdir()) == ["1", "2"]


@pytest.mark.slow
def test_a_trainer_keeps_the_end_also_where_a_callback_ends_it(tmp_path):
    made = trainer(tmp_path, save=True, callbacks=[Recorder(stop_at=2)])
    made.fit(1000)
    assert made.checkpoint == tmp_path / "run" / "checkpoints" / "step-000002"


@pytest.mark.slow
def test_what_cannot_be_saved_is_refused_after_the_first_step(tmp_path):
    recorder = Recorder()
    with pytest.raises(InputError, match="train with save=False and every=0"):
        trainer(tmp_path, optimizer=user_tasks.group_counting, save=True, callbacks=[recorder]).fit(50)
    assert len(recorder.metrics) == 1
