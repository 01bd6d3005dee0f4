"""The weights that the owned layers of a model begin with: of a folder, drawn by its own rule, or given."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from cost_model.errors import InputError
from hetpipe.models.adapter_folder import AdapterFolder
from hetpipe.models.block_structure import ParameterInfo
from hetpipe.models.frozen_weights import Use
from hetpipe.models.initialization import initialise_by_module, private_random_stream
from hetpipe.models.placement import replace_parameters
from hetpipe.models.pretrained_weights import FolderWeights
from hetpipe.models.quantized_weights import Packing, QuantizedParameter, from_parts, quantized


def begin_weights(
    model: nn.Module,
    names: Mapping[nn.Parameter, str],
    infos: Mapping[str, ParameterInfo],
    kept: Mapping[str, torch.dtype],
    seed: int,
    *,
    drawn: Collection[str],
    build: Callable[[], nn.Module],
    weights: FolderWeights | None,
    adapter: AdapterFolder | None,
) -> dict[nn.Parameter, str]:
    """Give the owned parameters their values on the CPU; return the names of all, new ones among them.

    Matrices that are held in 4 or 8 bits are read and quantized one after the other.

    names: of the model's parameters, without storage. infos: of the owned ones. kept: dtypes of those that
    are read. drawn: of those that the rule draws, the owned ones and others in the same streams of random
    numbers. build: makes the whole model, asked where its rule leaves parameters as its constructor made
    them. weights: of a folder, adapter: of a PEFT folder; None for none.
    """
    packings = {name: info.packing for name, info in infos.items() if info.packing is not None}
    read = set() if weights is None else weights.places.keys() & packings.keys()

    def allocated(name: str, old: nn.Parameter) -> nn.Parameter:
        here = name in drawn and name not in read
        return nn.Parameter(torch.full(old.shape, torch.nan), old.requires_grad) if here else old

    names = replace_parameters(model, names, allocated)
    stored = {} if weights is None else weights.load(infos.keys() - packings.keys(), kept)
    stored |= {} if adapter is None else adapter.load(infos)
    begun = set(drawn) - stored.keys() - read
    initialise_by_module(model, names, begun, seed)
    _as_constructed({name: value for value, name in names.items() if name in begun}, build, seed)
    for parameter, name in names.items():
        if name in stored:
            parameter.data = stored[name]

    def packed(name: str, old: nn.Parameter) -> nn.Parameter:
        if name not in packings:
            return old
        if weights is not None and name in read:
            return QuantizedParameter(weights.load_quantized(name, packings[name]))
        return QuantizedParameter(quantized(old, packings[name]))

    return replace_parameters(model, names, packed)


def _as_constructed(begun: Mapping[str, nn.Parameter], build: Callable[[], nn.Module], seed: int) -> None:
    """Give those that the model's rule left alone, which are not numbers yet, the values of its constructor.

    Raises: InputError if that gives them none.
    """
    if any(isinstance(value, FakeTensor) for value in begun.values()):
        return  # without memory, for an estimate: there are no values
    left = {name: value for name, value in begun.items() if value.isnan().any()}
    if not left:
        return
    with private_random_stream(seed):
        made = dict(build().named_parameters())
    for name, value in left.items():
        with torch.no_grad():
            value.copy_(made[name])
        if value.isnan().any():
            raise InputError(
                f"{name!r} begins as no number: neither the model's rule nor its constructor sets it; set it "
                "in one of them"
            )


def take_weights(
    model: nn.Module,
    names: Mapping[nn.Parameter, str],
    infos: Mapping[str, ParameterInfo],
    weights: Path | Mapping[str, Tensor],
) -> dict[nn.Parameter, str]:
    """Fill the owned parameters with weights, by name in memory or in a safetensors file, as `parts_of` says.

    Returns the names of all parameters, new ones among them.
    """
    plain = {name for name, info in infos.items() if info.packing is None}
    packings = {name: info.packing for name, info in infos.items() if info.packing is not None}
    held: dict[str, Tensor] = {}
    if isinstance(weights, Path):
        with safe_open(weights, framework="pt") as file:
            keys = file.keys()
            found: Mapping[str, Tensor] = {name: file.get_tensor(name) for name in plain}
            for name, packing in packings.items():
                shape = infos[name].shape
                held[name] = QuantizedParameter(from_parts(name, keys, file.get_tensor, packing, shape))
    else:
        found, held = weights, {name: weights[name] for name in packings}
    with torch.no_grad():
        for parameter, name in names.items():
            if name in plain:
                parameter.copy_(found[name])

    def quantized_or_old(name: str, old: nn.Parameter) -> nn.Parameter:
        new = held.get(name, old)
        assert isinstance(new, nn.Parameter)
        return new

    return replace_parameters(model, names, quantized_or_old)


def held_beside(
    layers: Sequence[Sequence[ParameterInfo]], packed: Mapping[str, Packing]
) -> tuple[tuple[ParameterInfo, ...], ...]:
    """Return the parameters of layers, those that are packed and those beside them as they are held then.

    Raises: InputError if a matrix that is to be quantized is trained, shared, or not only multiplied.
    """
    return tuple(tuple(_held(info, packed) for info in infos) for infos in layers)


def _held(info: ParameterInfo, packed: Mapping[str, Packing]) -> ParameterInfo:
    """Return a parameter as it is held beside quantized ones.

    A bias is given as float32 there: its layer adds it as it is, in the dtype in which it computes.
    """
    if info.name not in packed:
        weight = f"{info.name.removesuffix('.bias')}.weight"
        return replace(info, given=torch.float32) if weight in packed else info
    if info.reached or info.shared or info.keeps != Use.MULTIPLIED:
        raise InputError(
            f"{info.name!r} cannot be held in {packed[info.name].quantization.bits} bits: it is trained, "
            "shared, or used otherwise than in products; name it in llm_int8_skip_modules"
        )
    return replace(info, packing=packed[info.name])
