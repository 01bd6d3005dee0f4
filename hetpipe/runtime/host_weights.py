"""Frozen weights in the host's memory: those of a layer come to the device before it computes."""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from cost_model.host_memory import WEIGHT_ROOMS, is_around
from hetpipe.models.chain import ChainModel
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.quantized_weights import QuantizedParameter, matrix_held
from hetpipe.runtime.accelerators import current_stream, has_streams, new_stream, on_stream
from hetpipe.runtime.host_staging import room_on_host
from partition.plan import FROZEN_WEIGHTS, Plan

ALIGNED = 16
"""Bytes at multiples of which weights begin in a room, so that any dtype may."""
TABLE = "nested_quant_map"
"""Of a matrix whose scales are in 8 bits: what these stand for. Small and the same of all, it stays."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of a parameter: its place in bytes, and how it lies there; key: "" or of a matrix's scales."""

    parameter: nn.Parameter
    key: str
    first: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    strides: tuple[int, ...]

    def within(self, room: Tensor) -> Tensor:
        """Return the tensor that lies in memory of bytes."""
        flat = room[self.first : self.first + self.num_bytes].view(self.dtype)
        return flat.as_strided(self.size, self.strides, flat.storage_offset())


_View = tuple[int, torch.dtype, torch.Size, tuple[int, ...], int]
"""A view of a layer's weights: the layer; dtype, size, strides and offset."""


class HostWeights:
    """The frozen weights of some layers of a rank; owns their memory on the host, and rooms on the device.

    Between computations parameters are what the host has, so that whoever reads or fills them needs to know
    nothing of it. Where the device has streams, the next layer's come while one computes.
    """

    def __init__(self, model: LayerModel, names: Mapping[int, tuple[str, ...]], place: torch.device) -> None:
        """Move the weights of these layers (names by layer) into memory of their own, and serve the model."""
        self._place, self._pieces, self._on_host = place, {}, {}
        for layer, mine in names.items():
            parameters = [model.parameters_of(layer)[name] for name in mine]
            for parameter in parameters:
                _keep_table(parameter, place)
            self._pieces[layer], num_bytes = _laid_out(parameters)
            like = torch.empty(0, dtype=torch.uint8, device=place)
            self._on_host[layer] = room_on_host(like.new_empty(num_bytes))
            for piece in self._pieces[layer]:
                piece.within(self._on_host[layer]).copy_(_tensor_of(piece))
            self._put(layer, self._on_host[layer])
        largest = max(len(weights) for weights in self._on_host.values())
        self.rooms = [
            torch.empty(largest, dtype=torch.uint8, device=place)
            for _ in range(min(WEIGHT_ROOMS, len(self._on_host)))
        ]
        self._layer_in: list[int | None] = [None] * len(self.rooms)
        self._current = 0  # room of the layer that computes
        self._rooms_of = {room.untyped_storage()._cdata: index for index, room in enumerate(self.rooms)}
        self._coming = new_stream(place) if has_streams(place) else None
        model.fetch, model.rooms = self.fetch, tuple(self.rooms)
        model.host_tensors = tuple(self._on_host.values())

    @torch.no_grad()
    def fetch(self, layer: int, way: int) -> None:
        """Have a layer's weights on the device, and let those of the next one this way come; 0: of none."""
        if layer in self._pieces:
            if layer not in self._layer_in:
                self._bring(layer)
            self._current = self._layer_in.index(layer)
            if self._coming is not None:
                current_stream(self._place).wait_stream(self._coming)
        if self._coming is not None and layer + way in self._pieces and layer + way not in self._layer_in:
            self._bring(layer + way)

    def _bring(self, layer: int) -> None:
        """Let a layer's weights come into the room that no layer computes with."""
        room = (self._current + 1) % len(self.rooms)
        before = self._layer_in[room]
        if before is not None:
            self._put(before, self._on_host[before])
        there = self._on_host[layer]
        if self._coming is None:
            self.rooms[room][: len(there)].copy_(there)
        else:
            self._coming.wait_stream(current_stream(self._place))
            with on_stream(self._coming, self._place):
                self.rooms[room][: len(there)].copy_(there, non_blocking=True)
        self._layer_in[room] = layer
        self._put(layer, self.rooms[room])

    def _put(self, layer: int, memory: Tensor) -> None:
        """Let the parameters of a layer be what lies in some memory."""
        for piece in self._pieces[layer]:
            _set(piece, piece.within(memory))

    def saving(self) -> AbstractContextManager[object]:
        """Return a context of forwards whose backwards look for weights anew, and keep none."""
        return torch.autograd.graph.saved_tensors_hooks(self.put_down, self.taken_up)

    def put_down(self, tensor: Tensor) -> Tensor | _View:
        """Return what is kept of a tensor that is saved: where its weights are, or itself."""
        room = self._rooms_of.get(tensor.untyped_storage()._cdata)
        if room is None:
            return tensor.detach()  # an operation that kept its own output would never be freed
        layer = self._layer_in[room]
        assert layer is not None
        return layer, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def taken_up(self, kept: Tensor | _View) -> Tensor:
        """Return the tensor of what `put_down` gave."""
        if isinstance(kept, Tensor):
            return kept
        layer, dtype, size, strides, offset = kept
        if layer not in self._layer_in:
            self.fetch(layer, -1)
        elif self._coming is not None and layer != self._layer_in[self._current]:  # it may be on its way
            current_stream(self._place).wait_stream(self._coming)
        room = self.rooms[self._layer_in.index(layer)]
        return room.view(dtype).as_strided(size, strides, offset)


