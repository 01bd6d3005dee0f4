"""The optimizers that have a name on the command line: what each keeps of a parameter, and what it takes.

The states are what memory, checkpoints and transfers are planned by; the runtime makes the optimizers.
"""

import math
from enum import StrEnum

from cost_model.errors import InputError


class OptimizerKind(StrEnum):
    """An optimizer by name."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    ADADELTA = "adadelta"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"

    @property
    def epsilon(self) -> float:
        """Return what is added to divisors unless something else is asked for, as torch does."""
        return {OptimizerKind.ADADELTA: 1e-6, OptimizerKind.ADAGRAD: 1e-10}.get(self, 1e-8)

    @property
    def resident_states(self) -> bool:
        """Return whether its states are on the device alone: a host keeps and steps those of AdamW."""
        return self is not OptimizerKind.ADAMW


OPTIONS = {
    "betas": (OptimizerKind.ADAMW, OptimizerKind.ADAM),
    "momentum": (OptimizerKind.SGD, OptimizerKind.RMSPROP),
    "rho": (OptimizerKind.ADADELTA, OptimizerKind.RMSPROP),
    "epsilon": tuple(kind for kind in OptimizerKind if kind is not OptimizerKind.SGD),
}
"""The options that some optimizers take and others do not."""

_STATES = {OptimizerKind.SGD: 0, OptimizerKind.ADAGRAD: 1, OptimizerKind.RMSPROP: 1}


def num_states(kind: OptimizerKind, momentum: float) -> int:
    """Return how many numbers an optimizer keeps for each one of a parameter, in the same bytes.

    >>> num_states(OptimizerKind.ADAMW, 0.0), num_states(OptimizerKind.SGD, 0.9)
    (2, 1)
    """
    return _STATES.get(kind, 2) + (momentum > 0 and kind in OPTIONS["momentum"])


def check_taken(kind: OptimizerKind, option: str) -> None:
    """Check that an optimizer takes an option.

    Raises: InputError naming those that do.
    """
    if kind not in OPTIONS[option]:
        raise InputError(
            f"--{option} is of {' and '.join(OPTIONS[option])}, and --optimizer is {kind}; leave it out"
        )


def check_options(kind: OptimizerKind, *, learning_rate: float, momentum: float, rho: float) -> None:
    """Check the ranges of what optimizers take.

    Raises: InputError for what is out of its range.
    """
    for name, value in (("momentum", momentum), ("rho", rho)):
        if not (math.isfinite(value) and 0 <= value < 1):
            raise InputError(f"{name} is {value}; give a number in [0, 1)")
    if momentum:
        check_taken(kind, "momentum")
    if kind is not OptimizerKind.ADAMW and not learning_rate > 0:
        raise InputError(f"learning_rate is {learning_rate}; {kind} needs one above zero")
