"""The meetings of ranks between steps, at which they tell each other values, each with a time limit."""

import json
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from cost_model.errors import InputError
from hetpipe.runtime.heartbeats import goes_on, waits
from hetpipe.runtime.peer_errors import PeerError, peer_error

WAIT = -1
"""What the rank that reports says while it does not know yet whether to stop."""

_HEAD_BYTES = 248

LEAD_S = 0.003
"""The common start of a step lies this far ahead, so that every rank is waiting for it."""


@contextmanager
def keep_alive(every_s: float, first: int = 0) -> Iterator[None]:
    """Keep the others waiting in `from_first`, as the one that reports, however long callbacks take."""
    done = threading.Event()

    def tell() -> None:
        with suppress(PeerError):  # which this rank then meets itself
            while not done.wait(every_s):
                from_first(WAIT, first)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def from_first(value: int, first: int = 0) -> int:
    """Return a number of the rank that reports, on every rank.

    Raises: PeerError if it does not come in time, or that rank is gone.
    """
    found = torch.tensor(value)
    with meeting_with(f"rank {first}"):
        dist.broadcast(found, src=first)
    return int(found)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in order of rank, on every rank.

    value: what JSON can say; numbers come out exactly as they were, tuples as lists.

    Raises: PeerError if a rank does not come in time, or is gone.
    """
    if not dist.is_initialized():
        return [json.loads(json.dumps(value))]
    with meeting_with("all other ranks"):
        return [json.loads(text) for text in _texts_of_all(json.dumps(value).encode())]


def _texts_of_all(text: bytes) -> list[bytes]:
    """Return the texts of all ranks: in one message each where they are short, as mostly."""
    heads = _rows_of_all(struct.pack("!Q", len(text)) + text[:_HEAD_BYTES], _HEAD_BYTES + 8)
    lengths = [struct.unpack_from("!Q", head)[0] for head in heads]
    longest = max(lengths) - _HEAD_BYTES
    rests = _rows_of_all(text[_HEAD_BYTES:], longest) if longest > 0 else [b""] * len(heads)
    return [(head[8:] + rest)[:length] for head, rest, length in zip(heads, rests, lengths, strict=True)]


def _rows_of_all(row: bytes, width: int) -> list[bytes]:
    """Return the bytes of all ranks, each filled up with zeros to the same width."""
    mine = torch.frombuffer(bytearray(row.ljust(width, b"\0")), dtype=torch.uint8)
    found = [torch.empty(width, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [row.numpy().tobytes() for row in found]


def all_done(work: "Future[Any]", most_s: float) -> bool:
    """Wait for a piece of work for so long; return, on every rank, whether all have done theirs.

    To be called until they have: so they go on meeting, however long one takes. most_s: less than the time
    limit of a meeting.

    Raises: what the work raises here; PeerError if a rank is gone.
    """
    wait([work], most_s)
    if work.done():
        work.result()  # an error ends this rank at once
    return all(gather(work.done()))


@contextmanager
def meeting_with(peers: str) -> Iterator[None]:
    """Turn the error of a meeting between steps into a PeerError."""
    since_s, rank = time.monotonic(), dist.get_rank()
    waits((), rank)
    try:
        yield
    except RuntimeError as error:
        waited = f"rank {rank} waited between steps for {peers}"
        raise peer_error(waited, since_s, error) from error
    finally:
        goes_on()


def same_on_all_ranks(sha256: str) -> None:
    """Check that all ranks have the same program.

    Raises: InputError if they differ.
    """
    found = gather(sha256)
    if len(set(found)) > 1:
        other = next(rank for rank, other_sha256 in enumerate(found) if other_sha256 != found[0])
        raise InputError(f"rank {other} has another program than rank 0; start all ranks on one run folder")
