"""A member trains in the folder of the run, and in none of another run that has its name."""

import dataclasses
import errno
import fcntl
import json
from pathlib import Path

import pytest

import checkpoints
from cost_model.errors import InputError
from hetpipe.hosts.job import Job, member_folder
from hetpipe.runs.identity import identity_of, run_id_for
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, settings_text
from partition.plan_file import plan_text
from runs import chain_plan

JOB = Job("runs/toy-001", {}, "", 0, 0, 0, "")


def job_of(run_id: str, *, goes_on: bool = False) -> Job:
    source = "runs/toy-001/checkpoints/step-000003" if goes_on else None
    config = settings_text(Settings(steps=9, run_id=run_id, resume_from=source))
    return dataclasses.replace(JOB, files={"config": config})


def begun(job: Job, node: str = "mid", *, saves: bool = True) -> str:
    """Begin a run in the folder of a member, and return the folder's name."""
    with member_folder(job, node) as folder:
        folder.write(folder.config, job.files["config"])
        folder.write(folder.plan, "{}")
        if saves:
            checkpoints.save(folder.checkpoints)
        return folder.path.name


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_that_goes_on_has_its_own_folder_whatever_else_is_called_so():
    assert begun(job_of("of this host")) == "toy-001"
    assert begun(job_of("first")) == "toy-001-mid"
    assert begun(job_of("second")) == "toy-001-mid-2"
    for run_id, name in (("of this host", "toy-001"), ("first", "toy-001-mid"), ("second", "toy-001-mid-2")):
        assert begun(job_of(run_id, goes_on=True)) == name
        restarted = dataclasses.replace(job_of(run_id), attempt=1)  # before the first checkpoint
        assert begun(restarted) == name
    assert begun(job_of("unknown here", goes_on=True)) == "toy-001-mid-3"
    assert len(list(Path("runs").iterdir())) == 4


def test_a_node_folder_without_checkpoints_is_taken_again():
    assert begun(job_of("of this host")) == "toy-001"
    assert begun(job_of("first"), saves=False) == "toy-001-mid"
    assert begun(job_of("second"), saves=False) == "toy-001-mid"


def test_the_leaders_own_folder_is_never_taken_and_one_of_the_run_in_use_is_waited_for():
    leaders = RunFolder(Path(JOB.folder))
    with leaders.locked():
        leaders.write(leaders.config, job_of("first").files["config"])
        assert begun(job_of("first")) == "toy-001-mid"  # on a file system that both have
        assert begun(job_of("first", goes_on=True), "small") == "toy-001-small"
        with (
            RunFolder(Path("runs/toy-001-mid")).locked(),
            pytest.raises(InputError, match="another run is writing there; wait for it"),
            member_folder(job_of("first", goes_on=True), "mid"),
        ):
            pass


def test_the_leaders_folder_is_not_taken_where_a_file_system_has_no_locks(monkeypatch):
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    leaders = RunFolder(Path(JOB.folder))
    leaders.write(leaders.config, job_of("first").files["config"])
    assert begun(job_of("first")) == "toy-001-mid"
    assert begun(job_of("first", goes_on=True)) == "toy-001-mid"


def test_a_folder_that_cannot_be_made_is_named():
    Path("runs").write_text("a file")
    with pytest.raises(InputError, match="runs/toy-001: no run folder can be made there"):
        begun(job_of("first"))


def folder_before(name: str, seed: int) -> RunFolder:
    """A run folder of a hetpipe whose runs had no id."""
    folder = RunFolder(Path("runs") / name)
    settings = json.loads(settings_text(Settings(steps=9, seed=seed)))
    del settings["run_id"]
    folder.write(folder.config, json.dumps(settings))
    folder.write(folder.plan, plan_text(chain_plan("bert-tiny", [0, 4], 8)))
    return folder


def test_of_folders_from_before_runs_had_an_id_model_and_seed_tell():
    folders = {7: folder_before("toy-001", seed=7), 0: folder_before("toy-001-mid", seed=0)}
    leaders = folder_before("toy-001-of-the-leader", seed=0)
    run_id = run_id_for(leaders, leaders.checkpoints / "step-000003")
    with member_folder(job_of(run_id, goes_on=True), "mid") as found:
        assert found == folders[0]


def test_a_run_has_an_id_of_its_own_that_it_keeps_when_it_goes_on():
    folder, other = RunFolder(Path("runs/toy-001")), RunFolder(Path("runs/toy-002"))
    source = folder.checkpoints / "step-000003"
    run_id = run_id_for(folder, None)
    folder.write(folder.config, settings_text(Settings(steps=9, run_id=run_id)))
    assert run_id_for(folder, source) == run_id == run_id_for(folder, source.absolute())
    assert len({run_id, run_id_for(folder, None), run_id_for(other, source), run_id_for(other, None)}) == 4
    folder.config.write_text("{")
    assert identity_of(folder) == "" != run_id_for(folder, source)
