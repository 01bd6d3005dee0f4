"""`hetpipe run --rendezvous` on three hosts that share nothing but a network."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cost_model.profile import read_profile
from hetpipe import cli
from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.checkpoint_damage import damage_of
from host_runs import LINE, NODES, Runs, hosts_with_folders
from partition.plan_file import read_plan

STEPS = 5
LOSSES_AGREE = 2e-6


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with hosts_with_folders(tmp_path) as made:
        yield made


def rendezvous(runs: Runs) -> str:
    return f"--rendezvous tcp://{runs.hosts[0].address}:29500"


def losses(folder: RunFolder) -> list[float]:
    return [entry["loss"] for entry in folder.read_metrics()]


def test_three_hosts_train_as_one_process_does(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runs.start(f"{LINE} {rendezvous(runs)} --steps {STEPS} --no-save --json")
    ends = runs.ends(0, 0, 0)
    leader, *members = (RunFolder(folder / "runs" / "bert-tiny-001") for folder in runs.folders)
    plan = read_plan(leader.plan)
    assert {name.partition("/")[0] for name in plan.device_names} == set(NODES)
    assert json.loads(ends[0].out)["run_folder"] == "runs/bert-tiny-001"
    assert len(leader.read_traces()["measured"].device_names) == 4
    assert set(read_profile(leader.profile).kinds) == {"emulated", "emulated-slow"}
    for member, ended, name in zip(members, ends[1:], NODES[1:], strict=True):
        assert member.program.read_text() == leader.program.read_text()
        assert not member.metrics.exists()
        assert ended.out == ""
        assert f"note: {name}/0 train, in runs/bert-tiny-001\n" in ended.err
        assert f"note: {name}: training is over" in ended.err

    monkeypatch.chdir(tmp_path)
    alone = runs.folders[0] / "cluster.toml"
    alone.write_text(alone.read_text().replace(f'host = "{runs.hosts[0].address}"', "").partition('"mid"')[0]
                     .rpartition("[[nodes]]")[0])  # fmt: skip
    line = LINE.replace("gpipe-even", "single").replace("cluster.toml", str(alone))
    line = f"run {line} --steps {STEPS} --no-save --profile {leader.profile} -q --run-folder alone"
    assert cli.main([word for word in line.split() if word not in ("--trust-network",)]) == 0, (
        capsys.readouterr()
    )
    assert losses(leader) == pytest.approx(losses(RunFolder(tmp_path / "alone")), rel=LOSSES_AGREE)
    assert len(losses(leader)) == STEPS


def test_texts_that_differ_are_named_on_every_host(runs: Runs):
    for folder, text in zip(runs.folders, ("one", "one", "two"), strict=True):
        (folder / "text.txt").write_text(f"{text} text\n" * 200)
    runs.start(f"{LINE} {rendezvous(runs)} --steps {STEPS} --data text.txt")
    ends = runs.ends(2, 2, 2)
    last_lines = {ended.err.splitlines()[-1] for ended in ends}
    assert len(last_lines) == 1
    assert "copy the same texts to all hosts" in last_lines.pop()
    assert not any((folder / "runs").exists() for folder in runs.folders)


@pytest.mark.slow
def test_a_signal_to_any_host_ends_all_in_good_order(runs: Runs):
    runs.start(f"{LINE} {rendezvous(runs)} --steps 100000 -q")
    leader = RunFolder(runs.folders[0] / "runs" / "bert-tiny-001")
    runs.wait_for_step(leader, 2)
    runs.started[1].send_signal(signal.SIGTERM)
    ends = runs.ends(143, 143, 143)
    assert "SIGTERM on mid: training ends after this step" in ends[0].err
    assert leader.report.exists()
    kept = [list((folder / "runs").glob("*/checkpoints/step-*")) for folder in runs.folders]
    assert [len(found) for found in kept] == [1, 1, 0]  # on two hosts
    assert damage_of(kept[0][0]) is None
    assert damage_of(kept[1][0]) is None


@pytest.mark.slow
def test_the_loss_of_a_host_ends_the_others_with_its_name(runs: Runs):
    runs.start(f"{LINE} {rendezvous(runs)} --steps 100000 -q")
    runs.wait_for_step(RunFolder(runs.folders[0] / "runs" / "bert-tiny-001"), 2)
    if runs.hosts[2].namespace is None:
        runs.started[2].kill()
    else:
        runs.hosts[2].kill()
    ends = runs.ends(5, 5, -signal.SIGKILL)
    for ended in ends[:2]:
        assert "error: node small" in ended.err.splitlines()[-1]
        assert "is lost" in ended.err.splitlines()[-1]
        assert "Traceback" not in ended.err
