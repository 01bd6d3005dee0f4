"""Profiles of which nothing is measured: their bytes are those that a measurement counts."""

import json
from dataclasses import replace

import pytest
import torch

from cost_model.catalogue import accelerator
from cost_model.cluster import CPU
from cost_model.errors import InputError
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface_folder import WEIGHTS_FILE
from hetpipe.models.names import model_entry
from hetpipe.profiling.layer_estimates import LayerWork, contentless_task, estimated_profile
from hetpipe.profiling.layer_profiler import profile_task
from hetpipe.runs.lora import parse_lora
from hetpipe.runs.settings import Settings, TaskSettings
from shell import Shell

KINDS = ("RTX-4090", "RTX-3090")
TWO_CARDS = """
driver_memory = "0 B"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "box"
devices = [{{ kind = "RTX-4090", memory = "{0}" }}, {{ kind = "RTX-3090", memory = "{1}" }}]
interconnect = {{ bandwidth = "12 GB/s", latency = "10 us" }}
"""


def settings_of(
    model: str, lora: str | None = None, dtype: str = "float32", load_in: str | None = None
) -> TaskSettings:
    entry = model_entry(model)
    entry = entry if lora is None else entry.with_adapters(parse_lora(lora), load_in=load_in)
    return TaskSettings(entry.name, 16, dtype, Settings(steps=1, **entry.in_settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lora", "dtype", "load_in"),
    [
        ("llama-tiny", "r=4,dropout=0.1,targets=q_proj,v_proj", "bfloat16-autocast", None),
        ("llama-tiny", "r=4,targets=q_proj", "float32", "4bit"),
        ("gpt2-tiny", None, "float32", None),
        ("bert-tiny", "r=2,targets=query,dense", "float32", None),
    ],
)
def test_bytes_are_those_that_a_measurement_counts(model, lora, dtype, load_in):
    settings = settings_of(model, lora, dtype, load_in)
    spec = task_spec(settings)
    task = contentless_task(ChainModel.from_spec(spec), spec, settings.sequence_length)
    measured = profile_task(task, settings, CPU, (1, 2), 0.0, device=torch.device("cpu"))
    estimated = estimated_profile(settings, KINDS, (1, 2))
    # autocast casts the thin outputs of adapters elsewhere, and packed weights make a view: 2 % of so small
    # a layer
    rel = 0.02 if dtype != "float32" or load_in is not None else 0.0
    for mine, theirs in zip(estimated.layers, measured.layers, strict=True):
        assert mine.saved_bytes_per_sample == pytest.approx(theirs.saved_bytes_per_sample, rel=rel)
        for size in (1, 2):
            assert mine.workspace_at(size) == pytest.approx(theirs.workspace_at(size), rel=rel)
        assert mine.prefix_bytes_per_sample == pytest.approx(theirs.prefix_bytes_per_sample, rel=rel)
        saved, prefix = mine.saved_bytes_per_sample, mine.prefix_bytes_per_sample
        work = mine.workspace_by_size
        others = {"saved_bytes_per_sample": saved, "prefix_bytes_per_sample": prefix}
        assert mine == replace(theirs, workspace_by_size=work, **others)
    assert {kind.source for kind in estimated.kinds.values()} == {"estimated"}


@pytest.mark.slow
def test_seconds_follow_what_is_multiplied_and_what_is_trained():
    both = {lora: settings_of("llama-tiny", lora) for lora in (None, "r=4,targets=down_proj")}
    works, found = {}, {}
    for lora, settings in both.items():
        chain, found[lora] = ChainModel.from_spec(task_spec(settings)), estimated_profile(settings, KINDS)
        works[lora] = [LayerWork.of(chain, layer, found[lora].layers[layer], settings) for layer in range(6)]
    whole, beside = (each[2] for each in works.values())
    # four projections of 64 x 64 and three of 64 x 172; adapters of rank 4 on the last one; 16 tokens, each
    # scored against all 16 at width 64, and as much for what is weighed; the fused backward takes 2.5 of it
    weights, adapters = 2 * 16 * (4 * 64 * 64 + 3 * 64 * 172), 2 * 16 * 4 * (64 + 172)
    attention = 4 * 16**2 * 64
    assert whole.forward_flops == weights + attention
    assert beside.forward_flops == whole.forward_flops + adapters
    assert whole.backward_flops == 2 * weights + 2.5 * attention
    assert beside.backward_flops == weights + 2 * adapters + 2.5 * attention
    assert works[None][0].forward_flops == 0.0  # looked up; its rotary angles are no product
    assert whole.frozen_bytes == 0 and beside.frozen_bytes == whole.weight_bytes
    for kind in KINDS:
        full, adapters = (each.kinds[kind] for each in found.values())
        assert adapters.layers[2].backward_s < full.layers[2].backward_s
        assert adapters.layers[0].backward_s == (0.0, 0.0, 0.0)  # nothing is trained there or below
        # AdamW: weight, gradient and states, eight passes of 4 bytes; a card reaches 40 % of its bandwidth
        bandwidth = accelerator(kind).memory_bandwidth_bytes_per_s
        assert full.optimizer_s_per_byte == pytest.approx(8 / (0.3978 * bandwidth))
    fast, slow = (found[None].kinds[kind].layers[5].forward_s[-1] for kind in KINDS)
    assert fast < slow


def big_folder(hetpipe: Shell) -> str:
    """The configuration of Llama-3-70B, without a weight."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (hetpipe.folder / "big").mkdir()
    hetpipe.write("big/config.json", json.dumps(config))
    return "./big --lora r=16,targets=q_proj,v_proj --sequence-length 512 --dtype bf16 --no-proof"


@pytest.mark.slow
def test_whether_70_billion_weights_fit_is_known_from_config_json_alone(hetpipe: Shell, monkeypatch):
    monkeypatch.chdir(hetpipe.folder)
    monkeypatch.setattr("hetpipe.runtime.gpus.gpus_here", list)
    model = big_folder(hetpipe)
    hetpipe.write("cards.toml", TWO_CARDS.format("96 GiB", "96 GiB"))
    found = hetpipe(f"plan --model {model} --cluster cards.toml --json")
    assert found.code == 0 and "estimated, not measured: RTX-4090, RTX-3090" in found.err
    uses = found.json["memory"]
    # 80 blocks of 855,654,400 weights in bf16, norms float32 (2 more bytes each); embeddings and head
    blocks = 80 * (2 * 855_654_400 + 2 * 2 * 8192)
    ends = 2 * 2 * 128_256 * 8192 + 4 * 8192
    assert sum(use["frozen_bytes"] for use in uses.values()) == blocks + ends
    # r = 16 beside 8192 -> 8192 and 8192 -> 1024, float32 with a copy in bf16; gradients and two states
    adapters = 80 * 16 * (8192 + 8192 + 8192 + 1024)
    assert sum(use["trained_bytes"] for use in uses.values()) == 6 * adapters
    assert sum(use["state_bytes"] for use in uses.values()) == 3 * 4 * adapters
    assert all(use["total_bytes"] <= use["usable_bytes"] for use in uses.values())


@pytest.mark.slow
def test_the_table_says_what_fills_each_card(hetpipe: Shell, monkeypatch):
    monkeypatch.setattr("hetpipe.runtime.gpus.gpus_here", list)
    hetpipe.write("cards.toml", TWO_CARDS.format("1 GiB", "1 GiB"))
    model = "--model llama-tiny --lora r=4,targets=q_proj --cluster cards.toml --no-proof"
    table = hetpipe(f"plan {model}").out
    rows = table[table.rindex("memory, MiB") :].splitlines()[:4]
    columns = ["frozen", "trained", "states", "saved", "workspace", "sum", "of"]
    assert len(rows) == 4 and max(len(row.rstrip()) for row in rows) <= 80
    assert rows[0].split()[2:] == columns
    *filled, of_all, usable = map(float, rows[2].split()[1:])
    assert sum(filled) == pytest.approx(of_all, abs=0.04) and of_all <= usable
    assert "workspace" not in hetpipe("plan --model llama-tiny --cluster cards.toml --no-proof").out
    hetpipe.write("cards.toml", TWO_CARDS.format("1 MiB", "1 MiB"))
    short = hetpipe(f"plan {model}")
    said, error = short.err.splitlines()  # what is not given, and why it does not fit
    assert short.code == 3 and said.startswith("note: all devices are GPUs") and "are missing; " in error


def test_what_cannot_be_estimated_is_refused_in_a_line(hetpipe: Shell, monkeypatch):
    monkeypatch.setattr("hetpipe.runtime.gpus.gpus_here", list)
    hetpipe.write("cards.toml", TWO_CARDS.format("1 GiB", "1 GiB").replace("RTX-4090", "RTX-4091"))
    unknown = hetpipe("plan --model llama-tiny --cluster cards.toml")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1) and "RTX-4091" in unknown.err
    hetpipe.write("cards.toml", TWO_CARDS.format("1 GiB", "1 GiB").replace("RTX-4090", "RTX-2080-Ti"))
    slow = hetpipe("plan --model llama-tiny --cluster cards.toml --dtype bf16")
    assert (slow.code, slow.err.count("\n")) == (2, 1) and "no units for bfloat16" in slow.err
    trains = hetpipe("run --model llama-tiny --cluster cards.toml")
    assert (trains.code, trains.err.count("\n")) == (2, 1) and "this host has no GPU 0" in trains.err
    long = hetpipe("plan --model llama-tiny --cluster cards.toml --sequence-length 4096")
    assert (long.code, long.err.count("\n")) == (2, 1) and "sequence length 4096" in long.err
    with pytest.raises(InputError, match="float64"):
        estimated_profile(settings_of("llama-tiny", dtype="float64"), KINDS)
    assert WEIGHTS_FILE not in {path.name for path in hetpipe.folder.iterdir()}
