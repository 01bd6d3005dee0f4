"""What is told of held-out samples beside the loss: counts that are joined, and figures of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cost_model.errors import InputError
from hetpipe.data.answers import EXACT_MATCH, AnswerScores, best_of_each
from hetpipe.data.bleu import BLEU, check_installed
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.models.tasks import Task
from hetpipe.runs.settings import LOSS

ACCURACY, F1 = "accuracy", "f1"
_OUTSIDE = "O"
_Span = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a task; all of them are better when larger.

    names: of the figures. count: (outputs, labels) of a microbatch -> counts, as JSON can say them. joined:
    those of several microbatches, pipelines and ranks -> those of all. made_of: the counts of all -> the
    figures, in the order of the names.
    """

    names: tuple[str, ...]
    count: Callable[[Tensor, Tensor], Sequence[Any]]
    joined: Callable[[Sequence[Sequence[Any]]], Sequence[Any]]
    made_of: Callable[[Sequence[Any]], Sequence[float]]

    def of(self, counts: Sequence[Any]) -> dict[str, float]:
        """Return the figures by name."""
        return dict(zip(self.names, self.made_of(counts), strict=True))


def figures_of(task: Task, labels: tuple[str, ...], held_out: Path | None = None) -> Figures | None:
    """Return the figures of a task; None of one that has the loss alone.

    labels: of a classifier. held_out: the folder with held-out data, where answers are compared as texts.
    """
    if task.answers:
        scores = AnswerScores(held_out or Path())
        return Figures((EXACT_MATCH, F1), scores.found, best_of_each, scores.means)
    if task in (Task.SEQUENCE_CLASSIFICATION, Task.IMAGE_CLASSIFICATION):
        return Figures((ACCURACY,), _right_and_all, _summed, _accuracy)
    if task is Task.TOKEN_CLASSIFICATION:
        return Figures((F1, ACCURACY), _TagCounts(labels), _summed, _f1_and_accuracy)
    return None


def figure_names(task: Task) -> tuple[str, ...]:
    """Return the names of the figures of a task; BLEU is none of counts (`hetpipe.training.translations`)."""
    if task.translates:
        return (BLEU,)
    found = figures_of(task, ())
    return () if found is None else found.names


def check_best(by: str, names: Sequence[str]) -> None:
    """Check that the best can be found by this: the loss, or a figure of these names.

    Raises: InputError naming those that there are, or what is missing to compute it.
    """
    if by not in (known := (LOSS, *names)):
        raise InputError(f"--best is {by!r}, and of held-out data there is {' or '.join(known)}; give that")
    if by == BLEU:
        check_installed()


def _summed(counts: Sequence[Sequence[float]]) -> Sequence[float]:
    return [math.fsum(values) for values in zip(*counts, strict=True)]


def _right_and_all(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return how many labels are told right, of how many: outputs [..., labels], labels [...]."""
    counted = labels != IGNORE_LABEL
    right = (outputs.argmax(-1) == labels) & counted
    return float(right.sum()), float(counted.sum())


def _accuracy(counts: Sequence[float]) -> tuple[float]:
    right, every = counts
    return (right / every if every else 0.0,)


class _TagCounts:
    """Counts entities that are told, there, and both, then tags that are right, and all tags.

    Where tags begin with B- and I- (IOB2), an entity is the words from a B- or the first I- of its kind to
    its last I-, and is right if kind and both ends are, as the CoNLL evaluation has it (Tjong Kim Sang and
    De Meulder, CoNLL 2003). Of other tags each word is an entity, but those tagged "O".
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._in_spans = all(name == _OUTSIDE or name[:2] in ("B-", "I-") for name in names)

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[float, ...]:
        """Return the counts: outputs [samples, seq, tags], labels [samples, seq]."""
        told = outputs.argmax(-1).cpu()
        labels = labels.cpu()
        both = found = there = 0
        for mine, given in zip(told, labels, strict=True):
            counted = given != IGNORE_LABEL
            guessed, true = (
                set(self._spans([self._names[tag] for tag in tags[counted].tolist()]))
                for tags in (mine, given)
            )
            both += len(guessed & true)
            found += len(guessed)
            there += len(true)
        return (float(both), float(found), float(there), *_right_and_all(outputs.cpu(), labels))

    def _spans(self, tags: Sequence[str]) -> Iterator[_Span]:
        if self._in_spans:
            yield from spans_of(tags)
        else:
            yield from ((tag, at, at + 1) for at, tag in enumerate(tags) if tag != _OUTSIDE)


def spans_of(tags: Sequence[str]) -> Iterator[_Span]:
    """Yield the entities of IOB2 tags: kind, first word, and the word after the last.

    >>> list(spans_of(["B-who", "I-who", "O", "I-where", "B-where"]))
    [('who', 0, 2), ('where', 3, 4), ('where', 4, 5)]
    """
    kind, start = "", 0
    for at, tag in enumerate((*tags, _OUTSIDE)):
        mark, _, named = tag.partition("-")
        if kind and (mark != "I" or named != kind):
            yield kind, start, at
            kind = ""
        if mark in ("B", "I") and not kind:
            kind, start = named, at


def _f1_and_accuracy(counts: Sequence[float]) -> tuple[float, float]:
    both, found, there, *tags = counts
    return (2 * both / (found + there) if found + there else 0.0, *_accuracy(tags))
