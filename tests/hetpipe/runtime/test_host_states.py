"""AdamW with states on the host, stepped on the device or there: the bits of one without, resumed too."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hetpipe.runtime.host_states import HostStates
from hetpipe.runtime.host_steps import HostSteps
from hetpipe.runtime.optimizer import Optimizer

SHAPES = {"weight": (129, 65), "bias": (129,), "other": (31, 257), "norm": (3,), "kept": (17, 5)}
OFFLOADED = ("weight", "bias", "other", "norm")


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def host_states(kind: type[HostStates] = HostStates) -> HostStates:
    mine = parameters()
    return kind(mine, mine.keys(), 0.1, offloaded=OFFLOADED)


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
    if not isinstance(one, HostSteps):  # which scales the copies of gradients that it steps with
        assert torch.equal(one.square_sum(), other.square_sum())


@pytest.mark.parametrize("kind", [HostStates, HostSteps])
def test_every_bit_is_as_with_states_on_the_device(kind):
    mine, theirs = host_states(kind), whole()
    for step in range(4):
        without = "norm" if step == 1 else ""
        one_step(mine, step, without)
        one_step(theirs, step, without)
        assert_equal(mine, theirs)
    assert mine.num_steps == theirs.num_steps == 4


@pytest.mark.parametrize("kind", [HostStates, HostSteps])
@pytest.mark.parametrize("back", [True, False])
def test_states_that_were_saved_go_on_on_either_side(back, kind):
    first, expected = (host_states(kind) if back else whole()), whole()
    second = whole() if back else host_states(kind)
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


class _Copies(TorchDispatchMode):
    """Whether each copy may be late."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.late.append(len(args) > 2 and args[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [HostStates, HostSteps])
def test_without_streams_no_copy_is_late(kind):
    """Nobody would wait for it: a device like Apple's has none, and copies beside its host all the same."""
    mine = host_states(kind)
    with _Copies() as copies:
        one_step(mine, 0)
    assert copies.late and not any(copies.late)


def test_the_device_holds_three_sixteenths_of_them():
    mine = host_states()
    there = sum(tensor.nbytes for tensor in mine.state_tensors())
    kept = 2 * 4 * 17 * 5
    gone = 2 * 4 * sum(torch.Size(SHAPES[name]).numel() for name in OFFLOADED)
    assert there - kept == pytest.approx(gone * 3 / 16, abs=3 * 2 * 4 * 64)  # rooms are of whole 64 elements
    assert sum(tensor.nbytes for tensor in mine.host_tensors()) == pytest.approx(gone, rel=0.02)


def test_a_device_whose_host_steps_has_no_states_and_weights_that_others_change_are_taken():
    mine, theirs = host_states(HostSteps), whole()
    kept = 2 * 4 * 17 * 5
    assert sum(tensor.nbytes for tensor in mine.state_tensors()) == kept
    one_step(mine, 0)
    one_step(theirs, 0)
    for optimizer in (mine, theirs):
        with torch.no_grad():
            optimizer.parameters["other"].mul_(0.5)
    one_step(mine, 1)
    one_step(theirs, 1)
    assert_equal(mine, theirs)
