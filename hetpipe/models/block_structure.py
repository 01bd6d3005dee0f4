"""The structure of an unchanged model: its chain of blocks, and what is known of each parameter."""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.frozen_weights import NO_USE, Use, is_rounded, kept_dtype
from hetpipe.models.quantized_weights import Packing

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter of a layer.

    name: canonical, the first name under which the model lists it.
    reached: the loss on the logits depends on it and the model trains it (requires_grad); otherwise it has
    no gradient.
    unreached: the model trains it, and the output of the samples that were looked at does not depend on it.
    tied: another layer holds it as well, so that gradients have to be summed; never where it is not reached.
    shared: another layer holds it as well, be it trained or not.
    given: dtype of the weight that training begins with. uses: what this layer does with it.
    keeps: uses of all layers where it is frozen, with OTHER where a module may not cast it; none where it is
    not frozen. packing: how it is held in 4 or 8 bits, None: in a dtype.
    """

    name: str
    shape: tuple[int, ...]
    tied: bool
    reached: bool
    shared: bool = False
    given: torch.dtype = torch.float32
    uses: Use = Use.OTHER
    keeps: Use = NO_USE
    packing: Packing | None = None
    unreached: bool = False

    def kept_dtype(self, dtype: torch.dtype, lowered: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which the parameter is held between steps; dtype: of trained ones."""
        return kept_dtype(self.given, self.keeps, dtype, lowered) if self.keeps else dtype

    def kept_bytes(self, dtype: torch.dtype, lowered: torch.dtype | None) -> int:
        """Return the bytes that the parameter takes between steps; dtype: of trained ones."""
        if self.packing is not None:
            return self.packing.stored_bytes(self.shape)
        return math.prod(self.shape) * self.kept_dtype(dtype, lowered).itemsize

    def is_rounded(self, kept: torch.dtype) -> bool:
        """Return whether it is frozen and kept in a dtype that cannot hold what was given."""
        return bool(self.keeps) and is_rounded(kept, self.given)


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that travels from block to block.

    argument: position or keyword at which a block takes it.
    output: index in the tuple that a block returns; None where it returns the plain tensor.
    """

    argument: int | str
    output: int | None


@dataclass(frozen=True, slots=True)
class BlockList:
    """A list of alike blocks inside a model, called one after the other.

    path: name of the nn.ModuleList.
    order: which block each call is of; one that is called again, as ALBERT's, is a layer each time.
    beside: the arguments at which all calls take the same tensor, which what is before the list makes of
    parameters, as an encoder's output.
    num_outputs: length of the tuple that a block returns, None where it returns the plain tensor.
    """

    path: str
    order: tuple[int, ...]
    ports: tuple[Port, ...]
    beside: tuple[int | str, ...]
    num_outputs: int | None

    @property
    def places(self) -> tuple[int | str, ...]:
        """Return the arguments at which a block takes what travels to it."""
        return (*(port.argument for port in self.ports), *self.beside)


@dataclass(frozen=True, slots=True)
class BlockStructure:
    """Lists of alike blocks inside a model, one or, as of encoder and decoder, several after one another.

    Each call of a block is a layer, and so is what is before, between and after the lists.
    keeps_blocks: whether a block that is not owned keeps its modules, without weights: since the model's code
    looks into blocks that it does not call, as nn.TransformerEncoder, or what travels changes its shape.
    """

    lists: tuple[BlockList, ...]
    keeps_blocks: bool = False

    @property
    def first_layers(self) -> tuple[int, ...]:
        """Return, for each list, the layer that is its first call."""
        return tuple(around + 1 for around in self.around[:-1])

    @property
    def around(self) -> tuple[int, ...]:
        """Return the layers that are no blocks: the first, those between lists, the last."""
        return tuple(accumulate((len(blocks.order) + 1 for blocks in self.lists), initial=0))

    @property
    def calls(self) -> Mapping[int, tuple[BlockList, int]]:
        """Return for each layer that is a block its list and the index of the block in it."""
        return {
            first + call: (blocks, block)
            for blocks, first in zip(self.lists, self.first_layers, strict=True)
            for call, block in enumerate(blocks.order)
        }

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Return the names of all layers."""
        if len(self.lists) == 1:
            return ("embeddings", *(f"block{call}" for call in range(len(self.lists[0].order))), "head")
        names = ["embeddings"]
        stems = _told_apart([blocks.path for blocks in self.lists])
        for stem, blocks in zip(stems, self.lists, strict=True):
            names += [f"{stem}-embeddings"] if len(names) > 1 else []
            names += [f"{stem}-block{call}" for call in range(len(blocks.order))]
        return (*names, "head")


