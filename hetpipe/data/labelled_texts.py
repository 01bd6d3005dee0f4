"""Texts with a label each, or pairs of texts, for sequence classification: lines of JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding

from cost_model.errors import InputError
from hetpipe.data.file_rows import FileRows
from hetpipe.data.json_lines import first_line, json_lines, shown, text_of
from hetpipe.data.kind import Learner, Reading
from hetpipe.data.label_names import label_numbers, model_labels, number_of
from hetpipe.data.padded_texts import FILES, PaddedTexts, write_padded
from hetpipe.data.texts import read_corpus
from hetpipe.data.vocabulary import texts_sha256
from hetpipe.models.tasks import Task

_TEXT, _PAIR, _LABEL = "text", "text_pair", "label"
_FORM = f'"{_TEXT}" and "{_LABEL}" (and "{_PAIR}")'

LabelledText = tuple[str, str | None, int, str]
"""A text, the second one where there are two, the number of the label, and the place of the line."""


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Texts with a label each, that were read and checked; sha256: of texts and labels."""

    rows: FileRows[LabelledText]
    sha256: str

    @classmethod
    def of(cls, rows: FileRows[LabelledText]) -> "LabelledTexts":
        """Read rows from the first to the last.

        Raises: InputError naming the line that is none.
        """
        with rows.read_once("reading the texts"):
            return cls(rows, texts_sha256(part for row in rows for part in map(str, row[:3])))

    @property
    def words(self) -> Iterator[str]:
        """Yield the texts."""
        with self.rows.read_once("training a vocabulary on the texts"):
            for first, second, _, _ in self.rows:
                yield from (first,) if second is None else (first, second)

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write their tokens and labels.

        Raises: InputError if a text gives no token.
        """

        def labels(row: LabelledText, encoding: Encoding) -> list[int]:
            text, _, label, where = row
            if not encoding.overflowing and 0 not in encoding.sequence_ids:
                raise InputError(
                    f'{where}: "{_TEXT}" is {json.dumps(text)[:60]}, of which this vocabulary makes no '
                    "token; take the line out"
                )
            return [label]

        texts = ((row[0] if row[1] is None else row[:2], row) for row in self.rows)
        with self.rows.read_once("splitting the texts into tokens"):
            return write_padded(place, reading, texts, labels)


class LabelledTextKind:
    """The `hetpipe.data.kind.DataKind` of texts with a label each."""

    name = "labelled texts"
    form = f"JSON lines with {_FORM}"
    tasks: tuple[Task, ...] = (Task.SEQUENCE_CLASSIFICATION,)
    files: tuple[str, ...] = FILES
    is_brought = False
    packs = False
    fills = True
    is_held = False

    def holds(self, path: Path) -> bool:
        """Return whether the first line has a text and a label."""
        return {_TEXT, _LABEL} <= first_line(path).keys()

    def read(self, paths: Sequence[Path], model: Learner) -> LabelledTexts:
        """Read files; of none texts with labels without sense, to measure with."""
        names = model_labels(model)
        numbers = label_numbers(names)

        def rows() -> Iterator[LabelledText]:
            for index, text in () if paths else enumerate(read_corpus()):
                yield text, None, index % len(names), ""
            for path in paths:
                yield from (_row(place, data, numbers) for place, data in json_lines(path, _FORM))

        return LabelledTexts.of(FileRows.of(paths, rows))

    def load(self, place: Path, reading: Reading) -> PaddedTexts:
        """Return the texts as samples."""
        return PaddedTexts.load(place, reading)


def _row(place: str, data: dict[str, object], numbers: Mapping[str, int]) -> LabelledText:
    for key in (_TEXT, _LABEL):
        if key not in data:
            raise InputError(f'{place}: has {shown(sorted(data))} and no "{key}"; give objects with {_FORM}')
    text = text_of(data, _TEXT, place)
    if not text.strip():
        raise InputError(f'{place}: "{_TEXT}" is empty; give a text')
    second = None if data.get(_PAIR) is None else text_of(data, _PAIR, place)
    return text, second, number_of(data[_LABEL], numbers, place), place


LABELLED_TEXTS = LabelledTextKind()
