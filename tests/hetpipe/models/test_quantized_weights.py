"""Matrices in 4 and 8 bits are those that transformers and bitsandbytes hold, in value and in bytes."""

import importlib
import json
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn

import peft_models
import runs
from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface_folder import CONFIG_FILE, read_model_folder
from hetpipe.models.names import model_entry
from hetpipe.models.quantized_modules import matrices_in
from hetpipe.models.quantized_weights import Packing, QuantizedParameter, quantized
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.quantization import Quantization
from hetpipe.runs.settings import Settings, TaskSettings

LLAMA, GPT2, BERT = peft_models.TARGETS


def chain_of(folder: Path, architecture: str, load_in: str | None = None) -> ChainModel:
    lora = LoraSettings(4, 8.0, peft_models.TARGETS[architecture])
    return peft_models.chain_of(folder, lora, load_in)


def held(chain: ChainModel) -> dict[str, QuantizedParameter]:
    """The quantized parameters of all layers, by their names without adapters."""
    model = chain.materialise(range(chain.num_layers), 0)
    return {
        name.replace(".base_layer", ""): value
        for name, value in model.owned_parameters().items()
        if isinstance(value, QuantizedParameter)
    }


@pytest.mark.parametrize(
    ("architecture", "load_in"), [(LLAMA, "4bit"), (LLAMA, "8bit"), (GPT2, "4bit"), (BERT, "4bit")]
)
def test_the_matrices_and_their_bits_are_those_of_transformers(tmp_path, architecture, load_in):
    folder = peft_models.base_folder(tmp_path, architecture)
    mine = held(chain_of(folder, architecture, load_in))
    model = peft_models.quantized_base(folder, architecture, load_in)
    theirs = matrices_in(model)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        found, expected = value.matrix, theirs[name]
        assert torch.equal(found.values, expected.values), name
        assert all(torch.equal(scale, expected.scales[key]) for key, scale in found.scales.items()), name
        weight = expected.dequantized(torch.float32)
        weight = weight.t() if found.packing.transposed else weight
        assert torch.equal(found.dequantized(torch.float32), weight), name


