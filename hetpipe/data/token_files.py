"""Files of tokens, mapped into memory and never read whole: flat ids, in `.bin` or `.npy`."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from cost_model.errors import InputError
from cost_model.strict_files import read_json, write_atomically
from hetpipe.data.dataset import Dataset
from hetpipe.data.kind import IntArray, Learner, Reading, Samples
from hetpipe.models.huggingface_folder import TOKENIZER_FILE
from hetpipe.models.tasks import Task

SUFFIXES = (".bin", ".npy")
LISTED_FILE, PLACES_FILE = "token-files.json", "token-places.json"
HASHED_BYTES, HASHED_PIECES = 1 << 20, 16
CHECKED_TOKENS = 1 << 20

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def open_tokens(path: Path, vocabulary_size: int) -> Tokens:
    """Map the tokens of a file.

    A `.npy` says what its numbers are; a `.bin` has ids of 2 bytes, little-endian, or 4 where the vocabulary
    has more than 65,536 entries.

    Raises: InputError if it cannot be read, or holds no such numbers.
    """
    name = f"data file {path}"
    width = np.dtype("<u2") if vocabulary_size <= 1 << 16 else np.dtype("<u4")
    try:
        if path.suffix == ".npy":
            found: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            found = np.memmap(path, width, mode="r")
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{name} cannot be mapped ({reason}); give flat ids: a .npy, or a .bin of {width.name} for "
            f"{vocabulary_size:,} entries"
        ) from None
    if found.ndim != 1 or found.dtype.kind not in "ui":
        raise InputError(
            f"{name} holds {found.dtype.name} of {found.ndim} dimensions; give integers of one dimension"
        )
    if len(found) == 0:
        raise InputError(f"{name} is empty; give a file with tokens")
    begun = found[:CHECKED_TOKENS]
    if path.suffix != ".npy" and len(begun) > 2 and begun[::2].any() and not begun[1::2].any():
        raise InputError(
            f"{name} has a 0 after each id of {width.itemsize} bytes, as where ids were written in more; "
            f"write {width.name} for {vocabulary_size:,} entries, or a .npy"
        )
    check_ids(begun, vocabulary_size, path)
    return found


def check_ids(ids: npt.NDArray[Any], vocabulary_size: int, path: Path) -> None:
    """Check that ids are of a vocabulary.

    Raises: InputError naming one that is not.
    """
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary_size):
        wrong = int(ids.max()) if int(ids.max()) >= vocabulary_size else int(ids.min())
        raise InputError(
            f"data file {path} holds the id {wrong:,}, and the vocabulary has {vocabulary_size:,} entries; "
            "give tokens of this model's tokenizer (a .bin has 2 bytes an id, 4 of more than 65,536 entries)"
        )


class JoinedTokens:
    """The tokens of files, one after the other, of which those asked for are read; owns the maps."""

    def __init__(self, paths: Sequence[Path], vocabulary_size: int) -> None:
        self._paths, self._size = paths, vocabulary_size
        self._parts = [open_tokens(path, vocabulary_size) for path in paths]
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: IntArray) -> IntArray:
        """Return the tokens at places, of any shape.

        Raises: InputError for ids that are none of the vocabulary.
        """
        files = np.searchsorted(self._ends, places, side="right")
        found = np.empty(places.shape, np.int64)
        for file in np.unique(files):
            here, part = files == file, self._parts[file]
            found[here] = part[places[here] - (self._ends[file] - len(part))]
            check_ids(found[here], self._size, self._paths[file])
        return found


def partial_sha256(path: Path) -> str:
    """Return a hash of a file's length, and of pieces of it, from the first to the last.

    Files up to 16 MiB are hashed whole; of longer ones so many bytes, however long they are.
    """
    found, size = hashlib.sha256(), path.stat().st_size
    found.update(b"%d\0" % size)
    last = max(0, size - HASHED_BYTES)
    with path.open("rb") as file:
        for start in sorted({last * index // (HASHED_PIECES - 1) for index in range(HASHED_PIECES)}):
            file.seek(start)
            found.update(file.read(HASHED_BYTES))
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """Files of tokens, which stay where they are. tokenizer: the file of the vocabulary of their ids."""

    paths: tuple[Path, ...]
    tokenizer: Path | None

    @property
    def sha256(self) -> str:
        """Return the hash of what is in the files, in their order."""
        return hashlib.sha256("".join(map(partial_sha256, self.paths)).encode()).hexdigest()

    @property
    def words(self) -> Sequence[str]:
        """Return no text: there is none in tokens."""
        return ()

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write where the files are.

        Raises: InputError for what is no file of tokens of this vocabulary.
        """
        tokens = JoinedTokens(self.paths, reading.vocabulary.get_vocab_size())
        write_atomically(place / PLACES_FILE, json.dumps([str(path) for path in self.paths]) + "\n")
        hashes = [{"bytes": path.stat().st_size, "sha256": partial_sha256(path)} for path in self.paths]
        write_atomically(place / LISTED_FILE, json.dumps(hashes) + "\n")
        return [f"{len(tokens):,} tokens of {len(self.paths)} files, mapped where they are"]


class TokenKind:
    """The `hetpipe.data.kind.DataKind` of files of tokens."""

    name = "tokens"
    form = "files of tokens (.bin, .npy)"
    tasks: tuple[Task, ...] = (Task.MASKED_LM, Task.CAUSAL_LM)
    files: tuple[str, ...] = (LISTED_FILE,)
    is_brought = False
    packs = False
    fills = False
    is_held = False

    def holds(self, path: Path) -> bool:
        """Return whether a file is called so."""
        return path.suffix in SUFFIXES

    def read(self, paths: Sequence[Path], model: Learner) -> TokenFiles:
        """Find the files, and what their ids mean.

        Raises: InputError if one is missing, or nothing says what ids mean.
        """
        for path in paths:
            if not path.is_file():
                raise InputError(f"data file {path} does not exist; give the path of a file")
        own = None if model.folder is None else model.folder.tokenizer
        beside = paths[0].parent / TOKENIZER_FILE
        if own is None and not beside.is_file():
            raise InputError(
                f"{model.name} brings no tokenizer, so nothing says what the ids of {paths[0].name} mean; "
                f"put the {TOKENIZER_FILE} that wrote them into {beside.parent}"
            )
        JoinedTokens(paths, _size_of(own or beside))
        return TokenFiles(tuple(paths), None if own else beside)

    def load(self, place: Path, reading: Reading) -> Samples:
        """Return the sequences of the files' tokens.

        Raises: InputError if files are not there any more, or are others.
        """
        paths = [Path(path) for path in read_json(place / PLACES_FILE)]
        vocabulary = reading.vocabulary
        tokens = JoinedTokens(paths, vocabulary.get_vocab_size())
        for path, listed in zip(paths, read_json(place / LISTED_FILE), strict=True):
            if path.stat().st_size != listed["bytes"]:
                raise InputError(f"data file {path} has changed since the run began; train into a new folder")
        return Dataset(
            tokens=tokens,
            task=reading.model.task,
            sequence_length=reading.sequence_length,
            vocabulary_size=vocabulary.get_vocab_size(),
            seed=reading.seed,
            special=reading.special,
        )


def _size_of(tokenizer: Path) -> int:
    try:
        return int(Tokenizer.from_file(str(tokenizer)).get_vocab_size())
    except Exception as error:  # NOTE: tokenizers raises bare Exception on a malformed file
        raise InputError(f"{tokenizer}: cannot be read ({error}); copy it again") from None


TOKEN_FILES = TokenKind()
