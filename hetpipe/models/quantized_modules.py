"""Models that bitsandbytes has quantized already: their matrices, and linear layers in their place."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from cost_model.errors import InputError
from hetpipe.models.quantized_weights import Packing, QuantizedMatrix, matrix_of
from hetpipe.runs.quantization import EIGHT_BIT, Quantization


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the modules of bitsandbytes that hold a quantized matrix, by name."""
    library = sys.modules.get("bitsandbytes")
    if library is not None:  # else there are none
        kinds = (library.nn.Linear4bit, library.nn.Linear8bitLt)
        yield from ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))


def matrices_in(model: nn.Module) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices of a model by the names of their parameters; they are not copied.

    Raises: InputError if one is not quantized yet, or in a way that is not taken here.
    """
    found = {}
    for name, module in quantized_modules(model):
        is_4_bit = hasattr(module, "quant_state")
        matrix = _of_4_bits(module, name) if is_4_bit else _of_8_bits(module, name)
        found[f"{name}.weight" if name else "weight"] = matrix
    return found


def _of_4_bits(module: Any, name: str) -> QuantizedMatrix:
    module.state_dict()  # undoes the order that bitsandbytes gives values for inference on some CPUs
    state = getattr(module.weight, "quant_state", None) or module.quant_state
    if state is None:
        raise _not_yet(name)
    return matrix_of(state, module.weight.data, repr(name))


def _of_8_bits(module: Any, name: str) -> QuantizedMatrix:
    if module.state.has_fp16_weights:
        raise InputError(f"{name!r} has has_fp16_weights, which keeps it in 16 bits; quantize it without")
    scales = module.state.SCB if module.state.SCB is not None else module.weight.SCB
    if scales is None or module.weight.dtype != torch.int8:
        raise _not_yet(name)
    rows, columns = module.weight.shape
    packing = Packing(Quantization(EIGHT_BIT))
    return QuantizedMatrix(packing, module.weight.detach(), {"SCB": scales}, (int(rows), int(columns)))


def _not_yet(name: str) -> InputError:
    return InputError(f"{name!r} is not quantized yet; move the model to a device before, as .to('cpu')")


def linear_layers(
    model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]
) -> tuple[dict[int, nn.Module], set[int]]:
    """Return a linear layer for each quantized module, by its id, and the ids of their matrices.

    make: gives the parameter that stands for a bias.
    """
    layers: dict[int, nn.Module] = {}
    weights: set[int] = set()
    for _, module in quantized_modules(model):
        with torch.device("meta"):
            layer = nn.Linear(module.in_features, module.out_features, bias=False)
        layer.weight.requires_grad_(False)
        layer.register_parameter("bias", None if module.bias is None else make(module.bias))
        layers[id(module)] = layer
        weights.add(id(module.weight))
    return layers, weights
