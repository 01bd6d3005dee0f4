"""What a model's own rule leaves alone begins as its constructor makes it, under every plan."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM
from transformers.models.regnet.modeling_regnet import RegNetConfig, RegNetForImageClassification

from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel
from hetpipe.models.initialization import private_random_stream
from hetpipe.models.owned_weights import _as_constructed
from hetpipe.models.split_check import check_split

IDS = {"input_ids": torch.arange(6).reshape(1, 6)}


class Scaled(nn.Module):
    """A norm whose scales `_init_weights` of transformers does not know: a constant and a random one."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.constant = nn.Parameter(torch.full((16,), 0.3))
        self.drawn = nn.Parameter(torch.rand(16) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.constant * self.drawn


def scaled_bert(value: float = 0.3) -> nn.Module:
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        attn_implementation="eager",
    )  # fmt: skip
    model = BertForMaskedLM(config)
    for layer in model.bert.encoder.layer:
        layer.output.LayerNorm = Scaled(layer.output.LayerNorm)
        layer.output.LayerNorm.constant.data.fill_(value)
    return model


def test_what_the_rule_leaves_alone_is_as_constructed_under_any_plan():
    chain = ChainModel.from_module(scaled_bert, IDS)
    whole = chain.materialise(range(chain.num_layers), seed=5).owned_parameters()
    with private_random_stream(5):
        made = dict(scaled_bert().named_parameters())
    left = [name for name in whole if name.endswith(("constant", "drawn"))]
    assert len(left) == 6 and all(torch.equal(whole[name], made[name]) for name in left)
    assert all(value.isfinite().all() for value in whole.values())
    for layers in ((0, 1), (2, 3, 4)):
        part = chain.materialise(layers, seed=5).owned_parameters()
        assert part and all(torch.equal(value, whole[name]) for name, value in part.items())
    assert check_split(scaled_bert, IDS).passed


def test_a_parameter_that_nothing_sets_is_named():
    chain = ChainModel.from_module(partial(scaled_bert, torch.nan), IDS)
    with pytest.raises(InputError, match=r"constant' begins as no number: neither the model's rule nor"):
        chain.materialise(range(chain.num_layers), seed=5)


def test_biases_that_a_model_of_transformers_leaves_alone_are_those_of_from_config():
    """RegNet's rule draws the weights of convolutions and leaves their biases to their constructor."""

    def build() -> nn.Module:
        sizes = {"num_channels": 1, "hidden_sizes": [8, 8, 8, 8], "depths": [1] * 4, "groups_width": 8}
        return RegNetForImageClassification(RegNetConfig(**sizes))

    with private_random_stream(3):
        made = dict(build().named_parameters())
    biases = {name: nn.Parameter(torch.full_like(value, torch.nan)) for name, value in made.items()}
    _as_constructed(biases, build, seed=3)
    assert all(torch.equal(biases[name], value) for name, value in made.items())
