"""Saved activations that go to the host: exact where copies are late, two blocks at once, nothing left."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.models.chain import ChainModel
from hetpipe.models.partial_model import LayerModel
from hetpipe.program.instructions import Compute, Pass
from hetpipe.runtime import host_activations
from hetpipe.runtime.byte_counter import ByteCounter
from hetpipe.runtime.host_activations import HostActivations
from hetpipe.runtime.host_weights import HostWeights
from late_copies import copies_are_late

CPU = torch.device("cpu")
WIDTH, LAYERS, SAMPLES = 6, 8, 64
AROUND = (0, LAYERS - 1)


class Block(nn.Module):
    """Saves its input, and what comes between its matrices: once, though two operations save it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        between = torch.tanh(self.base(x))
        return x + self.side(between)


def model(*, frozen: bool = False) -> LayerModel:
    chain = ChainModel.from_module(
        lambda: nn.Sequential(*(Block() for _ in range(LAYERS))), torch.zeros(1, WIDTH), name="blocks"
    )
    layers = chain.materialise(range(LAYERS), 3)
    for name, value in layers.owned_parameters().items():
        value.requires_grad_(not frozen or "side" in name)
    return layers


def inputs(seed: int, samples: int = SAMPLES) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))


def forward(
    layers: LayerModel, keeper: HostActivations | None, microbatch: int, samples: int = SAMPLES
) -> Tensor:
    x = inputs(microbatch, samples)
    if keeper is None:
        return layers.run(0, LAYERS, {"input0": x})[0]
    with keeper.saving(Compute(Pass.FORWARD, 0, 0, microbatch), [x]):
        return layers.run(0, LAYERS, {"input0": x})[0]


def backward(layers: LayerModel, keeper: HostActivations | None, microbatch: int, output: Tensor) -> None:
    if keeper is not None:
        keeper.going_back(Compute(Pass.BACKWARD, 0, 0, microbatch))
    if layers.fetch is not None:
        layers.fetch(LAYERS - 1, -1)
    output.square().sum().backward()


def gradients(layers: LayerModel, keeper: HostActivations | None) -> dict[str, Tensor]:
    """Of four microbatches, two in flight: F0 F1 B0 F2 B1 F3 B2 B3."""
    outputs = {0: forward(layers, keeper, 0), 1: forward(layers, keeper, 1)}
    for microbatch in range(4):
        backward(layers, keeper, microbatch, outputs.pop(microbatch))
        if microbatch + 2 < 4:
            outputs[microbatch + 2] = forward(layers, keeper, microbatch + 2)
    return {name: value.grad for name, value in layers.owned_parameters().items() if value.grad is not None}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_gradients_have_the_bits_of_activations_that_stay(monkeypatch, late: bool, weights: bool) -> None:
    plain = gradients(model(frozen=weights), None)
    if late:
        copies_are_late(monkeypatch, host_activations)
    layers, host = model(frozen=weights), None
    if weights:
        names = {
            layer: tuple(name for name in layers.parameters_of(layer) if "base" in name)
            for layer in range(1, LAYERS - 1)
        }
        host = HostWeights(layers, names, CPU)
    found = gradients(layers, HostActivations(layers, [(0, 0)], AROUND, CPU, host))
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_a_device_keeps_what_two_blocks_save() -> None:
    """A block saves its input and what is between its matrices, each once."""
    one = 4 * SAMPLES * WIDTH
    kept = []
    for on_host in (False, True):
        layers = model()
        keeper = HostActivations(layers, [(0, 0)], AROUND, CPU) if on_host else None
        backward(layers, keeper, 0, forward(layers, keeper, 0))  # gradients have their room
        with ByteCounter() as counter:
            for value in layers.owned_parameters().values():
                counter.add(value)
                counter.add(value.grad)
            before = counter.live_bytes
            outputs = [forward(layers, keeper, microbatch) for microbatch in range(3)]
            kept.append(counter.live_bytes - before)
            for microbatch, output in enumerate(outputs):
                backward(layers, keeper, microbatch, output)
            del outputs, output
    plain, lean = kept
    assert plain == 3 * (2 * LAYERS + 1) * one  # all that is saved, and the outputs
    # what the layers around the blocks save, and the outputs; of the last microbatch its last block's, too
    assert lean == 3 * (2 * 2 + 1) * one + 2 * one


def test_nothing_is_left_when_all_is_over() -> None:
    layers = model()
    keeper = HostActivations(layers, [(0, 0)], AROUND, CPU)
    gradients(layers, keeper)
    assert not keeper._saved and not keeper._known
    rooms = {num_bytes: len(rooms) for num_bytes, rooms in keeper._rooms.items()}
    gradients(layers, keeper)
    again = {num_bytes: len(rooms) for num_bytes, rooms in keeper._rooms.items()}
    assert rooms == again == {4 * SAMPLES * WIDTH: 2 * 2 * (LAYERS - 2)}  # of two in flight


