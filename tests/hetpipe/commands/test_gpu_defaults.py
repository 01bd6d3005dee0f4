"""What is measured where no option says it: on GPUs what suits them, said in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.profile import ModelProfile, read_profile
from hetpipe import cli
from hetpipe.commands.gpu_defaults import measured
from hetpipe.profiling import profile_cache
from hetpipe.runs.settings import TaskSettings
from hetpipe.runtime import gpus
from runs import cluster_file, made_up_profile


def lab(folder: Path, *kinds: str) -> Cluster:
    devices = ", ".join(f'{{ kind = "{kind}", memory = "16 GiB" }}' for kind in kinds)
    text = '[network]\nbandwidth = "1 GB/s"\nlatency = "0 s"\n[[nodes]]\nname = "n"\n'
    return read_cluster(cluster_file(folder, f"{text}devices = [{devices}]\n"))


def test_gpus_alone_get_long_sequences_their_fastest_precision_and_large_microbatches(tmp_path):
    cluster = lab(tmp_path, "RTX-3090", "V100", "Apple-M3")
    how = measured(cluster, "llama-small", None, None)
    assert (how.sequence_length, how.dtype, how.microbatch_sizes) == (512, "auto,Apple-M3=float32", None)
    assert how.said == (
        "all devices are GPUs, so what is not given is --sequence-length 512, --dtype "
        "auto,Apple-M3=float32 (RTX-3090 bfloat16-autocast, V100 float16-autocast, Apple-M3 float32), "
        "--microbatch-sizes auto",
    )


def test_what_is_given_is_taken_without_a_word(tmp_path):
    how = measured(lab(tmp_path, "RTX-3090"), "llama-small", 128, "tf32", (1, 8), sizes_given=True)
    assert (how.sequence_length, how.dtype, how.microbatch_sizes) == (128, "tf32", (1, 8))
    assert how.said == ()


def test_no_sequence_is_longer_than_the_model_takes(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
        "max_position_embeddings": 48,
    }  # fmt: skip
    model = tmp_path / "short"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    assert measured(lab(tmp_path, "T4"), str(model), None, None).sequence_length == 48


@pytest.mark.parametrize("kinds", [("cpu",), ("emulated",), ("T4", "cpu")])
def test_others_keep_what_is_measured_in_seconds(tmp_path, kinds):
    how = measured(lab(tmp_path, *kinds), "llama-small", None, None)
    assert (how.sequence_length, how.dtype, how.microbatch_sizes) == (64, None, (1, 2, 4))
    assert how.said == ()


def test_a_profile_of_gpus_is_measured_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpus, "gpus_here", lambda: ["NVIDIA-Tesla-T4"])
    found: list[tuple[TaskSettings, object]] = []

    def measure(
        settings: TaskSettings, device: object, count: int, limits: object, *_: object
    ) -> ModelProfile:
        found.append((settings, limits))
        return replace(made_up_profile(settings.model, "T4"), dtype=settings.dtype)

    monkeypatch.setattr(profile_cache, "_measure", measure)
    monkeypatch.setattr(profile_cache, "_with_links", lambda profile, _: profile)
    lab(tmp_path, "T4")
    line = ["profile", "--model", "bert-tiny", "--cluster", str(tmp_path / "cluster.toml")]
    assert cli.main([*line, "-o", str(tmp_path / "profile.json"), "--profile-budget", "1"]) == 0
    ((settings, limits),) = found
    assert (settings.sequence_length, settings.dtype) == (512, "float16-autocast")
    assert limits == (None, 16 * 2.0**30, 1.0)
    assert read_profile(tmp_path / "profile.json").model == "bert-tiny"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "note: all devices are GPUs, so what is not given is --sequence-length 512, --dtype"
    )


def test_nothing_is_said_beside_a_refusal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpus, "gpus_here", list)
    lab(tmp_path, "T4")
    assert cli.main(["run", "--model", "bert-tiny", "--cluster", str(tmp_path / "cluster.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this host has no GPU 0" in line
