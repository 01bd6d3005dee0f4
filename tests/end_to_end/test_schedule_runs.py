"""Schedules on the command line and in real runs: what was chosen runs, and it changes no gradient."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.profile import profile_text
from hetpipe import cli
from hetpipe.program.instructions import Schedule
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, read_settings
from interleaved_runs import first_moments, interleaved
from partition.plan_file import plan_text, read_plan
from runs import CPU_CLUSTER, chain_plan, cluster_file, made_up_profile, run
from shared_plans import pipeline, plan_of
from small_case import CLUSTER_TOML, small_plan, small_profile

MODEL = "bert-tiny"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small plan on a/0 and b/0, one in rounds over them, and what they are of."""
    rounds = plan_of(pipeline(5, (0, 0, 1, 4), (1, 1, 2, 3), (0, 2, 3, 2), (1, 3, 4, 1)))
    text = plan_text(rounds).replace('"n/0"', '"a/0"').replace('"n/1"', '"b/0"')
    for name, content in {
        "cluster.toml": CLUSTER_TOML,
        "profile.json": profile_text(small_profile()),
        "plan.json": plan_text(small_plan()),
        "rounds.json": text,
    }.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = "--profile profile.json --cluster cluster.toml"


def test_simulate_tells_the_schedule_and_of_auto_the_seconds_of_each(folder, capsys):
    assert cli.main(f"simulate rounds.json {FILES} --json".split()) == 0
    data = json.loads(capsys.readouterr().out)
    choice = data["schedule_choice"]
    assert choice["asked"] == "auto" and set(choice["step_s"]) == {"1f1b", "interleaved", "list", "gpipe"}
    assert data["step_s"] == choice["step_s"][choice["taken"]] == min(choice["step_s"].values())
    for schedule, step_s in choice["step_s"].items():
        assert cli.main(f"simulate rounds.json {FILES} --json --schedule {schedule}".split()) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["schedule_choice"] == {"asked": schedule, "taken": schedule, "step_s": {}, "refused": {}}
        assert told["step_s"] == step_s
    assert cli.main(f"simulate rounds.json {FILES}".split()) == 0
    assert f"schedule auto takes {choice['taken']}; 1f1b " in capsys.readouterr().out
    assert cli.main(f"simulate plan.json {FILES} --schedule list".split()) == 0
    assert "\nschedule: list\n" in capsys.readouterr().out


def test_a_schedule_that_cannot_be_is_one_line(folder, capsys):
    assert cli.main(f"simulate plan.json {FILES} --schedule interleaved".split()) == 2
    assert "error: the interleaved schedule is for one pipeline that visits" in capsys.readouterr().err
    (folder / "cluster.toml").write_text(CLUSTER_TOML.replace("10 kB", "3.4 kB", 1))
    assert cli.main(f"simulate plan.json {FILES}".split()) == 0
    capsys.readouterr()
    assert cli.main(f"simulate plan.json {FILES} --schedule gpipe".split()) == 3
    printed = capsys.readouterr()
    assert printed.out == "" and "bytes are missing" in printed.err and printed.err.count("\n") == 1
    assert cli.main(f"simulate plan.json {FILES} --schedule auto --json".split()) == 0
    refused = json.loads(capsys.readouterr().out)["schedule_choice"]["refused"]
    assert "bytes are missing" in refused["gpipe"]


def test_plan_writes_the_plan_as_it_runs_under_the_schedule(folder, capsys):
    line = f"plan {FILES} --global-batch-size 4 --strategy gpipe-even --microbatch-size 1 --program"
    assert cli.main(f"{line} --schedule gpipe -o new.json --json".split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schedule_choice"]["taken"] == "gpipe"
    assert " schedule=gpipe\n" in data["program"]
    assert {stage.in_flight for stage in read_plan(folder / "new.json").pipelines[0].stages} == {4}
    assert cli.main(f"simulate new.json {FILES} --schedule gpipe --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == data["predicted"]["step_s"]


@pytest.mark.slow
def test_gradients_of_an_interleaved_and_a_gpipe_run_equal_one_process(tmp_path):
    # with clipping off, AdamW's first moment after one step is (1 - beta1) times the gradient
    settings = Settings(MODEL, 1, dtype="float64", save=True, clip_norm=1e30)
    profile = replace(made_up_profile(MODEL), dtype="float64")
    run(tmp_path / "one", chain_plan(MODEL, [0, 8], 16), settings, profile)
    expected = first_moments(tmp_path / "one" / "run")
    largest = max(float(value.abs().max()) for value in expected.values())
    for schedule in (Schedule.INTERLEAVED, Schedule.GPIPE, Schedule.LIST):
        where = tmp_path / schedule
        report, _ = run(where, interleaved(MODEL), replace(settings, schedule=schedule), profile)
        assert report.schedule is schedule
        program = RunFolder(where / "run").program.read_text()
        assert program.startswith("hetpipe.program/1") and f" schedule={schedule}\n" in program
        found = first_moments(where / "run")
        assert found.keys() == expected.keys()
        worst = max(float((found[key] - expected[key]).abs().max()) for key in found)
        assert largest > 0 and worst <= 1e-12 * largest


@pytest.mark.slow
def test_a_run_keeps_its_schedule_when_it_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cluster_file(tmp_path, CPU_CLUSTER)
    (tmp_path / "profile.json").write_text(profile_text(made_up_profile(MODEL)))
    (tmp_path / "plan.json").write_text(plan_text(interleaved(MODEL)))
    line = f"run --model {MODEL} --cluster cluster.toml --profile profile.json --plan plan.json --json"
    assert cli.main(f"{line} --steps 1 --total-steps 2 --save --schedule auto".split()) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["schedule_choice"]["taken"] == first["schedule"]
    assert first["schedule_choice"]["step_s"][first["schedule"]] == first["predicted_step_s"]
    kept = RunFolder(Path(first["run_folder"]))
    assert read_settings(kept.config).schedule is Schedule.AUTO
    assert cli.main(f"{line} --steps 2 --total-steps 2 --resume auto".split()) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["run_folder"] == first["run_folder"] and again["schedule_choice"] == first["schedule_choice"]
    assert read_settings(kept.config).schedule is Schedule.AUTO
    assert (
        cli.main(f"{line} --steps 3 --total-steps 3 --save --schedule gpipe --run-folder other".split()) == 0
    )
    assert json.loads(capsys.readouterr().out)["schedule"] == "gpipe"
    assert cli.main(["plot", "other", "--json"]) == 0
    assert "step.png" in capsys.readouterr().out
    assert cli.main(f"{line} --steps 4 --total-steps 4 --resume other".split()) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == "gpipe"
