"""Progress while something lasts: bars on a terminal; of training, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SILENCE_S = 30.0
"""Where there is no bar, a step is told at least so often."""


@contextmanager
def progress_bar(title: str, *, quiet: bool = False) -> Iterator[Callable[[float, str], None]]:
    """Give a function (fraction done, text) that moves a bar on stderr; none if stdout is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from hetpipe.reporting.tables import console

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console(sys.stderr),
        transient=True,
        disable=quiet or not sys.stdout.isatty(),
    )
    with bar:
        task = bar.add_task(title, total=1.0, text="")

        def report(fraction: float, text: str) -> None:
            bar.update(task, completed=fraction, text=text)

        yield report


@contextmanager
def step_bar(steps: int, done: int, *, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give what takes the events of a run: a bar on a terminal, else lines, one each half minute at least."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hetpipe.reporting.tables import console

    lines = not quiet and not sys.stdout.isatty()
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console(),
        disable=quiet or lines,
    )
    with bar:
        task = bar.add_task("training", total=steps, completed=done, text="")
        told_s = time.monotonic()

        def on_event(event: dict[str, Any]) -> None:
            nonlocal told_s
            if event.get("event") != "step":
                return
            text = (
                f"loss {event['loss']:.4f}  {event['samples_per_s']:.4g} samples/s  "
                f"bubble {event['bubble']:.0%}"
            )
            if "eval_loss" in event:
                text += f"  held-out {event['eval_loss']:.4f}{' (best)' if event['best'] else ''}"
            done = int(event["step"])
            bar.update(task, completed=done, text=text)
            late = time.monotonic() - told_s > SILENCE_S
            if lines and (late or "eval_loss" in event or done % max(1, steps // 10) == 0 or done == steps):
                told_s = time.monotonic()
                print(f"step {done}/{steps}  {text}", flush=True)

        yield on_event
