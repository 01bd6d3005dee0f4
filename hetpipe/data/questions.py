"""Questions with answers inside a text, for question answering: SQuAD's JSON, or lines of JSON."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from cost_model.errors import InputError
from cost_model.strict_files import each_once
from hetpipe.data.answers import CONTEXTS_FILE, NO_OFFSET, OFFSETS_FILE
from hetpipe.data.data_file import read_text_file
from hetpipe.data.dataset import IGNORE_LABEL, replacing
from hetpipe.data.json_lines import check_whole, first_line, json_lines, shown, text_of
from hetpipe.data.keyed_order import permuted
from hetpipe.data.kind import IntArray, Learner, Reading, StepData
from hetpipe.data.padded_texts import FILES, PaddedTexts, write_padded
from hetpipe.data.texts import read_corpus
from hetpipe.data.vocabulary import texts_sha256
from hetpipe.models.tasks import Task

_CONTEXT, _QUESTION, _ANSWERS = "context", "question", "answers"
_TEXT, _START, _DATA, _PARAGRAPHS, _ASKED = "text", "answer_start", "data", "paragraphs", "qas"
_FORM = f'"{_CONTEXT}", "{_QUESTION}" and "{_ANSWERS}" ("{_TEXT}" and "{_START}")'
LAST_FILE = "last_tokens.bin"

Answer = tuple[str, int]
"""A text, and at which character of the context it begins."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question on a context; without answers there is none in it. place: for errors."""

    context: str
    question: str
    answers: tuple[Answer, ...]
    place: str = ""


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions with their contexts and answers."""

    rows: list[Question]

    @property
    def sha256(self) -> str:
        """Return the hash of all texts and places of answers."""
        return texts_sha256(
            part
            for row in self.rows
            for part in (row.context, row.question, *(f"{at} {text}" for text, at in row.answers), "\n")
        )

    @property
    def words(self) -> Sequence[str]:
        """Return the questions, and each context once."""
        return [*dict.fromkeys(row.context for row in self.rows), *(row.question for row in self.rows)]

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write the tokens of question and context, and which are the first and last of the answer.

        Of a context in windows those of each; where the answer is not in one, the first token of all.

        Raises: InputError if a question leaves no room for its context.
        """
        lasts: list[int] = []
        windows: list[int] = []
        ends, overlap = [0], reading.overlap
        following = 0  # how many windows of the same context
        with replacing(place / OFFSETS_FILE) as offsets:

            def firsts(numbered: tuple[int, Question], encoding: Encoding) -> Sequence[int]:
                index, row = numbered
                found = _context_offsets(encoding)
                offsets.write(found.tobytes())
                ends.append(ends[-1] + len(found))
                nonlocal following
                is_first = not windows or windows[-1] != index
                following = len(encoding.overflowing) if is_first else following - 1
                windows.append(index)
                if not (found[:, 0] != NO_OFFSET).any():
                    raise InputError(
                        f"{row.place}: the question leaves no room for its context in "
                        f"{reading.sequence_length} tokens; give a longer --sequence-length"
                    )
                at_begin, at_end = is_first, not following
                if reading.cuts_left:  # the first window has the end of the context
                    at_begin, at_end = at_end, at_begin
                first, last = _answer_tokens(row, found, is_first=at_begin, is_last=at_end)
                if overlap is not None and first == IGNORE_LABEL:
                    first = last = 0
                lasts.append(last)
                return [first]

            pairs = (((row.question, row.context), (index, row)) for index, row in enumerate(self.rows))
            if overlap is not None:
                self._check_room(reading, overlap)
            told = write_padded(place, reading, pairs, firsts, cut="only_second", overlap=overlap)
        with replacing(place / LAST_FILE) as file:
            file.write(np.array(lasts, "<i4").tobytes())
        numbers = {context: at for at, context in enumerate(dict.fromkeys(row.context for row in self.rows))}
        asked = [[numbers[row.context], [text for text, _ in row.answers]] for row in self.rows]
        content = {"contexts": list(numbers), "questions": asked, "windows": windows, "ends": ends[1:]}
        with replacing(place / CONTEXTS_FILE) as file:
            file.write(json.dumps(content, ensure_ascii=False).encode())
        if num_lost := lasts.count(IGNORE_LABEL):
            told.append(
                f"{num_lost:,} of {len(lasts):,} answers lie beyond {reading.sequence_length} tokens; they "
                "are not learned, and held out they count as wrong; --doc-stride reads contexts in windows"
            )
        return told

    def _check_room(self, reading: Reading, overlap: int) -> None:
        """Check that each window of a context goes on where the one before ends.

        Raises: InputError naming a question that leaves too little room.
        """
        beside = reading.vocabulary.num_special_tokens_to_add(is_pair=True)
        for row in self.rows:
            asked = len(reading.vocabulary.encode(row.question, add_special_tokens=False).ids)
            room = reading.sequence_length - beside - asked
            if room > overlap:
                continue
            if len(reading.vocabulary.encode(row.question, row.context).ids) > reading.sequence_length:
                raise InputError(
                    f"{row.place}: the question leaves room for {max(0, room)} tokens of its context in "
                    f"{reading.sequence_length}, and --doc-stride is {overlap}; give less, or a longer "
                    "--sequence-length"
                )


