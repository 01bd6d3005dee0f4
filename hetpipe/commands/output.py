"""How the verbs print: JSON, warnings, notes and progress; rich is loaded when it is needed."""

import json
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_model.errors import InputError
from hetpipe.program.instructions import Schedule

if TYPE_CHECKING:
    from cost_model.cluster import Cluster
    from cost_model.profile import ModelProfile
    from hetpipe.simulation.schedule_selection import Choice

_HEAD_BYTES = 2**16
LONG_S = 5.0
"""What lasts longer is told of, where there is no terminal to show it."""
EMULATED_SHARE = 0.75
"""Of the host: memory that emulated devices get together, and cores that their speeds may add up to."""


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object, the whole of stdout; what is not a finite number becomes null."""
    sys.stdout.write(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def warn(message: str) -> None:
    """Write one unwrapped line on stderr."""
    sys.stderr.write(f"warning: {message}\n")


def note(sentences: Iterable[str]) -> None:
    """Write unwrapped lines on stderr, for what --json has no place for."""
    sys.stderr.writelines(f"note: {sentence}\n" for sentence in sentences)


def warn_if_too_fast(speeds: Iterable[float]) -> None:
    """Warn if this host has too few cores for emulated devices of these speeds."""
    total, cores = sum(speeds), os.cpu_count() or 1
    if total > EMULATED_SHARE * cores:
        warn(
            f"speeds add up to {total:g}, more than {EMULATED_SHARE:g} x {cores} cores; the host "
            "cannot keep up, and measured times will be too long: lower the speeds"
        )


def check_output(path: Path | None, kind: str) -> None:
    """Check, before anything slow is done, that a file can be written that the user asked for.

    kind: what its "format" begins with, or a word of a file that has none: an older one of it is replaced.

    Raises: InputError if there is no folder for it, or another file in its place, which would be lost.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path}: cannot be written (Is a directory); give the name of a file")
    if not path.parent.is_dir():
        raise InputError(
            f"{path}: cannot be written (no such folder as {path.parent}); make it, or give another"
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written (no file can be made in {path.parent}: {error.strerror}); give "
            "another folder"
        ) from None
    if not path.exists():
        return
    if not path.is_file():
        raise InputError(f"{path}: cannot be written (it is no file); give the name of one")
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); give another name") from None
    if head.strip() and kind.encode() not in head:
        raise InputError(f"{path}: exists, and is no {kind} file, which would be replaced; give another name")


def write_output(path: Path, text: str) -> None:
    """Write a file that the user asked for; where its name is a link, what that leads to.

    Raises: InputError if it cannot be written.
    """
    from cost_model.strict_files import write_atomically

    try:
        write_atomically(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


@contextmanager
def status(what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None] | None]:
    """Give a function that shows on a terminal what is being done; None if there is no terminal.

    There one line says what lasts longer than some seconds, unless that is to be quiet.
    """
    with statuses(quiet=quiet) as tell:
        tell(what)
        yield tell if _on_terminal() else None


@contextmanager
def statuses(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Give a function that says what is being done, one thing after the other: on a terminal, at once.

    Elsewhere in lines, unless that is to be quiet: what is being done after some seconds, and all that
    follows, however soon each is done.
    """
    if _on_terminal():
        from hetpipe.reporting.tables import console

        with console(sys.stderr).status("") as shown:
            yield lambda text: shown.update(text)
        return
    latest, is_late, one_at_a_time = "", False, threading.Lock()

    def begin_lines() -> None:
        nonlocal is_late
        with one_at_a_time:
            is_late = True
            sys.stderr.write(f"{latest} ...\n" if latest else "")

    def tell(text: str) -> None:
        nonlocal latest
        with one_at_a_time:
            latest = text
            if is_late:
                sys.stderr.write(f"{latest} ...\n")

    timer = threading.Timer(LONG_S, begin_lines)
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield tell
    finally:
        timer.cancel()


def _on_terminal() -> bool:
    """Return whether what is being done is seen at once: where it is written, and the answer after it."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def choice_sentences(choice: "Choice", schedule: Schedule | None) -> list[str]:
    """Name the schedule taken, where one was asked for or there was a choice."""
    return [str(choice)] if schedule is not None or choice.asked is Schedule.AUTO else []


def choice_json(choice: "Choice") -> dict[str, Any]:
    """Return what JSON output says of the schedule taken."""
    return {"schedule_choice": choice.to_json()}


def estimates_of(profile: "ModelProfile", cluster: "Cluster") -> list[str]:
    """Name the kinds of a cluster whose times are estimated."""
    from hetpipe.reporting.tables import estimate_sentences

    return estimate_sentences(profile, (device.kind for device in cluster.devices))
