"""Who is told how far long work on data has come: a listener, for as long as it listens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Report = Callable[[float, str], object]
"""Called with the share done in [0, 1] and what is being done."""

LEAST_SHARE = 0.01
"""Of the work, after which is told again."""
MOST_BEFORE_END = 0.99


@dataclass(slots=True)
class _Work:
    what: str
    num_bytes: int
    report: Report
    done_bytes: int = 0
    told_bytes: int = 0


# NOTE: no context variables, since tokenizers asks for the lines of a text from threads of its own.
_LISTENERS: list[Report] = []
_UNDER_WAY: list[_Work] = []


@contextmanager
def listening(report: Report) -> Iterator[None]:
    """Have a listener told of the work inside."""
    _LISTENERS.append(report)
    try:
        yield
    finally:
        _LISTENERS.pop()


@contextmanager
def work(what: str, num_bytes: int) -> Iterator[None]:
    """Tell of the reading of so many bytes inside; of 0 nothing."""
    if not _LISTENERS or not num_bytes:
        yield
        return
    now = _Work(what, num_bytes, _LISTENERS[-1])
    now.report(0.0, what)
    _UNDER_WAY.append(now)
    try:
        yield
        now.report(1.0, now.what)
    finally:
        _UNDER_WAY.remove(now)


def was_read(num_bytes: int) -> None:
    """Count bytes that were read, of whatever work is under way."""
    if not _UNDER_WAY:
        return
    now = _UNDER_WAY[-1]
    now.done_bytes += num_bytes
    if now.done_bytes - now.told_bytes >= LEAST_SHARE * now.num_bytes:
        now.told_bytes = now.done_bytes
        now.report(min(MOST_BEFORE_END, now.done_bytes / now.num_bytes), now.what)
