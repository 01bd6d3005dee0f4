"""Plain text as data: a document a file, or a line of JSON lines; cut into sequences of tokens."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from cost_model.errors import InputError
from cost_model.units import format_bytes
from hetpipe.data.data_file import read_text_file
from hetpipe.data.dataset import (
    ENDS_FILE,
    TOKENS_FILE,
    Dataset,
    load_ends,
    load_tokens,
    write_tokens,
    written_out_in,
)
from hetpipe.data.file_states import FileStates, is_long
from hetpipe.data.json_lines import first_line, has_rows, json_lines, shown
from hetpipe.data.kept_tokens import keep_sha256, kept_tokens, known_sha256, refused_without_room, take
from hetpipe.data.kind import Learner, Reading, Samples
from hetpipe.data.listened import work
from hetpipe.data.long_texts import Document, LongText
from hetpipe.data.packed_samples import PackedSamples
from hetpipe.data.vocabulary import texts_sha256
from hetpipe.models.tasks import Task
from hetpipe.runs.cache import texts_folder

_KEY = "text"


def read_corpus(paths: Sequence[Path] = ()) -> list[str]:
    """Return the documents: one per UTF-8 text file, or CPython's language reference if no path is given.

    Of a .jsonl file one per line, its "text".

    Raises: InputError if a path is missing, not a file, empty or not UTF-8, or a line has no text.
    """
    if not paths:
        return [topics[name] for name in sorted(topics)]
    return [
        document
        for path in map(Path, paths)
        for document in (_rows(path) if has_rows(path) else (read_text_file(path),))
    ]


def _rows(path: Path) -> Iterator[str]:
    for place, data in json_lines(path, f'"{_KEY}"'):
        if _KEY not in data:
            raise InputError(f"{place}: has {shown(sorted(data))}, and the first line a text; give one kind")
        if not isinstance(data[_KEY], str) or not data[_KEY].strip():
            raise InputError(f'{place}: "{_KEY}" is {shown(data[_KEY])}; give a text')
        yield data[_KEY]


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents, held."""

    documents: list[str]

    @property
    def sha256(self) -> str:
        """Return the hash of the documents."""
        return texts_sha256(self.documents)

    @property
    def words(self) -> Iterable[Document]:
        """Return the documents."""
        return self.documents

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write their tokens."""
        write_tokens(place, self.documents, reading.vocabulary, reading.special.separator)
        return written_out_in(place)


@dataclass(frozen=True, slots=True)
class LongTexts:
    """Documents of files that are read anew whenever they are asked for. files: as they were checked."""

    paths: tuple[Path, ...]
    files: FileStates
    sha256: str

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "LongTexts":
        """Check files from end to end, or know that they were.

        Raises: InputError as `read_corpus`.
        """
        begun_s, files = time.time(), FileStates.of(paths)
        sha256 = known_sha256(files)
        if sha256 is None:
            with work("reading the text", files.num_bytes):
                sha256 = texts_sha256(_documents(paths))
            files.check_unchanged()
            keep_sha256(files, sha256, begun_s)
        return cls(tuple(paths), files, sha256)

    @property
    def words(self) -> Iterable[Document]:
        """Yield the documents."""
        with work("training a vocabulary on the text", self.files.num_bytes):
            yield from _documents(self.paths)

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write their tokens, by way of the cache where there is one."""

        def split(folder: Path) -> None:
            with work("splitting the text into tokens", self.files.num_bytes):
                write_tokens(folder, _documents(self.paths), reading.vocabulary, reading.special.separator)
            self.files.check_unchanged()

        if not _is_writable(texts_folder()):
            with refused_without_room(place):
                split(place)
            return written_out_in(place)
        with refused_without_room(texts_folder()):
            kept, was_there = kept_tokens(
                self.sha256, self.paths, reading.vocabulary, reading.special.separator, split
            )
        with refused_without_room(place):
            take(kept, place, TextKind.files)
        count = len(load_tokens(place, reading.vocabulary))
        names = self.paths[0].name if len(self.paths) == 1 else f"{len(self.paths):,} files"
        return [
            f"{count:,} tokens of {names}, {format_bytes(self.files.num_bytes)}, "
            f"{'taken from' if was_there else 'kept in'} the cache (hetpipe cache)",
            *written_out_in(place),
        ]


def _documents(paths: Sequence[Path]) -> Iterator[Document]:
    for path in paths:
        yield from _rows(path) if has_rows(path) else (LongText(path),)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


class TextKind:
    """The `hetpipe.data.kind.DataKind` of documents, and of the reference manual that comes with Python."""

    name = "text"
    form = f'text (or JSON lines with "{_KEY}")'
    tasks: tuple[Task, ...] = (Task.MASKED_LM, Task.CAUSAL_LM)
    files: tuple[str, ...] = (TOKENS_FILE, ENDS_FILE)
    is_brought = True
    packs = True
    fills = False
    is_held = False

    def holds(self, path: Path) -> bool:
        """Return whether it has no rows, or the first has a text; JSON as a whole is no text."""
        return path.suffix.lower() != ".json" and (not has_rows(path) or _KEY in first_line(path))

    def read(self, paths: Sequence[Path], model: Learner) -> Texts | LongTexts:
        """Read files, or the reference manual; long files are checked and not held."""
        if is_long(paths):
            return LongTexts.read(paths)
        return Texts(read_corpus(paths))

    def load(self, place: Path, reading: Reading) -> Samples:
        """Return the sequences of the tokens, or documents packed into rows."""
        if reading.inputs.packed:
            return _packed_documents(place, reading)
        return Dataset(
            tokens=load_tokens(place, reading.vocabulary),
            task=reading.model.task,
            sequence_length=reading.sequence_length,
            vocabulary_size=reading.vocabulary.get_vocab_size(),
            seed=reading.seed,
            special=reading.special,
        )


def _packed_documents(place: Path, reading: Reading) -> PackedSamples:
    """Return documents, several a row; those that are longer than a row in pieces as long as it."""
    tokens, length = load_tokens(place, reading.vocabulary), reading.sequence_length
    ends = load_ends(place, len(tokens))
    begins = np.concatenate(([0], ends[:-1]))
    counts = -(-(ends - begins) // length)
    each = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + each * length
    lengths = np.minimum(np.repeat(ends, counts) - starts, length)
    learns = lengths > 1  # nothing predicts the first token
    if not learns.any():
        raise InputError(f"no text has two tokens within {length}; give a larger --sequence-length")
    cut = int((counts > 1).sum())
    said = f"{cut:,} of {len(ends):,} texts are longer than {length} tokens and in pieces" if cut else ""
    return PackedSamples(
        tokens, starts[learns], lengths[learns], None, lengths[learns] - 1,
        length, reading.seed, reading.special.separator,
        "texts and pieces of them" if cut else "texts", (said,) if cut else (),
    )  # fmt: skip


TEXTS = TextKind()
