"""`hetpipe run --hosts` starts another host by a real sshd, trains, and leaves nothing running there."""

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ssh_server
from cost_model.cluster import Node
from cost_model.profile import ModelProfile, profile_text
from hetpipe import cli
from hetpipe.hosts.ssh import Launch, RemoteHosts
from hetpipe.runs.run_folder import RunFolder
from places import ROOT
from runs import made_up_profile
from three_hosts import Host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ssh_server.IS_HERE, reason="needs sshd and ssh of openssh"),
]

CLUSTER = """
[network]
bandwidth = "1 Gbit/s"
latency = "0.1 ms"
[[nodes]]
name = "big"
host = "127.0.0.1"
devices = [{ kind = "emulated", count = 1, speed = 0.4, memory = "1 GiB", driver_memory = "0 B" }]
[[nodes]]
name = "small"
host = "127.0.0.2"
devices = [{ kind = "emulated", count = 1, speed = 0.4, memory = "1 GiB", driver_memory = "0 B" }]
"""
TINY = "--model bert-tiny --sequence-length 16 --global-batch-size 8 --profile profile.json --no-save -q"
ALONE = f"{TINY} --cluster one.toml --strategy single"
LINE = f"{TINY} --cluster cluster.toml --node big --hosts --token-file token --strategy gpipe-even"
TOKEN = "0123456789abcdef" * 2
ENDLESS = 100_000
"""Steps of the schedule of a run that is killed."""


def made_up(kind: str) -> ModelProfile:
    return dataclasses.replace(made_up_profile("bert-tiny", kind), sequence_length=16)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    first, _, _ = CLUSTER.rpartition("[[nodes]]")
    (tmp_path / "one.toml").write_text(first.replace('host = "127.0.0.1"\n', ""))
    (tmp_path / "profile.json").write_text(profile_text(made_up("emulated")))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with ssh_server.ssh_servers(tmp_path / "sshd", Host("small", "127.0.0.2", "lo")) as config:
        yield config


