"""Names who waited, at which instruction, for whom and how long, when a message or a sum does not come."""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hetpipe.instructions import Instruction, Program

_PLACE = re.compile(r"^\[\S+:\d+\] ")
"""Where in its own sources torch has raised an error."""


class PeerError(RuntimeError):
    """A message or a sum did not come; names rank, instruction, peers and age."""


@contextmanager
def waiting_for(
    program: Program, rank: int, instruction: Instruction, peers: Iterable[int], since_s: float
) -> Iterator[None]:
    """Turn the error of a communication that began at since_s, on the monotonic clock, into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        reason = _PLACE.sub("", (str(error).strip().splitlines() or ["no reason given"])[-1])
        others = ", ".join(_name(program, peer) for peer in peers if peer != rank)
        raise PeerError(
            f"{_name(program, rank)} waited at {instruction} for {others}, "
            f"begun {time.monotonic() - since_s:.1f} s ago: {reason}"
        ) from error


def _name(program: Program, rank: int) -> str:
    return f"rank {rank} ({program.device_names[rank]})"
