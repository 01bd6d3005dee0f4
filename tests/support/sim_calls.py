"""How a rank comes to the device made of Python, which nothing but that rank may have loaded."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def call(name: str, *arguments: Any, rank: int, emit: Callable[[dict[str, Any]], None]) -> None:
    """Call a function of `sim_mains`, and emit what it emits."""
    assert rank == 0
    getattr(import_module("sim_mains"), name)(
        *arguments, emit=lambda found: emit({"event": "found", **found})
    )
