"""The placing of a model's parameters: owned ones on their device, all others as views of one zero."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from hetpipe.models.block_structure import ParameterInfo
from hetpipe.models.quantized_weights import QuantizedParameter, matrix_held


def replace_parameters(
    model: nn.Module, names: Mapping[nn.Parameter, str], make: Callable[[str, nn.Parameter], nn.Parameter]
) -> dict[nn.Parameter, str]:
    """Put new parameters in the old ones' places, one for each tied one; return the new ones' names."""
    made: dict[str, nn.Parameter] = {}
    for module in model.modules():
        for key, old in module._parameters.items():
            if old is not None:
                name = names[old]
                if name not in made:
                    made[name] = make(name, old)
                module._parameters[key] = made[name]
    return {parameter: name for name, parameter in made.items()}


def place(
    model: nn.Module,
    names: Mapping[nn.Parameter, str],
    infos: Mapping[str, ParameterInfo],
    dtype: torch.dtype,
    device: torch.device,
    kept: Mapping[str, torch.dtype],
    on_host: Collection[str] = (),
) -> dict[nn.Parameter, str]:
    """Cast and move the owned parameters; make all others views of one zero, which cost nothing.

    kept: dtypes of the owned ones. on_host: names of those that stay in the host's memory.
    """

    def target(tensor: Tensor) -> torch.dtype:
        return dtype if tensor.is_floating_point() else tensor.dtype

    def make(name: str, old: nn.Parameter) -> nn.Parameter:
        matrix = matrix_held(old)
        home = torch.device("cpu") if name in on_host else device
        if matrix is not None:
            return QuantizedParameter(matrix.to(home))
        if name in infos:
            moved = old.detach().to(device=home, dtype=kept[name] if old.is_floating_point() else old.dtype)
            return nn.Parameter(moved, requires_grad=old.requires_grad and infos[name].reached)
        zero = torch.zeros((), dtype=target(old), device=device)
        return nn.Parameter(zero.expand(old.shape), requires_grad=False)

    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                # Derived tables, such as rotary frequencies, keep their precision, as Hugging Face does.
                derived = key in module._non_persistent_buffers_set and hasattr(model, "_init_weights")
                module._buffers[key] = buffer.to(
                    device=device, dtype=buffer.dtype if derived else target(buffer)
                )
    return replace_parameters(model, names, make)