@pytest.mark.parametrize("load_in", ["4bit", "8bit"])
def test_a_product_is_that_of_the_layer_of_bitsandbytes(load_in):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator)
    matrix = quantized(weight, Packing(Quantization(load_in)))
    if load_in == "4bit":
        layer = bitsandbytes.nn.Linear4bit(64, 96, False, torch.float32, False, "nf4")
    else:
        layer = bitsandbytes.nn.Linear8bitLt(64, 96, False, has_fp16_weights=False)
    layer.load_state_dict({"weight": weight})
    layer = layer.to("cpu").train()
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(5, 64, generator=generator).to(dtype)
        if load_in == "4bit":
            layer.compute_dtype = dtype
        expected = layer(rows)
        assert torch.equal(rows @ matrix.dequantized(dtype).t(), expected) or torch.allclose(
            rows @ matrix.dequantized(dtype).t(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6
        )


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("load_in", ["4bit", "8bit"])
@pytest.mark.parametrize("shape", [(64, 64), (40, 24), (300, 640)])
def test_bytes_are_counted_as_they_are_held(load_in, double_quant, shape):
    quantization = Quantization(load_in, double_quant=double_quant and load_in == "4bit")
    matrix = quantized(torch.randn(shape), Packing(quantization))
    assert sum(tensor.nbytes for tensor in matrix.tensors()) == quantization.stored_bytes(*shape)
    # by hand: 64 x 64 in 4 bits are 2,048 bytes and 64 scales of 4
    assert Quantization("4bit").stored_bytes(64, 64) == 2048 + 256


@pytest.mark.parametrize(
    ("architecture", "load_in", "double_quant"),
    [(LLAMA, "4bit", True), (GPT2, "4bit", False), (LLAMA, "8bit", False)],
)
def test_a_folder_that_bitsandbytes_quantized_is_taken(tmp_path, architecture, load_in, double_quant):
    folder = peft_models.base_folder(tmp_path, architecture)
    model = peft_models.quantized_base(
        folder,
        architecture,
        load_in,
        bnb_4bit_use_double_quant=double_quant,
        llm_int8_skip_modules=["lm_head", "v_proj"],
    )
    saved = tmp_path / "quantized"
    model.save_pretrained(saved)
    assert read_model_folder(saved).quantization == Quantization(
        load_in, double_quant=double_quant, skip=("lm_head", "v_proj")
    )
    chain = chain_of(saved, architecture)
    mine, theirs = held(chain), matrices_in(model)
    assert mine.keys() == theirs.keys()
    assert not any("v_proj" in name for name in mine)
    for name, value in mine.items():
        expected = theirs[name].dequantized(torch.float32)
        expected = expected.t() if value.matrix.packing.transposed else expected
        assert torch.equal(value.matrix.dequantized(torch.float32), expected), name
    counted = sum(layer.stored for layer in chain.weight_bytes(torch.float32))
    tensors = chain.materialise(range(chain.num_layers), 0).held_tensors()
    tied = 0 if architecture == LLAMA else 512 * 32 * 4
    assert counted - tied == sum(tensor.nbytes for tensor in tensors)


def test_an_entry_knows_how_its_base_is_held(tmp_path):
    folder = peft_models.base_folder(tmp_path, LLAMA)
    lora = LoraSettings(4, 8.0, ("q_proj",))
    entry = model_entry(str(folder))
    held_in = entry.with_adapters(lora, load_in="4bit")
    assert held_in.name == f"{entry.name}+4bit{lora.suffix}"
    spec = task_spec(TaskSettings(held_in.name, run=Settings(steps=1, **held_in.in_settings)))
    assert (spec.name, spec.quantization) == (held_in.name, Quantization("4bit"))
    with pytest.raises(InputError, match=r"is no model with the adapters .* beside weights in 8bit"):
        TaskSettings(held_in.name, run=Settings(steps=1, **{**held_in.in_settings, "load_in": "8bit"}))
    with pytest.raises(InputError, match="weights in 4bit cannot be trained"):
        Settings(steps=1, load_in="4bit")
    with pytest.raises(InputError, match=r"give peft\.get_peft_model"):
        ChainModel.from_module(
            peft_models.quantized_base(folder, LLAMA, "4bit"),
            {"input_ids": torch.zeros(1, 4, dtype=torch.long)},
        )


LORA = "--lora r=4,targets=q_proj"
WRONG = [
    (
        "--load-in 4bit",
        "weights in 4bit cannot be trained, only adapters beside them; give --lora or --adapter",
    ),
    (f"--load-in 3bit {LORA}", "--load-in '3bit' is not supported; give 4bit or 8bit"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_refused_in_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    peft_models.base_folder(tmp_path, LLAMA)
    Path("cluster.toml").write_text(runs.CPU_CLUSTER)
    for verb in ("profile", "plan", "compare", "run", "check"):
        _refused(capsys, f"{verb} --model ./base {options}", message, cluster=verb != "check")


def test_what_cannot_be_held_so_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = peft_models.base_folder(tmp_path, LLAMA)
    config = json.loads((folder / CONFIG_FILE).read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    _refused(
        capsys, f"check --model ./base --load-in 4bit {LORA}", "is in 8bit already; leave the option out"
    )
    for key, value, message in (
        (
            "quant_method",
            "awq",
            "quant_method 'awq', and weights in 4 or 8 bits are taken by bitsandbytes alone",
        ),
        ("load_in_4bit", True, "load_in_4bit True and load_in_8bit True; one is needed"),
        ("llm_int8_has_fp16_weight", True, "keeps weights in 16 bits"),
        ("llm_int8_skip_modules", "lm_head", "llm_int8_skip_modules is 'lm_head'; a list of names is needed"),
        ("llm_int8_skip_modules", ["proj", "lm_head"], "has no linear layer to hold in 8 bits"),
    ):
        changed = {**config, "quantization_config": {**config["quantization_config"], key: value}}
        (folder / CONFIG_FILE).write_text(json.dumps(changed))
        _refused(capsys, f"check --model ./base {LORA}", message)
    real = importlib.import_module

    def without(name: str, *others: Any) -> Any:
        if name == "bitsandbytes":
            raise ImportError("No module named 'bitsandbytes'")
        return real(name, *others)

    monkeypatch.setattr(importlib, "import_module", without)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    _refused(
        capsys,
        f"check --model ./base {LORA}",
        "need bitsandbytes (No module named 'bitsandbytes'); pip install -e \".[qlora]\"",
    )


def _refused(capsys: Any, line: str, message: str, *, cluster: bool = False) -> None:
    capsys.readouterr()
    words = [*line.split(), *(["--cluster", "cluster.toml"] if cluster else [])]
    assert cli.main(words) == 2, line
    out, err = capsys.readouterr()
    assert message in err and err.startswith("error: ") and err.count("\n") == 1 and out == "", (line, err)


def test_split_equals_whole_with_quantized_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    peft_models.base_folder(tmp_path, LLAMA)
    assert cli.main(["check", "--model", "./base", "--load-in", "4bit", *LORA.split()]) == 0
    assert "+4bit+lora@" in capsys.readouterr().out


def test_a_conv1d_is_held_as_a_linear_layer_is():
    weight = torch.randn(32, 96)
    packing = Packing(Quantization("8bit"), transposed=True)
    matrix = quantized(weight, packing)
    assert matrix.shape == (96, 32) and packing.stored_bytes((32, 96)) == 96 * 32 + 4 * 96
    assert (matrix.dequantized(torch.float32) - weight).abs().max() < 0.05
    assert isinstance(QuantizedParameter(matrix), nn.Parameter)
