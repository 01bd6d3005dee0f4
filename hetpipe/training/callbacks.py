"""What listens to a `Trainer`: told of steps, checkpoints and the end, in the process that called `fit`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from hetpipe.runs.run_report import RunReport

_METHODS = ("on_step_end", "on_checkpoint", "on_end", "on_begin")


class Callback:
    """A listener to a `Trainer`: inherit, and write the methods that you need.

    Called in the process that called `fit`, in the order of the list; training goes on when all have
    returned. True ends training after the step at hand, with a checkpoint unless `save` is False; whatever
    else a method gives does not. An exception ends training so, too, and comes out of `fit`; nobody is told
    of anything from then on.
    """

    def on_begin(self, source: Path | None) -> None:
        """Take, before anything is measured, the checkpoint that is gone on from; None: training begins."""

    def on_step_end(self, metrics: Mapping[str, Any]) -> bool | None:
        """Take a step's line of metrics.jsonl (step from 1, loss, step_s, gradient_norm, ...)."""

    def on_checkpoint(self, step: int, path: Path) -> bool | None:
        """Take, after each complete checkpoint, how many steps are in it, and its folder."""

    def on_end(self, report: RunReport) -> None:
        """Take the report after the last step, once it is written."""


class Callbacks:
    """The listeners of a trainer, in the order in which they are told.

    Raises: InputError for one that listens to nothing.
    """

    def __init__(self, listeners: Sequence[Callback]) -> None:
        for listener in listeners:
            if not any(callable(getattr(listener, method, None)) for method in _METHODS):
                raise InputError(
                    f"a callback is a {type(listener).__name__} without any of {', '.join(_METHODS)}; "
                    "inherit from hetpipe.Callback"
                )
        self._listeners = tuple(listeners)

    def began(self, source: Path | None) -> None:
        """Tell that training begins, or goes on from a checkpoint."""
        for listener in self._listeners:
            getattr(listener, "on_begin", _ignore)(source)

    def told(self, event: Mapping[str, Any]) -> bool:
        """Tell of an event of the ranks; return whether one of them ends training."""
        answers: list[object] = []
        for listener in self._listeners:
            if event["event"] == "step":
                metrics = {key: value for key, value in event.items() if key != "event"}
                answers.append(getattr(listener, "on_step_end", _ignore)(metrics))
            elif event["event"] == "checkpoint":
                path = Path(event["path"])
                answers.append(getattr(listener, "on_checkpoint", _ignore)(event["step"], path))
        return any(answer is True for answer in answers)

    def ended(self, report: RunReport) -> None:
        """Tell of the end."""
        for listener in self._listeners:
            getattr(listener, "on_end", _ignore)(report)


def _ignore(*_: object) -> None:
    """Stand for a method that a callback does not have."""
