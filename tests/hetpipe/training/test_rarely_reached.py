"""Parameters that not every sample reaches: found by several, in train mode, else refused."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import user_tasks
from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel
from runs import chain_plan, made_up_profile_of
from trainers import losses, plain_losses, trainer

WIDTH = 16
EXAMPLE = torch.zeros(1, user_tasks.NUM_FEATURES, dtype=torch.float64)
SGD = partial(torch.optim.SGD, lr=0.05)


class Experts(nn.Module):
    """Sends each sample to one of four layers, by the signs of two of its features."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        given = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if rows.numel():
                given = given.index_copy(0, rows, expert(x[rows]))
        return x + torch.tanh(given)


class Rare(nn.Module):
    """Has a layer for samples whose first feature is large."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        large = x[:, :1].abs() > 50
        return torch.where(large, self.rare(x), x) if bool(large.any()) else x


class Training(nn.Module):
    """Has a layer that is run in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.always(x) + (self.then(x) if self.training else 0))


class Blocks(nn.Module):
    def __init__(self, make: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(user_tasks.NUM_FEATURES, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.last = nn.Linear(WIDTH, user_tasks.NUM_OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def sequential(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    ends = nn.Linear(user_tasks.NUM_FEATURES, WIDTH), nn.Linear(WIDTH, user_tasks.NUM_OUTPUTS)
    return nn.Sequential(ends[0], make(), nn.Tanh(), make(), ends[1]).double()


def several() -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in user_tasks.samples()[:32]])}


def unreached(chain: ChainModel) -> list[str]:
    return [info.name for infos in chain.layer_parameters for info in infos if info.unreached]


def test_further_samples_show_what_the_example_does_not_reach():
    model = sequential(Experts)
    assert unreached(ChainModel.from_module(model, EXAMPLE))
    chain = ChainModel.from_module(model, EXAMPLE, more=several)
    assert not unreached(chain)
    assert all(info.reached for infos in chain.layer_parameters for info in infos)
    frozen = copy.deepcopy(model)
    frozen[1].requires_grad_(False)
    infos = ChainModel.from_module(frozen, EXAMPLE, more=several).layer_parameters[1]
    assert not any(info.reached or info.unreached for info in infos)


def test_what_runs_in_training_alone_is_trained_in_the_layer_of_its_block():
    chain = ChainModel.from_module(Blocks(Training), {"x": EXAMPLE.float()})
    assert not unreached(chain)
    for number, infos in enumerate(chain.layer_parameters[1:-1]):
        assert {f"blocks.{number}.then.weight", f"blocks.{number}.then.bias"} <= {info.name for info in infos}


@pytest.mark.slow
def test_a_mixture_of_experts_trains_as_torch_trains_it(tmp_path):
    model = sequential(Experts)
    copied = copy.deepcopy(model)
    expected = plain_losses(copied, SGD(copied.parameters()), user_tasks.halving)
    chain = ChainModel.from_module(model, EXAMPLE, more=several)
    profile = made_up_profile_of(chain, "mine", dtype="float64", sequence_length=1)
    options = {"model": model, "profile": profile, "optimizer": SGD, "rate_schedule": user_tasks.halving}
    found = losses(tmp_path, chain_plan("mine", [0, 2, 5], 4), **options)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_parameter_that_a_later_sample_reaches_is_refused(tmp_path):
    samples = user_tasks.samples(64)
    data = [(x * (1000 if number == 40 else 1), y) for number, (x, y) in enumerate(samples)]
    made = trainer(tmp_path, model=sequential(Rare), data=data, shuffle=False)
    with pytest.raises(InputError, match=r"parameter '\d\.rare\.\w+' has a gradient, and the samples that"):
        made.fit(4)
