"""What launchers of a run leave on the host: folders, and ports that somebody listens on."""

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from processes import running_in_session

from hetpipe.runtime.scratch import MADE_BEFORE_S

SHARED_MEMORY = Path("/dev/shm")
START = """
from hetpipe.runtime.scratch import scratch_folder
with scratch_folder("next"), scratch_folder("next", in_memory=True):
    pass
"""
_LISTENS = "0A"
_COMPILED = "torchinductor_"
"""What torch compiled, which it keeps there for all programs of a user."""


def folders_of(launchers: Collection[int], temporary: Path) -> set[Path]:
    """Return what is in a run's own temporary folder, and what its launchers have in shared memory."""
    own = {path for path in temporary.iterdir() if not path.name.startswith(_COMPILED)}
    return in_shared_memory(launchers) | own


def in_shared_memory(launchers: Collection[int]) -> set[Path]:
    """Return what launchers have there."""
    shared = SHARED_MEMORY.glob("hetpipe-*") if SHARED_MEMORY.is_dir() else ()
    return {path for path in shared if any(f"-{pid}-" in path.name for pid in launchers)}


def folders_after_next_start(launchers: Collection[int], temporary: Path) -> set[Path]:
    """Return what is still there of a run that is over, after a start later than a minute after its end.

    Nobody waits for the minute: the folders are made to look as old.
    """
    for path in folders_of(launchers, temporary):
        before_s = path.lstat().st_mtime - 2 * MADE_BEFORE_S
        os.utime(path, (before_s, before_s), follow_symlinks=False)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", START], env=environment, check=True)
    return folders_of(launchers, temporary)


def listening() -> dict[int, int]:
    """Return the sockets of this host that listen: ports by inode, which no later socket has soon."""
    return {inode: port for table in ("tcp", "tcp6") for inode, port in _rows(Path("/proc/net") / table)}


def _rows(table: Path) -> Iterator[tuple[int, int]]:
    for line in table.read_text().splitlines()[1:] if table.exists() else ():
        words = line.split()
        if words[3] == _LISTENS:
            yield int(words[9]), int(words[1].rpartition(":")[2], 16)


def listening_in(session: int) -> dict[int, int]:
    """Return the sockets that processes of a session listen on: ports by inode."""
    inodes = set()
    for pid in running_in_session(session):
        try:
            links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:  # it has ended
            continue
        inodes |= {int(link[len("socket:[") : -1]) for link in links if link.startswith("socket:[")}
    return {inode: port for inode, port in listening().items() if inode in inodes}
