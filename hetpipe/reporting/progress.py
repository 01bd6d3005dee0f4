"""Progress while something lasts: bars on a terminal, that move at once; lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

from hetpipe.runs.run_folder import figure_text, held_out_figures

SILENCE_S = 30.0
"""Where there is no bar, a step is told at least so often."""
FIRST_PHASE = "loading torch"
STARTING = "starting the processes"
ROUND = "round "
"""What the text of a repetition begins with, which is no phase of its own."""
MOST_WITHIN = 0.95
"""Of a step, that a bar moves before the step is done."""


@contextmanager
def progress_bar(title: str, *, quiet: bool = False) -> Iterator[Callable[[float, str], None]]:
    """Give a function (fraction done, text) that moves a bar on stderr; a line for each phase in a pipe.

    Lines of phases before anything is done are held back until something is: what refuses the input then is
    the only line.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    from hetpipe.reporting.tables import console

    lines = not quiet and not sys.stdout.isatty()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(20),
        _wrapped_text(),
        _remaining(),
        console=console(sys.stderr),
        transient=True,
        disable=quiet or lines,
    )
    with bar:
        task = bar.add_task(title, total=1.0, text=FIRST_PHASE)
        held: list[str] = []
        told = ""

        def report(fraction: float, text: str) -> None:
            nonlocal told
            bar.update(task, completed=fraction, text=text)
            if lines and text != told and not text.rpartition(": ")[2].startswith(ROUND):
                told = text
                held.append(f"{title}: {text}\n")
            if fraction > 0:
                sys.stderr.write("".join(held))
                held.clear()

        yield report


@contextmanager
def bar_if_long(title: str, *, quiet: bool = False) -> Iterator[Callable[[float, str], None]]:
    """Give what `progress_bar` gives, of a bar that is shown once something is told."""
    with ExitStack() as shown:
        bars: list[Callable[[float, str], None]] = []

        def report(fraction: float, text: str) -> None:
            if not bars:
                bars.append(shown.enter_context(progress_bar(title, quiet=quiet)))
            bars[0](fraction, text)

        yield report


def _remaining() -> "ProgressColumn":
    """Return the column of the time that is left, empty as long as nothing is known of it."""
    from rich.progress import ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Remaining(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.time_remaining else Text("")

    column: ProgressColumn = Remaining()
    return column


def _wrapped_text() -> "ProgressColumn":
    """Return the column of the text, which goes on in a line below where it is too long for one."""
    from rich.progress import TextColumn
    from rich.table import Column

    return TextColumn("{task.fields[text]}", table_column=Column(no_wrap=False, overflow="fold"))


def _moving_bar() -> "ProgressColumn":
    """Return a bar that also moves within a step, as long as the last one took."""
    from rich.progress import BarColumn, Task
    from rich.progress_bar import ProgressBar

    class MovingBar(BarColumn):
        def render(self, task: Task) -> ProgressBar:
            shown, last_s = super().render(task), task.fields["last_s"]
            if last_s is not None and not task.finished:
                within = (task.get_time() - task.fields["since_s"]) / max(last_s, 1e-9)
                shown.completed = task.completed + min(MOST_WITHIN, within)
            return shown

    column: ProgressColumn = MovingBar(12)
    return column


@contextmanager
def step_bar(steps: int, done: int, *, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give what takes the events of a run: a bar on a terminal, else lines, one each half minute at least."""
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn

    from hetpipe.reporting.tables import console

    lines = not quiet and not sys.stdout.isatty()
    bar = Progress(
        SpinnerColumn(finished_text=""),
        _moving_bar(),
        MofNCompleteColumn(),
        _wrapped_text(),
        _remaining(),
        console=console(),
        disable=quiet or lines,
    )
    with bar:
        fields: dict[str, Any] = {"text": STARTING, "last_s": None, "since_s": 0.0}
        task = bar.add_task("training", total=steps, completed=done, **fields)
        told_s = time.monotonic()

        def on_event(event: dict[str, Any]) -> None:
            nonlocal told_s
            if event.get("event") == "progress":
                text = f"{event['what']}: {event['done']:.0%}"
                bar.update(task, text=text if event["done"] < 1.0 else STARTING)
                if lines and time.monotonic() - told_s > SILENCE_S:
                    told_s = time.monotonic()
                    print(text, flush=True)
                return
            if event.get("event") != "step":
                return
            text = f"loss {event['loss']:.4f}  "
            if "eval_loss" in event:  # in the place of the rate: a terminal has 80 columns
                found = held_out_figures(event).items()
                figures = "".join(f", {name} {figure_text(name, value)}" for name, value in found)
                text += f"held-out {event['eval_loss']:.4f}{figures}{' (best)' if event['best'] else ''}"
            else:
                text += f"{event['samples_per_s']:.4g} samples/s  bubble {event['bubble']:.0%}"
            done = int(event["step"])
            bar.update(task, completed=done, text=text, last_s=event.get("wall_s"), since_s=bar.get_time())
            late = time.monotonic() - told_s > SILENCE_S
            if lines and (late or "eval_loss" in event or done % max(1, steps // 10) == 0 or done == steps):
                told_s = time.monotonic()
                print(f"step {done}/{steps}  {text}", flush=True)

        yield on_event
