"""The benchmark that compares two versions: the same answers twice, and what differs is named."""

import copy
import json
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from answers import TICK_S, counted_time
from cases import all_cases
from places import load_benchmark
from trainings import TRAININGS


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("same_answers/main.py")


def status(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["main.py", *map(str, arguments)])
    code = benchmark.main()
    assert isinstance(code, int)
    return code


def test_sixty_problems_of_all_sorts_always_the_same():
    cases = all_cases()
    assert cases == all_cases()
    assert len({case.name for case in cases}) == len(cases) == 60
    names = " ".join(case.name for case in cases)
    for trait in ("scant", "tight", "ample", "slow", "tied", "--pin", "--exclude", "--schedule"):
        assert names.count(trait) >= 3, trait
    counts = [int(case.name.split(": ")[1].split(" ")[0]) for case in cases]
    assert (min(counts), counts.count(64), max(counts) >= 200) == (2, 3, True)


@pytest.mark.slow
def test_the_same_code_gives_the_same_bytes(benchmark, monkeypatch, tmp_path, capsys):
    before, after, full = tmp_path / "before.json", tmp_path / "after.json", tmp_path / "full"
    assert status(benchmark, monkeypatch, "write", before, "--only", "13", "107", "--full", full) == 0
    assert status(benchmark, monkeypatch, "write", after, "--only", "13", "107") == 0
    assert before.read_bytes() == after.read_bytes()
    capsys.readouterr()
    assert status(benchmark, monkeypatch, "compare", before, after) == 0
    assert "0 of 2 differ" in capsys.readouterr().out
    plans = json.loads((full / "13.json").read_text())
    assert plans["auto"]["plan"]["predicted"]["step_s"] > 0
    assert plans["auto"]["program"].count("\nrank ") == 2


@pytest.mark.slow
def test_what_differs_is_named(benchmark, monkeypatch, tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert status(benchmark, monkeypatch, "write", before, "--only", "13") == 0
    data = json.loads(before.read_text())
    ((name, answers),) = data["answers"].items()
    assert {"auto", "single", "gpipe-even"} <= answers.keys()
    other = copy.deepcopy(data)
    answer = other["answers"][name]["auto"]
    answer["step_s"] = repr(1.01 * float(answer["step_s"]))
    answer["plan"] = "another"
    del other["answers"][name]["gpipe-even"]
    after.write_text(json.dumps(other))
    capsys.readouterr()
    assert status(benchmark, monkeypatch, "compare", before, after) == 1
    out = capsys.readouterr().out
    assert "gpipe-even: only before" in out
    assert "auto: plan, step_s +1.0e-02" in out
    assert "+1.00%" in out
    assert "1 of 1 differ" in out


def test_each_look_at_the_clock_counts_and_the_clock_comes_back():
    clocks = time.monotonic, time.process_time
    with counted_time():
        looks = [time.monotonic(), time.process_time(), time.monotonic()]
        assert looks == [TICK_S, 2 * TICK_S, 3 * TICK_S]
    assert (time.monotonic, time.process_time) == clocks


@pytest.mark.slow
def test_a_run_gives_the_same_losses(benchmark, tmp_path, monkeypatch):
    training = next(entry for entry in TRAININGS if entry.name == "shared devices")
    monkeypatch.setattr(benchmark, "TRAININGS", (training,))
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path in paths:
        assert status(benchmark, monkeypatch, "write", path, "--only", "training") == 0
    answers = json.loads(paths[0].read_text())["answers"]
    losses = [float(loss) for loss in answers["training: shared devices"]["run"]["losses"]]
    assert losses[-1] < losses[0]
    assert len(set(losses)) == 4
    assert paths[0].read_bytes() == paths[1].read_bytes()
