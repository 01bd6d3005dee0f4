"""Adapters beside a base: who has them, how both are drawn, what is refused."""

import sys

import pytest
import torch

from cost_model.errors import InputError
from hetpipe.models.adapters import (
    adapted_layers,
    base_name,
    is_adapter,
    merged_weights,
    with_adapters,
    with_named_targets,
)
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.split_check import check_split
from hetpipe.runs.lora import parse_lora

LLAMA = "r=4,alpha=8,dropout=0.1,targets=q_proj,down_proj,lm_head"
MODELS = {
    "llama-tiny": LLAMA,
    "gpt2-tiny": "r=3,rslora=true,targets=c_attn,c_proj",
    "bert-tiny": "r=2,targets=query,dense",
}


def chains(name: str) -> tuple[ChainModel, ChainModel]:
    spec = model_spec(name)
    return ChainModel.from_spec(spec), ChainModel.from_spec(with_adapters(spec, parse_lora(MODELS[name])))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_base_is_drawn_as_without_adapters_and_they_are_drawn_by_name(name):
    """Of GPT-2 also c_proj, which its attention draws a second time."""
    plain, adapted = chains(name)
    base = plain.materialise(range(plain.num_layers), seed=3).owned_parameters()
    whole = adapted.materialise(range(adapted.num_layers), seed=3).owned_parameters()
    assert {base_name(key) for key in adapted.base} == base.keys()
    assert {key for key in whole if is_adapter(key)} == whole.keys() - adapted.base
    drawn = []
    for key, value in whole.items():
        if key in adapted.base:
            assert torch.equal(value, base[base_name(key)]), key
        elif "lora_B" in key:
            assert not value.any(), key
        else:
            drawn.append(value.detach().flatten()[:8])
    assert len({tuple(row.tolist()) for row in drawn}) == len(drawn) > 3
    for layers in ([0, 2], [adapted.num_layers - 1]):
        for key, value in adapted.materialise(layers, seed=3).owned_parameters().items():
            assert torch.equal(value, whole[key]), key
    other = adapted.materialise([2], seed=4).owned_parameters()
    assert not any(torch.equal(value, whole[key]) for key, value in other.items() if "lora_A" in key)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_split_equals_whole_with_adapters_and_their_dropout(name):
    report = check_split(with_adapters(model_spec(name), parse_lora(MODELS[name])))
    assert report.passed, report.reason
    assert report.worst_parameter and is_adapter(report.worst_parameter)


def test_only_adapters_that_reach_the_loss_are_trained():
    _, adapted = chains("bert-tiny")
    infos = [info for layer in range(adapted.num_layers) for info in adapted.parameters(layer)]
    idle = {info.name for info in infos if is_adapter(info.name) and not info.reached}
    assert all(name.startswith("bert.pooler.dense.lora_") for name in idle) and len(idle) == 2
    assert not any(info.reached or info.tied for info in infos if not is_adapter(info.name))


def test_merging_adds_what_the_adapters_compute():
    _, adapted = chains("gpt2-tiny")
    model = adapted.materialise(range(adapted.num_layers), seed=0).model
    (name, layer), *_ = adapted_layers(model).items()
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        up.fill_(0.5)
    merged = merged_weights(model)
    expected = layer.base_layer.weight + (3 / 3**0.5) * (up @ down).T  # c_attn lies transposed
    torch.testing.assert_close(merged[f"{name}.weight"], expected)
    assert merged.keys() == dict(model_spec("gpt2-tiny").build().named_parameters()).keys()


def test_without_peft_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r'adapters need peft .*; pip install -e "\.\[lora\]"$'):
        with_adapters(model_spec("llama-tiny"), parse_lora(LLAMA))


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("llama-tiny", "q_prj", 'llama-tiny has no such linear layer; did you mean "q_proj"'),
        ("llama-tiny", "embed_tokens", "no such linear layer"),
        ("llama-tiny", "layers.0.self_attn.q_proj", "no such linear layer"),  # in all blocks, or in none
        ("llama-tiny", "proj", "no such linear layer"),  # peft would adapt nothing
        ("gpt2-tiny", "lm_head", "shares its weights with another layer"),
        ("bert-tiny", "decoder", "shares its weights with another layer"),
    ],
)
def test_a_target_that_is_none_is_refused(name, target, reason):
    with pytest.raises(InputError) as caught:
        with_adapters(model_spec(name), parse_lora(f"r=2,targets={target}"))
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    with_adapters(model_spec("llama-tiny"), parse_lora("r=2,targets=self_attn.q_proj"))


@pytest.mark.parametrize("name", MODELS)
def test_all_linear_are_the_layers_that_peft_takes_for_it(name):
    peft = pytest.importorskip("peft")
    spec = model_spec(name)
    settings = parse_lora("r=2,targets=all-linear")
    with torch.device("meta"):
        ours = with_adapters(spec, with_named_targets(spec, settings)).build()
        theirs = peft.get_peft_model(
            spec.build(),
            peft.LoraConfig(r=2, target_modules="all-linear", fan_in_fan_out=name == "gpt2-tiny"),
        )
    expected = {layer.removeprefix("base_model.model.") for layer in adapted_layers(theirs)}
    assert set(adapted_layers(ours)) == expected
    with pytest.raises(InputError, match=r"'all-linear' is all there are"):
        with_named_targets(spec, parse_lora("r=2,targets=all-linear,query"))
