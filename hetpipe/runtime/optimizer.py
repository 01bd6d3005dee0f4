"""AdamW on the parameters of one rank, with the gradient norm of all ranks."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from hetpipe.runtime.accelerators import widest_float

OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Fused AdamW (Loshchilov and Hutter, ICLR 2019) over named parameters; owns their states.

    Vectors (biases, normalisation) do not decay. counted: names of the parameters whose squares this rank
    adds to the norm, so that each counts once over all ranks.
    """

    name = "AdamW"

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: Collection[str],
        weight_decay: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        self.parameters = dict(parameters)
        self.num_steps = 0
        self._counted = [self.parameters[name] for name in self.parameters if name in counted]
        matrices = [value for value in self.parameters.values() if value.dim() > 1]
        vectors = [value for value in self.parameters.values() if value.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # NOTE: torch refuses an empty list, which a stage without parameters has (nn.ReLU, nn.Flatten)
        nothing = {"params": [torch.zeros(1)]}
        filled = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(filled or [nothing], lr=0.0, betas=betas, eps=epsilon, fused=True)
        # NOTE: torch makes the states in the first step; here the first needs as much as all later ones
        for value in self.parameters.values():
            self._adamw.state[value] = {
                "step": torch.zeros((), device=value.device),
                **{key: torch.zeros_like(value) for key in OPTIMIZER_STATES},
            }

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def square_sum(self) -> Tensor:
        """Return the sum of squares of the gradients that count here: scalar, on the device.

        In float64, or what the device has nearest.
        """
        gradients = [value.grad for value in self._counted if value.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack(torch._foreach_norm(gradients))
        return norms.to(widest_float(norms.device)).square().sum()

    @torch.no_grad()
    def step(self, learning_rate: float, scale: float, loss_scale: float = 1.0) -> None:
        """Make one step with all gradients multiplied by scale; they are those of losses times loss_scale."""
        self._step_resident(learning_rate, self._grad_scale(scale / loss_scale))
        self.num_steps += 1

    def _step_resident(self, learning_rate: float, grad_scale: Tensor | None) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.grad_scale = grad_scale  # type: ignore[attr-defined]  # as GradScaler does
        self._adamw.step()

    def _grad_scale(self, factor: float) -> Tensor | None:
        """Have all gradients multiplied by a factor: where it can, by AdamW in its own pass over them.

        Returns what AdamW is to divide by for that, None where nothing is left to do.

        NOTE: it divides by `grad_scale`, a float32 that torch's GradScaler sets (torch/optim/adam.py), and
        writes the gradients back.
        """
        values = [value for value in self.parameters.values() if value.grad is not None]
        scale = None
        if factor != 1.0 and values:
            if all(value.dtype is torch.float32 and value.device.type != "mps" for value in values):
                scale = torch.full((), 1 / factor, dtype=torch.float32, device=values[0].device)
            else:
                self._multiply_gradients(factor)
        return scale

    def _multiply_gradients(self, factor: float) -> None:
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def state_tensors(self) -> list[Tensor]:
        """Return the states of all parameters."""
        return [state[key] for state in self._adamw.state.values() for key in OPTIMIZER_STATES]

    def host_tensors(self) -> list[Tensor]:
        """Return the tensors of states that are in the host's memory, where the device has its own."""
        return []

    def states(self, name: str) -> dict[str, Tensor]:
        """Return the states of a parameter as "name.state"; none if it is not trained."""
        if name not in self.parameters:
            return {}
        state = self._adamw.state[self.parameters[name]]
        return {f"{name}.{key}": state[key] for key in OPTIMIZER_STATES}

    def load_states(self, name: str, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Take back what `states` gave after num_steps steps."""
        self.num_steps = num_steps
        if name in self.parameters:
            state = self._adamw.state[self.parameters[name]]
            state["step"].fill_(float(num_steps))
            for key in OPTIMIZER_STATES:
                state[key].copy_(tensors[f"{name}.{key}"])
