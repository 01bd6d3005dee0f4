"""Disks that are full or cannot be written: one line, and nothing is lost."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cost_model.memory import checkpoint_bytes
from cost_model.profile import profile_text
from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.checkpoint_damage import damage_of
from partition.plan_file import plan_text
from runs import CPU_CLUSTER, chain_plan, made_up_profile
from shell import Result, Shell
from small_disk import mounted

MODEL = "bert-tiny"
OTHER_FILES = 2**20
"""What else is in the folder of a run, at most."""

Run = Callable[[str], Result]


@pytest.fixture
def run(hetpipe: Shell) -> Run:
    hetpipe.write("cluster.toml", CPU_CLUSTER)
    hetpipe.write("profile.json", profile_text(made_up_profile(MODEL)))
    hetpipe.write("plan.json", plan_text(chain_plan(MODEL, [0, 4, 8], 16)))
    line = f"run --model {MODEL} --cluster cluster.toml --profile profile.json --plan plan.json -q"
    return lambda options: hetpipe(f"{line} --total-steps 9 {options}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for a checkpoint and a half."""
    found = tmp_path / "disk"
    found.mkdir()
    with mounted(found, f"size={int(1.5 * checkpoint_bytes(made_up_profile(MODEL))) + OTHER_FILES}"):
        yield found


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_in_a_line_and_the_checkpoint_before_is_gone_on_from(run, disk):
    folder = RunFolder(disk / "run")
    ended = run(f"--steps 4 --every 1 --run-folder {folder.path}")
    warned, error = ended.err.splitlines()
    assert ended.code == 2 and "; training stops after 1 of them unless" in warned
    assert error == (
        f"error: {folder.checkpoints}: the checkpoint of step 2 cannot be written (No space left on device); "
        "make room there, and go on with --resume from the one before"
    )
    # nothing that became no checkpoint takes its room
    (kept,) = folder.checkpoints.iterdir()
    assert kept.name == "step-000001" and damage_of(kept) is None
    alone = run("--steps 3 --no-save --run-folder alone")
    again = run(f"--steps 3 --every 0 --no-save --resume {folder.path} --run-folder elsewhere")
    assert (alone.code, again.code) == (0, 0), again.err
    expected = [entry["loss"] for entry in RunFolder(Path("alone")).read_metrics()]
    assert [entry["loss"] for entry in RunFolder(Path("elsewhere")).read_metrics()] == expected[1:]


@pytest.mark.slow
def test_what_cannot_be_written_is_read(run, hetpipe, disk):
    folder = RunFolder(disk / "run")
    assert run(f"--steps 1 --run-folder {folder.path}").code == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for options, words in (
        ("--steps 2 --run-folder disk/new", "disk/new: no run folder can be made there (Read-only file"),
        (
            "--steps 2 --no-save --resume auto --run-folder disk/run",
            "error: disk/run/vocabulary.json: Read-only file system;",
        ),
    ):
        refused = run(options)
        assert refused.code == 2 and words in refused.err.splitlines()[-1], refused.err
    elsewhere = run(f"--steps 2 --resume {folder.path} --run-folder elsewhere --json")
    assert elsewhere.code == 0, elsewhere.err
    assert elsewhere.json["checkpoint"] == "elsewhere/checkpoints/step-000002"
    assert hetpipe("export disk/run -o model").code == 0
    into = hetpipe("export disk/run -o disk/model")
    assert into.code == 2 and into.err.count("\n") == 1 and "Read-only file system" in into.err


@pytest.mark.slow
def test_what_a_killed_run_left_is_removed_where_a_new_one_begins(run):
    """Its room may be all there is."""
    left = Path("mine/checkpoints/.step-000003.tmp-1f2e3d4c")
    left.mkdir(parents=True)
    (left / "layer-000.safetensors").write_bytes(bytes(100))
    shutil.copy("plan.json", "mine/plan.json")
    assert run("--steps 1 --resume auto --run-folder mine").code == 0
    assert [path.name for path in left.parent.iterdir()] == ["step-000001"]
