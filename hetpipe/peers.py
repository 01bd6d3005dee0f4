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
        others = ", ".join(_name(program, peer) for peer in peers if peer != rank)
        waited = f"{_name(program, rank)} waited at {instruction} for {others}"
        raise peer_error(waited, since_s, error) from error


def peer_error(waited: str, since_s: float, error: RuntimeError) -> PeerError:
    """Who waited for whom, for how long, and the reason in torch's error."""
    reason = _PLACE.sub("", (str(error).strip().splitlines() or ["no reason given"])[-1])
    return PeerError(f"{waited}, begun {time.monotonic() - since_s:.1f} s ago: {reason}")


def _name(program: Program, rank: int) -> str:
    return f"rank {rank} ({program.device_names[rank]})"
