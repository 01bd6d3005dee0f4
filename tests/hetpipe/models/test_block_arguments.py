"""Masks and rotary tables are worked out once for each shape, and never where values decide them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from folders import MODELS, tiny_model
from hetpipe.models import block_arguments
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import PREFIX
from hetpipe.models.partial_model import LayerModel

WIDTH = 8
Inputs = Mapping[str, Tensor]


def middle(model: nn.Module, example: Inputs) -> LayerModel:
    """Layers 1 and 2 of a model in training."""
    return ChainModel.from_module(model, example).materialise([1, 2], 0).train()


def run(layers: LayerModel, inputs: Inputs, hidden: Tensor) -> tuple[Tensor, bool]:
    """What layers 1 and 2 give, and whether the model's part before the blocks was run for it."""
    announced: list[int] = []
    layers.on_layer = announced.append
    (result,) = layers.run(1, 3, inputs, (hidden,))
    return result, PREFIX in announced


def afresh(layers: LayerModel, inputs: Inputs, hidden: Tensor) -> Tensor:
    """The same where nothing is known."""
    layers.forget_arguments()
    result, by_model = run(layers, inputs, hidden)
    assert by_model
    return result


def ids(seed: int, count: int = 2, length: int = 6) -> Tensor:
    return torch.randint(1, 60, (count, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_a_second_microbatch_of_the_same_shape_needs_no_prefix(architecture):
    layers = middle(tiny_model(architecture), {"input_ids": ids(0, 1)})
    hidden = torch.randn(2, 6, layers.model.config.hidden_size)
    expected = [afresh(layers, {"input_ids": ids(seed)}, hidden * seed) for seed in (1, 2)]
    layers.forget_arguments()
    for seed, by_model in ((1, True), (2, False), (1, False)):
        result, found = run(layers, {"input_ids": ids(seed)}, hidden * seed)
        assert torch.equal(result, expected[seed - 1])
        assert found == by_model
    longer = {"input_ids": ids(3, length=8)}
    hidden = torch.randn(2, 8, hidden.shape[-1])
    result, by_model = run(layers, longer, hidden)
    assert by_model and torch.equal(result, afresh(layers, longer, hidden))


def test_a_model_with_a_padding_token_does_not_look_for_it():
    model = tiny_model("GPT2LMHeadModel")
    model.config.pad_token_id = 3
    layers = middle(model, {"input_ids": ids(0, 1)})
    hidden = torch.randn(2, 6, model.config.hidden_size)
    assert [run(layers, {"input_ids": ids(1)}, hidden)[1] for _ in range(2)] == [True, False]


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_masks_of_the_caller_are_made_anew_for_each_microbatch(architecture):
    layers = middle(tiny_model(architecture), {"input_ids": ids(0, 1)})
    hidden = torch.randn(2, 6, layers.model.config.hidden_size)
    masks = [torch.ones(2, 6, dtype=torch.long) for _ in range(2)]
    masks[0][0, -2:] = 0
    masks[1][1, :3] = 0
    inputs = [{"input_ids": ids(1), "attention_mask": mask} for mask in masks]
    expected = [afresh(layers, each, hidden) for each in inputs]
    assert not torch.equal(*expected)
    plain = {"input_ids": ids(1)}
    without = [afresh(layers, plain, hidden), *(run(layers, plain, hidden)[0] for _ in range(2))]
    for each, result in zip(inputs, expected, strict=True):
        found, by_model = run(layers, each, hidden)
        assert by_model and torch.equal(found, result)
    assert all(torch.equal(each, without[0]) for each in without)
    masks[0][0, -3:] = 0  # the same tensor with another content
    assert torch.equal(run(layers, inputs[0], hidden)[0], afresh(layers, inputs[0], hidden))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Any, scale: float = 1.0) -> Tensor:
        if isinstance(bias, Sum):
            bias = bias.value
        x = x.float()
        return x + self.linear(x) * scale + bias


class Sum:
    """What is no tensor and may change."""

    def __init__(self) -> None:
        self.value = 0.0


class Own(nn.Module):
    """Blocks around which each way makes a bias [samples or 1, seq, 1] and a scale of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.way, self.sum = way, Sum()

    def forward(self, ids: Tensor) -> Tensor:
        x, bias, scale = self.embedding(ids), torch.zeros(1, ids.shape[1], 1), 1.0
        match self.way:
            case "by shape":
                bias = torch.arange(ids.shape[1])[None, :, None] / 7.0 + torch.zeros_like(bias)
            case "by values":
                bias = (ids < 30)[..., None] * 0.5
            case "by item":
                scale = 1.0 + ids.max().item()
            case "by choice":
                scale = 2.0 if (ids[:, 0] < 30).any() else 3.0
            case "by list":
                scale = float(ids.tolist()[0][0])
            case "by array":
                scale = float(ids.numpy().max())
            case "by number of rows":
                scale = float(len(ids[ids < 30]))
            case "by writing":
                bias[0, :, 0] = ids[0] / 60.0
            case "by writing into a view":
                bias.view(-1)[:2].copy_(ids[0, :2])
            case "by an object":
                self.sum.value = bias = self.sum
                self.sum.value = float(ids.shape[1])
        for block in self.blocks:
            x = block(x, bias, scale)
            if self.way == "by the block before":
                bias = x.detach().mean(-1, keepdim=True)
        return self.head(x)


KEPT = {"by shape": True}
WAYS = [
    *("by shape", "by values", "by item", "by choice", "by list", "by array", "by number of rows"),
    *("by writing", "by writing into a view", "by an object", "by the block before"),
]


@pytest.mark.parametrize("way", WAYS)
def test_what_depends_on_values_is_never_kept(way):
    layers = middle(Own(way), {"ids": ids(0, 1)})
    hidden = torch.randn(2, 6, WIDTH)
    batches = [{"ids": ids(seed)} for seed in range(1, 9)]
    expected = [afresh(layers, batch, hidden + seed) for seed, batch in enumerate(batches)]
    layers.forget_arguments()
    found = [run(layers, batch, hidden + seed) for seed, batch in enumerate(batches)]
    assert all(torch.equal(one, other) for (one, _), other in zip(found, expected, strict=True))
    assert all(by_model for _, by_model in found[1:]) is not KEPT.get(way, False)


class Widened(Own):
    """Runs its blocks in float32 whatever autocast says."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(ids)


def test_blocks_inside_a_context_of_the_model_stay_there():
    chain = ChainModel.from_module(Widened("by shape"), {"ids": ids(0, 1)})
    layers = chain.materialise([1, 2], 0, lowered=torch.bfloat16).train()
    hidden = torch.randn(2, 6, WIDTH).bfloat16().float()
    expected = afresh(layers, {"ids": ids(1)}, hidden)
    found, by_model = run(layers, {"ids": ids(1)}, hidden)
    assert by_model and torch.equal(found, expected)


def test_only_so_many_shapes_are_kept(monkeypatch):
    monkeypatch.setattr(block_arguments, "MOST_SHAPES", 2)
    layers = middle(Own("by shape"), {"ids": ids(0, 1)})
    for length, by_model in ((4, True), (5, True), (6, True), (4, False), (5, False), (6, True)):
        hidden = torch.randn(2, length, WIDTH)
        found = run(layers, {"ids": ids(1, length=length)}, hidden)
        assert found[1] == by_model
    assert len({tensor.untyped_storage()._cdata for tensor in layers.kept_arguments()}) == 2


def test_an_evaluation_does_not_take_the_arguments_of_training():
    layers = middle(Own("by shape"), {"ids": ids(0, 1)})
    hidden = torch.randn(2, 6, WIDTH)
    assert [run(layers, {"ids": ids(1)}, hidden)[1] for _ in range(2)] == [True, False]
    layers.eval()
    assert [run(layers, {"ids": ids(1)}, hidden)[1] for _ in range(2)] == [True, False]
