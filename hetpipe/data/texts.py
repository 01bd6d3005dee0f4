"""Plain text as data: a document a file, or a line of JSON lines; cut into sequences of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from cost_model.errors import InputError
from hetpipe.data.data_file import read_text_file
from hetpipe.data.dataset import ENDS_FILE, TOKENS_FILE, Dataset, load_ends, load_tokens, write_tokens
from hetpipe.data.json_lines import first_line, has_rows, json_lines, shown
from hetpipe.data.kind import Learner, Reading, Samples
from hetpipe.data.packed_samples import PackedSamples
from hetpipe.data.special_tokens import SpecialTokens
from hetpipe.data.vocabulary import texts_sha256
from hetpipe.models.tasks import Task

_KEY = "text"


def read_corpus(paths: Sequence[Path] = ()) -> list[str]:
    """Return the documents: one per UTF-8 text file, or CPython's language reference if no path is given.

    Of a .jsonl file one per line, its "text".

    Raises: InputError if a path is missing, not a file, empty or not UTF-8, or a line has no text.
    """
    if not paths:
        return [topics[name] for name in sorted(topics)]
    return [document for path in paths for document in _documents(Path(path))]


def _documents(path: Path) -> list[str]:
    if not has_rows(path):
        return [read_text_file(path)]
    found = []
    for place, data in json_lines(path, f'"{_KEY}"'):
        if _KEY not in data:
            raise InputError(f"{place}: has {shown(sorted(data))}, and the first line a text; give one kind")
        if not isinstance(data[_KEY], str) or not data[_KEY].strip():
            raise InputError(f'{place}: "{_KEY}" is {shown(data[_KEY])}; give a text')
        found.append(data[_KEY])
    return found


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents."""

    documents: list[str]

    @property
    def sha256(self) -> str:
        """Return the hash of the documents."""
        return texts_sha256(self.documents)

    @property
    def words(self) -> Sequence[str]:
        """Return the documents."""
        return self.documents

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write their tokens."""
        write_tokens(place, self.documents, reading.vocabulary)
        return []


class TextKind:
    """The `hetpipe.data.kind.DataKind` of documents, and of the reference manual that comes with Python."""

    name = "text"
    form = f'text (or JSON lines with "{_KEY}")'
    tasks: tuple[Task, ...] = (Task.MASKED_LM, Task.CAUSAL_LM)
    files: tuple[str, ...] = (TOKENS_FILE, ENDS_FILE)
    is_brought = True
    packs = True

    def holds(self, path: Path) -> bool:
        """Return whether it has no rows, or the first has a text."""
        return not has_rows(path) or _KEY in first_line(path)

    def read(self, paths: Sequence[Path], model: Learner) -> Texts:
        """Read files, or the reference manual."""
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
            special=SpecialTokens.of(reading.vocabulary),
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
        length, reading.seed, SpecialTokens.of(reading.vocabulary).separator,
        "texts and pieces of them" if cut else "texts", (said,) if cut else (),
    )  # fmt: skip


TEXTS = TextKind()
