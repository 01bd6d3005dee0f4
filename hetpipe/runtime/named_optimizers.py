"""What makes the optimizers that have a name on the command line, as torch computes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hetpipe.data.task import OptimizerFactory
from hetpipe.runs.optimizers import OptimizerKind
from hetpipe.runs.settings import Settings

_CLASSES: dict[OptimizerKind, Callable[..., torch.optim.Optimizer]] = {
    OptimizerKind.ADAM: torch.optim.Adam,
    OptimizerKind.SGD: torch.optim.SGD,
    OptimizerKind.ADADELTA: torch.optim.Adadelta,
    OptimizerKind.ADAGRAD: torch.optim.Adagrad,
    OptimizerKind.RMSPROP: torch.optim.RMSprop,
}


def factory_of(settings: Settings) -> OptimizerFactory | None:
    """Return what makes the optimizer of the settings; None for hetpipe's own AdamW.

    Vectors (biases, normalisation) do not decay, as with AdamW; the decay of matrices is added to the
    gradient, after clipping, as these do.
    """
    return None if settings.optimizer is OptimizerKind.ADAMW else partial(_made, settings)


def _made(settings: Settings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [value for value in parameters if value.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [value for value in parameters if value.dim() <= 1], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return _CLASSES[settings.optimizer](filled, lr=settings.learning_rate, **_options(settings))


def _options(settings: Settings) -> dict[str, Any]:
    kind, epsilon = settings.optimizer, {"eps": settings.epsilon}
    taken: dict[OptimizerKind, dict[str, Any]] = {
        OptimizerKind.ADAM: {"betas": settings.betas, **epsilon},
        OptimizerKind.SGD: {"momentum": settings.momentum},
        OptimizerKind.ADADELTA: {"rho": settings.rho, **epsilon},
        OptimizerKind.ADAGRAD: epsilon,
        OptimizerKind.RMSPROP: {"alpha": settings.rho, "momentum": settings.momentum, **epsilon},
    }
    return taken[kind]
