"""Parameters of which several ranks own a range, whole again on the rank that writes their layer."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.models.chain import ChainModel
from hetpipe.program.instructions import Program
from hetpipe.runtime.bucket_parameters import Part, bucket_names, parts_in
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.peer_errors import peer_error
from hetpipe.training.meeting import gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(slots=True)
class JoinedParts:
    """What a rank writes of layers that are cut; owns the group on which it comes, and memory for it.

    The memory is of the host, and used again by each checkpoint.
    """

    program: Program
    rank: int
    chain: ChainModel
    optimizer: Optimizer
    timeout_s: float
    _group: "ProcessGroup | None" = None
    _writers: dict[str, int] = field(default_factory=dict)  # by parameter
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _joined: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Open the group, on all ranks together; none where no layer is cut."""
        plan, ranks = self.program.plan, {name: rank for rank, name in enumerate(self.program.device_names)}
        if not plan.owner_ranges or plan.state_owners is None:
            return
        for index, bucket in enumerate(self.program.buckets):
            if bucket.is_part:
                writer = ranks[plan.state_owners[bucket.layers[0]]]
                names = bucket_names(self.program, index, self.chain)
                self._writers |= dict.fromkeys(names, writer)
                infos = self.chain.parameters(bucket.layers[0])
                self._shapes |= {info.name: info.shape for info in infos if info.name in names}
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))

    @property
    def names(self) -> frozenset[str]:
        """The parameters that are cut, of all ranks."""
        return frozenset(self._writers)

    @property
    def missing_bytes(self) -> float:
        """Return bytes of the host that this rank has yet to take for what it writes; 0 after `join`.

        As many for each number, of weights and states, as its own ranges take.
        """
        parts = parts_in(self.optimizer.parameters).items()
        numbers = sum(part.stop - part.start for _, part in parts)
        held = sum(tensor.nbytes for key, _ in parts for tensor in self._tensors(key).values())
        missing = sum(
            math.prod(self._shapes[name])
            for name, writer in self._writers.items()
            if writer == self.rank and name not in self._joined
        )
        return missing * held / numbers if numbers else 0.0

    def join(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Bring the ranges to the ranks that write them, on all ranks together.

        Returns what this rank writes, on the host: by parameter, the whole weights under "", and states under
        what their names have behind the parameter's. The next call changes it.

        Raises: PeerError if a rank is gone.
        """
        if self._group is None:
            return {}
        mine = [
            (part, rest, tensor, tensor.shape == self.optimizer.parameters[key].shape)
            for key, part in parts_in(self.optimizer.parameters).items()
            for rest, tensor in self._tensors(key).items()
        ]
        told = gather(
            [
                [part.name, part.start, part.stop, rest, str(tensor.dtype).rpartition(".")[2], is_range,
                 list(tensor.shape)]
                for part, rest, tensor, is_range in mine
            ]
        )  # fmt: skip
        own = iter(mine)
        for owner, rows in enumerate(told):
            for name, start, stop, rest, dtype, is_range, shape in rows:
                tensor = next(own)[2] if owner == self.rank else None
                if self.rank in (owner, self._writers[name]):
                    place = self._place(Part(name, start, stop), rest, getattr(torch, dtype), shape, is_range)
                    self._move(tensor, place, owner, self._writers[name])
        return self._joined

    def _tensors(self, key: str) -> dict[str, Tensor]:
        """Return the weights of a part, under "", and its states, under the rest of their names."""
        states = {name.removeprefix(key): state for name, state in self.optimizer.states(key).items()}
        return {"": self.optimizer.parameters[key].detach(), **states}

    def _place(
        self, part: Part, rest: str, dtype: torch.dtype, shape: list[int], is_range: bool
    ) -> Tensor | None:
        """Return where what comes of a part belongs; None where another rank writes it."""
        if self.rank != self._writers[part.name]:
            return None
        held = self._joined.setdefault(part.name, {})
        if rest not in held:
            held[rest] = torch.empty(self._shapes[part.name] if is_range else shape, dtype=dtype)
        return held[rest].view(-1)[part.start : part.stop] if is_range else held[rest].view(-1)

    def _move(self, tensor: Tensor | None, place: Tensor | None, owner: int, writer: int) -> None:
        since_s = time.monotonic()
        try:
            if tensor is not None and place is not None:
                place.copy_(tensor.reshape(-1))
            elif tensor is not None:
                dist.send(tensor.to("cpu").contiguous(), writer, group=self._group)
            elif place is not None:
                dist.recv(place, owner, group=self._group)
        except RuntimeError as error:
            peer = writer if tensor is not None else owner
            raise peer_error(
                f"rank {self.rank} met rank {peer} over a range of a layer", since_s, error
            ) from error
