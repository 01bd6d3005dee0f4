"""What the cache holds of texts: a folder of tokens for each, what became none, and hashes of files."""

import fcntl
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.runs.cache import texts_folder

KEPT_FILE, KNOWN_SUFFIX, UNFINISHED = "text.json", ".known.json", ".unfinished-"


@dataclass(frozen=True, slots=True)
class KeptText:
    """The tokens of texts in the cache. files: of the texts, none where they were never complete.

    problem: why they cannot be read, "" where they can; num_bytes is 0 then.
    """

    path: Path
    files: tuple[str, ...]
    num_bytes: int
    age_s: float
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as `hetpipe cache --json` gives it."""
        return {
            "path": str(self.path),
            "files": list(self.files),
            "bytes": self.num_bytes,
            "age_s": self.age_s,
        }

    def remove(self) -> str:
        """Remove it, unless a run is writing it now; return why it is kept, "" where it is gone.

        Run folders keep what they have of it.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:  # another has removed it
            return ""
        except OSError as error:
            return f"it cannot be read ({error.strerror})"
        try:
            with suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return "a run is writing it"
            shutil.rmtree(self.path, ignore_errors=True)
        finally:
            os.close(descriptor)
        return "it cannot be removed (who may write there?)" if self.path.exists() else ""


def kept_texts() -> tuple[KeptText, ...]:
    """Return what is kept, what was taken last first."""
    folder = texts_folder()
    places = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    found = [text for text in map(_read, places) if text is not None]
    return tuple(sorted(found, key=lambda text: text.age_s))


def kept_hashes() -> list[Path]:
    """Return where hashes of files are kept: without them each is read again."""
    return sorted(texts_folder().glob(f"*{KNOWN_SUFFIX}"))


def _read(path: Path) -> KeptText | None:
    """Return what a folder holds; None where it is gone meanwhile."""
    try:
        return _whole(path)
    except OSError as error:
        if not path.exists():
            return None
        return KeptText(path, (), 0, 0.0, f"it cannot be read ({error.strerror})")


def _whole(path: Path) -> KeptText:
    named = path / KEPT_FILE
    try:
        files = tuple(map(str, json.loads(named.read_text(encoding="utf-8"))["files"]))
        taken_s = named.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        files, taken_s = (), path.stat().st_mtime
    return KeptText(
        path, files, sum(each.stat().st_size for each in path.iterdir()), max(0.0, time.time() - taken_s)
    )
