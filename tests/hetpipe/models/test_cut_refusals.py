"""What a model does that a plan would leave out or change is refused, be the module given or built."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel

WIDTH = 8


class Doubling(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def layers(first: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(first or nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def doubling() -> nn.Module:
    return Doubling(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))


def patched() -> nn.Module:
    made = layers()
    made.forward = lambda x: x  # type: ignore[method-assign]
    return made


def hooked() -> nn.Module:
    made = layers()
    made.register_forward_hook(lambda module, given, output: 2 * output)
    return made


def hooked_gradient() -> nn.Module:
    made = layers()
    next(made.parameters()).register_hook(lambda gradient: gradient / 2)
    return made


def hooked_sum() -> nn.Module:
    made = layers()
    next(made.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    return made


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (doubling, "Doubling is an nn.Sequential with a forward of its own"),
        (patched, "Sequential is an nn.Sequential with a forward of its own"),
        (hooked, "the Sequential has a hook of its own"),
        (hooked_gradient, r"parameter '0\.weight' has a gradient hook"),
        (hooked_sum, r"parameter '0\.weight' has a gradient hook"),
    ],
)
def test_what_ranks_would_leave_out_is_refused(build: Callable[[], nn.Module], message: str, given: bool):
    with pytest.raises(InputError, match=message):
        ChainModel.from_module(build() if given else build, torch.zeros(1, WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 1.0}, "layer '0' has max_norm=1, with which a forward changes its weights"),
        ({"sparse": True}, "layer '0' has sparse gradients"),
        ({"scale_grad_by_freq": True}, "layer '0' has scale_grad_by_freq"),
    ],
)
def test_embeddings_that_depend_on_the_plan_are_refused_unless_frozen(options, message):
    ids = torch.zeros(1, 3, dtype=torch.long)
    made = layers(nn.Embedding(5, WIDTH, **options))
    with pytest.raises(InputError, match=message):
        ChainModel.from_module(made, ids)
    made[0].requires_grad_(False)
    assert ChainModel.from_module(made, ids).first_trained == 2


def test_a_layer_may_have_a_forward_and_hooks():
    made = nn.Sequential(doubling(), nn.Linear(4, 4))
    made[0].register_forward_hook(lambda module, given, output: output + 1)
    assert ChainModel.from_module(made, torch.zeros(1, WIDTH)).num_layers == 2
