"""Whether files are those that were read: their sizes, inodes and times."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_model.errors import InputError

MOST_HELD_BYTES = 1 << 24
"""Of files whose content is held; larger ones are read anew each time it is asked for."""

FileState = tuple[str, int, int, int, int]
"""Place, inode, bytes, and when content and inode changed, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class FileStates:
    """Files as they were."""

    states: tuple[FileState, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "FileStates":
        """Return files as they are.

        Raises: InputError naming one that is missing.
        """
        return cls(tuple(map(_state_of, paths)))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(state[2] for state in self.states)

    @property
    def newest_s(self) -> float:
        """Return when one of them was changed last, in seconds as `time.time` has them."""
        return max(time_ns for state in self.states for time_ns in state[3:]) / 1e9

    def check_unchanged(self) -> None:
        """Check that the files are as they were.

        Raises: InputError naming one that is not.
        """
        for state in self.states:
            if _state_of(path := Path(state[0])) != state:
                raise InputError(f"data file {path} was changed while it was read; begin again")


def is_long(paths: Sequence[Path]) -> bool:
    """Return whether files are too large to hold; those that are missing or pipes are not."""
    return sum(path.stat().st_size for path in paths if path.is_file()) > MOST_HELD_BYTES


def _state_of(path: Path) -> FileState:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise InputError(f"data file {path} does not exist; give the path of a file") from None
    except OSError as error:
        raise InputError(f"data file {path} cannot be read ({error.strerror}); check it") from None
    return str(path.resolve()), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
