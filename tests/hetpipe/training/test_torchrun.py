"""The same program under torchrun."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import trainers
from cost_model.errors import InputError
from cost_model.profile import profile_text
from hetpipe.data.task import registered_task
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import RankGroup, WorkerLostError
from hetpipe.runtime.remote_store import RemoteStore, StoreServer
from hetpipe.runtime.stopping import Stopping
from hetpipe.training import torchrun
from hetpipe.trust.channel import Channel, Listener, listening_socket
from partition.plan_file import plan_text
from places import SUPPORT
from runs import chain_plan, cluster_file, made_up_profile, run

MODEL = "bert-tiny"


def under_torchrun(folder: Path, processes: int) -> "subprocess.CompletedProcess[str]":
    """`hetpipe run` for two steps on the cluster, profile and plan in the folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--master-port", "0", "--standalone"]
    command = ["-m", "hetpipe", "run", "--model", MODEL, "--steps", "2", "--quiet"]
    for option in ("cluster", "profile", "plan"):
        command += [f"--{option}", str(next(folder.glob(f"{option}.*")))]
    command += ["--run-folder", str(folder / "torchrun")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cluster_file(tmp_path)
    (tmp_path / "profile.json").write_text(profile_text(made_up_profile(MODEL)))
    (tmp_path / "plan.json").write_text(plan_text(chain_plan(MODEL, [0, 4, 8], 4)))
    return tmp_path


@pytest.mark.slow
def test_torchrun_trains_what_hetpipe_launches(folder):
    result = under_torchrun(folder, 2)
    assert result.returncode == 0, result.stderr
    profile, plan = made_up_profile(MODEL), chain_plan(MODEL, [0, 4, 8], 4)
    _, expected = run(folder / "own", plan, Settings(MODEL, 2, save=False), profile)
    found = [entry["loss"] for entry in RunFolder(folder / "torchrun").read_metrics()]
    assert found == expected


@pytest.mark.slow
def test_another_number_of_processes_is_refused(folder):
    result = under_torchrun(folder, 3)
    assert result.returncode != 0
    assert "torchrun started 3 processes, the plan uses 2 devices (here/0, here/1)" in result.stderr


def test_processes_on_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Their ranks are no devices: the second host's first process is not the plan's third device."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    group = RankGroup(("a/0", "b/0", "a/1", "b/1"), (1,) * 4)
    with pytest.raises(InputError, match=r"on several hosts.*--rendezvous"):
        torchrun.lead("run", registered_task, "handover", group, lambda event: None, Stopping())


Listening = Callable[[bytes], int]


@pytest.fixture
def agents_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """A store as torchrun's agent has one, at which this process is rank 1."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**names, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HETPIPE_TOKEN", raising=False)
    return store


@pytest.fixture
def listening() -> Iterator[Listening]:
    """Listens as rank 0, to whoever holds a token; gives the port."""
    listeners: list[Listener] = []
    serve: Callable[[Channel], None] = partial(torchrun._serve, StoreServer())

    def begin(token: bytes) -> int:
        listeners.append(Listener(listening_socket(("127.0.0.1", 0)), token, serve))
        return listeners[-1].address[1]

    yield begin
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    "said", ["", "0", "65536", "-1", "127.0.0.1:80", '{"task": ["os", "abort"]}', "9" * 5000]
)
def test_what_anybody_writes_to_the_agents_store_is_a_port_or_nothing(agents_store: TCPStore, said: str):
    agents_store.set("hetpipe0/port", said)
    with pytest.raises(WorkerLostError, match="names no port of rank 0"):
        torchrun.follow(registered_task)


def test_a_rank_0_that_does_not_prove_the_token_is_not_followed(agents_store: TCPStore, listening: Listening):
    agents_store.set("hetpipe0/port", str(listening(b"a token that somebody else has made up")))
    with pytest.raises(WorkerLostError, match=r"rank 1 does not reach rank 0: .* another token"):
        torchrun.follow(registered_task)


@pytest.mark.parametrize("task", [["os", "abort"], None])
def test_no_rank_is_named_what_to_load(agents_store: TCPStore, listening: Listening, task: Any):
    """Not even by one that holds the token."""
    port = listening(torchrun._token())
    store = RemoteStore(("127.0.0.1", port), torchrun._token(), 5.0)
    store.set("run", json.dumps({"task": task}))
    agents_store.set("hetpipe0/port", str(port))
    with pytest.raises(InputError, match="rank 0 trains something else"):
        torchrun.follow(registered_task)
    store.close()


def test_each_start_has_a_token_of_its_own(agents_store: TCPStore, monkeypatch: pytest.MonkeyPatch):
    first = torchrun._token()
    assert torchrun._token() == first
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert torchrun._token() != first


@pytest.mark.slow
def test_a_trainer_runs_under_torchrun(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    script = str(SUPPORT / "trainer_script.py")
    result = subprocess.run(
        [*launcher, script, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["rank 0 comes back with"]
    found = [entry["loss"] for entry in RunFolder(tmp_path / "run").read_metrics()]
    assert found == trainers.losses(tmp_path / "own", trainers.two_pipelines(), steps=3)