@dataclass(frozen=True, slots=True)
class QuestionSamples:
    """The endless training order over questions whose answer is within the length, or windows of all.

    labels of a batch: [samples, 3], the first and last token of the answer, and the number of the window,
    which is that of the question where each has one.
    """

    texts: PaddedTexts
    last_tokens: npt.NDArray[np.int32]
    count_terms: Callable[[Any], int] | None = None

    @property
    def num_samples(self) -> int:
        """Return the questions of one epoch."""
        return self.texts.num_samples

    @property
    def num_terms(self) -> int:
        """Return two a question: the first token and the last."""
        return 2 * self.num_samples

    def num_loss_tokens(self, num_samples: int) -> int:
        """Return the same of so many questions."""
        return 2 * num_samples

    @property
    def sequence_length(self) -> int:
        """Return the tokens that samples are filled up to."""
        return self.texts.sequence_length

    @property
    def seed(self) -> int:
        """Return the seed of the order."""
        return self.texts.seed

    @property
    def lengths(self) -> IntArray:
        """Return the tokens of each sample."""
        return self.texts.lengths

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the samples at positions [first_sample, first_sample + num_samples)."""
        samples = permuted(self.seed, self.num_samples, first_sample, num_samples)
        return self.rows(samples, first_sample, self.sequence_length)

    def rows(self, samples: IntArray, first_sample: int, length: int) -> StepData:
        """Return samples by their number, as `hetpipe.data.length_groups.FilledSamples`."""
        data, questions = self.texts.rows(samples, first_sample, length), self.texts.kept[samples]
        labels = np.stack((data.labels, self.last_tokens[questions], questions), axis=1).astype(np.int64)
        return StepData(data.inputs, labels, data.sample_positions, 2 * len(samples))

    def notes(self) -> list[str]:
        """Return how many there are, and how much of them is filling."""
        return self.texts.notes()


def check_windows(model: Learner) -> None:
    """Check that contexts in windows are something for a model.

    Raises: InputError if it answers no questions.
    """
    if not model.task.answers:
        raise InputError(
            f"--doc-stride is for the contexts of questions, and {model.name} learns {model.task}; leave it "
            "out"
        )


class QuestionKind:
    """The `hetpipe.data.kind.DataKind` of questions."""

    name = "questions with answers in a text"
    form = f"JSON lines with {_FORM}, or SQuAD's .json"
    tasks: tuple[Task, ...] = (Task.QUESTION_ANSWERING,)
    files: tuple[str, ...] = (*FILES, LAST_FILE, OFFSETS_FILE, CONTEXTS_FILE)
    is_brought = False
    packs = False
    fills = True
    is_held = True

    def holds(self, path: Path) -> bool:
        """Return whether the first line has a context and a question, or the file is as SQuAD's."""
        return {_CONTEXT, _QUESTION} <= first_line(path).keys() or _is_squad(path)

    def read(self, paths: Sequence[Path], model: Learner) -> Questions:
        """Read files; of none questions without sense, to measure with."""
        if not paths:
            return Questions([_senseless(text) for text in read_corpus() if len(text.split()) > 1])
        rows = []
        for path in paths:
            found = _in_squad(path) if _is_squad(path) else json_lines(path, _FORM)
            rows += [_row(place, data) for place, data in found]
        if not rows:
            raise InputError(f"data file {paths[0]} has no question; give {self.form}")
        return Questions(rows)

    def load(self, place: Path, reading: Reading) -> QuestionSamples:
        """Return the questions as samples.

        Raises: InputError if they are torn, or none has its answer within the length.
        """
        texts = PaddedTexts.load(place, reading)
        try:
            last_tokens = np.fromfile(place / LAST_FILE, "<i4")
        except OSError as error:
            raise InputError(
                f"{place / LAST_FILE} cannot be read ({error}); train into a new folder"
            ) from None
        if len(last_tokens) != len(texts.ends):
            raise InputError(f"questions in {place} are torn; train into a new folder")
        return QuestionSamples(texts, last_tokens)


