"""Plain text as data: a document a file, or a line of JSON lines; cut into sequences of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from cost_model.errors import InputError
from hetpipe.data.data_file import read_text_file
from hetpipe.data.dataset import TOKENS_FILE, Dataset, load_tokens, write_tokens
from hetpipe.data.json_lines import first_line, is_json_lines, json_lines, shown
from hetpipe.data.kind import Learner, Reading
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
    if not is_json_lines(path):
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
    files: tuple[str, ...] = (TOKENS_FILE,)
    is_brought = True

    def holds(self, path: Path) -> bool:
        """Return whether it is no JSON lines, or the first has a text."""
        return not is_json_lines(path) or _KEY in first_line(path)

    def read(self, paths: Sequence[Path], model: Learner) -> Texts:
        """Read files, or the reference manual."""
        return Texts(read_corpus(paths))

    def load(self, place: Path, reading: Reading) -> Dataset:
        """Return the sequences of the tokens."""
        return Dataset(
            tokens=load_tokens(place, reading.vocabulary),
            task=reading.model.task,
            sequence_length=reading.sequence_length,
            vocabulary_size=reading.vocabulary.get_vocab_size(),
            seed=reading.seed,
            special=SpecialTokens.of(reading.vocabulary),
        )


TEXTS = TextKind()
