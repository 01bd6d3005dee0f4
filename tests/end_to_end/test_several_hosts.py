"""`hetpipe run --rendezvous` on three hosts that share nothing but a network."""

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ssh_server
from cost_model.cluster_file import read_cluster
from cost_model.profile import read_profile
from hetpipe import cli
from hetpipe.program.instructions import Compute, Pass
from hetpipe.program.trace import Trace
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.simulation.prediction import predict
from hetpipe.simulation.shared_network import shared_step_s
from hetpipe.training.checkpoint_damage import damage_of
from host_runs import ALONE, LINE, NODES, SOON_S, TOKEN, Runs, hosts_with_folders
from partition.plan_file import read_plan
from small_disk import mounted

STEPS = 5
LOSSES_AGREE = 2e-6
CLOCKS_AGREE_S = 5e-3
LAYER_S = 5e-4
"""Of the times that are made up where measuring is not what is tested: steps of some 0.2 s."""
ENDLESS = 1000
"""Steps of the schedule of a run that SIGTERM ends."""
ONE_DEVICE = """
[network]
bandwidth = "1 Gbit/s"
latency = "1 ms"
[[nodes]]
name = "one"
devices = [{ kind = "emulated", memory = "1 GiB", speed = 8.0 }]
"""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with hosts_with_folders(tmp_path) as made:
        yield made


def rendezvous(runs: Runs) -> str:
    return f"--rendezvous tcp://{runs.hosts[0].address}:29500"


def losses(folder: RunFolder) -> list[float]:
    return [entry["loss"] for entry in folder.read_metrics()]


def too_early_s(trace: Trace) -> float:
    """Return by how much a computation began, at most, before the one that gives it its input was over."""
    found = {
        (entry.op, entry.pipeline, entry.stage, entry.microbatch): event
        for event in trace.events
        if isinstance(entry := event.instruction, Compute)
    }
    beside = {Pass.FORWARD: -1, Pass.BACKWARD: 1}
    given = [
        (event, found.get((op, pipeline, stage + beside[op], microbatch)))
        for (op, pipeline, stage, microbatch), event in found.items()
    ]
    return max(before.end_s - event.start_s for event, before in given if before is not None)


