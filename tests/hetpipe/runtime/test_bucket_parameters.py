"""Parts of parameters: their keys and shapes, and the optimizers that step them as they step the whole."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from cost_model.errors import InputError
from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.program.instructions import Program
from hetpipe.runs.optimizers import OptimizerKind
from hetpipe.runs.settings import Settings
from hetpipe.runtime.bucket_parameters import Part, owned_parts, part_of, parts_in
from hetpipe.runtime.held_weights import Held, Piece
from hetpipe.runtime.named_optimizers import factory_of
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.torch_optimizer import BY_NUMBER, optimizer_of
from hetpipe.training.given_optimizer import AdamW, whole_states
from user_tasks import adagrad_by_shape

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def test_a_part_knows_its_name_its_place_and_how_many_dimensions_the_whole_has() -> None:
    part = Part("wte.weight", 2, 5)
    assert part_of(part.key) == part
    assert part_of("wte.weight") is None
    assert parts_in(["a", "b[0:3]"]) == {"b[0:3]": Part("b", 0, 3)}
    whole = torch.arange(6.0).view(2, 3)
    assert part.of(whole).tolist() == [[2.0], [3.0], [4.0]]
    assert part.of(whole.view(-1)).tolist() == [2.0, 3.0, 4.0]
    assert Part("scale", 0, 1).of(torch.tensor(7.0)).shape == ()
    part.of(whole).zero_()
    assert whole.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 5.0]]


def stepped(make: Factory, cuts: list[tuple[int, int]]) -> torch.Tensor:
    """A matrix and a vector after three steps; the matrix in parts."""
    draws = torch.Generator().manual_seed(0)
    matrix = nn.Parameter(torch.randn(4, 3, generator=draws, dtype=torch.float64))
    vector = nn.Parameter(torch.randn(5, generator=draws, dtype=torch.float64))
    parts = [Part("matrix", *cut) for cut in cuts]
    own = [nn.Parameter(part.of(matrix)) for part in parts] if parts else [matrix]
    optimizer = make([*own, vector])
    for _ in range(3):
        gradient = torch.randn(4, 3, generator=draws, dtype=torch.float64)
        for value, part in zip(own, parts or [None], strict=True):
            value.grad = gradient.clone() if part is None else part.of(gradient).clone()
        vector.grad = torch.randn(5, generator=draws, dtype=torch.float64)
        optimizer.step()
    return torch.cat([matrix.detach().view(-1), vector.detach()])


@pytest.mark.parametrize("kind", sorted(BY_NUMBER, key=lambda kind: kind.__name__))
def test_parts_get_the_steps_of_the_whole(kind: type[torch.optim.Optimizer]) -> None:
    make = partial(kind, lr=0.1)
    assert torch.equal(stepped(make, [(0, 5), (5, 11), (11, 12)]), stepped(make, []))


@pytest.mark.parametrize("kind", [kind for kind in OptimizerKind if kind is not OptimizerKind.ADAMW])
def test_so_do_those_with_a_name_of_which_matrices_alone_decay(kind: OptimizerKind) -> None:
    make = factory_of(Settings(steps=1, optimizer=kind, weight_decay=0.1, learning_rate=0.1))
    assert make is not None
    assert torch.equal(stepped(make, [(0, 5), (5, 12)]), stepped(make, []))


def test_a_round_without_a_backward_takes_memory_for_its_range_alone() -> None:
    value = nn.Parameter(torch.ones(4, 3))
    pieces = {0: Piece(0, 5, is_owner=False), 1: Piece(5, 5, is_owner=False), 2: Piece(5, 12, is_owner=True)}
    given = [Held([value], [value.shape], pieces).to_sum(bucket) for bucket in (0, 1)]
    assert [each.tolist() for each in given] == [[0.0] * 5, [0.0]]
    assert [each.untyped_storage().nbytes() for each in given] == [20, 4]


def test_parts_are_cut_out_of_parameters_of_any_layout() -> None:
    bucket = SimpleNamespace(is_part=True, state_owner=0, layers=[0], part=(0.5, 1.0), tied=False)
    info = SimpleNamespace(name="turned", shape=(2, 3), reached=True, tied=False)
    program = cast(Program, SimpleNamespace(buckets=[bucket]))
    chain = cast(ChainModel, SimpleNamespace(parameters=lambda layer: [info]))
    turned = nn.Parameter(torch.arange(6.0).view(3, 2).t())
    (own,) = owned_parts(program, 0, chain, {"turned": turned}).values()
    assert own.tolist() == [[1.0], [3.0], [5.0]] == [[each] for each in turned[1].tolist()]
    own.detach().zero_()
    assert turned.tolist() == [[0.0, 2.0, 4.0], [0.0, 0.0, 0.0]]


def task_of(make: Factory | None) -> TrainingTask:
    chain = ChainModel.from_module(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(1, 8), name="two"
    )
    return cast(TrainingTask, SimpleNamespace(make_optimizer=make, chain=chain))


def part_of_a_layer() -> dict[str, nn.Parameter]:
    return {"0.weight[0:8]": nn.Parameter(torch.ones(8, 1)), "0.bias": nn.Parameter(torch.ones(8))}


def hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1)
    made.register_step_pre_hook(lambda *given: None)
    return made


def by_size(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    large = [value for value in parameters if value.numel() > 32]
    small = [value for value in parameters if value.numel() <= 32]
    groups: list[dict[str, Any]] = [{"params": large, "lr": 0.1}, {"params": small, "lr": 0.2}]
    return torch.optim.SGD([group for group in groups if group["params"]])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(torch.optim.Adafactor, lr=0.1), "Adafactor is not known to step each number by itself"),
        (hooked, "SGD is not known to step each number by itself"),
        (by_size, "the optimizer factory groups parameters by their shapes"),
    ],
)
def test_an_optimizer_that_looks_at_whole_parameters_is_refused(make: Factory, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        optimizer_of(task_of(make), part_of_a_layer(), (), Settings(steps=1))
    assert "give a plan without owner_ranges" in str(caught.value)


def test_one_that_groups_by_dimensions_and_adamw_are_taken() -> None:
    settings = Settings(steps=1, optimizer=OptimizerKind.SGD, learning_rate=0.1)
    assert optimizer_of(task_of(None), part_of_a_layer(), (), settings).name == "torch.optim.sgd.SGD"
    assert isinstance(optimizer_of(task_of(None), part_of_a_layer(), (), Settings(steps=1)), Optimizer)


def test_a_trainer_plans_with_whole_layers_for_an_optimizer_that_needs_whole_parameters() -> None:
    assert whole_states(partial(torch.optim.Adafactor, lr=0.1)) and whole_states(by_size)
    assert not whole_states(partial(torch.optim.SGD, lr=0.1)) and not whole_states(AdamW())
    assert not whole_states(adagrad_by_shape)  # by dimensions alone
