"""What a command takes from whoever has started its process."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import CheckFailedError, InfeasibleError, InputError
from hetpipe import cli
from hetpipe.commands.several_hosts import HostOptions
from hetpipe.commands.started_by import Start, started
from hetpipe.hosts.environments import port_of
from hetpipe.runtime.processes import WorkerLostError, under_torchrun

TWO = """
[network]
bandwidth = "1 Gbit/s"
latency = "0.1 ms"
[[nodes]]
name = "big"
host = "127.0.0.5"
devices = [{ kind = "emulated", memory = "1 GiB" }]
[[nodes]]
name = "gpu02"
host = "127.0.0.6"
devices = [{ kind = "emulated", memory = "1 GiB" }]
"""
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "127.0.0.5,gpu02", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.5", "MASTER_PORT": "29500"}
TORCHRUN = {
    **RANKS, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}  # fmt: skip


def surround(monkeypatch: pytest.MonkeyPatch, *environments: dict[str, str], **changed: str) -> None:
    for environment in (*environments, changed):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster.toml").write_text(TWO)
    return read_cluster(tmp_path / "cluster.toml")


def test_a_task_of_srun_knows_its_node_and_where_the_hosts_meet(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    surround(monkeypatch, SLURM, RANKS)
    with started(HostOptions()) as start:
        assert not under_torchrun()  # what a batch script has said of ranks is put away
        hosts = start.options(HostOptions(), cluster)
    assert under_torchrun()
    text = f"tcp://big:{port_of('7', '0', '0')}"
    assert (hosts.rendezvous, hosts.node) == (text, "gpu02")
    assert capsys.readouterr().err == f"note: started by SLURM on several hosts, which meet at {text}\n"
    assert start.options(HostOptions(node="big"), cluster).node == "big"


@pytest.mark.parametrize("given", [HostOptions(rendezvous="tcp://big:1"), HostOptions(hosts=True)])
def test_what_is_given_goes_before(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, given: HostOptions):
    surround(monkeypatch, SLURM, SLURM_NODEID="9")  # a contradiction, which nobody reads
    with started(given) as start:
        assert start.options(given, cluster) is given
    with pytest.raises(InputError, match="SLURM_NODEID is 9"), started(HostOptions()):
        pass


def test_processes_of_torchrun_on_one_host_are_ranks(monkeypatch: pytest.MonkeyPatch):
    surround(monkeypatch, TORCHRUN)
    with started(HostOptions()) as start:
        assert start == Start(None)
        assert under_torchrun()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0), (InputError("x"), 2), (InfeasibleError("x"), 3), (CheckFailedError("x"), 4),
        (WorkerLostError("x"), 5), (KeyboardInterrupt(), 130), (SystemExit(143), 143), (typer.Exit(6), 6),
        (ZeroDivisionError(), 1),
    ],
)  # fmt: skip
def test_other_tasks_of_a_host_end_as_the_first_does(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int
):
    tasks = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_PROCID": "2"}
    surround(monkeypatch, SLURM, tasks, SLURM_JOB_ID=f"{os.getpid()}-{code}")

    has_begun = threading.Event()

    def first() -> None:
        with started(HostOptions()):
            has_begun.set()
            if error is not None:
                raise error

    with ThreadPoolExecutor(1) as other:
        launched = other.submit(first)
        assert has_begun.wait(10.0)
        monkeypatch.setenv("SLURM_LOCALID", "1")
        with pytest.raises(typer.Exit) as ended, started(HostOptions()):
            pass
        assert ended.value.exit_code == code
        assert launched.exception(10.0) is error


@pytest.mark.parametrize("how", ["--hosts", "--rendezvous tcp://big:29500", "SLURM"])
def test_shares_do_not_move_between_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
):
    (tmp_path / "cluster.toml").write_text(TWO)
    if how == "SLURM":
        surround(monkeypatch, SLURM)
    options = "" if how == "SLURM" else how
    line = f"run --model bert-tiny --cluster {tmp_path}/cluster.toml --adapt {options}"
    assert cli.main(line.split()) == cli.BAD_INPUT
    assert "--adapt starts the ranks again, which works on one host" in capsys.readouterr().err
