"""Streams of a device that has none: copies on them are made when somebody waits, and no sooner."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LateStream:
    """A stream whose copies are made when another one waits for them, and no sooner."""

    def __init__(self) -> None:
        self.queue: list[tuple[Any, Any, Any]] = []
        self.done = 0

    def wait_stream(self, other: "LateStream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> tuple["LateStream", int]:
        return self, len(self.queue)

    def wait_event(self, event: tuple["LateStream", int]) -> None:
        stream, count = event
        while stream.done < count:
            function, args, kwargs = stream.queue[stream.done]
            stream.done += 1
            function(*args, **kwargs)


class _Late(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.stream.queue.append((func, args, kwargs or {}))
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _on_stream(stream: LateStream, _: torch.device) -> Iterator[None]:
    with _Late(stream):
        yield


def copies_are_late(monkeypatch: pytest.MonkeyPatch, room: ModuleType) -> None:
    """Give the device of a module such streams."""
    current = LateStream()
    monkeypatch.setattr(room, "has_streams", lambda _: True)
    monkeypatch.setattr(room, "new_stream", lambda _: LateStream())
    monkeypatch.setattr(room, "current_stream", lambda _: current)
    monkeypatch.setattr(room, "on_stream", _on_stream)
