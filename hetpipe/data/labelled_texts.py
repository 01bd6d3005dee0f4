"""Texts with a label each, or pairs of texts, for sequence classification: lines of JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_model.errors import InputError
from hetpipe.data.json_lines import first_line, json_lines, shown, text_of
from hetpipe.data.kind import Learner, Reading
from hetpipe.data.label_names import label_numbers, model_labels, number_of
from hetpipe.data.padded_texts import FILES, PaddedTexts, write_padded
from hetpipe.data.texts import read_corpus
from hetpipe.data.vocabulary import texts_sha256
from hetpipe.models.tasks import Task

_TEXT, _PAIR, _LABEL = "text", "text_pair", "label"
_FORM = f'"{_TEXT}" and "{_LABEL}" (and "{_PAIR}")'

LabelledText = tuple[str, str | None, int]
"""A text, the second one where there are two, and the number of the label."""


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Texts with a label each."""

    rows: list[LabelledText]

    @property
    def sha256(self) -> str:
        """Return the hash of texts and labels."""
        return texts_sha256(part for row in self.rows for part in map(str, row))

    @property
    def words(self) -> Sequence[str]:
        """Return the texts."""
        return [text for first, second, _ in self.rows for text in (first, second) if text is not None]

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write their tokens and labels."""
        texts = [first if second is None else (first, second) for first, second, _ in self.rows]
        return write_padded(place, reading, texts, lambda index, _: [self.rows[index][2]])


class LabelledTextKind:
    """The `hetpipe.data.kind.DataKind` of texts with a label each."""

    name = "labelled texts"
    form = f"JSON lines with {_FORM}"
    tasks: tuple[Task, ...] = (Task.SEQUENCE_CLASSIFICATION,)
    files: tuple[str, ...] = FILES
    is_brought = False
    packs = False
    fills = True

    def holds(self, path: Path) -> bool:
        """Return whether the first line has a text and a label."""
        return {_TEXT, _LABEL} <= first_line(path).keys()

    def read(self, paths: Sequence[Path], model: Learner) -> LabelledTexts:
        """Read files; of none texts with labels without sense, to measure with."""
        names = model_labels(model)
        if not paths:
            return LabelledTexts(
                [(text, None, index % len(names)) for index, text in enumerate(read_corpus())]
            )
        numbers = label_numbers(names)
        return LabelledTexts(
            [_row(place, data, numbers) for path in paths for place, data in json_lines(path, _FORM)]
        )

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
    return text, second, number_of(data[_LABEL], numbers, place)


LABELLED_TEXTS = LabelledTextKind()
