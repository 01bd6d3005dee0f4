"""Parameters that no sample was seen to reach when a model was looked at, and that are not frozen."""

from collections.abc import Mapping

from torch import nn

from cost_model.errors import InputError


class Unreached:
    """Owns what is watched of these on a rank: they have no states, and nobody sums their gradients."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch parameters, by name; each takes a gradient from now on."""
        self._parameters = {name: value for name, value in parameters.items() if value.is_floating_point()}
        for value in self._parameters.values():
            value.requires_grad_(True)

    def forget(self) -> None:
        """Forget gradients of no sample."""
        for value in self._parameters.values():
            value.grad = None

    def check(self) -> None:
        """Forget the gradients of a step, which are none, or zeros of what others do not use.

        Raises: InputError if a sample has reached one: it would not be trained.
        """
        for name, value in self._parameters.items():
            if value.grad is not None and bool(value.grad.any()):
                raise InputError(
                    f"parameter {name!r} has a gradient, and the samples that the model was looked at with "
                    "did not reach it, so that it would not be trained; begin the data with samples that "
                    "reach all, give such a one as example, or freeze it"
                )
        self.forget()
