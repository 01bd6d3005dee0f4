"""The errors that name who waited, at which instruction, for whom and how long, when nothing comes."""

import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType

import torch

from hetpipe.program.instructions import Instruction, Program
from hetpipe.runtime.heartbeats import goes_on, waits

_PLACE = re.compile(r"^\[\S+:\d+\] ")
"""Where in its own sources torch has raised an error."""


_FULL = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")
"""What torch says where the host has no memory left, in an error of no type of its own."""


def is_full(error: BaseException) -> bool:
    """Return whether an error says that memory is full: that of a GPU, an emulated device, or the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _FULL.search(str(error)) is not None


class PeerError(RuntimeError):
    """An error that a message or a sum did not come; names rank, instruction, peers and age."""


@dataclass(slots=True)
class PeerTimeout:
    """A context that turns the error of a communication begun at since_s into a PeerError.

    But not that of this rank's own memory. And says meanwhile for whom this rank waits.

    since_s is on the monotonic clock. A class, and not a frozen one, since every message has some: a
    generator takes three times as long.
    """

    program: Program
    rank: int
    instruction: Instruction
    peers: Collection[int]
    since_s: float

    def __enter__(self) -> None:
        waits(self.peers, self.rank)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        goes_on()
        if isinstance(error, RuntimeError) and not is_full(error):
            others = ", ".join(_name(self.program, peer) for peer in self.peers if peer != self.rank)
            waited = f"{_name(self.program, self.rank)} waited at {self.instruction} for {others}"
            raise peer_error(waited, self.since_s, error) from error


def peer_error(waited: str, since_s: float, error: RuntimeError) -> PeerError:
    """Return an error with who waited for whom, for how long, and the reason in torch's error."""
    reason = _PLACE.sub("", (str(error).strip().splitlines() or ["no reason given"])[-1])
    return PeerError(f"{waited}, begun {time.monotonic() - since_s:.1f} s ago: {reason}")


def _name(program: Program, rank: int) -> str:
    return f"rank {rank} ({program.device_names[rank]})"
