"""GPUs that a cluster names and this host does not have are refused before anything starts."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cost_model.cluster import Device
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, read_profile
from hetpipe import cli
from hetpipe.profiling import profile_cache
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime import gpus
from hetpipe.runtime.host_staging import Staging
from hetpipe.runtime.processes import open_default_group
from hetpipe.training.rank_results import RankSummary, SharedParameter, owners_agree
from hetpipe.training.run import train
from runs import chain_plan, cluster_file, made_up_profile

MODEL = "bert-tiny"
LAB = """
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "lab"
devices = [
  { kind = "RTX-3090", memory = "24 GiB" },
  { kind = "RTX-2080-Ti", count = 2, memory = "11 GiB" },
  { kind = "cpu", memory = "8 GiB" },
]
"""
CARDS = ["NVIDIA-GeForce-RTX-3090", "NVIDIA-GeForce-RTX-2080-Ti", "NVIDIA-GeForce-RTX-2080-Ti"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def devices_of(*kinds: str, node: str = "lab") -> list[Device]:
    return [Device(f"{node}/{index}", node, kind, 1e9) for index, kind in enumerate(kinds)]


def test_cards_that_are_here_pass(monkeypatch):
    monkeypatch.setattr(gpus, "gpus_here", lambda: CARDS)
    gpus.check_here([*devices_of("RTX-3090", "RTX-2080-Ti", "my-card", "cpu"), *devices_of("emulated")], "")


def test_gpus_are_numbered_among_the_gpus_of_their_node(tmp_path):
    cluster = read_cluster(
        cluster_file(tmp_path, LAB.replace("devices = [", 'devices = [{ kind = "cpu", memory = "1 GiB" },'))
    )
    names = {device.name: gpus.gpu_index(device) for device in cluster.devices if device.is_gpu}
    assert names == {"lab/1": 0, "lab/2": 1, "lab/3": 2}
    assert all(device.gpu is None for device in cluster.devices if not device.is_gpu)


def test_a_card_after_a_cpu_is_the_first_card(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "gpus_here", lambda: CARDS)
    cluster = read_cluster(
        cluster_file(tmp_path, LAB.replace("devices = [", 'devices = [{ kind = "cpu", memory = "1 GiB" },'))
    )
    gpus.check_here(cluster.devices, "")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            devices_of("RTX-3090", "RTX-2080-Ti", "RTX-2080-Ti", "T4"),
            "device 'lab/3' is a T4, and this host has no GPU 3; do this",
        ),
        (
            devices_of("RTX-3090", "T4"),
            "device 'lab/1' is a T4, and GPU 1 of this host a NVIDIA-GeForce-RTX-2080-Ti; do this",
        ),
        (
            [*devices_of("RTX-3090"), *devices_of("RTX-3090", node="other")],
            "devices 'lab/0' and 'other/0' are both GPU 0 here; do this",
        ),
    ],
)
def test_cards_that_are_not_here_are_named(devices, message, monkeypatch):
    monkeypatch.setattr(gpus, "gpus_here", lambda: CARDS)
    with pytest.raises(InputError, match=message):
        gpus.check_here(devices, "do this")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("command", ["profile", "plan", "compare", "run", "run --dry-run"])
def test_no_command_measures_gpus_that_are_not_here(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def fail(*_: object) -> ModelProfile:
        raise AssertionError("measured")

    monkeypatch.setattr(profile_cache, "_measure", fail)
    cluster = cluster_file(tmp_path, LAB)
    before = {*tmp_path.iterdir()}
    assert cli.main([*command.split(), "--model", "bert-tiny", "--cluster", str(cluster)]) == 2
    assert "device 'lab/0' is a RTX-3090, and this host has no GPU 0; run `hetpipe profile`" in (
        capsys.readouterr().err
    )
    assert {*tmp_path.iterdir()} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_run_on_gpus_that_are_not_here_writes_nothing(tmp_path):
    profile, folder = made_up_profile(MODEL, "RTX-3090"), RunFolder(tmp_path / "run")
    cluster = cluster_file(tmp_path, LAB.replace("RTX-2080-Ti", "RTX-3090"))
    with pytest.raises(InputError, match="this host has no GPU 0; give a --plan of devices that are here"):
        train(Settings(MODEL, 1), cluster, profile, chain_plan(MODEL, [0, 8], 2, node="lab"), folder)
    assert not folder.path.exists()


def measured_devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """The devices measured from here on, whose profiles are made up."""
    found: list[Device] = []

    def measure(settings: TaskSettings, device: Device, *_: object) -> ModelProfile:
        found.append(device)
        return made_up_profile(settings.model, device.kind)

    monkeypatch.setattr(gpus, "gpus_here", lambda: CARDS)
    monkeypatch.setattr(profile_cache, "_measure", measure)
    monkeypatch.setattr(profile_cache, "_with_links", lambda profile, _: profile)
    return found


def test_each_kind_is_measured_on_its_own_card(tmp_path, monkeypatch):
    found = measured_devices(monkeypatch)
    profile_cache.profile_model(MODEL, read_cluster(cluster_file(tmp_path, LAB)), 64)
    assert {device.kind: device.name for device in found} == {
        "RTX-3090": "lab/0",
        "RTX-2080-Ti": "lab/1",
        "cpu": "lab/3",
    }


def test_estimated_kinds_are_not_measured(tmp_path, monkeypatch):
    found = measured_devices(monkeypatch)
    cluster = cluster_file(tmp_path, LAB.replace('"RTX-2080-Ti"', '"T4"'))
    line = ["profile", "--model", MODEL, "--cluster", str(cluster), "-o", str(tmp_path / "profile.json")]
    assert cli.main([*line, "--estimate", "T4"]) == 0
    assert {device.kind for device in found} == {"RTX-3090", "cpu"}
    kinds = read_profile(tmp_path / "profile.json").kinds
    assert {kind: entry.source for kind, entry in kinds.items()} == {
        "RTX-3090": "measured",
        "cpu": "measured",
        "T4": "estimated",
    }


def test_where_every_kind_is_estimated_nothing_is_measured(tmp_path, capsys):
    cluster = cluster_file(tmp_path, LAB.replace('{ kind = "cpu", memory = "8 GiB" },', ""))
    line = ["profile", "--model", MODEL, "--cluster", str(cluster), "--sequence-length", "8"]
    line += ["--estimate", "RTX-3090", "--estimate", "RTX-2080-Ti", "--estimate", "A6000"]
    assert cli.main([*line, "--microbatch-sizes", "1,2"]) == 2
    assert "nothing is measured; leave out --microbatch-sizes" in capsys.readouterr().err
    assert cli.main([*line, "-o", str(tmp_path / "profile.json")]) == 0
    assert "from no measured kind" in capsys.readouterr().out
    profile = read_profile(tmp_path / "profile.json")
    assert {entry.source for entry in profile.kinds.values()} == {"estimated"}
    assert profile.dtypes["RTX-2080-Ti"] == "float16-autocast"  # each in its fastest, as in `plan`
    assert sorted(profile.kinds) == ["A6000", "RTX-2080-Ti", "RTX-3090"]
    cli.main(["profile", "--profile", str(tmp_path / "profile.json"), "--estimate", "T4"])
    assert "its kinds are estimated themselves" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("processes", "before", "after"),
    [
        (2, None, "EAGER"),
        (2, "LAZY", "LAZY"),  # the user knows better
        (1, None, None),
        (None, None, None),
    ],
)
def test_kernels_are_loaded_at_the_start_where_others_send_meanwhile(monkeypatch, processes, before, after):
    given = (
        ("CUDA_MODULE_LOADING", before),
        ("NCCL_RUNTIME_CONNECT", None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", None),
        ("WORLD_SIZE", processes),
    )
    for name, value in given:
        monkeypatch.setenv(name, str(value))
        if value is None:
            monkeypatch.delenv(name)
    gpus.gpus_here()
    assert os.environ.get("CUDA_MODULE_LOADING") == after
    assert os.environ.get("NCCL_RUNTIME_CONNECT") == ("0" if after else None)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == ("32" if after else None)


def test_kernels_are_to_be_loaded_before_a_group_counts_the_gpus(monkeypatch):
    """NCCL's group does when it is made, and the driver reads the variable then."""
    found, between_gpus = [], Staging((True, True)).backend

    def joined(backend, **_):
        found.append((backend, os.environ.get("CUDA_MODULE_LOADING"), os.environ.get("NCCL_RUNTIME_CONNECT")))

    monkeypatch.setattr(dist, "init_process_group", joined)
    for backend in ("gloo", between_gpus):
        for name in ("CUDA_MODULE_LOADING", "NCCL_RUNTIME_CONNECT"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        open_default_group(backend, dist.HashStore(), 0, 2, 60.0)
    assert found == [("gloo", None, None), (between_gpus, "EAGER", "0")]


def shared(on_gpu: bool, *values: float, others: tuple[float, ...] = ()) -> RankSummary:
    found = {"weight": SharedParameter.of(torch.tensor(values))}
    if others:
        found["bias"] = SharedParameter.of(torch.tensor(others))
    return RankSummary(None, (), (1.0, 1.0, 1.0), found, on_gpu)


def test_owners_agree_bit_by_bit_and_to_rounding_between_gpus_and_cpus():
    other = 1.0000001
    assert owners_agree("weight", [shared(True, 1.0, 2.0), shared(True, 1.0, 2.0), shared(False, other, 2.0)])
    assert not owners_agree("weight", [shared(True, 1.0, 2.0), shared(True, other, 2.0)])
    assert not owners_agree("weight", [shared(False, 1.0, 2.0), shared(False, other, 2.0)])
    assert not owners_agree("weight", [shared(True, 1.0, 2.0), shared(False, 1.01, 2.0)])
    assert owners_agree("bias", [shared(True, 1.0, others=(1.0,)), shared(False, 3.0)])
