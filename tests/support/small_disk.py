"""A disk of a few bytes, mounted in memory, for tests of what happens where one is full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(disk: Path, options: str) -> Iterator[None]:
    """Mount a disk with these options of tmpfs at an empty folder; the test is left out where nobody may."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, f"hetpipe-test-{os.getpid()}", disk], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
