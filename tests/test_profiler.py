from dataclasses import replace
from pathlib import Path

import pytest
import torch

import own_tasks
from cost_model.cluster import CPU, EMULATED, Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe import profiling
from hetpipe.link_profiler import kind_pairs, measure_links
from hetpipe.models import model_spec
from hetpipe.profiler import profile_task
from hetpipe.profiling import cache_key, profile_model
from hetpipe.run_folder import RunFolder
from hetpipe.settings import Settings
from hetpipe.splitting import ChainModel
from runs import chain_plan, cluster_file, made_up_profile, run

EXAMPLES = Path(__file__).parents[1] / "examples" / "clusters"

EMULATED_CLUSTER = """
name = "emulated"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "emulated", count = 3, speed = 0.5, memory = "2 GiB" }]
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def emulated(folder: Path) -> Cluster:
    return read_cluster(cluster_file(folder, EMULATED_CLUSTER))


def measure(model: str, folder: Path) -> ModelProfile:
    return profile_model(model, emulated(folder), 64, budget_s=0.2, microbatch_sizes=(1, 2), use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_blocks"), [("bert-tiny", 6), ("gpt2-tiny", 4)])
def test_a_profile_describes_the_model(tmp_path, model, num_blocks):
    profile = measure(model, tmp_path)
    chain = ChainModel.from_spec(model_spec(model))
    names = ["embeddings", *(f"block{index}" for index in range(num_blocks)), "head"]
    assert [layer.name for layer in profile.layers] == names
    with torch.device("meta"):
        whole = model_spec(model).build()
    # the embedding is in the first and the last layer
    tied = 4 * whole.get_parameter(next(info.name for info in chain.parameters(0) if info.tied)).numel()
    head = profile.layers[-1]
    assert head.tied_to == "embeddings"
    total = sum(layer.parameter_bytes for layer in profile.layers)
    assert total - head.tied_bytes == 4 * sum(value.numel() for value in whole.parameters())
    assert tied <= head.tied_bytes <= tied + 4 * 1024  # with the bias of the predictions, where it is tied
    # the loss does not reach BERT's pooler (64 x 64 + 64) and next-sentence head (2 x 64 + 2)
    assert head.unreached_bytes == (4.0 * (64 * 64 + 64 + 2 * 64 + 2) if model == "bert-tiny" else 0.0)
    assert all(layer.unreached_bytes == 0.0 for layer in profile.layers[:-1])
    assert [layer.output_bytes_per_sample for layer in profile.layers] == [
        *[64 * 64 * 4.0] * (num_blocks + 1),
        0,
    ]
    assert all(layer.saved_bytes_per_sample > 0 for layer in profile.layers)
    assert len({layer.saved_bytes_per_sample for layer in profile.layers[1:-1]}) == 1  # alike
    kind = profile.kinds[EMULATED]
    assert (kind.source, kind.microbatch_sizes) == ("measured", (1, 2))
    assert kind.optimizer_s_per_byte > 0
    assert all(value > 0 for layer in kind.layers for value in (*layer.forward_s, *layer.backward_s))


@pytest.mark.parametrize("size", [2, 8])
def test_saved_bytes_of_linear_layers_are_their_inputs(tmp_path, size):
    settings = Settings("mine", 1, sequence_length=1)
    task = own_tasks.linear_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, CPU, (size,), 0.01, device=torch.device("cpu"))
    # 8 -> 16 -> 12 -> 4, float32. A linear layer keeps its input; that of the first is the data, which is
    # there anyway. The loss keeps the difference of prediction and target, and is 4 bytes itself.
    saved = [layer.saved_bytes_per_sample for layer in profile.layers]
    assert saved == [0.0, 4 * 16, 4 * 12 + 4 * 4 + 4 / size]
    assert [layer.output_bytes_per_sample for layer in profile.layers] == [4 * 16, 4 * 12, 0]
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 9 * 16, 4 * 17 * 12, 4 * 13 * 4]


def test_layers_before_the_first_parameter_have_a_profile(tmp_path):
    settings = Settings("mine", 1, sequence_length=1)
    task = own_tasks.mixed_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, CPU, (2,), 0.01, device=torch.device("cpu"))
    assert profile.layers[0].parameter_bytes == 0.0
    assert profile.num_layers == 6


@pytest.mark.slow
def test_a_profile_in_the_cache_is_not_measured_again(tmp_path, monkeypatch):
    first = measure("gpt2-tiny", tmp_path)

    def fail(*_: object) -> ModelProfile:
        raise AssertionError("measured again")

    monkeypatch.setattr(profiling, "_measure", fail)
    cluster = emulated(tmp_path)
    assert profile_model("gpt2-tiny", cluster, 64, microbatch_sizes=(1, 2)) == first
    for options in ({"use_cache": False}, {"dtype": "float64"}):
        with pytest.raises(AssertionError, match="measured again"):
            profile_model("gpt2-tiny", cluster, 64, microbatch_sizes=(1, 2), **options)
    with pytest.raises(AssertionError, match="measured again"):
        profile_model("gpt2-tiny", cluster, 32, microbatch_sizes=(1, 2))


def test_a_measurement_with_other_threads_has_another_key():
    settings = Settings("bert-tiny", 1)
    keys = {cache_key(settings, {CPU: count}, (1, 2), "") for count in (1, 2, 1)}
    assert len(keys) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_measured_peaks_are_near_the_predicted_ones(tmp_path, recompute):
    profile = measure("bert-tiny", tmp_path)
    plan = chain_plan("bert-tiny", [0, 2, 5, 8], 2, recompute=recompute)
    report, _ = run(tmp_path / "run", plan, Settings("bert-tiny", 1), profile, EMULATED_CLUSTER)
    for name, device in report.devices.items():
        assert device.peak_bytes is not None
        assert device.peak_bytes == pytest.approx(device.predicted_bytes, rel=0.1), name


def test_kinds_of_several_profiles_are_joined():
    here, there = made_up_profile("bert-tiny", CPU), made_up_profile("bert-tiny", EMULATED)
    assert set(profiling.merge([here, there]).kinds) == {CPU, EMULATED}
    with pytest.raises(InputError, match="profiles of sequence_length 64 and 32 cannot be joined"):
        profiling.merge([here, replace(there, sequence_length=32)])


@pytest.mark.slow
def test_links_between_real_devices_are_measured(tmp_path):
    links = measure_links(read_cluster(cluster_file(tmp_path)))
    assert links.keys() == {"cpu>cpu"}
    link = links["cpu>cpu"]
    assert 0 < link.latency_s < 1
    assert link.bandwidth_bytes_per_s > 1e6


def test_emulated_links_are_not_measured():
    assert kind_pairs(read_cluster(EXAMPLES / "four-unequal.toml")) == []