def _senseless(text: str) -> Question:
    first = text.split(maxsplit=1)[0]
    return Question(text, "What?", ((first, text.index(first)),))


def _context_offsets(encoding: Encoding) -> npt.NDArray[np.int32]:
    """Return where each token lies in the context, in characters: [tokens, 2]; -1 of what is not of it."""
    found = np.array(encoding.offsets, "<i4").reshape(-1, 2)
    outside = np.array([text != 1 for text in encoding.sequence_ids], bool)
    found[outside | (found[:, 0] == found[:, 1])] = NO_OFFSET
    return found


def _answer_tokens(
    row: Question, offsets: npt.NDArray[np.int32], *, is_first: bool, is_last: bool
) -> tuple[int, int]:
    """Return the first and last token of the first answer; of none the first token of all.

    is_first, is_last: whether nothing of the context comes before these tokens, or after them. -100 both
    where the answer is not within them.
    """
    if not row.answers:
        return 0, 0
    text, begin = row.answers[0]
    end = begin + len(text.rstrip())
    inside = offsets[:, 0] != NO_OFFSET
    touched = np.flatnonzero(inside & (offsets[:, 0] < end) & (offsets[:, 1] > begin))
    # NOTE: no token may hold the last character: accents that follow their letter are stripped, say
    if (
        not len(touched)
        or (not is_last and offsets[inside, 1].max() < end)
        or (not is_first and offsets[inside, 0].min() > begin)
    ):
        return IGNORE_LABEL, IGNORE_LABEL
    return int(touched[0]), int(touched[-1])


def _is_squad(path: Path) -> bool:
    """Return whether a file is called .json and begins as SQuAD's, with "data" somewhere at its top."""
    if path.suffix.lower() != ".json":
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get(_DATA), list)


def _in_squad(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the content of each question of a file as SQuAD's.

    Raises: InputError naming what is not as it is there.
    """
    text = read_text_file(path)
    try:
        content = json.loads(text, object_pairs_hook=each_once)
    except InputError as error:
        raise InputError(f"data file {path}: {error}") from None
    check_whole(text, content, f"data file {path}")
    for at, article in enumerate(content[_DATA]):
        for paragraph in _listed(article, _PARAGRAPHS, f"data file {path}, article {at}"):
            place = f"data file {path}, article {at}"
            for asked in _listed(paragraph, _ASKED, place):
                if not isinstance(asked, dict):
                    raise InputError(f"{place}: {shown(asked)} is no question; give an object with {_FORM}")
                yield f"{place}, question {asked.get('id', '')}", {_CONTEXT: paragraph.get(_CONTEXT), **asked}


def _listed(value: object, key: str, place: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise InputError(f'{place}: has no list "{key}"; give a file as SQuAD\'s')
    return found


def _row(place: str, data: dict[str, Any]) -> Question:
    for key in (_CONTEXT, _QUESTION, _ANSWERS):
        if key not in data:
            raise InputError(f'{place}: has {shown(sorted(data))} and no "{key}"; give objects with {_FORM}')
    context, question = (text_of(data, key, place) for key in (_CONTEXT, _QUESTION))
    for key, text in ((_CONTEXT, context), (_QUESTION, question)):
        if not text.strip():
            raise InputError(f'{place}: "{key}" is empty; give a text')
    answers = tuple(_answers(place, data[_ANSWERS]))
    for text, start in answers:
        if start < 0 or not text or context[start : start + len(text)] != text:
            raise InputError(
                f'{place}: at {start} of "{_CONTEXT}" is {shown(context[max(0, start) :][: len(text)])} and '
                f'not {shown(text)}; give the "{_START}" of the answer, in characters from 0'
            )
    return Question(context, question, answers, place)


def _answers(place: str, given: Any) -> Iterator[Answer]:
    """Yield answers: a list of objects as in SQuAD, or an object of two lists, as `datasets` has them."""
    if isinstance(given, dict):
        texts, starts = given.get(_TEXT), given.get(_START)
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise InputError(f'{place}: "{_ANSWERS}" has no lists "{_TEXT}" and "{_START}" of one length')
        given = [{_TEXT: text, _START: start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(given, list):
        raise InputError(f'{place}: "{_ANSWERS}" is {shown(given)}; give a list of "{_TEXT}" and "{_START}"')
    for answer in given:
        text, start = (answer.get(_TEXT), answer.get(_START)) if isinstance(answer, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise InputError(f'{place}: {shown(answer)} is no answer; give "{_TEXT}" and "{_START}"')
        yield text, start


QUESTIONS = QuestionKind()
