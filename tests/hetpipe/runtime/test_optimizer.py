import pytest
import torch
from torch import nn

from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.torch_optimizer import TorchOptimizer

SHAPES = {"weight": (5, 3), "bias": (5,), "other": (2, 5), "norm": (3,)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (step - 2)
        for name, shape in SHAPES.items()
    }


def one_step(optimizer: Optimizer, step: int, clip_norm: float = 1.0) -> None:
    optimizer.zero_grad()
    for name, gradient in gradients(step).items():
        optimizer.parameters[name].grad = gradient
    norm = float(optimizer.square_sum().sqrt())
    optimizer.step(0.1 / (step + 1), min(1.0, clip_norm / (norm + 1e-6)))


def test_steps_equal_those_of_torch_with_clipping():
    mine, theirs = parameters(), parameters()
    optimizer = Optimizer(mine, mine.keys(), weight_decay=0.1)
    adamw = torch.optim.AdamW(
        [
            {"params": [theirs["weight"], theirs["other"]], "weight_decay": 0.1},
            {"params": [theirs["bias"], theirs["norm"]], "weight_decay": 0.0},
        ]
    )
    for step in range(5):  # the first gradients are too small to be clipped, the last are not
        one_step(optimizer, step)
        for name, gradient in gradients(step).items():
            theirs[name].grad = gradient
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = 0.1 / (step + 1)
        adamw.step()
        for name in SHAPES:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-13, atol=1e-13)
    assert optimizer.num_steps == 5


def test_states_that_were_saved_go_on_as_if_never_stopped():
    mine = parameters()
    optimizer = Optimizer(mine, mine.keys(), 0.1)
    for step in range(2):
        one_step(optimizer, step)
    saved = {name: optimizer.states(name) for name in SHAPES}
    saved = {name: {key: value.clone() for key, value in states.items()} for name, states in saved.items()}
    assert sorted(saved["bias"]) == ["bias.exp_avg", "bias.exp_avg_sq"]
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in mine.items()}
    resumed = Optimizer(copies, copies.keys(), 0.1)
    for name in SHAPES:
        resumed.load_states(name, saved[name], num_steps=2)
    assert resumed.num_steps == 2
    for step in range(2, 4):
        one_step(optimizer, step)
        one_step(resumed, step)
    for name in SHAPES:
        assert torch.equal(copies[name], mine[name])


@pytest.mark.parametrize(
    ("kind", "before", "later", "added"),
    [
        (torch.optim.RMSprop, {}, {"momentum": 0.5, "centered": True}, {"momentum_buffer", "grad_avg"}),
        (torch.optim.Adam, {"betas": (0.8, 0.9)}, {"amsgrad": True, "fused": True}, {"max_exp_avg_sq"}),
        (torch.optim.SGD, {"momentum": 0.5}, {"momentum": 0.9}, set()),
    ],
)
def test_states_that_new_options_ask_for_begin_with_zeros(kind, before, later, added):
    mine, theirs = parameters(), parameters()
    first = TorchOptimizer(kind(mine.values(), lr=0.1, **before), mine, mine.keys())
    one_step(first, 0)
    saved = {key: value.clone() for name in mine for key, value in first.states(name).items()}
    for name, value in theirs.items():
        value.data.copy_(mine[name].data)
    again = TorchOptimizer(kind(theirs.values(), lr=0.1, **later), theirs, theirs.keys())
    for name in theirs:
        again.load_states(name, saved, 1)
        found = again.states(name)
        assert {key.removeprefix(f"{name}.") for key in found.keys() - saved.keys()} == added
        assert not any(found[f"{name}.{key}"].any() for key in added)
    one_step(again, 1)
    assert all(value.isfinite().all() for value in theirs.values())


def test_only_counted_parameters_add_to_the_norm():
    mine = parameters()
    optimizer = Optimizer(mine, {"bias", "norm"}, 0.0)
    for value in mine.values():
        value.grad = torch.ones_like(value)
    assert float(optimizer.square_sum()) == 5 + 3


def test_a_gradient_that_is_not_finite_shows_in_the_sum_of_squares():
    for bad in (float("inf"), float("nan")):
        mine = parameters()
        mine["other"].grad = torch.full(SHAPES["other"], bad, dtype=torch.float64)
        assert not Optimizer(mine, mine.keys(), 0.0).square_sum().isfinite()


def test_a_rank_without_parameters_takes_steps_too():
    optimizer = Optimizer({}, (), 0.1)
    optimizer.zero_grad()
    assert float(optimizer.square_sum()) == 0.0
    optimizer.step(0.1, 0.5)
    assert optimizer.num_steps == 1
    assert optimizer.state_tensors() == []
    assert optimizer.states("elsewhere") == {}


@pytest.mark.parametrize("capturable", [True, False])
def test_the_number_of_steps_lives_where_the_optimizer_looks_for_it(capturable):
    value = nn.Parameter(torch.zeros(3, device="meta"))
    adamw = torch.optim.AdamW([value], lr=1e-3, capturable=capturable)
    optimizer = TorchOptimizer(adamw, {"w": value}, {"w"}, rate=1e-3)
    optimizer.load_states("w", {"w.step": torch.tensor(4.0), "w.exp_avg": torch.zeros(3)}, 4)
    state = adamw.state[value]
    assert state["exp_avg"].is_meta
    assert state["step"].is_meta is capturable  # as torch's own load_state_dict does
