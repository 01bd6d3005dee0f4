"""AdamW whose states are in the host's memory: they come to the device part by part, and go back."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as step_adamw

from cost_model.host_memory import NUM_ROOMS, room_bytes
from hetpipe.runtime.accelerators import current_stream, has_streams, new_stream, on_stream, synchronize
from hetpipe.runtime.host_staging import room_on_host
from hetpipe.runtime.optimizer import OPTIMIZER_STATES, Optimizer

ALIGNED = 64
"""Parameters are cut at multiples of so many elements, so that kernels compute each as in one piece."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The names of the parameters whose states the host keeps; by_host: whether its CPU steps them."""

    names: tuple[str, ...] = ()
    by_host: bool = False

    def __bool__(self) -> bool:
        return bool(self.names)


NOTHING = Offloaded()


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of a parameter, at `place` of the part that it is in; steps: made so far."""

    parameter: nn.Parameter
    start: int
    stop: int
    place: int
    steps: Tensor

    @property
    def of_value(self) -> Tensor:
        return self.parameter.detach().view(-1)[self.start : self.stop]

    @property
    def of_gradient(self) -> Tensor | None:
        gradient = self.parameter.grad
        return None if gradient is None else gradient.view(-1)[self.start : self.stop]

    @property
    def in_room(self) -> slice:
        return slice(self.place, self.place + self.stop - self.start)


Operands = tuple[Slice, Tensor, Tensor, Tensor, Tensor]
"""What AdamW takes of a piece: the piece, its value, gradient, and both states."""


class HostStates(Optimizer):
    """AdamW as `Optimizer`, bit for bit, some of whose states are on the host; owns them, and rooms.

    In a step the states of a part come to one of `NUM_ROOMS` rooms on the device, where it is stepped, and
    go back; where the device has streams, both beside the steps of other parts.

    offloaded: names of these parameters, in the order of steps. num_rooms: of parts on the device.
    """

    num_rooms = NUM_ROOMS

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: Collection[str],
        weight_decay: float,
        *,
        offloaded: Collection[str],
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        resident = {name: value for name, value in parameters.items() if name not in offloaded}
        super().__init__(resident, counted, weight_decay, betas=betas, epsilon=epsilon)
        self.parameters = dict(parameters)
        self._counted = [value for name, value in self.parameters.items() if name in counted]
        self._weight_decay, self._betas, self._epsilon = weight_decay, betas, epsilon
        self._starts: dict[str, int] = {}  # of each parameter in the flat states
        size = 0
        for name in offloaded:
            self._starts[name] = size
            size += _aligned(self.parameters[name].numel())
        like = self.parameters[next(iter(offloaded))]
        self._place = like.device
        self._on_host = [room_on_host(like.detach().new_empty(size)).zero_() for _ in OPTIMIZER_STATES]
        state_bytes = len(OPTIMIZER_STATES) * like.element_size()
        self._room_size = _aligned(int(room_bytes(size * state_bytes) / state_bytes))
        self._parts = [self._slices(first, size) for first in range(0, size, self._room_size)]
        self._rooms = [
            torch.zeros(len(OPTIMIZER_STATES), self._room_size, dtype=like.dtype, device=self._place)
            for _ in range(min(self.num_rooms, len(self._parts)))
        ]
        streams = has_streams(self._place)
        self._coming = new_stream(self._place) if streams else None
        self._going = new_stream(self._place) if streams else None

    @property
    def steps_place(self) -> torch.device:
        """Where steps are counted, beside what is stepped."""
        return self._place

    def _slices(self, first: int, size: int) -> list[Slice]:
        """Return what the part has that begins at an element of the flat states."""
        last, found = min(first + self._room_size, size), []
        for name, start in self._starts.items():
            value = self.parameters[name]
            begin, end = max(first, start), min(last, start + value.numel())
            if begin < end:
                steps = torch.zeros((), device=self.steps_place)
                found.append(Slice(value, begin - start, end - start, begin - first, steps))
        return found

    def zero_grad(self) -> None:
        for value in self.parameters.values():
            value.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float, scale: float, loss_scale: float = 1.0) -> None:
        """Make one step with all gradients multiplied by scale; they are those of losses times loss_scale."""
        grad_scale = self._grad_scale(scale / loss_scale)
        count = len(self._rooms)
        if self._coming is not None:
            self._coming.wait_stream(current_stream(self._place))
        for part in range(count):
            self._fetch(part)
        self._step_resident(learning_rate, grad_scale)
        for part in range(len(self._parts)):
            if self._coming is not None:
                current_stream(self._place).wait_stream(self._coming)
            self._step_part(part, learning_rate, grad_scale)
            self._give_back(part)
            if part + count < len(self._parts):
                self._fetch(part + count)
        if self._going is not None:
            current_stream(self._place).wait_stream(self._going)
        self.num_steps += 1

    def _fetch(self, part: int) -> None:
        """Let the states of a part come into its room, once what was there has gone."""
        if self._coming is not None:
            self._coming.wait_stream(self._going)
        with self._on(self._coming):
            for room, states in self._moves(part):
                room.copy_(states, non_blocking=self._coming is not None)

    def _give_back(self, part: int) -> None:
        if self._going is not None:
            self._going.wait_stream(current_stream(self._place))
        with self._on(self._going):
            for room, states in self._moves(part):
                states.copy_(room, non_blocking=self._going is not None)

    def _moves(self, part: int) -> list[tuple[Tensor, Tensor]]:
        """Return (room, place on the host) of each of the states of a part."""
        first = part * self._room_size
        pairs = []
        for room, states in zip(self._rooms[part % len(self._rooms)], self._on_host, strict=True):
            there = states[first : first + self._room_size]
            pairs.append((room[: len(there)], there))
        return pairs

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else on_stream(stream, self._place)

    def _operands(self, part: int) -> Iterator[Operands]:
        """Yield what there is to step of a part."""
        room = self._rooms[part % len(self._rooms)]
        for piece in self._parts[part]:
            gradient = piece.of_gradient
            if gradient is not None:
                yield piece, piece.of_value, gradient, room[0, piece.in_room], room[1, piece.in_room]

    def _step_part(self, part: int, learning_rate: float, grad_scale: Tensor | None) -> None:
        operands = list(self._operands(part))
        for decays in (True, False):
            known = [each for each in operands if (each[0].parameter.dim() > 1) is decays]
            if known:
                pieces, values, gradients, averages, squares = map(list, zip(*known, strict=True))
                step_adamw(
                    values,
                    gradients,
                    averages,
                    squares,
                    [],
                    [piece.steps for piece in pieces],
                    fused=True,
                    grad_scale=grad_scale,
                    found_inf=None,
                    amsgrad=False,
                    beta1=self._betas[0],
                    beta2=self._betas[1],
                    lr=learning_rate,
                    weight_decay=self._weight_decay if decays else 0.0,
                    eps=self._epsilon,
                    maximize=False,
                )

    def state_tensors(self) -> list[Tensor]:
        """Return the states that are on the device, and the rooms of the others there."""
        return [*super().state_tensors(), *self._rooms]

    def host_tensors(self) -> list[Tensor]:
        """Return the tensors of states that are in the host's memory, where the device has its own."""
        return self._on_host

    def states(self, name: str) -> dict[str, Tensor]:
        """Return the states of a parameter as "name.state"; none if it is not trained."""
        if name not in self._starts:
            return super().states(name)
        synchronize(self._place)
        return {f"{name}.{key}": state for key, state in self._states_on_host(name).items()}

    def load_states(self, name: str, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Take back what `states` gave after num_steps steps."""
        if name not in self._starts:
            super().load_states(name, tensors, num_steps)
            return
        self.num_steps = num_steps
        for key, state in self._states_on_host(name).items():
            state.copy_(tensors[f"{name}.{key}"])
        for piece in (piece for part in self._parts for piece in part):
            if piece.parameter is self.parameters[name]:
                piece.steps.fill_(float(num_steps))

    def _states_on_host(self, name: str) -> dict[str, Tensor]:
        value, start = self.parameters[name], self._starts[name]
        flat = (states[start : start + value.numel()] for states in self._on_host)
        return {key: state.view(value.shape) for key, state in zip(OPTIMIZER_STATES, flat, strict=True)}


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNED) * ALIGNED
