"""Transcripts in pages: commands with what they print, run again and compared, or stored anew.

    python tests/support/transcripts.py docs/walk.md

runs all commands of a page in a new folder, with the profile of the notebooks in place of a measured one,
and stores what they print; better on an idle computer. Files that the page shows with a name are there.
"""

import contextlib
import functools
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from rich.console import Console

from hetpipe import cli
from hetpipe.reporting import tables

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r'^```\w+ title="([\w.-]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
FIGURE = re.compile(f"{NUMBER.pattern}%?")
MEASURED = ("profile", "init", "check", "run")
"""Verbs whose figures are of the host and the hour."""
SAID = ("warning: ", "note: ", "error: ")
"""What lines on stderr begin with, beside those of progress."""
MARKS = re.compile(
    r"host (?:overloaded|busy): .*?(?:measured times|at most) |between steps: .*?within steps "
    r"|standard error of the median: .*?(?=bert-tiny: )"
)
"""What is said of a busy host, or of times that are known well or not."""
UNITS = re.compile(r"(?<=[# ])(?:ms|us|s)\b")
STEPS = re.compile(r"(?:step #/# loss # # samples/s bubble #% ?)+")
BOUND = re.compile(r"can be faster than \S+ \S+; this one is at most \S+")
"""A proof gets less or more time, and then it is less or more close."""
CLOSE = 0.01
"""Relative, of shares absolute: how far other computed figures may lie apart."""
TERMINAL = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "TERM": "dumb"}
"""What makes rich wrap sentences as for a terminal, and draw no bars."""
PROFILE = ROOT / "notebooks" / "data" / "bert-tiny-profile.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A command of a page, in one line without `$ `, and what is shown below it."""

    command: str
    shown: str

    @property
    def verb(self) -> str:
        """Return the verb of hetpipe; "" of another program."""
        program, verb, *_ = *self.command.split(), ""
        return verb if program == "hetpipe" else ""

    @property
    def is_measured(self) -> bool:
        """Return whether its figures differ from one time to the next, as those of a program in Python."""
        return self.verb in MEASURED or self.command.startswith("python ")


def entries(page: str) -> list[Entry]:
    """Return the commands of a page, in their order."""
    return [_entry(match[1]) for match in BLOCK.finditer(page)]


def _entry(block: str) -> Entry:
    begun, shown = re.match(r"\$ ((?:[^\n]*\\\n)*[^\n]*\n)(.*)", block, re.DOTALL).groups()  # type: ignore[union-attr]
    return Entry(re.sub(r" *\\\n *", " ", begun).strip(), shown)


@contextlib.contextmanager
def newcomers_folder(folder: Path, page: str) -> Iterator[None]:
    """Go to a folder with the files that a page shows, with an empty cache and a terminal of 80 columns."""
    before, variables = Path.cwd(), dict(os.environ)
    os.environ |= {"COLUMNS": "80", "XDG_CACHE_HOME": str(folder / ".cache"), "HF_HUB_OFFLINE": "1"}
    os.chdir(folder)
    for name, text in FILE.findall(page):
        Path(name).write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


def printed(entry: Entry) -> str:
    """Return what a command prints; of one that is refused, what it says then."""
    out, err = _of_hetpipe(entry) if entry.verb else _of_shell(entry.command)
    said = [line for line in err.splitlines() if line.startswith(SAID) and entry.verb != "profile"]
    return "".join(f"{line.rstrip()}\n" for line in (*said, *out.splitlines()))


def _of_hetpipe(entry: Entry) -> tuple[str, str]:
    words = shlex.split(entry.command)[1:]
    out, err = io.StringIO(), io.StringIO()
    terminal = functools.partial(Console, width=80, force_terminal=True, color_system=None, highlight=False)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(tables, "console", lambda file=None: terminal(file=file or sys.stdout)),
    ):
        code = cli.main(words)
    if entry.verb == "profile" and code == 0:
        shutil.copyfile(PROFILE, words[words.index("-o") + 1])
    return ("" if code else out.getvalue()), err.getvalue()


def _of_shell(command: str) -> tuple[str, str]:
    """Run another program than hetpipe; `python` is this one, and finds hetpipe where this one does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {
        **os.environ,
        **TERMINAL,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(["bash", "-c", command], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def differences(entry: Entry, now: str) -> list[str]:
    """Return in what a text differs from what a page shows: words, and figures that are computed."""
    shown = [" ".join(text.replace("─", "").split()) + " " for text in (entry.shown, now)]
    texts = [MARKS.sub("", text) for text in shown]
    words = [NUMBER.sub("#", text) for text in texts]
    if entry.is_measured:
        words = [STEPS.sub("steps ", UNITS.sub("#", text)) for text in words]
    if words[0] != words[1]:
        return [f"shown: {words[0]}", f"now: {words[1]}"]
    figures = zip(*(FIGURE.findall(BOUND.sub("", text)) for text in texts), strict=True)
    return [] if entry.is_measured else [f"{one}, now {two}" for one, two in figures if not _close(one, two)]


def _close(one: str, two: str) -> bool:
    values = [float(text.replace(",", "").removesuffix("%")) for text in (one, two)]
    return math.isclose(*values, rel_tol=CLOSE, abs_tol=100 * CLOSE if one.endswith("%") else 0.0)


def store(path: Path) -> None:
    """Run the commands of a page and store it with what they print."""
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place, newcomers_folder(Path(place), page):

        def anew(match: re.Match[str]) -> str:
            entry = _entry(match[1])
            begun = match[1][: len(match[1]) - len(entry.shown)]
            return f"```console\n{begun}{printed(entry)}```"

        page = BLOCK.sub(anew, page)
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        store(Path(given).resolve())
