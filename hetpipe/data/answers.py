"""Answers as texts: what they are compared by, and the most likely one of a model."""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hetpipe.data.dataset import IGNORE_LABEL

EXACT_MATCH = "exact_match"
OFFSETS_FILE, CONTEXTS_FILE = "offsets.bin", "contexts.json"
NO_OFFSET = -1
MOST_TOKENS = 30
"""An answer is no longer, as in the programs for SQuAD of BERT and of transformers."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compared(text: str) -> str:
    """Return an answer as it is compared: small letters, without articles and punctuation (SQuAD, 2016).

    >>> compared("The  Blue-green sea!")
    'bluegreen sea'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(told: str, answer: str) -> float:
    """Return 1.0 where two answers are the same, as they are compared; else 0.0."""
    return float(compared(told) == compared(answer))


def word_f1(told: str, answer: str) -> float:
    """Return the F1 of the words of an answer; of an empty one whether both are (Rajpurkar et al., 2018).

    >>> word_f1("the blue sea", "blue sea of ice")  # 2 of 2 words, 2 of 4
    0.6666666666666666
    """
    mine, theirs = compared(told).split(), compared(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs))


def best_span(begin: npt.NDArray[Any], end: npt.NDArray[Any]) -> tuple[int, int, float]:
    """Return the first and last token with the largest sum of logits, of at most `MOST_TOKENS`, and the sum.

    begin, end: [tokens].

    >>> best_span(np.array([0.0, 2.0, 1.0]), np.array([5.0, 0.0, 1.0]))  # not from 1 back to 0
    (0, 0, 5.0)
    """
    sums = begin[:, None] + end[None, :]
    places = np.arange(len(begin))
    lengths = places[None, :] - places[:, None]
    sums[(lengths < 0) | (lengths >= MOST_TOKENS)] = -np.inf
    first, last = np.unravel_index(int(sums.argmax()), sums.shape)
    return int(first), int(last), float(sums[first, last])


class Found(NamedTuple):
    """The most likely answer in a window of a question's context: its text, and the sum of its logits.

    none: the sum of the logits of the first token, which tells that there is no answer.
    """

    question: int
    text: str
    value: float
    none: float


def best_of_each(found: Sequence[Sequence[Sequence[Any]]]) -> list[Found]:
    """Return of each question the most likely answer of all its windows; that there is none, as in the least.

    So do transformers' examples for SQuAD (`postprocess_qa_predictions`). found: `Found` of several places,
    as JSON may have made them.
    """
    best: dict[int, Found] = {}
    for each in (Found(*row) for rows in found for row in rows):
        other = best.get(each.question, each)
        chosen = max(each, other, key=lambda one: (one.value, one.text))
        best[each.question] = chosen._replace(none=min(each.none, other.none))
    return [best[question] for question in sorted(best)]


@dataclass(frozen=True)
class AnswerScores:
    """Exact match and F1 of the answers to held-out questions, by their texts, in a folder of data.

    A question with several answers counts with the one that is nearest, one of which no window is read as
    wrong. That there is no answer is told only where the folder has such questions.
    """

    folder: Path

    @cached_property
    def _contexts(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.folder / CONTEXTS_FILE).read_text(encoding="utf-8"))
        return data

    @cached_property
    def _offsets(self) -> list[npt.NDArray[np.int32]]:
        """Where the tokens of each window lie in its context: [tokens, 2] in characters."""
        flat = np.fromfile(self.folder / OFFSETS_FILE, "<i4").reshape(-1, 2)
        return np.split(flat, self._contexts["ends"][:-1])

    @cached_property
    def _may_be_none(self) -> bool:
        return any(not answers for _, answers in self._contexts["questions"])

    def found(self, outputs: Tensor, labels: Tensor) -> list[Found]:
        """Return what is found in windows: outputs [samples, seq, 2], labels [samples, 3], its window."""
        samples = zip(outputs.float().cpu().numpy(), labels[:, 2].tolist(), strict=True)
        return best_of_each(
            [[self.found_in(window, logits) for logits, window in samples if window != IGNORE_LABEL]]
        )

    def means(self, found: Sequence[Sequence[Any]]) -> tuple[float, float]:
        """Return the figures over all questions; of each, what is the best in all its windows."""
        exact = f1 = 0.0
        for each in (Found(*row) for row in found):
            answers, told = self._contexts["questions"][each.question][1] or [""], self.told(each)
            exact += max(exact_match(told, answer) for answer in answers)
            f1 += max(word_f1(told, answer) for answer in answers)
        count = len(self._contexts["questions"])
        return exact / count, f1 / count

    def told(self, found: Found) -> str:
        """Return the answer that is told, "" for none."""
        return "" if self._may_be_none and found.none > found.value else found.text

    def found_in(self, window: int, logits: npt.NDArray[Any]) -> Found:
        """Return the most likely answer in a window: logits [seq, 2], for begin and end."""
        offsets, question = self._offsets[window], self._contexts["windows"][window]
        inside = np.flatnonzero(offsets[:, 0] != NO_OFFSET)
        none = float(logits[0].sum())
        if not len(inside):
            return Found(question, "", -np.inf, none)
        start = int(inside[0])
        places = slice(start, int(inside[-1]) + 1)
        # NOTE: a space of its own has no place in the context where the tokenizer trims spaces (RoBERTa's)
        begin, end = np.where(offsets[places, :1] == NO_OFFSET, -np.inf, logits[places]).T
        first, last, value = best_span(begin, end)
        context = self._contexts["contexts"][self._contexts["questions"][question][0]]
        return Found(
            question, str(context[offsets[start + first, 0] : offsets[start + last, 1]]), value, none
        )
