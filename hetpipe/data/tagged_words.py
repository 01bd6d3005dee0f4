"""Words with a tag each, for token classification: lines of JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding

from cost_model.errors import InputError
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.file_rows import FileRows
from hetpipe.data.json_lines import first_line, json_lines, shown
from hetpipe.data.kind import Learner, Reading
from hetpipe.data.label_names import label_numbers, model_labels, number_of
from hetpipe.data.padded_texts import FILES, PaddedTexts, write_padded
from hetpipe.data.texts import read_corpus
from hetpipe.data.vocabulary import texts_sha256
from hetpipe.models.tasks import Task

_WORDS, _TAGS = "tokens", "tags"
_FORM = f'"{_WORDS}" and "{_TAGS}", lists of one length'

TaggedWords = tuple[tuple[str, ...], tuple[int, ...], str]
"""Words, the number of the tag of each, and the place of the line, for errors."""


@dataclass(frozen=True, slots=True)
class TaggedTexts:
    """Texts as words with a tag each, that were read and checked; sha256: of words and tags."""

    rows: FileRows[TaggedWords]
    sha256: str

    @classmethod
    def of(cls, rows: FileRows[TaggedWords]) -> "TaggedTexts":
        """Read rows from the first to the last.

        Raises: InputError naming the line that is none.
        """
        with rows.read_once("reading the words"):
            parts = (part for words, tags, _ in rows for part in (*words, *map(str, tags), "\n"))
            return cls(rows, texts_sha256(parts))

    @property
    def words(self) -> Iterator[str]:
        """Yield the words, each by itself, as they are split into tokens."""
        with self.rows.read_once("training a vocabulary on the words"):
            yield from (word for words, _, _ in self.rows for word in words)

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write their tokens; the first of a word has its tag, what follows in it none.

        Raises: InputError if a word gives no token, so that its tag could not be learned.
        """

        def labels(row: TaggedWords, encoding: Encoding) -> list[int]:
            words, tags, where = row
            found = []
            # words whose first token was there, or was cut off
            seen = _num_begun_before(encoding, len(tags)) if reading.cuts_left else 0
            for word in encoding.word_ids:
                if word is None or word < seen:
                    found.append(IGNORE_LABEL)
                    continue
                if word > seen:
                    break
                found.append(tags[word])
                seen += 1
            ends_there = reading.cuts_left or not encoding.overflowing
            if len(found) < len(encoding.ids) or (ends_there and seen < len(tags)):
                raise InputError(
                    f"{where}: {shown(words[seen])} gives no token of this "
                    "vocabulary, so its tag cannot be learned; take both out"
                )
            return found

        texts = ((list(row[0]), row) for row in self.rows)
        with self.rows.read_once("splitting the words into tokens"):
            return write_padded(place, reading, texts, labels, is_pretokenized=True)


def _num_begun_before(encoding: Encoding, num_words: int) -> int:
    """Return how many words have their first token in what is cut off before an encoding."""
    before = {word for part in encoding.overflowing for word in part.word_ids}
    if not before:
        return 0
    return next((word for word in encoding.word_ids if word is not None and word not in before), num_words)


class TaggedWordKind:
    """The `hetpipe.data.kind.DataKind` of words with a tag each."""

    name = "tagged words"
    form = f"JSON lines with {_FORM}"
    tasks: tuple[Task, ...] = (Task.TOKEN_CLASSIFICATION,)
    files: tuple[str, ...] = FILES
    is_brought = False
    packs = False
    fills = True
    is_held = False

    def holds(self, path: Path) -> bool:
        """Return whether the first line has words and tags."""
        return {_WORDS, _TAGS} <= first_line(path).keys()

    def read(self, paths: Sequence[Path], model: Learner) -> TaggedTexts:
        """Read files; of none words with tags without sense, to measure with."""
        names = model_labels(model)
        numbers = label_numbers(names)

        def rows() -> Iterator[TaggedWords]:
            for text in () if paths else read_corpus():
                words = tuple(text.split())
                yield words, tuple(len(word) % len(names) for word in words), ""
            for path in paths:
                yield from (_row(place, data, numbers) for place, data in json_lines(path, _FORM))

        return TaggedTexts.of(FileRows.of(paths, rows))

    def load(self, place: Path, reading: Reading) -> PaddedTexts:
        """Return the texts as samples."""
        return PaddedTexts.load(place, reading)


def _row(place: str, data: dict[str, object], numbers: Mapping[str, int]) -> TaggedWords:
    words, tags = data.get(_WORDS), data.get(_TAGS)
    if not isinstance(words, list) or not isinstance(tags, list):
        raise InputError(f"{place}: has {shown(sorted(data))}; give objects with {_FORM}")
    if len(words) != len(tags) or not words:
        raise InputError(f"{place}: has {len(words)} words and {len(tags)} tags; give a tag for each word")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InputError(f"{place}: {shown(word)} is no word; give texts, or take it out with its tag")
    return tuple(words), tuple(number_of(tag, numbers, place) for tag in tags), place


TAGGED_WORDS = TaggedWordKind()
