"""How often a rank lowers, verifies and simulates, from its first moment on.

A rank imports this file before its main function begins, since its task is made here.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetpipe.data.task import TrainingTask, registered_task
from hetpipe.program import lowering, verification
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import TaskSettings
from hetpipe.simulation import simulator
from hetpipe.training import rank  # what a rank runs is imported, wherever it imports the functions


class _Calls:
    """The names of the functions in the order of their calls; owns a file, once the rank has its folder."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.file: Path | None = None

    def note(self, *names: str) -> None:
        self.names += names
        if self.file is not None:
            self.file.write_text("\n".join(self.names))


_CALLS = _Calls()


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        _CALLS.note(function.__name__)
        return function(*arguments, **options)

    return call


if multiprocessing.current_process().name != "MainProcess":
    assert rank
    for one in (lowering.lower_as, simulator.simulate, verification.verify):
        for module in [module for name, module in sys.modules.items() if name.startswith("hetpipe")]:
            if vars(module).get(one.__name__) is one:
                setattr(module, one.__name__, _noted(one))


def counted_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    _CALLS.file = folder.path / f"calls-{os.getpid()}"
    _CALLS.note()
    return registered_task(folder, settings)


def read(folder: Path) -> list[list[str]]:
    """The calls of each rank."""
    return [path.read_text().splitlines() for path in folder.glob("calls-*")]
