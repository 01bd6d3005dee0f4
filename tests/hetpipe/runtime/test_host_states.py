"""AdamW with states on the host: the same bits as without, step by step, and in checkpoints."""

import pytest
import torch
from torch import nn

from hetpipe.runtime.host_states import HostStates
from hetpipe.runtime.optimizer import Optimizer

SHAPES = {"weight": (129, 65), "bias": (129,), "other": (31, 257), "norm": (3,), "kept": (17, 5)}
OFFLOADED = ("weight", "bias", "other", "norm")


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def host_states() -> HostStates:
    mine = parameters()
    return HostStates(mine, mine.keys(), 0.1, offloaded=OFFLOADED)


def whole() -> Optimizer:
    mine = parameters()
    return Optimizer(mine, mine.keys(), 0.1)


def one_step(optimizer: Optimizer, step: int, without: str = "") -> None:
    """Make a step; without: a parameter that has no gradient, as where the loss reaches nothing of it."""
    generator = torch.Generator().manual_seed(100 + step)
    optimizer.zero_grad()
    for name, shape in SHAPES.items():
        gradient = torch.randn(shape, generator=generator)
        if name != without:
            optimizer.parameters[name].grad = gradient
    optimizer.step(0.1 / (step + 1), 0.5 if step else 1.0, loss_scale=4.0 if step == 2 else 1.0)


def assert_equal(one: Optimizer, other: Optimizer) -> None:
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name
        for key, state in one.states(name).items():
            assert torch.equal(state, other.states(name)[key]), key
    assert torch.equal(one.square_sum(), other.square_sum())


def test_every_bit_is_as_with_states_on_the_device():
    mine, theirs = host_states(), whole()
    for step in range(4):
        without = "norm" if step == 1 else ""
        one_step(mine, step, without)
        one_step(theirs, step, without)
        assert_equal(mine, theirs)
    assert mine.num_steps == theirs.num_steps == 4


@pytest.mark.parametrize("back", [True, False])
def test_states_that_were_saved_go_on_on_either_side(back):
    first, expected = (host_states() if back else whole()), whole()
    second = whole() if back else host_states()
    for step in range(2):
        one_step(first, step)
    for step in range(4):
        one_step(expected, step)
    with torch.no_grad():
        for name, value in second.parameters.items():
            value.copy_(first.parameters[name])
    for name in SHAPES:
        second.load_states(name, first.states(name), first.num_steps)
    for step in range(2, 4):
        one_step(second, step)
    assert_equal(second, expected)


def test_the_device_holds_three_sixteenths_of_them():
    mine = host_states()
    there = sum(tensor.nbytes for tensor in mine.state_tensors())
    kept = 2 * 4 * 17 * 5
    gone = 2 * 4 * sum(torch.Size(SHAPES[name]).numel() for name in OFFLOADED)
    assert there - kept == pytest.approx(gone * 3 / 16, abs=3 * 2 * 4 * 64)  # rooms are of whole 64 elements
    assert sum(tensor.nbytes for tensor in mine.host_tensors()) == pytest.approx(gone, rel=0.02)
