"""The benchmark of faults in short: who is killed learns what one left alone does."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from cost_model.profile import profile_text
from places import ROOT, load_benchmark
from runs import made_up_profile


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmarks" / "faults"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return load_benchmark("faults/main.py")


def metrics(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True)
    rows = [{"step": i + 1, "samples_seen": 16 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("mine", "said"),
    [([7.0, 6.0], None), ([7.0, 6.1], "losses differ by 1.7e-02"), ([7.0], "a step is missing, or twice")],
)
def test_the_judge_names_what_differs(benchmark, tmp_path, mine, said):
    metrics(tmp_path / "run", mine)
    metrics(tmp_path / "undisturbed", [7.0, 6.0])
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "tmp").mkdir()
    found = benchmark.Faults(tmp_path, {}, None)
    other = benchmark.RunFolder(tmp_path / "undisturbed")
    if said is None:
        benchmark.check(found, other, 2)
        assert found.worst == 0
    else:
        with pytest.raises(AssertionError, match=said):
            benchmark.check(found, other, 2)


LEAVES = """
import os, socket, sys, time
from hetpipe.runtime.scratch import scratch_folder
listener = socket.create_server(("127.0.0.1", 0))
with scratch_folder("run", in_memory=True), scratch_folder("store"):
    print(listener.getsockname()[1], flush=True)
    time.sleep(60)
"""


def test_the_judge_finds_ports_and_folders_that_are_left(benchmark, tmp_path):
    metrics(tmp_path / "run", [7.0])
    (tmp_path / "run" / "checkpoints").mkdir()
    metrics(tmp_path / "undisturbed", [7.0])
    (tmp_path / "tmp").mkdir()
    found = benchmark.Faults(tmp_path, {}, None)
    judge = partial(benchmark.check, found, benchmark.RunFolder(tmp_path / "undisturbed"), 1)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        [sys.executable, "-c", LEAVES], env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        port = int(launcher.stdout.readline())
        found.ports |= benchmark.listening_in(launcher.pid)
        assert list(found.ports.values()) == [port]
        with pytest.raises(AssertionError, match=f"listened on still: .{port}."):
            judge()
        launcher.kill()
    found.sessions.append(launcher.pid)
    assert len(benchmark.folders_of(found.sessions, tmp_path / "tmp")) == 2
    with pytest.raises(AssertionError, match=f"hetpipe-store-{launcher.pid}-"):
        judge()  # nobody has killed it that one knows of
    found.killed.append(launcher.pid)
    judge()  # the next start removes them
    (tmp_path / "tmp" / "pymp-left").mkdir()
    with pytest.raises(AssertionError, match="pymp-left"):
        judge()


@pytest.mark.slow
@pytest.mark.exhaustive  # at once what test_recovery, test_checkpoint, test_processes, test_scratch have
def test_a_run_with_killed_processes_is_as_one_that_was_left_alone(benchmark, tmp_path):
    profile = made_up_profile("bert-tiny", kind="emulated", layer_s=2e-4)
    (tmp_path / "profile.json").write_text(profile_text(profile))
    wanted = dict(zip(benchmark.KINDS, (1, 1, 1, 0, 0), strict=True))  # who is stopped: test_recovery.py
    found = benchmark.faults_of(tmp_path, wanted)
    assert sum(found.done.values()) == 3
    assert found.worst == 0
    assert max(found.noticed_s[benchmark.KINDS[0]]) < 30
