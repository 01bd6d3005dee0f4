"""What a host has lost comes back from one that holds a copy, whole or not at all."""

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import checkpoints
from cost_model.errors import InputError
from hetpipe.hosts import returned_copies
from hetpipe.hosts.conversation import Answer
from hetpipe.hosts.member import _Member, way_on
from hetpipe.hosts.returned_copies import PIECE, OwnCopies, bring_back
from hetpipe.runs.identity import identity_of
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, settings_text
from hetpipe.training.checkpoint import written
from hetpipe.training.checkpoint_damage import damage_of

MODEL, RUNS = "toy", Path("runs")


class Members:
    """Two other hosts, each with a working folder of its own; who is spoilt sends other bytes."""

    def __init__(self, place: Path) -> None:
        self.folders = {name: place / name for name in ("mid", "small")}
        self.copies = {name: OwnCopies(RUNS, name) for name in self.folders}
        self.num_pieces, self.spoilt = 0, False
        for folder in self.folders.values():
            folder.mkdir()

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def ask(
        self, question: str, nodes: Iterable[str], meanwhile: Callable[[], None], **rest: Any
    ) -> tuple[None, dict[str, Answer]]:
        found = {}
        for name in nodes:
            with contextlib.chdir(self.folders[name]):
                message, blob = self.copies[name].answers[question](rest)
            self.num_pieces += question == PIECE
            found[name] = message, blob[:-1] + b"!" if self.spoilt and blob else blob
        return meanwhile(), found


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Members:
    (tmp_path / "big").mkdir()
    monkeypatch.chdir(tmp_path / "big")
    return Members(tmp_path)


def bring(members: Members, resume: str = "auto", folder: str | None = None) -> list[str]:
    told: list[str] = []
    bring_back(members, resume, None if folder is None else RunFolder(Path(folder)), RUNS, MODEL, told.append)
    return told


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", ["mine", "mine-mid"])
@pytest.mark.parametrize("resume", ["auto", "mine"])
def test_a_run_of_which_nothing_is_left_comes_back_from_the_newest_copy(members, monkeypatch, place, resume):
    monkeypatch.setattr(returned_copies, "PIECE_BYTES", 20)
    checkpoints.save(members.folders["small"] / "mine" / "checkpoints", step=3, value=3.0)
    for step in (3, 6):
        checkpoints.save(members.folders["mid"] / place / "checkpoints", step=step, value=float(step))
    (told,) = bring(members, resume, "mine" if resume == "auto" else None)
    assert told == (
        "mine/checkpoints/step-000006 is brought back from mid, which holds a copy; it was lost here"
    )
    (kept,) = (path for _, path in written(Path("mine/checkpoints")))
    assert damage_of(kept) is None and checkpoints.value_of(kept) == 6.0
    assert members.num_pieces > 20
    assert bring(members, resume, "mine" if resume == "auto" else None) == []  # it is there


def test_without_a_folder_it_is_the_newest_numbered_run(members):
    for number, step in ((1, 9), (2, 4)):
        root = members.folders["small"] / "runs" / f"{MODEL}-{number:03d}"
        checkpoints.save(root / "checkpoints", step=step)
    assert "runs/toy-002/checkpoints/step-000004 is brought" in bring(members)[0]


def held(place: Path, run_id: str, step: int, *, alone: bool = False) -> RunFolder:
    """A run folder with a checkpoint; alone: as a run on one host leaves it."""
    folder = RunFolder(place)
    checkpoints.save(folder.checkpoints, step=step, value=float(step))
    folder.write(folder.config, settings_text(Settings(steps=9, run_id=run_id)))
    if alone:
        folder.write(folder.job, "")
    return folder


def test_a_run_that_another_host_had_alone_is_not_taken_for_the_one_that_is_lost(members):
    mid = members.folders["mid"] / "runs"
    held(mid / "toy-001", "of mid alone", 9, alone=True)
    assert bring(members) == []  # nothing of several hosts
    held(mid / "toy-001-mid", "of all", 4)
    held(mid / "toy-002", "of mid alone, too", 7, alone=True)
    assert "runs/toy-001/checkpoints/step-000004 is brought back from mid" in bring(members)[0]
    assert identity_of(RunFolder(RUNS / "toy-001")) == "of all"


@pytest.mark.parametrize("named", [None, "runs/toy-001"])
def test_where_nothing_is_left_here_copies_of_several_runs_are_refused_by_name(members, named):
    held(members.folders["mid"] / "runs" / "toy-001", "one", 9)
    held(members.folders["mid"] / "runs" / "toy-001-mid", "two", 4)
    held(members.folders["small"] / "runs" / "toy-001", "one", 6)
    with pytest.raises(InputError) as caught:
        bring(members, folder=named)
    assert str(caught.value) == (
        "nothing to resume here, and other hosts hold checkpoints of 2 runs: runs/toy-001-mid on mid (step "
        "4) and runs/toy-001 on mid (step 9); give --run-folder the name of the one to go on with, or move "
        "the others away"
    )
    assert not RUNS.exists()
    (told,) = bring(members, folder="runs/toy-001-mid")
    assert "runs/toy-001-mid/checkpoints/step-000004 is brought back from mid" in told


def test_a_run_that_is_named_comes_back_also_from_a_host_that_had_it_alone(members):
    held(members.folders["mid"] / "mine", "of mid", 9, alone=True)
    assert "mine/checkpoints/step-000009 is brought back from mid" in bring(members, "mine")[0]