def names_on_host(plan: Plan, device: str, chain: ChainModel) -> dict[int, tuple[str, ...]]:
    """Return the names of the parameters that a device keeps in its host's memory, by layer.

    Those of `cost_model.host_memory.movable_bytes`: frozen ones of layers that are not around the blocks, and
    share none with another layer.
    """
    found: dict[int, tuple[str, ...]] = {}
    holders = Counter(info.name for layer in range(chain.num_layers) for info in chain.parameters(layer))
    for layer in sorted(plan.offloaded_layers(device, FROZEN_WEIGHTS)):
        names = tuple(info.name for info in chain.parameters(layer) if not info.reached)
        around = is_around(layer, chain.num_layers, chain.layer_names[layer])
        if not around and all(holders[name] == 1 for name in names):
            found[layer] = names
    return {layer: names for layer, names in found.items() if names}


def check_fetched(model: LayerModel, layers: Mapping[int, object], names: tuple[str, ...]) -> None:
    """Check that weights of these layers can come right before they compute.

    Raises: InputError if not.
    """
    if layers and model.compiles:
        raise InputError(
            "the plan keeps frozen weights on the host, and blocks are compiled, with the place of their "
            "weights in the code; leave --compile out, or offload out of the plan"
        )
    for layer in layers:
        if model.module_of(layer) is None:
            raise InputError(
                f"the plan keeps frozen weights of layer {layer} ({names[layer]!r}) on the host, which is no "
                "block, so that nobody knows when they are needed; take offload out of its stage"
            )


def _keep_table(parameter: nn.Parameter, place: torch.device) -> None:
    """Put what a quantized parameter's scales stand for on the device, where it is looked up."""
    if isinstance(parameter, QuantizedParameter) and TABLE in parameter.matrix.scales:
        scales = {**parameter.matrix.scales, TABLE: parameter.matrix.scales[TABLE].to(place)}
        parameter.matrix = replace(parameter.matrix, scales=scales)


def _laid_out(parameters: list[nn.Parameter]) -> tuple[list[_Piece], int]:
    """Return the tensors of parameters one after the other, and the bytes of all."""
    pieces, first = [], 0
    for parameter in parameters:
        matrix = matrix_held(parameter)
        tensors = {"": parameter.detach()} if matrix is None else {"": matrix.values, **matrix.scales}
        if matrix is not None:
            tensors.pop(TABLE, None)
        for key, tensor in tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            pieces.append(
                _Piece(parameter, key, first, num_bytes, tensor.dtype, tensor.size(), tensor.stride())
            )
            first += -(-num_bytes // ALIGNED) * ALIGNED
    return pieces, first


def _tensor_of(piece: _Piece) -> Tensor:
    matrix = matrix_held(piece.parameter)
    if matrix is None:
        return piece.parameter.detach()
    return matrix.scales[piece.key] if piece.key else matrix.values


def _set(piece: _Piece, tensor: Tensor) -> None:
    parameter = piece.parameter
    if not piece.key:
        parameter.data = tensor
    if isinstance(parameter, QuantizedParameter):
        matrix = parameter.matrix
        if piece.key:
            parameter.matrix = replace(matrix, scales={**matrix.scales, piece.key: tensor})
        else:
            parameter.matrix = replace(matrix, values=tensor)
