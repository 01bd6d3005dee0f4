"""Answers as texts: what they are compared by, and the most likely one of a model."""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class AnswerScores:
    """Exact match and F1 of the answers to held-out questions, by their texts, in a folder of data.

    A question with several answers counts with the one that is nearest, one whose answer lies beyond the
    length as wrong. That there is no answer is told only where the folder has such questions.
    """

    folder: Path

    @cached_property
    def _contexts(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.folder / CONTEXTS_FILE).read_text(encoding="utf-8"))
        return data

    @cached_property
    def _offsets(self) -> list[npt.NDArray[np.int32]]:
        """Where the tokens of each question lie in its context: [tokens, 2] in characters."""
        flat = np.fromfile(self.folder / OFFSETS_FILE, "<i4").reshape(-1, 2)
        return np.split(flat, self._contexts["ends"][:-1])

    @cached_property
    def _may_be_none(self) -> bool:
        return any(not answers for _, answers in self._contexts["questions"])

    def counts(self, outputs: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return the sums of both: outputs [samples, seq, 2], labels [samples, 3], the last the question."""
        exact = f1 = 0.0
        for logits, question in zip(outputs.float().cpu().numpy(), labels[:, 2].tolist(), strict=True):
            if question == IGNORE_LABEL:  # past the end
                continue
            answers = self._contexts["questions"][question][1] or [""]
            told = self.told(question, logits)
            exact += max(exact_match(told, answer) for answer in answers)
            f1 += max(word_f1(told, answer) for answer in answers)
        return exact, f1

    def means(self, sums: Sequence[float]) -> tuple[float, ...]:
        """Return the figures of the sums over all samples."""
        return tuple(value / len(self._contexts["questions"]) for value in sums)

    def told(self, question: int, logits: npt.NDArray[Any]) -> str:
        """Return the answer that a model tells: logits [seq, 2], for begin and end."""
        offsets = self._offsets[question]
        inside = np.flatnonzero(offsets[:, 0] != NO_OFFSET)
        if not len(inside):
            return ""
        start = int(inside[0])
        places = slice(start, int(inside[-1]) + 1)
        # NOTE: a space of its own has no place in the context where the tokenizer trims spaces (RoBERTa's)
        begin, end = np.where(offsets[places, :1] == NO_OFFSET, -np.inf, logits[places]).T
        first, last, value = best_span(begin, end)
        if self._may_be_none and float(logits[0].sum()) > value:
            return ""
        context = self._contexts["contexts"][self._contexts["questions"][question][0]]
        return str(context[offsets[start + first, 0] : offsets[start + last, 1]])
