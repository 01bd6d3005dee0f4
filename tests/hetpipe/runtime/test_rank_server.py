"""The server that forks ranks, started ahead: it loads what they need meanwhile, and is never left over."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from cost_model.cluster import CPU, Device
from cost_model.profile import profile_text
from hetpipe.models.huggingface import model_spec
from hetpipe.models.huggingface_folder import ALSO_TESTED, ARCHITECTURES, CLASSIFIERS_TESTED
from hetpipe.models.names import MODEL_ENTRIES, model_entry
from hetpipe.models.rank_modules import modules_ahead, modules_of
from hetpipe.runs.lora import parse_lora
from hetpipe.runs.settings import Settings, TaskSettings
from small_case import CLUSTER_TOML, small_cluster, small_profile

USED = """
import sys
from multiprocessing import forkserver
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.runtime.rank_server import server_ahead
import told_mains

if __name__ == "__main__":
    with server_ahead(["html.parser", "no_such_module"]):
        first = forkserver._forkserver._forkserver_pid
        events = []
        run_ranks(told_mains.told_modules, (), RankGroup(("a", "b"), (1, 1)), events.append)
    assert forkserver._forkserver._forkserver_pid == first
    print(sorted("html.parser" in event["modules"] for event in events))
"""
RANK_MAINS = """
import sys

def told_modules(*, rank, emit):
    emit({"event": "modules", "modules": sorted(sys.modules)})
"""
UNUSED = """
import os
from multiprocessing import forkserver
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.runtime.rank_server import server_ahead
import told_mains

if __name__ == "__main__":
    try:
        with server_ahead(["slow_module"]):
            first = forkserver._forkserver._forkserver_pid
            raise ValueError
    except ValueError:
        print(first, os.path.exists(f"/proc/{first}"), flush=True)
    events = []
    run_ranks(told_mains.told_modules, (), RankGroup(("a",), (1,)), events.append)
    print(len(events))
"""
KILLED = """
import time
from multiprocessing import forkserver
from hetpipe.runtime.rank_server import server_ahead
with server_ahead(["slow_module"]):
    print(forkserver._forkserver._forkserver_pid, flush=True)
    time.sleep(60)
"""
SLOW = """
import pathlib, sys, time
pathlib.Path(__file__).with_name("begun").touch()
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Give a folder with the modules that the scripts import."""
    (tmp_path / "told_mains.py").write_text(RANK_MAINS)
    (tmp_path / "slow_module.py").write_text(SLOW)
    return tmp_path


def _started(place: Path, script: str | None = None) -> "subprocess.Popen[str]":
    if script is not None:
        (place / "main.py").write_text(script)
    path = os.pathsep.join([str(place), *sys.path])
    return subprocess.Popen(
        [sys.executable, "main.py"], cwd=place, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_ranks_have_what_was_loaded_ahead(place):
    with _started(place, USED) as process:
        assert process.communicate(timeout=60)[0] == "[True, True]\n"


def test_a_server_without_ranks_is_ended_at_once_and_another_one_starts(place):
    begun_s = time.monotonic()
    with _started(place, UNUSED) as process:
        said = process.communicate(timeout=300)[0].splitlines()
    assert said[0].endswith(" False") and said[1] == "1"
    assert time.monotonic() - begun_s < 300  # it would have slept for longer


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_server_that_loads_ends_with_the_one_that_started_it(place):
    with _started(place, KILLED) as process:
        assert process.stdout is not None
        server = Path(f"/proc/{process.stdout.readline().strip()}")
        deadline = time.monotonic() + 60
        while not (place / "begun").exists():
            assert server.exists() and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    while server.exists() and "Z" not in server.joinpath("stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_is_refused_leaves_no_server(place):
    (place / "cluster.toml").write_text(CLUSTER_TOML)
    (place / "profile.json").write_text(profile_text(small_profile()))
    words = ["run", "--model", "bert-tiny", "--cluster", "cluster.toml", "--profile", "profile.json"]
    (place / "main.py").write_text(f"""
from multiprocessing import forkserver
from hetpipe import cli

as_usual, servers = forkserver.ForkServer._stop, []

def stopped(self):
    servers.append(self._forkserver_pid)
    as_usual(self)

forkserver.ForkServer._stop = stopped
print(cli.main({words}), servers)
""")
    with _started(place) as process:
        code, _, servers = process.communicate(timeout=60)[0].partition(" ")
    assert code == "2" and len(json.loads(servers)) == 1
    assert not Path(f"/proc/{json.loads(servers)[0]}").exists()


@pytest.mark.parametrize("entry", MODEL_ENTRIES, ids=lambda entry: entry.name)
def test_the_module_of_a_model_of_the_table_is_told_without_loading_it(entry):
    with torch.device("meta"):
        model = model_spec(entry.name).build_as_saved()
    assert type(model).__module__ in modules_ahead(entry, small_cluster().devices)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *ALSO_TESTED, *CLASSIFIERS_TESTED])
def test_the_module_of_a_folder_is_told_by_its_configuration(architecture, tmp_path):
    """All that the tests train; of others a rank loads by itself what is elsewhere."""
    config = getattr(transformers, architecture).config_class()
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    entry, devices = model_entry(str(tmp_path)), small_cluster().devices
    assert getattr(transformers, architecture).__module__ in modules_ahead(entry, devices)


def test_the_modules_of_settings_are_those_of_their_model():
    lora, devices = parse_lora("r=8,targets=c_attn"), small_cluster().devices
    entry = model_entry("gpt2-tiny").with_adapters(lora)
    settings = TaskSettings(entry.name, 64, "float32", run=Settings(steps=1, **entry.in_settings))
    assert modules_of(settings, devices) == modules_ahead(entry, devices)
    assert "hetpipe.models.peft_ahead" in modules_of(settings, devices)
    bare = TaskSettings("gpt2-tiny", 64, "float32", run=Settings(steps=1))
    assert "hetpipe.models.peft_ahead" not in modules_of(bare, devices)


def test_ranks_on_gpus_load_no_machine_code_for_cpus():
    kinds = ([CPU], [CPU, "RTX-4090"], ["RTX-4090"])
    told = [
        modules_ahead(model_entry("gpt2"), [Device("a/0", "a", kind, 1e9) for kind in each]) for each in kinds
    ]
    assert ["hetpipe.models.dropout_ahead" in modules for modules in told] == [True, True, False]