def _told_apart(paths: Sequence[str]) -> list[str]:
    """Return of each path the part by which it differs from the others.

    >>> _told_apart(["model.encoder.layers", "model.decoder.layers"])
    ['encoder', 'decoder']
    """
    parts = [path.split(".") for path in paths]
    depth = next(
        depth for depth in range(len(min(parts, key=len))) if len({part[depth] for part in parts}) > 1
    )
    return [part[depth] for part in parts]


_SMALLEST_SHARE = 0.05
"""Lists of less than this share of the largest one's parameters are no part of the chain."""


def lists_of_blocks(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of the lists of alike modules that a chain may be made of; the first choice first.

    Raises: InputError if the model has no such list.
    """
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and len({type(block) for block in module}) == 1
    }
    several = {name: size for name, size in sizes.items() if len(model.get_submodule(name)) > 1}  # type: ignore[arg-type]
    sizes = several or sizes  # a single block may be called several times
    if not sizes or not max(sizes.values()):
        raise InputError(
            f"{type(model).__name__} cannot be split: it has no list of alike blocks (nn.ModuleList)"
        )
    most, largest = max((size, name) for name, size in sizes.items())
    if not several:
        largest = min((name for name, size in sizes.items() if size == most), key=len)
    outer = tuple(
        name
        for name, size in sizes.items()
        if size >= _SMALLEST_SHARE * most and not any(name.startswith(f"{other}.") for other in sizes)
    )
    if len(outer) < 2:
        return [(largest,)]
    return [outer, *((name,) for name in sorted(outer, key=lambda name: -sizes[name]))]


def logits_of(output: Any) -> Tensor:
    """Return the prediction logits in a model's output: its tensor, its logits, or the first of a tuple.

    Of a model that finds answers those of begin and end beside each other: [samples, seq, 2].
    """
    start, end = (getattr(output, f"{name}_logits", None) for name in ("start", "end"))
    for candidate in (
        output,
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None),
        torch.stack((start, end), -1) if isinstance(start, Tensor) and isinstance(end, Tensor) else None,
        getattr(output, "prediction_logits", None),
        output[0] if isinstance(output, tuple) and output else None,
    ):
        if isinstance(candidate, Tensor):
            return candidate
    raise InputError(
        f"the model returns a {type(output).__name__} without logits; return a tensor or set .logits"
    )


def one_sample(example: Inputs) -> Inputs:
    """Return the inputs of one sample.

    Raises: InputError if they are of several, each of which would be compared with all of them.
    """
    for name, tensor in example.items():
        if len(tensor) != 1:
            raise InputError(
                f"the example has {len(tensor)} samples in {name!r}; give the inputs of one, as tensor[:1]"
            )
    return example


@contextmanager
def refused_on_error(reason: str) -> Iterator[None]:
    """Turn whatever a model's own code raises into an InputError that gives this reason."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        message = str(error).partition("\n")[0]
        raise InputError(f"{reason}: {type(error).__name__}: {message}") from error


def call_options(model: nn.Module) -> dict[str, bool]:
    """Return keyword arguments for every forward of this model: Hugging Face's must not build caches."""
    if not hasattr(getattr(model, "config", None), "use_cache"):
        return {}
    takes = inspect.signature(model.forward).parameters
    keywords = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    return {"use_cache": False} if keywords or "use_cache" in takes else {}


def whole_logits(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits of a whole model; an nn.Sequential takes its inputs by position."""
    if isinstance(model, nn.Sequential):
        values = tuple(inputs.values())
        return logits_of(model(values if len(values) > 1 else values[0]))
    return logits_of(model(**inputs, **call_options(model)))


def unfreeze(model: nn.Module) -> None:
    """Let every parameter that can take a gradient take one, so that autograd shows where it goes."""
    for value in model.parameters():
        value.requires_grad_(value.is_floating_point() or value.is_complex())
