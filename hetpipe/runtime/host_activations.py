"""Saved activations in the host's memory: what blocks save in a forward goes, and comes for the backward."""

import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cost_model.errors import InputError
from cost_model.host_memory import SAVED_ROOMS, is_around
from hetpipe.models.mixed_precision import kept_copies
from hetpipe.models.partial_model import LayerModel
from hetpipe.program.instructions import Compute, Program
from hetpipe.runtime.accelerators import current_stream, has_streams, new_stream, on_stream
from hetpipe.runtime.host_staging import room_on_host
from hetpipe.runtime.host_weights import HostWeights
from partition.plan import SAVED_ACTIVATIONS

Key = tuple[int, int, int]
"""Of a microbatch in a stage: (pipeline, stage, microbatch)."""


@dataclass(eq=False)  # no slots: it is referred to weakly
class _Memory:
    """The memory of saved tensors: its bytes on the host, and on the device while they are there.

    come: the mark behind their copy to the device, which who reads them first waits for; None of none.
    version: of what was saved, while `here` is that. is_changed: whether something wrote into it until then.
    """

    on_host: Tensor
    here: Tensor | None
    version: int | None
    come: Any = None
    is_changed: bool = False

    def look(self) -> None:
        """See whether what was saved is as it was."""
        if self.here is not None and self.version is not None:
            self.is_changed = self.here._version != self.version


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor: its memory, and how it lies there."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    strides: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Going:
    """What a block saved of a microbatch and is on its way to the host; gone: the mark behind all of it."""

    key: Key
    layer: int
    memories: list[_Memory] = field(default_factory=list)
    is_whole: bool = False
    gone: Any = None


