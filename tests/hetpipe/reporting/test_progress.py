"""On a terminal something is seen at once, and within long steps; in a pipe there is a line for a phase."""

import io
import re
import sys
import threading
import time

import pytest
from rich.console import Console

from hetpipe.commands import output
from hetpipe.reporting import progress, tables
from hetpipe.reporting.progress import bar_if_long, progress_bar, step_bar

STEP = {
    "event": "step", "step": 9_999, "loss": 1.23456, "samples_per_s": 1234.5, "bubble": 0.4, "wall_s": 9.0
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stdout and stderr one terminal of 80 columns, in the test: pytest sets its own after fixtures."""
    written = Terminal()
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(tables, "console", lambda file=None: console_of(written))
    return written


def console_of(file: io.StringIO) -> Console:
    settings = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    return Console(file=file, width=80, highlight=False, force_terminal=True, _environ=settings)


def lines_of(screen: Terminal) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    return [line.rstrip() for line in plain.replace("\r", "\n").splitlines() if line.strip()]


def test_a_bar_says_at_once_what_is_done_and_no_time_that_nobody_knows(monkeypatch: pytest.MonkeyPatch):
    screen = screen_of(monkeypatch)
    with progress_bar("measuring bert-tiny"):
        shown = screen.getvalue()
    assert "loading torch" in shown and "-:--:--" not in shown


def test_a_bar_of_training_is_there_before_the_first_step_and_fits(monkeypatch: pytest.MonkeyPatch):
    screen = screen_of(monkeypatch)
    with step_bar(10_000, 0, quiet=False) as on_event:
        assert "starting the processes" in screen.getvalue()
        on_event(STEP)
    last = next(line for line in reversed(lines_of(screen)) if "9999/10000" in line)
    assert "samples/s" in last and "bubble 40%" in last  # in one line of 80 columns
    assert max(map(len, lines_of(screen))) <= 80


def test_a_bar_moves_within_a_step():
    column = progress._moving_bar()
    from rich.progress import Progress

    bar = Progress(column, console=Console(file=io.StringIO()))
    task = bar.add_task("", total=10, completed=3, last_s=8.0, since_s=bar.get_time() - 2.0)
    shown = column.render(bar.tasks[task])
    assert 3.25 <= shown.completed < 3.5
    bar.update(task, since_s=bar.get_time() - 1e6)
    assert column.render(bar.tasks[task]).completed == 3 + progress.MOST_WITHIN
    bar.update(task, last_s=None)
    assert column.render(bar.tasks[task]).completed == 3


def test_a_pipe_gets_a_line_for_each_phase(capsys: pytest.CaptureFixture[str]):
    with progress_bar("measuring bert-tiny") as report:
        for text in ("reading the text", "round 1", "round 2", "cpu: round 3", "known to 1.2 %"):
            report(0.5, text)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "measuring bert-tiny: reading the text\nmeasuring bert-tiny: known to 1.2 %\n")
    with progress_bar("measuring bert-tiny", quiet=True) as report:
        report(0.5, "reading the text")
    assert capsys.readouterr() == ("", "")


def test_a_pipe_is_told_of_what_lasts_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with output.status("planning"):
        pass
    monkeypatch.setattr(output, "LONG_S", 0.0)
    for quiet, told in ((False, "planning ...\n"), (True, "")):
        with output.status("planning", quiet=quiet):
            time.sleep(0.2)
        assert capsys.readouterr() == ("", told)


def test_all_that_follows_something_long_is_told_of_in_a_pipe_and_all_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Rows of `compare --what-if` had been silent where each was done within some seconds."""

    timers: list[threading.Timer] = []
    monkeypatch.setattr(
        threading.Timer, "start", lambda self: timers.append(self)
    )  # it is over when the test says so
    with output.statuses() as tell:
        tell("planning: today")
        tell("planning: one")
        timers.pop().function()
        tell("planning: two")
        tell("planning: all together")
    told = "planning: one ...\nplanning: two ...\nplanning: all together ...\n"
    assert capsys.readouterr() == ("", told)
    screen = screen_of(monkeypatch)
    with output.statuses() as tell:
        tell("planning: today")
    assert "planning: today" in screen.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a log, beside a terminal
    with output.statuses() as tell:
        tell("planning: today")
        timers.pop().function()
    assert sys.stderr.getvalue() == "planning: today ...\n"


def test_how_far_long_data_are_read_is_in_the_bar_of_training_and_in_one_that_comes_when_there_are(
    monkeypatch: pytest.MonkeyPatch,
):
    screen = screen_of(monkeypatch)
    for done, shown in ((0.25, "splitting the text into tokens: 25%"), (1.0, "starting the processes")):
        with step_bar(10, 0, quiet=False) as on_event:
            on_event({"event": "progress", "done": done, "what": "splitting the text into tokens"})
        assert shown in " ".join(" ".join(lines_of(screen)[-2:]).split())
    screen = screen_of(monkeypatch)
    with bar_if_long("data"):
        pass
    assert not screen.getvalue()
    with bar_if_long("data") as report:
        report(0.25, "reading the text")
    assert "reading the text" in screen.getvalue()


def test_what_is_too_long_for_a_line_goes_on_in_the_next(monkeypatch: pytest.MonkeyPatch):
    screen = screen_of(monkeypatch)
    with step_bar(2_000, 0, quiet=False) as on_event:
        on_event({**STEP, "eval_loss": 6.5, "eval_f1": 0.98, "eval_accuracy": 0.97, "best": True})
    text = " ".join(" ".join(lines_of(screen)).split())
    assert "held-out 6.5000, f1 98.00%, accuracy 97.00% (best)" in text and "…" not in text
    with progress_bar("measuring") as report:
        report(0.5, "again, since times varied: standard error of the median: worst 1.4 % (block0 forward)")
    lines = lines_of(screen)
    assert "worst 1.4 % (block0" in " ".join(" ".join(lines).split()) and "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_a_line_with_held_out_figures_fits_into_80_columns(capsys: pytest.CaptureFixture[str]):
    with step_bar(2_000, 1_999, quiet=False) as on_event:
        event = {
            **STEP,
            "step": 2_000,
            "eval_loss": 6.5,
            "eval_f1": 0.98,
            "eval_accuracy": 0.97,
            "best": True,
        }
        on_event(event)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("held-out 6.5000, f1 98.00%, accuracy 97.00% (best)") and len(line) <= 80
