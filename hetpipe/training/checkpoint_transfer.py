"""The layers of a checkpoint that a member lacks, on their way from the leader's disk to its own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.checkpoint import MANIFEST_FILE, LayerFile, Manifest, file_damage, read_manifest
from partition.plan import Plan

PIECE_BYTES = 2**24
_PREFIX = ".received-"


def needed_files(
    manifest: Manifest, plan: Plan, profile: ModelProfile, devices: list[str]
) -> tuple[LayerFile, ...]:
    """Return the files that the ranks of some devices read: their layers', and those they are tied to."""
    layers = {layer for name in devices for layer in plan.layers_of(name)}
    names = [layer.name for layer in profile.layers]
    tied = {profile.layers[layer].tied_to for layer in layers} - {None}
    layers |= {names.index(name) for name in tied if name is not None}
    return tuple(manifest.layers[layer] for layer in sorted(layers))


class Received:
    """The checkpoint that a member goes on from: its own copy, or what it is sent of the leader's.

    lacks: names of files that are to be sent.
    """

    def __init__(self, path: Path, files: tuple[LayerFile, ...]) -> None:
        """Take a folder with the manifest, in which some files are to be."""
        self.path, self._files = path, files
        self.lacks = [file.file for file in files if not (path / file.file).exists()]

    def take(self, name: str, blob: bytes) -> None:
        """Take the next piece of a file that is lacking.

        Raises: InputError for another file, or if it cannot be written.
        """
        if name not in self.lacks:
            raise InputError(f"the leader sent {name!r}, which was not asked for")
        try:
            with open(self.path / name, "ab") as file:
                file.write(blob)
        except OSError as error:
            raise InputError(f"{self.path / name}: cannot be written ({error.strerror}); make room") from None

    def check(self) -> None:
        """Check all files by their hashes.

        Raises: InputError naming one that is damaged.
        """
        for file in self._files:
            if damage := file_damage(self.path, file):
                raise InputError(f"{damage}; start again")


@contextmanager
def received(
    folder: RunFolder, name: str, text: str, files_of: Callable[[Manifest], tuple[LayerFile, ...]]
) -> Iterator[Received]:
    """Give what a member goes on from; what it is sent is removed in the end.

    name: of the checkpoint's folder. text: of the leader's manifest. files_of: those that are read here.

    Raises: InputError for a manifest that is none.
    """
    for left_over in folder.path.glob(f"{_PREFIX}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder.path) as made:
        path = Path(made) / Path(name).name
        path.mkdir()
        (path / MANIFEST_FILE).write_text(text, encoding="utf-8")
        files = files_of(read_manifest(path))
        own = folder.checkpoints / path.name
        if _holds(own, text, files):
            path = own
        yield Received(path, files)


def _holds(own: Path, text: str, files: tuple[LayerFile, ...]) -> bool:
    """Return whether a folder has the same manifest, and files of the right sizes."""
    try:
        same = (own / MANIFEST_FILE).read_text(encoding="utf-8") == text
        return same and all((own / file.file).stat().st_size == file.bytes for file in files)
    except (OSError, UnicodeDecodeError):
        return False


def pieces(path: Path) -> Iterator[bytes]:
    """Yield a file piece by piece; one that is empty is one piece.

    Raises: InputError if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            yield file.read(PIECE_BYTES)
            while piece := file.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