class HostActivations:
    """What the blocks of some stages of a rank save; owns its memory on the host, which is used again.

    A tensor counts with all of its memory, once for all views. The device has what two blocks saved at once
    (`SAVED_ROOMS`): that of the one before the last is waited for before a block computes. In a backward that
    of the next block comes while one computes. Weights, what enters a stage, and what blocks take beside that
    stay where they are.
    """

    def __init__(
        self,
        model: LayerModel,
        stages: Collection[tuple[int, int]],
        around: Collection[int],
        place: torch.device,
        weights: HostWeights | None = None,
    ) -> None:
        """Serve the model; stages: (pipeline, stage). around: layers whose saved tensors stay."""
        self._model, self._stages, self._around = model, frozenset(stages), frozenset(around)
        self._weights, self._place = weights, place
        self._rooms: dict[int, list[Tensor]] = {}  # on the host, that nobody uses, by bytes
        self._forwards: set[Compute] = set()  # of the step at hand
        self._sizes: set[int] = set()  # bytes of the rooms that these took
        self._of_weights = {_key(tensor) for tensor in (*model.held_tensors(), *model.buffers())}
        self._stay: set[int] = set()
        self._lowered: tuple[int, set[int]] = (0, set())  # copies of weights: how many, and which
        self._known: dict[int, _Memory] = {}  # of the forward at hand, by the storage on the device
        self._going: list[_Going] = []
        self._saved: dict[Key, dict[int, weakref.WeakSet[_Memory]]] = {}
        self._forward: Key | None = None
        self._backward: Key | None = None
        streams = has_streams(place)
        self._out = new_stream(place) if streams else None
        self._in = new_stream(place) if streams else None
        model.fetch = self.fetch

    def saving(self, compute: Compute, held: Iterable[Tensor]) -> AbstractContextManager[object]:
        """Return the context of a forward; held: tensors that stay on the device, such as its inputs."""
        others = nullcontext() if self._weights is None else self._weights.saving()
        if (compute.pipeline, compute.stage) not in self._stages or not torch.is_grad_enabled():
            self._forward = None
            return others
        self._forward = key = (compute.pipeline, compute.stage, compute.microbatch)
        self._backward, self._lowered = None, (0, set())
        if compute in self._forwards:  # the next step's
            self._forwards.clear()
            self._sizes.clear()
        self._forwards.add(compute)
        self._saved[key] = {}
        self._known.clear()
        kept = (*held, *self._model.kept_arguments())
        self._stay = self._of_weights | {_key(tensor) for tensor in kept}
        return torch.autograd.graph.saved_tensors_hooks(self._put_down, self._taken_up)

    def going_back(self, compute: Compute) -> None:
        """Say that the next backward is that of a microbatch."""
        self._forward, self._backward = None, (compute.pipeline, compute.stage, compute.microbatch)
        self._known.clear()

    @torch.no_grad()
    def fetch(self, layer: int, way: int) -> None:
        """Do what `LayerModel.fetch` asks for: let go of what has gone, and bring what comes."""
        if self._weights is not None:
            self._weights.fetch(layer, way)
        if way < 0:
            self._fetch_back(layer)
            return
        self._mark_whole()
        while len(self._going) >= SAVED_ROOMS:
            self._let_go(self._going.pop(0))
        if self._forward is not None and layer not in self._around:
            self._going.append(_Going(self._forward, layer))

    def _fetch_back(self, layer: int) -> None:
        if self._backward is None:
            return
        self._mark_whole()
        waiting, self._going = self._going, []
        for going in waiting:
            if going.key != self._backward:
                self._let_go(going)
            elif going.layer < layer:
                self._going.append(going)
            elif going.gone is not None:  # it is freed in this backward, and read until then
                current_stream(self._place).wait_event(going.gone)
        saved = self._saved.get(self._backward, {})
        self._bring(saved.pop(layer, ()))
        if self._in is not None:
            current_stream(self._place).wait_stream(self._in)
        self._bring(saved.get(layer - 1, ()))
        if not saved:
            self._saved.pop(self._backward, None)

    def _mark_whole(self) -> None:
        """Mark where what the last block saved ends."""
        if self._going and not self._going[-1].is_whole:
            self._going[-1].is_whole = True
            self._going[-1].gone = None if self._out is None else self._out.record_event()

    def _let_go(self, going: _Going) -> None:
        """Give the memory on the device back, once all has gone."""
        if going.gone is not None:
            current_stream(self._place).wait_event(going.gone)
        for memory in going.memories:
            if memory.here is not None:
                self._known.pop(_key(memory.here), None)
                memory.look()
                memory.here = memory.version = None

    def _put_down(self, tensor: Tensor) -> Any:
        if self._weights is not None:
            kept = self._weights.put_down(tensor)
            if not isinstance(kept, Tensor):
                return kept
        going = self._going[-1] if self._going else None
        key = _key(tensor)
        if going is None or going.is_whole or going.key != self._forward or not self._moves(tensor, key):
            return tensor.detach()  # an operation that kept its own output would never be freed
        memory = self._known.get(key)
        if memory is None or memory.version != tensor._version:  # or it was written into since
            memory = self._known[key] = self._send(_bytes_of(tensor))
            going.memories.append(memory)
        self._saved[going.key].setdefault(going.layer, weakref.WeakSet()).add(memory)
        return _Saved(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _moves(self, tensor: Tensor, key: int) -> bool:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
            return False
        if tensor.device.type != self._place.type:  # it is not the device's memory, and must not come there
            return False
        copies = kept_copies()
        if len(copies) != self._lowered[0]:
            self._lowered = len(copies), set(map(_key, copies))
        return key not in self._stay and key not in self._lowered[1]

    def _send(self, there: Tensor) -> _Memory:
        """Let bytes go to the host; the device keeps them until that is done."""
        rooms = self._rooms_for(len(there))
        if self._out is None:
            with _disable_current_modes():  # no counter is to take them for the device's
                room = rooms.pop() if rooms else torch.empty_like(there)
                room.copy_(there)
        else:
            room = rooms.pop() if rooms else room_on_host(there)
            self._out.wait_stream(current_stream(self._place))
            with on_stream(self._out, self._place):
                room.copy_(there, non_blocking=True)
        memory = _Memory(room, there, there._version)
        weakref.finalize(memory, rooms.append, room)
        return memory

    def _rooms_for(self, num_bytes: int) -> list[Tensor]:
        """Return the rooms of a size that nobody uses; if none, let go of those of sizes of steps before.

        So lengths that change from step to step do not pile up, and steps that are alike make no new rooms.
        """
        self._sizes.add(num_bytes)
        rooms = self._rooms.setdefault(num_bytes, [])
        if not rooms:
            for size, unused in self._rooms.items():
                if size not in self._sizes:
                    unused.clear()
        return rooms

    def _bring(self, memories: Iterable[_Memory]) -> None:
        missing = [memory for memory in memories if memory.here is None]
        for memory in missing:
            memory.here = torch.empty(len(memory.on_host), dtype=torch.uint8, device=self._place)
        if self._in is not None and missing:
            self._in.wait_stream(current_stream(self._place))
        for memory in missing:
            assert memory.here is not None
            if self._in is None:
                with _disable_current_modes():
                    memory.here.copy_(memory.on_host)
            else:
                with on_stream(self._in, self._place):
                    memory.here.copy_(memory.on_host, non_blocking=True)
        if self._in is not None and missing:
            come = self._in.record_event()
            for memory in missing:
                memory.come = come

    @torch.no_grad()
    def _taken_up(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Saved):
            return kept if isinstance(kept, Tensor) or self._weights is None else self._weights.taken_up(kept)
        kept.memory.look()
        if kept.memory.is_changed:  # autograd, which would say so, leaves it to whoever keeps the tensors
            raise RuntimeError(
                f"a tensor of size {list(kept.size)} that is saved for the backward was modified by an "
                "in-place operation afterwards; let that operation return a new tensor"
            )
        if kept.memory.here is None:
            self._bring([kept.memory])
        if (
            kept.memory.come is not None
        ):  # a layer may begin its backward before all of the next one's is over
            current_stream(self._place).wait_event(kept.memory.come)
            kept.memory.come = None
        here = kept.memory.here
        assert here is not None
        whole = len(here) // kept.dtype.itemsize * kept.dtype.itemsize
        return here[:whole].view(kept.dtype).as_strided(kept.size, kept.strides, kept.offset)


def activations_on_host(
    program: Program,
    rank: int,
    model: LayerModel,
    names: Sequence[str],
    place: torch.device,
    weights: HostWeights | None,
) -> HostActivations | None:
    """Return what keeps the saved activations of a rank's stages on the host; None where none of them does.

    names: of all layers.

    Raises: InputError if blocks are compiled.
    """
    plan = program.plan
    stages = [
        (number, index)
        for number, index in plan.places[program.device_names[rank]]
        if SAVED_ACTIVATIONS in plan.pipelines[number].stages[index].offload
    ]
    if not stages:
        return None
    if model.compiles:
        raise InputError(
            "the plan keeps saved activations on the host, and blocks are compiled, which keep them as they "
            "like; leave --compile out, or offload out of the plan"
        )
    around = [layer for layer, name in enumerate(names) if is_around(layer, plan.num_layers, name)]
    return HostActivations(model, stages, around, place, weights)


def _key(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return all memory of a tensor as bytes."""
    flat = tensor.detach()
    count = flat.untyped_storage().nbytes() // flat.element_size()
    return flat.as_strided((count,), (1,), 0).view(torch.uint8)
