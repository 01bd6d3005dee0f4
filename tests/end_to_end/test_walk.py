"""The newcomer's walk: the commands of two pages run, and print what the pages show."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.profile import profile_text
from hetpipe.cli import VERBS
from places import ROOT
from planned_once import each_plan_once
from runs import made_up_profile
from shell import Shell
from short_searches import short_searches
from transcripts import SAID, Entry, differences, entries, newcomers_folder, printed
from warm_starts import warm_python

WALK_PAGE = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
WALKED = entries(WALK_PAGE)
"""What docs/walk.md shows of each command, in its order."""
PAGE = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
COMMANDS = [line.removeprefix("    ") for line in PAGE.splitlines() if line.startswith("    hetpipe ")]
PROFILE = " --profile profile.json --sequence-length 16"
FIRST = "hetpipe run --model bert-tiny --cluster four-unequal --steps 10 --every 5"
STOPPED = "hetpipe run --model bert-tiny --cluster four-unequal --steps 20 --every 5 --total-steps 40"
RESUMED = "hetpipe run --model bert-tiny --cluster four-unequal --steps 40 --resume auto"
EXPORT = "hetpipe export runs/bert-tiny-001 -o my-model"
PLOT = "hetpipe plot runs/bert-tiny-001"
PLANNED = "hetpipe plan --profile profile.json --cluster four-unequal -o plan.json"
SIMULATED = "hetpipe simulate plan.json --profile profile.json --cluster four-unequal"
BY_PLAN = (
    "hetpipe run --model bert-tiny --cluster four-unequal --profile profile.json --plan plan.json --steps 5"
)
EMULATED = "hetpipe init --emulate 0.6,0.4,0.2 -o emulated.toml"
HERE = "hetpipe init -o cluster.toml"
WALK = {FIRST, STOPPED, RESUMED, EXPORT, PLOT, PLANNED, SIMULATED, BY_PLAN, EMULATED, HERE}
ELSEWHERE = {
    "hetpipe demo": "tests/end_to_end/test_package.py",
    "hetpipe run --model bert-tiny --cluster cluster.toml --steps 10": "as the first, on this host",
    "hetpipe profile --model bert-tiny --cluster four-unequal -o profile.json": "a minute of measuring",
    "hetpipe run --model bert-large --cluster cluster.toml --run-folder mine --resume auto --every 10min &":
        "tests/end_to_end/test_signals.py",
    "hetpipe run --model bert-tiny --cluster cluster.toml --data train.txt --eval-data held-out.txt"
    " --eval-every 50 --keep 2": "tests/hetpipe/training/test_evaluation.py",
}  # fmt: skip
"""Commands of the page that are not run here, and why, or where they are."""


def words_of(text: str) -> set[str]:
    """Return the words of a text, its figures left out."""
    return set(re.findall(r"[A-Za-z][\w.:/-]*", text))


def test_every_command_of_the_page_is_run_or_said_to_be_elsewhere():
    assert set(COMMANDS) == WALK | ELSEWHERE.keys()


@pytest.mark.slow
@short_searches()
@each_plan_once()
def test_the_walk_prints_what_the_page_shows(hetpipe: Shell, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("cluster.toml", "plan.json"):
        (tmp_path / name).unlink()
    profile = made_up_profile("bert-tiny", kind="emulated", layer_s=3e-4)
    hetpipe.write("profile.json", profile_text(replace(profile, sequence_length=16)))

    def walked(command: str, measured_there: str = "") -> str:
        assert command in COMMANDS
        result = hetpipe(command.removeprefix("hetpipe ") + measured_there)
        assert result.code == 0, result.err
        return result.out

    for command in (HERE, EMULATED):
        assert "wrote " in walked(command)

    printed = walked(FIRST, PROFILE)
    plan_head = PAGE.partition("    stage  device, emulated")[2].partition("\n")[0]
    assert plan_head and words_of(plan_head) <= words_of(printed)
    for begin in (
        "auto: bert-tiny, 16 samples a step, microbatch ",
        "proven: no plan of its kind can be faster than ",
        "step 10/10  loss ",
        "run folder: runs/bert-tiny-001\n",
        "model: runs/bert-tiny-001/checkpoints/step-000010\n",
        "next: hetpipe export runs/bert-tiny-001 -o my-model\n",
    ):
        assert f"    {begin}" in PAGE and begin in printed, (begin, printed)
    report = re.compile(r"predicted +measured +error")
    assert report.search(PAGE) and report.search(printed)

    assert "runs/bert-tiny-002" in walked(STOPPED, PROFILE)
    assert "step 40/40" in walked(RESUMED, PROFILE)
    assert "my-model" in walked(EXPORT) and (tmp_path / "my-model" / "model.safetensors").is_file()
    walked(PLOT)
    walked(PLANNED)
    assert "waiting for" in walked(SIMULATED)
    assert "run folder: runs/bert-tiny-0" in walked(BY_PLAN)


def test_the_transcript_goes_over_every_verb_but_those_that_stay_open_or_tell_of_the_host():
    assert set(VERBS) - {entry.verb for entry in WALKED} == {"demo", "watch", "env", "cache"}
    files = ("hetpipe clusters ", "head ")
    shown = [entry.shown for entry in WALKED if not entry.command.startswith(files)]
    lines = [line for text in shown for line in text.splitlines() if not line.startswith(SAID)]
    assert [line for line in lines if len(line) > 80] == []


def test_a_difference_to_the_transcript_is_seen():
    entry = Entry("hetpipe plan", "a 1.50 s step\n──\n")
    assert differences(entry, "a 1.501 s\n  step\n") == []
    assert differences(entry, "a 1.60 s step\n") == ["1.50, now 1.60"]
    assert differences(entry, "the 1.50 s step\n") != []
    bound = "step {} s; no plan of its kind can be faster than {} ms; this one is at most {}% slower\n"
    planned = Entry("hetpipe plan", bound.format(1.5, 790, 9.9))
    assert differences(planned, bound.format(1.5, 768, 13.1)) == []  # another time for the proof
    assert differences(planned, bound.format(1.6, 790, 9.9)) == ["1.5, now 1.6"]
    run = Entry("hetpipe run", "step 1/2  loss 3.1  1 samples/s  bubble 3%\nstep  110 ms  120 ms\n")
    late = "host overloaded: operations took up to 4.2% longer than they may; do not trust the measured times"
    now = f"step 1/2  loss 3.1  1 samples/s  bubble 3%\nstep  110 ms  0.9 s\n{late}\n"
    assert differences(run, now) == []
    assert differences(run, f"{now}loss\n") != []


@pytest.mark.slow
def test_every_command_of_the_transcript_prints_what_it_shows(tmp_path: Path):
    with newcomers_folder(tmp_path, WALK_PAGE), each_plan_once():
        for entry in WALKED:
            # what is measured is not compared, and the profile of the notebooks takes its place
            command = entry.command.replace("--profile-budget 10", "--profile-budget 1")
            if command.startswith("python "):
                command = shlex.join(warm_python()) + command.removeprefix("python")
            assert differences(entry, printed(replace(entry, command=command))) == [], entry.command
