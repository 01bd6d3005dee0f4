"""The optimizer that a trainer is given: AdamW with its options, or what makes one of torch."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from cost_model.errors import InputError
from hetpipe.data.task import OptimizerFactory
from hetpipe.runtime.torch_optimizer import made_of_samples, optimizer_name, takes_parts


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, ICLR 2019), fused; vectors (biases, normalisation) do not decay.

    learning_rate: its highest value; the schedule gives multiples of it.
    """

    name: ClassVar[str] = "AdamW"

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01


def whole_states(optimizer: AdamW | OptimizerFactory) -> bool:
    """Return whether an optimizer, which is checked, may need all of a parameter to step it."""
    return not isinstance(optimizer, AdamW) and not takes_parts(optimizer)


def checked_optimizer(
    optimizer: AdamW | OptimizerFactory,
) -> tuple[dict[str, Any], OptimizerFactory | None, str]:
    """Return hyper-parameters for the settings; the factory, if it is one; and the optimizer's name."""
    if isinstance(optimizer, AdamW):
        return {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}, None, AdamW.name
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__} of parameters in this process, the ranks have "
            "their own; give what makes one, as functools.partial(torch.optim.SGD, lr=0.1)"
        )
    if not callable(optimizer):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__}; give hetpipe.AdamW(...) or what makes an "
            "optimizer of a list of parameters"
        )
    try:
        made = made_of_samples(optimizer)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the optimizer factory fails: {str(error).partition(chr(10))[0]}") from None
    if isinstance(made, torch.optim.LBFGS):
        raise InputError(
            "LBFGS looks at all parameters at once, and each rank has some; give another optimizer"
        )
    return {"learning_rate": float(made.param_groups[0]["lr"])}, optimizer, optimizer_name(made)
