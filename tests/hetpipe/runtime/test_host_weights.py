"""Frozen weights that come from the host: exact where copies are late, two layers' at once, whole after."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.quantized_weights import Packing, QuantizedParameter, quantized
from hetpipe.runs.quantization import Quantization
from hetpipe.runtime import host_weights
from hetpipe.runtime.host_weights import HostWeights, check_fetched
from hetpipe.runtime.layer_sync import LayerSync
from late_copies import copies_are_late

CPU = torch.device("cpu")
WIDTH, LAYERS = 6, 6


class Block(nn.Module):
    """A frozen matrix, and a small one that is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + 0.1 * self.side(x)


def model() -> LayerModel:
    chain = ChainModel.from_module(
        lambda: nn.Sequential(*(Block() for _ in range(LAYERS))), torch.zeros(1, WIDTH), name="blocks"
    )
    layers = chain.materialise(range(LAYERS), 3)
    for name, value in layers.owned_parameters().items():
        value.requires_grad_("side" in name)
    return layers


def frozen_names(layers: LayerModel) -> dict[int, tuple[str, ...]]:
    return {
        layer: tuple(name for name in layers.parameters_of(layer) if "base" in name)
        for layer in range(1, LAYERS - 1)
    }


def gradients(layers: LayerModel, weights: HostWeights | None) -> dict[str, Tensor]:
    """Of two microbatches, both forwards before both backwards."""
    outputs = []
    for seed in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        if weights is None:
            outputs.append(layers.run(0, LAYERS, {"input0": x})[0])
        else:
            with weights.saving():
                outputs.append(layers.run(0, LAYERS, {"input0": x})[0])
    for output in outputs:
        if layers.fetch is not None:
            layers.fetch(LAYERS - 1, -1)
        output.square().sum().backward()
    return {name: value.grad for name, value in layers.owned_parameters().items() if value.grad is not None}


@pytest.mark.parametrize("late", [False, True])
def test_gradients_have_the_bits_of_weights_that_are_always_there(monkeypatch, late: bool) -> None:
    plain = gradients(model(), None)
    if late:
        copies_are_late(monkeypatch, host_weights)
    layers = model()
    weights = HostWeights(layers, frozen_names(layers), CPU)
    for room in weights.rooms:
        room.fill_(255)  # no numbers, where weights were used that are not there yet
    found = gradients(layers, weights)
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert all(bool(value.isfinite().all()) for value in found.values())


def test_what_comes_after_a_segment_does_not_take_the_room_of_its_layers(monkeypatch) -> None:
    """Layers 2 and 3 run again for their backward: to bring 4 then is a move for nothing, and one back."""
    copies_are_late(monkeypatch, host_weights)
    layers, brought = model(), []
    weights = HostWeights(layers, frozen_names(layers), CPU)
    bring = weights._bring
    monkeypatch.setattr(weights, "_bring", lambda layer: (brought.append(layer), bring(layer)))
    with weights.saving():
        (output,) = layers.run(2, 4, {}, (torch.ones(1, WIDTH, requires_grad=True),))
    weights.fetch(3, -1)
    output.sum().backward()
    assert brought == [2, 3, 1]


def test_weights_on_their_way_are_waited_for_by_who_reads_them_first(monkeypatch) -> None:
    copies_are_late(monkeypatch, host_weights)
    layers = model()
    weights = HostWeights(layers, frozen_names(layers), CPU)
    weights.fetch(3, 1)
    kept = weights.put_down(layers.parameters_of(3)[frozen_names(layers)[3][0]].detach())
    expected = weights.taken_up(kept).clone()
    weights.fetch(1, 0)
    weights.fetch(4, -1)  # 3 is on its way
    for room in weights.rooms:
        if room is not weights.rooms[weights._current]:
            room.fill_(255)
    assert torch.equal(weights.taken_up(kept), expected)


def test_two_layers_have_room_and_parameters_are_whole_in_between() -> None:
    layers, before = model(), model().owned_parameters()
    weights = HostWeights(layers, frozen_names(layers), CPU)
    one = 4 * (WIDTH * WIDTH + WIDTH)
    assert [len(room) for room in weights.rooms] == [-(-one // 16) * 16] * 2
    held = sum(tensor.numel() * tensor.element_size() for tensor in layers.held_tensors())
    gradients(layers, weights)
    assert held == sum(tensor.numel() * tensor.element_size() for tensor in layers.held_tensors())
    for name, value in layers.owned_parameters().items():
        assert torch.equal(value, before[name]), name


def test_compiled_blocks_are_refused() -> None:
    layers = model()
    layers.compiles = True
    with pytest.raises(InputError, match="leave --compile out"):
        check_fetched(layers, {1: ()}, ("a", "b"))
    check_fetched(layers, {}, ())


class Fetched(LayerSync):
    """Sharded weights of which none is there, and no process group."""

    def __init__(self) -> None:
        self.fetches, self._storages = True, {}


@pytest.mark.parametrize("sharded", [False, True])
def test_what_has_no_backward_is_freed(sharded: bool) -> None:
    """A pooler beside the loss: tanh keeps its own output, and must not hold itself for ever."""
    layers = model()
    keeper = Fetched() if sharded else HostWeights(layers, frozen_names(layers), CPU)
    x = torch.ones(2, WIDTH, requires_grad=True)
    with keeper.saving():
        unused = torch.tanh(2 * x)
    alive = weakref.ref(unused)
    del unused
    assert alive() is None


def test_what_scales_in_8_bits_stand_for_is_on_the_device_with_the_room() -> None:
    matrix = quantized(torch.randn(64, 64), Packing(Quantization("4bit", double_quant=True)))
    held = QuantizedParameter(matrix)
    layers = LayerModel(nn.Module(), 3, {1: {"weight": held}})
    HostWeights(layers, {1: ("weight",)}, torch.device("meta"))
    on_device = {key for key, part in held.matrix.scales.items() if part.is_meta}
    assert on_device == {"nested_quant_map"}  # all else comes when the layer computes
    assert not held.matrix.values.is_meta
