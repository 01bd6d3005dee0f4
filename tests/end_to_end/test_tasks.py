"""The tasks of docs/data.md: their scripts write data, their commands train on it, for fewer steps."""

import json
import math
import re
import shlex
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from places import ROOT
from shell import Shell
from warm_starts import warm_python

PAGE = re.sub(r" *\\\n *", " ", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"))
LINES = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
SCRIPT = re.compile(r"python (examples/tasks/(\w+)\.py.*)")


@dataclass(frozen=True)
class Task:
    """A task of the page: its script with what it writes, and the command that trains."""

    script: str
    run: str


def _tasks() -> dict[str, Task]:
    found, script = {}, None
    for line in LINES:
        if match := SCRIPT.fullmatch(line):
            script = match
        elif script is not None and line.startswith("hetpipe run "):
            found[script[2]] = Task(script[1], line.removeprefix("hetpipe "))
            script = None
    return found


TASKS = _tasks()
SHORT = {
    "defaults_in_python": (60, "f1", 0.2),
    "digits": (150, "accuracy", 0.5),
    "docstrings_in_python": (60, "loss", 6.3),
    "names_in_python": (30, "f1", 0.5),
    "packages_in_python": (80, "accuracy", 0.15),
    "python_chats": (40, "loss", 6.5),
    "translated_messages": (60, "loss", 6.2),
}
"""Steps, and the figure of held-out samples that they reach: of digits to chats guessing has 0.1, 0,
0.08, and a loss of 6.9; of translations one of 7.6."""

HELD_OUT = 500
"""Rows of held-out samples that are looked at, at most: of 6,000 the loss took longer than all steps."""

LEARNED = "names_in_python"


def test_every_task_is_on_the_page_and_run_here():
    scripts = {path.stem for path in (ROOT / "examples" / "tasks").glob("*.py")}
    assert scripts == TASKS.keys() == SHORT.keys()


def trained(hetpipe: Shell, name: str, steps: int) -> dict[str, Any]:
    """Run the script and the command of a task for so many steps; gives the report."""
    task = TASKS[name]
    path, *written = shlex.split(task.script)
    subprocess.run([*warm_python(), ROOT / path, *written], cwd=hetpipe.folder, check=True, timeout=300)
    for held_out in hetpipe.folder.glob("held-out.jsonl"):
        rows = held_out.read_text(encoding="utf-8").splitlines(keepends=True)
        held_out.write_text("".join(rows[:: 1 + len(rows) // HELD_OUT]), encoding="utf-8")
    assert hetpipe("init --emulate 1,0.9 -o emulated.toml").code == 0  # soon done, and not what is tested

    short = re.sub(r"--steps \d+", f"--steps {steps}", task.run)
    short = re.sub(r"--eval-every \d+", f"--eval-every {steps}", short)
    assert short != task.run
    short = re.sub(r" --run-folder \S+", "", short)
    result = hetpipe(f"{short} --run-folder run --profile-budget 0.9")
    assert result.code == 0, result.err
    report: dict[str, Any] = json.loads((hetpipe.folder / "run" / "report.json").read_text())
    return report


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHORT.keys() - {LEARNED}))
def test_a_task_runs(hetpipe: Shell, name: str):
    report = trained(hetpipe, name, 2)
    figures = {"loss": report["eval_loss"], **(report["eval_figures"] or {})}
    assert math.isfinite(figures["loss"]) and SHORT[name][1] in figures


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # of other sorts of data tests/hetpipe/data/ has that losses and gradients are those of transformers
    [pytest.param(name, marks=[] if name == LEARNED else [pytest.mark.exhaustive]) for name in SHORT],
)
def test_a_task_learns(hetpipe: Shell, name: str):
    steps, figure, reached = SHORT[name]
    report = trained(hetpipe, name, steps)
    if figure == "loss":
        assert report["eval_loss"] < reached
    else:
        assert report["eval_figures"][figure] > reached
