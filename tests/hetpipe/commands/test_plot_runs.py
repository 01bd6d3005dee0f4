"""`plot` of runs: one, several beside each other, and all of a folder."""

from pathlib import Path

import pytest

from run_folders import add_steps, made_up_run
from shell import Shell

RUN_PICTURES = ("step", "memory", "layers", "beside-even", "predicted-and-measured", "loss")


@pytest.fixture
def runs(hetpipe: Shell) -> Shell:
    for name in ("first", "second"):
        add_steps(made_up_run(hetpipe.folder / "runs" / name), 3)
    return hetpipe


def names(files: list[str]) -> set[str]:
    return {Path(file).name for file in files}


@pytest.mark.slow
def test_a_run_is_pictures_that_say_what_they_are_of_or_the_pages_of_a_pdf(runs: Shell):
    drawn = runs("plot runs/first -o pictures --json")
    both = {f"{name}.{suffix}" for name in RUN_PICTURES for suffix in ("png", "svg")}
    assert names(drawn.json["files"]) == both | {"report.html"}
    for name in RUN_PICTURES:
        title = "made-up, 3 samples a step, manual, on 2 devices of 'cluster', 20"
        assert title in (runs.folder / "pictures" / f"{name}.svg").read_text(), name
    assert runs("plot runs/first -o run.pdf").out == "run.pdf\n"
    assert (runs.folder / "run.pdf").read_bytes().count(b"/Type /Page ") == len(RUN_PICTURES)


@pytest.mark.slow
def test_several_runs_or_all_of_a_folder_stand_beside_each_other(runs: Shell):
    both = {f"{name}.{suffix}" for name in ("losses", "predictions") for suffix in ("png", "svg")}
    drawn = runs("plot runs/first runs/second -o two --json").json["files"]
    assert names(drawn) == both and {Path(file).parent.name for file in drawn} == {"two"}
    (runs.folder / "runs" / "notes.txt").write_text("of no run")
    drawn = runs("plot runs --json").json["files"]
    assert names(drawn) == both and {Path(file).parent.name for file in drawn} == {"runs"}
    text = (runs.folder / "runs" / "losses.svg").read_text()
    assert ">first</text>" in text and ">second</text>" in text and "2 runs, made-up, 20" in text


def test_what_cannot_be_drawn_is_refused_in_one_line(runs: Shell):
    made_up_run(runs.folder / "early" / "one", ended=False)
    made_up_run(runs.folder / "early" / "two", ended=False)
    folder = "several pictures; give a folder, or a file such as run.pdf"
    for words, said in (
        ("runs/first -o out.png", f"-o out.png: a run is {folder}"),
        ("runs -o out.png", f"-o out.png: runs are {folder}"),
        ("runs -o page.html", f"-o page.html: runs are {folder}"),
        ("runs/first plan.json", "plan.json: no run folder, it holds no plan.json and program.txt"),
        ("runs/first nowhere", "nowhere: no such file or folder; give a run folder, or a plan.json"),
        ("runs --profile profile.json", "runs: a run folder has its own profile; leave --profile out"),
        ("early", "one, two: no step has been done; there is nothing to draw"),
    ):
        result = runs(f"plot {words}")
        assert (result.code, result.err) == (2, f"error: {said}\n"), words