def started(folder: Path, line: str, *more: str) -> "subprocess.Popen[str]":
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "hetpipe", "run", *line.split(), *more],
        cwd=folder, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def running_in(folder: Path) -> dict[int, str]:
    """The commands of hetpipe whose working directory is the folder, by process."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if os.readlink(process / "cwd") == str(folder) and "hetpipe" in command:
                found[int(process.name)] = command
        except OSError:
            continue
    return found


def wait_until_none_runs(folder: Path) -> None:
    end_s = time.monotonic() + 30
    while left := running_in(folder):
        assert time.monotonic() < end_s, left
        time.sleep(0.1)


def test_a_host_is_started_again_and_nothing_is_left_there_when_the_launcher_here_is_killed(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """And what it trains with that host is what one device here trains."""
    options = ("--steps", str(ENDLESS), "--every", "5", "--keep", "2", "--ssh-config", str(config))
    process = started(tmp_path, LINE, *options, "--run-folder", "run")
    folder = RunFolder(tmp_path / "run")

    def wait_until(is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 240
        while not is_so():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end_s
            time.sleep(0.1)

    try:
        wait_until(lambda: len(folder.read_metrics()) >= 2)
        there = running_in(tmp_path).items()
        (launcher,) = (pid for pid, command in there if "--node small" in command and command[:3] != "ssh")
        os.kill(launcher, signal.SIGKILL)
        wait_until(
            lambda: folder.recoveries.exists() and len(folder.recoveries.read_text().splitlines()) == 2
        )
        lost, joined = (json.loads(line) for line in folder.recoveries.read_text().splitlines())
        assert (lost["kind"], lost["devices"]) == ("lost", ["big/0"])
        assert (joined["kind"], joined["devices"]) == ("joined", ["big/0", "small/0"])
    finally:
        process.kill()
        out, err = process.communicate()
    wait_until_none_runs(tmp_path)
    assert "[small] note: small/0 train, in run" in err
    assert TOKEN not in err + out
    monkeypatch.chdir(tmp_path)
    alone = f"run {ALONE} --steps 2 --total-steps {ENDLESS} --run-folder alone"
    assert cli.main(alone.split()) == 0, capsys.readouterr()
    rows = {name: RunFolder(tmp_path / name).read_metrics()[:2] for name in ("run", "alone")}
    losses = {name: [row["loss"] for row in found] for name, found in rows.items()}
    assert losses["run"] == pytest.approx(losses["alone"], rel=2e-6)


def test_a_host_that_lets_nobody_in_is_one_line(tmp_path: Path, config: Path):
    (tmp_path / "sshd" / "authorized").write_text("")
    process = started(tmp_path, LINE, "--steps", "3", "--ssh-config", str(config))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith("error: small (127.0.0.2) ended with code 255: ")
    assert "Permission denied" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("there", "code", "reason"),
    [
        ('echo welcome; kill -9 "$$"', 255, "the connection was lost, or it was killed there"),
        ("echo welcome; cd nowhere >&2", 1, "nowhere"),
        ("echo 'error: no such model' >&2; echo bye; exit 2", 2, "error: no such model"),
    ],
)
def test_what_ended_a_host_is_told_and_no_banner_or_greeting(
    tmp_path: Path, there: str, code: int, reason: str
):
    (tmp_path / "banner").write_text("private system, go away\n")
    more = f"Banner {tmp_path / 'banner'}\nForceCommand {there}\n"
    host = Host("small", "127.0.0.2", "lo")
    told: list[str] = []
    ended: queue.Queue[str] = queue.Queue()

    def on_end(node: str, how: str) -> bool:
        ended.put(how)
        return False

    with ssh_server.ssh_servers(tmp_path / "sshd", host, more=more) as config:
        known = tmp_path / "sshd" / "known"
        config.write_text(f"{config.read_text()}\nStrictHostKeyChecking accept-new\nLogLevel INFO\n")
        known.unlink()
        node = Node("small", (), host=host.address)
        with RemoteHosts(Launch((node,), (), config), TOKEN.encode(), told.append) as remote:
            remote.start(("127.0.0.1", 1), on_end)
            how = ended.get(timeout=60)
    assert how.startswith(f"small (127.0.0.2) ended with code {code}: ")
    assert reason in how
    assert all(word not in "".join([*told, how]) for word in ("private", "Permanently"))
    assert known.exists()


def test_a_run_file_that_starts_hosts_starts_them_once(tmp_path: Path, config: Path):
    """The other host reads the same file, in the same folder: it starts none, and is refused nothing."""
    job = f'hosts = true\nssh_config = "{config}"\nnode = "big"\ntoken_file = "token"\nsteps = 2\n'
    (tmp_path / "job.toml").write_text(job)
    given = f"{TINY} --cluster cluster.toml --strategy gpipe-even --run-folder run"
    process = started(tmp_path, f"job.toml {given}")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err.count("waits for the leader") == 1, err
    assert "Fatal Python error" not in err
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 2
    wait_until_none_runs(tmp_path)


def test_the_lines_to_paste(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    words = [
        "run",
        "--model",
        "bert-tiny",
        "--cluster",
        "cluster.toml",
        "--rendezvous",
        "tcp://big:29500",
        "--print-launch",
    ]
    monkeypatch.setattr(sys, "argv", ["hetpipe", *words])
    assert cli.main(words) == 0
    line = "hetpipe " + " ".join(words[:-1]) + " --node {} --token-file token"
    assert capsys.readouterr().out.splitlines() == [
        "# on 127.0.0.1", line.format("big"), "# on 127.0.0.2", line.format("small")
    ]  # fmt: skip
    (tmp_path / "job.toml").write_text('hosts = true\nprint_launch = true\nssh_config = "config"\n')
    words = [words[0], "job.toml", *words[1:-1]]
    monkeypatch.setattr(sys, "argv", ["hetpipe", *words])
    assert cli.main(words) == 0
    line = "hetpipe " + " ".join(words) + " --node {} --token-file token --no-hosts --no-print-launch"
    assert capsys.readouterr().out.splitlines()[1::2] == [line.format("big"), line.format("small")]
