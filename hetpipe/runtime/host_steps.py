"""AdamW that the host's CPU steps: gradients go down, new weights come up, states never move."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cost_model.host_memory import NUM_ROOMS
from hetpipe.runtime.accelerators import current_stream
from hetpipe.runtime.host_staging import room_on_host
from hetpipe.runtime.host_states import HostStates, Operands


class HostSteps(HostStates):
    """AdamW as `HostStates` whose offloaded parameters are stepped on the CPU; owns a copy of them there.

    The gradients of a part come to one of `NUM_ROOMS` rooms of the host; where the device has streams, while
    other parts are stepped. On a CPU every bit is as on the device; a GPU rounds some products otherwise.
    Weights that something else changes, which their version tells, are copied anew.
    """

    num_rooms = 0

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
        super().__init__(parameters, counted, weight_decay, offloaded=offloaded, betas=betas, epsilon=epsilon)
        like = self.parameters[next(iter(offloaded))].detach()
        self._weights = room_on_host(like.new_empty(len(self._on_host[0])))
        self._gradients = [
            room_on_host(like.new_empty(self._room_size)) for _ in range(min(NUM_ROOMS, len(self._parts)))
        ]
        self._versions: dict[str, int] = {}

    @property
    def steps_place(self) -> torch.device:
        """The host, where steps are counted beside the states."""
        return torch.device("cpu")

    @torch.no_grad()
    def step(self, learning_rate: float, scale: float, loss_scale: float = 1.0) -> None:
        """Make one step with all gradients multiplied by scale; they are those of losses times loss_scale."""
        factor = scale / loss_scale
        grad_scale = self._grad_scale(factor)
        on_host = None if grad_scale is None else torch.full((), 1 / factor, dtype=torch.float32)
        self._copy_changed_weights()
        count, sent = len(self._gradients), {}
        if self._going is not None:
            self._going.wait_stream(current_stream(self._place))
        for part in range(count):
            sent[part] = self._send_gradients(part)
        self._step_resident(learning_rate, grad_scale)
        for part in range(len(self._parts)):
            if sent[part] is not None:
                sent[part].synchronize()
            self._step_part(part, learning_rate, on_host)
            self._bring_weights(part)
            if part + count < len(self._parts):
                sent[part + count] = self._send_gradients(part + count)
        if self._coming is not None:
            current_stream(self._place).wait_stream(self._coming)
        self._versions = {name: self.parameters[name]._version for name in self._starts}
        self.num_steps += 1

    def _copy_changed_weights(self) -> None:
        """Copy what somebody else has changed: a checkpoint that was loaded, or the first weights."""
        for name, start in self._starts.items():
            value = self.parameters[name].detach()
            if self._versions.get(name) != self.parameters[name]._version:
                self._weights[start : start + value.numel()].copy_(value.reshape(-1))

    def _send_gradients(self, part: int) -> Any:
        """Let the gradients of a part go to their room; return the mark behind them, None if all is there."""
        room = self._gradients[part % len(self._gradients)]
        with self._on(self._going):
            for piece in self._parts[part]:
                gradient = piece.of_gradient
                if gradient is not None:
                    room[piece.in_room].copy_(gradient, non_blocking=self._going is not None)
        return None if self._going is None else self._going.record_event()

    def _operands(self, part: int) -> Iterator[Operands]:
        room, first = self._gradients[part % len(self._gradients)], part * self._room_size
        average, square = (states[first : first + self._room_size] for states in self._on_host)
        weights = self._weights[first : first + self._room_size]
        for piece in self._parts[part]:
            if piece.of_gradient is not None:
                here = piece.in_room
                yield piece, weights[here], room[here], average[here], square[here]

    def _bring_weights(self, part: int) -> None:
        weights = self._weights[part * self._room_size :]
        if self._coming is not None:
            self._coming.wait_stream(current_stream(self._place))
        with self._on(self._coming):
            for piece in self._parts[part]:
                if piece.of_gradient is not None:
                    piece.of_value.copy_(weights[piece.in_room], non_blocking=self._coming is not None)

    def host_tensors(self) -> list[Tensor]:
        """Return the tensors of states, weights and gradients that are in the host's memory."""
        return [*super().host_tensors(), self._weights, *self._gradients]

    def load_states(self, name: str, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Take back what `states` gave after num_steps steps."""
        super().load_states(name, tensors, num_steps)
        self._versions.pop(name, None)
