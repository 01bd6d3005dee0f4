"""What a strategy is, and why one may have no plan."""

import math
from collections.abc import Callable, Iterable
from copy import copy

from cost_model.errors import InfeasibleError, InputError
from partition.estimates.plan_memory import plan_memories
from partition.plan import Plan
from partition.problem import Evaluate, Problem

Strategy = Callable[[Problem, Evaluate | None], Plan]
"""From a problem to a plan; the simulator, where it is given, chooses between the best two by closed forms.

Raises: InfeasibleError where memory or samples are too few; TooManyDevicesError.
"""


class TooManyDevicesError(InputError):
    """A strategy has no plan for so many devices: it wants a layer for each, or would take too long."""


def shortfall(problem: Problem, plan: Plan, remark: str = "") -> InfeasibleError | None:
    """Return the error of the device that lacks most bytes for a plan; None where all fit.

    remark: what was done already to make it fit.
    """
    missing_bytes, name = 0.0, ""
    for device, need in plan_memories(plan, problem.profile, problem.cluster).items():
        missing = need.total_bytes - problem.cluster.device(device).usable_bytes
        if missing > missing_bytes:
            missing_bytes, name = missing, device
    if not name:
        return None
    usable_bytes, layers = problem.cluster.device(name).usable_bytes, plan.layers_of(name)
    return InfeasibleError(
        f"{plan.strategy}: layers [{layers[0]}, {layers[-1] + 1}) need "
        f"{math.ceil(usable_bytes + missing_bytes):,} bytes on {name!r}, which has "
        f"{math.floor(usable_bytes):,} usable; {math.ceil(missing_bytes):,} are missing{remark}; let `auto` "
        "choose the layers",
        device=name,
        missing_bytes=missing_bytes,
    )


def least_of(strategy: str, errors: Iterable[InfeasibleError]) -> InfeasibleError:
    """Return the error of what lacks least, apart: to raise one of them would tie their frame to itself."""
    few = f"{strategy}: memory takes too few outputs of the layers that are not trained; let `auto` choose"
    return copy(min(errors, key=missing_bytes, default=InfeasibleError(few)))


def missing_bytes(error: InfeasibleError) -> float:
    """Return what is missing, to find the error of what lacks least or most."""
    return error.missing_bytes