def train_alone(profile: Path, options: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Return the losses of one process on one device, in the folder "alone" here."""
    Path("one.toml").write_text(ONE_DEVICE)
    line = f"run {ALONE} {options} --profile {profile} -q --run-folder alone"
    assert cli.main(line.split()) == 0, capsys.readouterr()
    return losses(RunFolder(Path("alone")))


@pytest.mark.slow
def test_three_hosts_train_as_one_process_does(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runs.start(f"{LINE} {rendezvous(runs)} --steps {STEPS} --no-save --json")
    ends = runs.ends(0, 0, 0)
    leader, *members = (RunFolder(folder / "runs" / "bert-tiny-001") for folder in runs.folders)
    plan = read_plan(leader.plan)
    assert {name.partition("/")[0] for name in plan.device_names} == set(NODES)
    assert json.loads(ends[0].out)["run_folder"] == "runs/bert-tiny-001"
    prediction = predict(plan, read_profile(leader.profile), read_cluster(leader.cluster))
    shared_s = read_report(leader.report).shared_step_s
    assert shared_s is not None and shared_s == shared_step_s(prediction.costs)
    measured = leader.read_traces()["measured"]
    assert len(measured.device_names) == 4
    assert too_early_s(measured) < CLOCKS_AGREE_S  # devices wait for what other hosts send, too
    assert set(read_profile(leader.profile).kinds) == {"emulated", "emulated-slow"}
    for member, ended, name in zip(members, ends[1:], NODES[1:], strict=True):
        assert member.program.read_text() == leader.program.read_text()
        assert not member.metrics.exists()
        assert ended.out == ""
        assert f"note: {name}/0 train, in runs/bert-tiny-001\n" in ended.err
        assert f"note: {name}: training is over" in ended.err

    monkeypatch.chdir(tmp_path)
    alone = train_alone(leader.profile, f"--steps {STEPS} --no-save", capsys)
    assert losses(leader) == pytest.approx(alone, rel=LOSSES_AGREE)
    assert len(alone) == STEPS

    for folder in runs.folders:
        shutil.copy(leader.profile, folder / "measured.json")
    line = f"{LINE} --profile measured.json --steps {STEPS} --no-save -q"
    runs.start_by_torchrun(line)
    ends = runs.ends(0, 0, 0)
    assert "note: started by torchrun on several hosts, which meet at tcp://big:" in ends[0].err
    for member, ended, name in zip(members, ends[1:], NODES[1:], strict=True):
        again = member.path.with_name("bert-tiny-002")
        assert again.is_dir(), ended.err
        assert f"note: {name}/0 train, in runs/bert-tiny-002\n" in ended.err
    started_by_torchrun = RunFolder(leader.path.with_name("bert-tiny-002"))
    assert losses(started_by_torchrun) == pytest.approx(alone, rel=LOSSES_AGREE)


@pytest.mark.slow
@pytest.mark.exhaustive  # which host it is says `placed`; test_full_disks.py has what one host says
def test_a_disk_that_is_full_is_told_with_its_host(runs: Runs):
    disk = runs.folders[1] / "run"
    disk.mkdir()
    with mounted(disk, "size=2M"):
        runs.start(f"{LINE} {runs.give_profile(LAYER_S)} {rendezvous(runs)} --steps {STEPS} --run-folder run")
        for ended in runs.ends(2, 2, 2):
            (error,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
            assert error.startswith(
                f"error: on {NODES[1]}: run/checkpoints: the checkpoint of step {STEPS} cannot"
            )
            assert error.endswith(
                "(No space left on device); make room there, and begin again: none is there"
            )


@pytest.mark.slow
@pytest.mark.exhaustive  # test_started_by_ssh.py has it with two hosts that see one disk
@pytest.mark.skipif(not ssh_server.IS_HERE, reason="needs sshd and ssh of openssh")
def test_one_command_starts_the_others_by_ssh(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    line, home = f"{LINE} {runs.give_profile(LAYER_S)} --steps {STEPS} --no-save -q", runs.folders[0]
    with ssh_server.ssh_servers(tmp_path / "sshd", *runs.hosts[1:], home=home) as config:
        runs.start_here(f"{line} --hosts --ssh-config {config} --run-folder by-ssh")
        (ended,) = runs.ends(0)
    assert "[small] note: small/0 train, in by-ssh" in ended.err
    assert TOKEN not in ended.err + ended.out
    monkeypatch.chdir(tmp_path)
    alone = train_alone(home / "made-up.json", f"--steps {STEPS} --no-save", capsys)
    assert losses(RunFolder(home / "by-ssh")) == pytest.approx(alone, rel=LOSSES_AGREE)


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
def test_a_signal_to_any_host_ends_all_in_good_order_and_they_go_on(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The leader's disk is lost meanwhile; its checkpoint comes back from the host that has a copy.

    Each host has the texts at a place of its own, which they leave meanwhile, too.
    """
    for folder in runs.folders:
        (folder / "text.txt").write_text("a text that all have\n" * 400)
        (folder / "held.txt").write_text("held out words\n" * 90)
    made_up = runs.give_profile(LAYER_S)
    texts = f"{made_up} --data text.txt --eval-data held.txt"
    runs.start(f"{LINE} {rendezvous(runs)} --steps 100000 -q {texts}")
    leader = RunFolder(runs.folders[0] / "runs" / "bert-tiny-001")
    runs.wait_for_step(leader, 2)
    checkpoints = [folder / "runs" / leader.path.name / "checkpoints" for folder in runs.folders]
    for folder in checkpoints:  # as where a second Ctrl-C ends a run while one is written
        (folder / ".step-000001.tmp-0123abcd").mkdir(parents=True)
    runs.started[1].send_signal(signal.SIGTERM)
    ends = runs.ends(143, 143, 143)
    assert [path for folder in checkpoints for path in folder.glob(".step*")] == []
    assert "SIGTERM on mid: training ends after this step" in ends[0].err
    assert leader.report.exists()
    kept = [list((folder / "runs").glob("*/checkpoints/step-*")) for folder in runs.folders]
    assert [len(found) for found in kept] == [1, 1, 0]  # on two hosts
    assert damage_of(kept[0][0]) is None
    assert damage_of(kept[1][0]) is None

    done = len(leader.read_metrics())
    shutil.rmtree(leader.path)
    for folder in runs.folders:
        (folder / "text.txt").rename(folder / "moved.txt")
    texts = texts.replace("text.txt", "moved.txt")
    runs.start(f"{LINE} {rendezvous(runs)} --steps {done + 2} --no-save --resume auto -q {texts}")
    ends = runs.ends(0, 0, 0)
    name = kept[0][0].relative_to(runs.folders[0])
    assert f"note: {name} is brought back from mid, which holds a copy; it was lost here\n" in ends[0].err
    assert f"note: going on from {name}\n" in ends[0].err
    assert not list(runs.folders[2].glob("runs/*/.received*"))  # what the last host was sent
    monkeypatch.chdir(tmp_path)
    monkeypatch.chdir(runs.folders[0])
    alone = train_alone(
        leader.profile,
        f"--steps {done + 2} --no-save --resume {kept[1][0]} {texts.removeprefix(made_up)}",
        capsys,
    )
    assert losses(leader) == pytest.approx(alone, rel=LOSSES_AGREE)
    held_out = [RunFolder(path).read_metrics()[-1]["eval_loss"] for path in (leader.path, Path("alone"))]
    assert held_out[0] == pytest.approx(held_out[1], rel=LOSSES_AGREE)


@pytest.mark.slow
def test_a_host_that_is_lost_is_done_without_and_let_in_again_when_it_is_back(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The last host dies with all that runs there; its layers are on the leader's disk as well."""
    line = f"{LINE} {rendezvous(runs)} --steps {ENDLESS} --every 2 --keep 2 -q {runs.give_profile(LAYER_S)}"
    runs.start(line)
    leader = RunFolder(runs.folders[0] / "runs" / "bert-tiny-001")
    runs.wait_for_step(leader, 4)
    if runs.hosts[2].namespace is None:
        runs.started[2].kill()
    else:
        runs.hosts[2].kill()
    gone = runs.started.pop(2)
    gone.communicate(timeout=SOON_S)
    assert gone.returncode == -signal.SIGKILL
    lost = recoveries(runs, leader, 1)[0]
    assert {name.partition("/")[0] for name in lost["devices"]} == {"big", "mid"}
    runs.start_on(2, line)
    joined = recoveries(runs, leader, 2)[1]
    assert {name.partition("/")[0] for name in joined["devices"]} == set(NODES)
    assert joined["from_step"] == joined["after_step"]  # a checkpoint was written for it
    runs.wait_for_step(leader, joined["after_step"] + 2)
    runs.started[0].send_signal(signal.SIGTERM)
    told = runs.ends(143, 143, 143)[0].err
    assert re.search("note: node small .* is lost: .* without small/0 ", told)
    assert re.search("note: node small .* is back; it joins at the next checkpoint\n", told)
    assert re.search(
        r"note: small/0 is back, after step \d+; going on from step \d+ with small/0 again\n", told
    )

    done = len(leader.read_metrics())
    monkeypatch.chdir(tmp_path)
    steps = f"--steps {done} --total-steps {ENDLESS} --no-save"
    assert losses(leader) == pytest.approx(train_alone(leader.profile, steps, capsys), rel=LOSSES_AGREE)


def recoveries(runs: Runs, leader: RunFolder, count: int) -> list[dict[str, Any]]:
    """Wait until the leader has noted so many losses and returns, and give them."""
    end_s = time.monotonic() + SOON_S
    while True:
        found = leader.recoveries.read_text().splitlines() if leader.recoveries.exists() else []
        if len(found) >= count:
            return [json.loads(row) for row in found]
        ended = [process.communicate() for process in runs.started if process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < end_s
        time.sleep(0.1)