def rooms_after(layers: LayerModel, keeper: HostActivations, *samples: int) -> dict[int, set[int]]:
    """The rooms that nobody uses after a step of such microbatches: by samples, where each lies."""
    for microbatch, count in enumerate(samples):
        backward(layers, keeper, microbatch, forward(layers, keeper, microbatch, count))
    return {
        size // (4 * WIDTH): {room.data_ptr() for room in rooms}
        for size, rooms in keeper._rooms.items()
        if rooms
    }


def test_steps_of_other_lengths_leave_no_room_behind() -> None:
    layers = model()
    keeper = HostActivations(layers, [(0, 0)], AROUND, CPU)
    for samples in (64, 48, 32, 16):
        rooms = rooms_after(layers, keeper, samples, samples)
        assert {size: len(places) for size, places in rooms.items()} == {samples: 2 * (LAYERS - 2)}


def test_steps_that_are_alike_make_no_new_room() -> None:
    """The last microbatch is smaller."""
    layers = model()
    keeper = HostActivations(layers, [(0, 0)], AROUND, CPU)
    rooms = rooms_after(layers, keeper, 64, 64, 16)
    assert {size: len(places) for size, places in rooms.items()} == dict.fromkeys((64, 16), 2 * (LAYERS - 2))
    for _ in range(2):
        assert rooms_after(layers, keeper, 64, 64, 16) == rooms


def test_stages_that_keep_theirs_do() -> None:
    layers = model()
    keeper = HostActivations(layers, [(0, 1)], AROUND, CPU)
    gradients(layers, keeper)
    assert not keeper._rooms


def test_evaluation_between_forward_and_backward_disturbs_nothing() -> None:
    plain, layers = gradients(model(), None), model()
    keeper = HostActivations(layers, [(0, 0)], AROUND, CPU)
    for microbatch in range(4):
        output = forward(layers, keeper, microbatch)
        with torch.no_grad():
            forward(layers, keeper, 3 - microbatch)
        backward(layers, keeper, microbatch, output)
    for name, value in layers.owned_parameters().items():
        assert value.grad is not None and torch.equal(value.grad, plain[name])


class Fork(nn.Module):
    """Gives two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.base(x), x + self.base.bias


class Beside(nn.Module):
    """Its second result is made last, and so goes back first: before the next layer gave back the first."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return torch.tanh(x), torch.sin(2 * y)


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


def test_what_a_layer_reads_before_the_next_one_is_over_has_come(monkeypatch) -> None:
    copies_are_late(monkeypatch, host_activations)
    found = []
    for on_host in (False, True):
        chain = ChainModel.from_module(
            lambda: nn.Sequential(Fork(), *(Beside() for _ in range(LAYERS - 2)), Join()),
            torch.zeros(1, WIDTH),
            name="pairs",
        )
        layers = chain.materialise(range(LAYERS), 3)
        keeper = HostActivations(layers, [(0, 0)], AROUND, CPU) if on_host else None
        found.append(gradients(layers, keeper))
    plain, late = found
    assert plain.keys() == late.keys()
    assert all(torch.equal(plain[name], late[name]) for name in plain)


class _Elsewhere(torch.autograd.Function):
    """Saves a tensor of another device, and needs it there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(3, device="meta"))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (there,) = ctx.saved_tensors
        assert there.device.type == "meta"
        return 2 * gradient


def test_tensors_of_another_device_stay_there() -> None:
    layers = model()
    keeper = HostActivations(layers, [(0, 0)], AROUND, CPU)
    for layer in range(1, LAYERS - 1):
        block = layers.module_of(layer)
        assert block is not None
        block.register_forward_hook(lambda _, __, output: _Elsewhere.apply(output))
    found = gradients(layers, keeper)
    assert all(bool(value.isfinite().all()) for value in found.values())


class InPlace(nn.Module):
    """Writes into what was saved: for a result that nobody needs, unless it is used."""

    is_used = False

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        unneeded = torch.sin(y)  # saves y
        y.mul_(2)
        result = torch.tanh(y) * y
        return result + unneeded if self.is_used else result


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("is_used", [False, True])
def test_writes_into_saved_tensors_are_told_where_autograd_tells_them(
    monkeypatch, is_used: bool, late: bool
) -> None:
    if late:
        copies_are_late(monkeypatch, host_activations)
    found = []
    for on_host in (False, True):
        chain = ChainModel.from_module(
            lambda: nn.Sequential(*(InPlace() for _ in range(LAYERS))), torch.zeros(1, WIDTH), name="in place"
        )
        layers = chain.materialise(range(LAYERS), 3)
        block = layers.module_of(3)
        assert isinstance(block, InPlace)
        block.is_used = is_used
        keeper = HostActivations(layers, [(0, 0)], AROUND, CPU) if on_host else None
        if is_used:
            with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
                gradients(layers, keeper)
        else:
            found.append(gradients(layers, keeper))
    if found:
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
