"""Facts about an nn.Sequential, each child of which is a layer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hetpipe.models.block_structure import Inputs, unfreeze
from hetpipe.models.frozen_weights import Use
from hetpipe.models.initialization import private_random_stream
from hetpipe.models.observation import UseRecorder
from hetpipe.models.partial_model import SequentialLayers


def holders_of(model: nn.Sequential) -> dict[str, tuple[int, ...]]:
    """Return the children that hold each parameter, by its name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    holders: dict[str, list[int]] = {name: [] for name in names.values()}
    for layer, child in enumerate(model):
        for parameter in child.parameters():
            holders[names[parameter]].append(layer)
    return {name: tuple(layers) for name, layers in holders.items()}


def run_through(
    build: Callable[[], nn.Module], inputs: Inputs, recorders: list[UseRecorder] | None = None
) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """Run an nn.Sequential, on the meta device if it can; return it with the output of each child.

    recorders: gets the record of each try, the last one's last.
    """
    for device in ("meta", "cpu"):
        with private_random_stream(0), torch.device(device):
            model = build()
            assert isinstance(model, nn.Sequential)
            unfreeze(model)
            layers = SequentialLayers(model, len(model), {})
            outputs: list[tuple[Tensor, ...]] = []
            layers.on_boundary = lambda _, tensors, outputs=outputs: outputs.append(tensors)
            try:
                moved = {key: tensor.to(device) for key, tensor in inputs.items()}
                recorder = UseRecorder(model)
                if recorders is not None:
                    recorders.append(recorder)
                with recorder:
                    outputs.append(layers.compute(0, layers.num_layers, moved, ()))
            except (NotImplementedError, RuntimeError):
                if device == "cpu":
                    raise
                continue
            return model, outputs
    raise AssertionError("unreachable")


def let_inputs_be(layer: nn.Module) -> None:
    """Keep a layer from working in place on its input, which autograd does not allow at a cut.

    The result is the same; only what the layer itself, or its first part, says is `inplace` is changed.
    """
    first: nn.Module | None = layer
    while first is not None:
        if getattr(first, "inplace", None) is True:
            first.inplace = False  # type: ignore[assignment]  # a module's attributes are tensors or modules
        first = next(first.children(), None)


def reached_and_used(build: Callable[[], nn.Module], inputs: Inputs) -> tuple[set[str], dict[str, Use]]:
    """Return the names of the parameters that the first output reaches, frozen ones too, and all uses."""
    recorders: list[UseRecorder] = []
    model, outputs = run_through(build, inputs, recorders)
    outputs[-1][0].sum().backward()  # type: ignore[no-untyped-call]
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    seen = recorders[-1]
    return reached, {seen.names[parameter]: use for parameter, use in seen.used.get(0, {}).items()}