def test_a_folder_that_lost_its_checkpoints_gets_those_of_its_own_run(members):
    here = RunFolder(Path("mine"))
    here.write(here.config, settings_text(Settings(steps=9, run_id="of all")))
    held(members.folders["mid"] / "mine", "of mid", 9)
    assert bring(members, folder="mine") == []
    held(members.folders["mid"] / "mine-mid", "of all", 4)
    assert "mine/checkpoints/step-000004 is brought back" in bring(members, folder="mine")[0]


def test_a_later_checkpoint_of_the_run_is_told_of_and_one_of_another_run_is_not(members):
    held(Path("mine"), "of all", 3)
    held(members.folders["small"] / "mine", "of small", 9)
    assert bring(members, folder="mine") == []
    held(members.folders["mid"] / "mine-mid", "of all", 6)
    assert bring(members, folder="mine") == [
        "mid holds step 6 of this run (mine-mid/checkpoints/step-000006), and the newest here is step 3, so "
        "the later steps are made anew; to go on from step 6, end this run and copy that folder to "
        "mine/checkpoints"
    ]
    assert [step for step, _ in written(Path("mine/checkpoints"))] == [3]


def test_a_damaged_one_is_replaced_by_the_same_and_by_no_other(members):
    here = checkpoints.save(Path("mine/checkpoints"), step=6, value=6.0)
    theirs = members.folders["mid"] / "mine" / "checkpoints" / "step-000006"
    shutil.copytree(here, theirs)
    flip(here / "layer-001.safetensors")
    assert len(bring(members, folder="mine")) == 1
    assert damage_of(here) is None and checkpoints.value_of(here) == 6.0
    assert len(list(here.parent.glob(".step-000006.aside-*"))) == 1

    flip(here / "layer-001.safetensors")
    shutil.rmtree(theirs)
    checkpoints.save(theirs.parent, step=6, value=7.0)  # of a run of the same name
    assert bring(members, folder="mine") == []
    assert damage_of(here) is not None


def test_a_copy_that_is_damaged_or_of_another_model_is_not_offered(members):
    flip(checkpoints.save(members.folders["mid"] / "mine" / "checkpoints") / "layer-000.safetensors")
    assert bring(members, folder="mine") == []
    checkpoints.save(members.folders["small"] / "mine" / "checkpoints")
    told: list[str] = []
    bring_back(members, "auto", RunFolder(Path("mine")), RUNS, "another", told.append)
    assert told == [] and not Path("mine").exists()


def test_what_arrives_otherwise_leaves_nothing(members):
    checkpoints.save(members.folders["mid"] / "mine" / "checkpoints")
    members.spoilt = True
    with pytest.raises(InputError, match=r"is damaged: .*, sent by mid; start again"):
        bring(members, folder="mine")
    assert list(Path("mine/checkpoints").iterdir()) == []


def test_no_file_is_sent_but_those_of_the_checkpoint(members):
    copies = members.copies["mid"]
    checkpoints.save(members.folders["mid"] / "mine" / "checkpoints")
    with pytest.raises(InputError, match="was not offered"):
        copies.piece({"path": "mine/checkpoints/step-000010", "file": "manifest.json", "start": 0})
    members.ask(returned_copies.NEWEST, ["mid"], lambda: None, folder="mine", model=MODEL, run="")
    place = "mine/checkpoints/step-000010"
    members.ask(PIECE, ["mid"], lambda: None, path=place, file="manifest.json", start=0)
    for path, name in (
        (place, "../step-000010/manifest.json"),
        (place, "/etc/hostname"),
        (place, ".."),
        ("/etc", "hostname"),
    ):
        with pytest.raises(InputError):
            members.ask(PIECE, ["mid"], lambda: None, path=path, file=name, start=0)


def test_a_checkpoint_that_is_named_and_here_is_taken_as_it_is(members):
    here = checkpoints.save(Path("mine/checkpoints"), step=3)
    checkpoints.save(members.folders["mid"] / "mine" / "checkpoints", step=6)
    assert bring(members, str(here)) == []
    assert bring(members, folder="mine") == []  # what is here is whole


def test_where_the_leader_is_lost_the_host_with_a_whole_copy_says_how_to_go_on(tmp_path):
    folder = RunFolder(tmp_path / "mine")
    assert way_on(None) == "start the same line again when it is back"
    assert way_on(folder).startswith("a host that keeps a copy of its checkpoints, if one does")
    for step in (3, 6):
        newest = checkpoints.save(folder.checkpoints, step=step)
    told = way_on(folder)
    assert told.startswith(f"this host keeps a copy of its checkpoints ({newest}): start the same line")
    assert told.endswith(f"--resume auto, --run-folder {folder.path}")
    next(newest.glob("*.safetensors")).unlink()
    assert f"({newest.with_name('step-000003')})" in way_on(folder)


def test_a_member_that_loses_its_leader_ends_also_where_its_checkpoints_cannot_be_read(tmp_path, monkeypatch):
    """The thread that listens had died of it, and the one that obeys waited for ever."""
    folder = RunFolder(tmp_path / "mine")
    checkpoints.save(folder.checkpoints, step=3)
    filled = SimpleNamespace(folder=folder)
    member = _Member(b"", None, None, {}, print, _filled=filled)  # type: ignore[arg-type]

    def broken(place: Path) -> Iterable[Path]:
        raise OSError(errno.EIO, "Input/output error", str(place))

    monkeypatch.setattr(Path, "iterdir", broken)
    member.lose("it is gone")
    with pytest.raises(Exception, match=r"lost with its leader: it is gone; its .* Input/output error"):
        member._obey()
