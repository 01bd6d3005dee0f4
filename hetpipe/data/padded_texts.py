"""Texts of which each is a sample, filled up to one length behind a mask, labelled whole or by token."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from cost_model.errors import InputError
from hetpipe.data.dataset import (
    IGNORE_LABEL,
    TOKENS_FILE,
    batches,
    load_tokens,
    replacing,
    sums_of_ranges,
    write_token_ids,
)
from hetpipe.data.file_rows import Row
from hetpipe.data.keyed_order import permuted
from hetpipe.data.kind import IntArray, Reading, StepData
from hetpipe.data.special_tokens import SpecialTokens
from hetpipe.models.task_inputs import MASK, TOKENS, TYPES, InputShape

ENDS_FILE, LABELS_FILE, TYPES_FILE = "ends.bin", "labels.bin", "types.bin"
FILES = (TOKENS_FILE, ENDS_FILE, LABELS_FILE, TYPES_FILE)
TEXTS_PER_WRITE = 1_000


def mark_ends(vocabulary: Tokenizer) -> None:
    """Let a vocabulary that was trained here put [CLS] before a text and [SEP] after it, as BERT's does.

    One that a model brings has a rule of its own, which `transformers` follows as well.
    """
    special = SpecialTokens.of(vocabulary)
    if vocabulary.post_processor is not None or special.cls is None:
        return
    first, last = (vocabulary.id_to_token(token) for token in (special.cls, special.separator))
    vocabulary.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, special.cls), (last, special.separator)],
    )


@contextmanager
def cut_at(reading: Reading, strategy: str = "longest_first", overlap: int = 0) -> Iterator[None]:
    """Cut what is encoded inside to the length, as transformers does with this truncation (or True).

    overlap: the tokens that what is cut off begins with once more (transformers' `stride`).
    """
    vocabulary, length = reading.vocabulary, reading.sequence_length
    side = "left" if reading.cuts_left else "right"
    try:
        vocabulary.enable_truncation(length, stride=overlap, strategy=strategy, direction=side)
        yield
    except (InputError, OSError, MemoryError):  # of what is read and written inside
        raise
    except Exception as error:  # NOTE: tokenizers raises bare Exception where special tokens alone are longer
        raise InputError(f"texts cannot be cut to {length} tokens ({error}); give more") from None
    finally:
        vocabulary.no_truncation()


def write_padded(
    place: Path,
    reading: Reading,
    texts: Iterable[tuple[Any, Row]],
    labels: Callable[[Row, Encoding], Sequence[int]],
    cut: str = "longest_first",
    overlap: int | None = None,
    **options: Any,
) -> list[str]:
    """Write the tokens of texts, what each is labelled with, and which of two texts a token is of.

    texts: each as `Tokenizer.encode_batch` takes it, with the row that it is of; read once, and not held.
    labels: those of the text of this row, one, or one a token. cut: which of two texts is, as `cut_at`.
    overlap: where what is cut off is written too, in windows of so many tokens in common; `labels` are asked
    of each, from the last one where texts are cut at their beginning. Returns how many are cut.
    """
    vocabulary = reading.vocabulary
    num_texts = num_windows = num_cut = end = 0
    with (
        cut_at(reading, cut, overlap or 0),
        replacing(place / ENDS_FILE) as ends,
        replacing(place / LABELS_FILE) as labelled,
        replacing(place / TYPES_FILE) as typed,
        write_token_ids(place, vocabulary) as write,
    ):
        for part in batches(texts, _num_characters, TEXTS_PER_WRITE):
            encodings = vocabulary.encode_batch([text for text, _ in part], **options)
            for (_, row), encoding in zip(part, encodings, strict=True):
                num_cut += bool(encoding.overflowing)
                for window in (encoding, *(() if overlap is None else encoding.overflowing)):
                    write(window.ids)
                    typed.write(np.array(window.type_ids, np.uint8).tobytes())
                    labelled.write(np.array(labels(row, window), "<i4").tobytes())
                    end += len(window.ids)
                    num_windows += 1
                    ends.write(end.to_bytes(8, "little"))
            num_texts += len(part)
    if not num_cut:
        return []
    longer = f"{num_cut:,} of {num_texts:,} texts are longer than {reading.sequence_length} tokens"
    if overlap is None:
        return [f"{longer} and cut {'at their beginning' if reading.cuts_left else 'there'}"]
    return [f"{longer}; all are in {num_windows:,} windows, neighbours with {overlap} tokens in common"]


def _num_characters(text: tuple[Any, object]) -> int:
    """Return the characters of a text with its row: of one text, of two, or of its words."""
    given, _ = text
    return len(given) if isinstance(given, str) else sum(map(len, given))


@dataclass(frozen=True, slots=True, eq=False)
class PaddedTexts:
    """The endless training order over texts, each filled up to sequence_length behind an attention mask.

    tokens, types: of all texts; ends: of each in them, rising; labels: one a text, or as many as tokens, -100
    where nothing is learned. Texts of which nothing is learned within the length are left out.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    types: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int32]
    ends: IntArray
    shape: InputShape
    sequence_length: int
    seed: int
    kept: IntArray = field(init=False)
    num_learned: IntArray = field(init=False)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InputError(f"seed {self.seed} is negative; choose 0 or more")
        counts = self._counts()
        kept = np.flatnonzero(counts)
        if len(kept) == 0:
            raise InputError("there is no text with a label to learn; give some")
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "num_learned", counts[kept])

    def _counts(self) -> IntArray:
        """Return how many labels each text has that are learned."""
        if not self.by_token:
            counts: IntArray = (np.asarray(self.labels) != IGNORE_LABEL).astype(np.int64)
            return counts
        starts = np.concatenate(([0], self.ends[:-1]))
        return sums_of_ranges(lambda begin, end: self.labels[begin:end] != IGNORE_LABEL, starts, self.ends)

    @classmethod
    def load(cls, place: Path, reading: Reading) -> "PaddedTexts":
        """Return the texts that `write_padded` wrote, memory-mapped.

        Raises: InputError if they are missing, torn, or written with another vocabulary.
        """
        tokens = load_tokens(place, reading.vocabulary)
        try:
            types = np.memmap(place / TYPES_FILE, np.uint8, mode="r")
            labels = np.memmap(place / LABELS_FILE, "<i4", mode="r")
            ends = np.fromfile(place / ENDS_FILE, "<i8").astype(np.int64)
        except (OSError, ValueError) as error:
            raise InputError(f"texts in {place} cannot be read ({error}); train into a new folder") from None
        if not len(types) == len(tokens) == ends[-1] or len(labels) not in (len(ends), len(tokens)):
            raise InputError(f"texts in {place} are torn; train into a new folder")
        shape = reading.inputs
        return cls(tokens, types, labels, ends, shape, reading.sequence_length, reading.seed)

    @property
    def by_token(self) -> bool:
        """Return whether each token has a label of its own."""
        return self.shape.labels_tokens

    @property
    def num_samples(self) -> int:
        """Return the texts of one epoch."""
        return len(self.kept)

    @property
    def num_terms(self) -> int:
        """Return how many labels an epoch learns."""
        return int(self.num_learned.sum())

    @property
    def count_terms(self) -> Callable[[Any], int] | None:
        """Return what counts them in the labels of a step; None where each text has one."""
        return count_labels if self.by_token else None

    def num_loss_tokens(self, num_samples: int) -> int:
        """Return how many labels so many texts have, of one each."""
        assert not self.by_token, num_samples
        return num_samples

    @property
    def lengths(self) -> IntArray:
        """Return the tokens of each sample."""
        return np.diff(self.ends, prepend=0)[self.kept]

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the samples at positions [first_sample, first_sample + num_samples), as `Dataset.batch`."""
        samples = permuted(self.seed, self.num_samples, first_sample, num_samples)
        return self.rows(samples, first_sample, self.sequence_length)

    def rows(self, samples: IntArray, first_sample: int, length: int) -> StepData:
        """Return samples by their number, as `hetpipe.data.length_groups.FilledSamples`."""
        texts, num_samples = self.kept[samples], len(samples)
        size = (num_samples, length)
        made = {TOKENS: np.full(size, self.shape.padding, np.int64)}
        made |= {name: np.zeros(size, np.int64) for name in (MASK, TYPES)}
        labels = np.full(size if self.by_token else num_samples, IGNORE_LABEL, np.int64)
        for row, text in enumerate(texts):
            start, stop = (0 if text == 0 else int(self.ends[text - 1])), int(self.ends[text])
            count = stop - start
            made[TOKENS][row, :count] = self.tokens[start:stop]
            made[TYPES][row, :count] = self.types[start:stop]
            made[MASK][row, :count] = 1
            if self.by_token:
                labels[row, :count] = self.labels[start:stop]
            else:
                labels[row] = self.labels[text]
        positions = np.arange(first_sample, first_sample + num_samples)
        inputs = {name: made[name] for name in self.shape.names}
        return StepData(inputs, labels, positions, int(self.num_learned[samples].sum()))

    def notes(self) -> list[str]:
        """Return how many there are, and how much of them is filling."""
        filled = 1 - self.lengths.mean() / self.sequence_length
        left_out = len(self.ends) - len(self.kept)
        said = [
            f"{self.num_samples:,} texts, {self.num_terms:,} labels; filled up to {self.sequence_length} "
            f"tokens each, {filled:.0%} is filling"
        ]
        if left_out:
            said.append(f"{left_out:,} texts have nothing to learn within the length and are left out")
        return said


def count_labels(labels: Any) -> int:
    """Return how many labels of a step count."""
    return int((labels != IGNORE_LABEL).sum())
