"""Pairs of texts of which the second is learned from the first, for encoder-decoders."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    write_token_ids,
)
from hetpipe.data.file_rows import FileRows
from hetpipe.data.keyed_order import permuted
from hetpipe.data.kind import CountedTerms, IntArray, Learner, Reading, StepData
from hetpipe.data.padded_texts import TEXTS_PER_WRITE, count_labels, cut_at
from hetpipe.data.pair_files import FORM, Languages, Pair, may_hold_pairs, read_pairs
from hetpipe.data.texts import read_corpus
from hetpipe.data.vocabulary import SPECIAL_TOKENS, texts_sha256
from hetpipe.models.task_inputs import DECODER, MASK, TOKENS, InputShape
from hetpipe.models.tasks import Task

_TELLING_LANGUAGES = ("mbart", "m2m_100", "plbart")
"""Model types whose tokenizer puts a token for the language beside a text (NLLB is an m2m_100)."""

ENDS_FILE, TARGETS_FILE = "ends.bin", "targets.jsonl"
FILES = (TOKENS_FILE, ENDS_FILE, TARGETS_FILE)


def mark_ends_of_pairs(vocabulary: Tokenizer, shape: InputShape, where: object) -> None:
    """Let a vocabulary that was trained here end each text with the token that ends one in the model.

    where: the configuration, for errors.

    Raises: InputError if that, or what fills up, is no special token of such a vocabulary.
    """
    special = range(len(SPECIAL_TOKENS))
    start = shape.end if shape.start is None else shape.start
    if not {shape.end, shape.padding, start} <= set(special) or shape.end == shape.padding:
        raise InputError(
            f"{where}: eos_token_id is {shape.end}, pad_token_id {shape.padding}, decoder_start_token_id "
            f"{shape.start}; of the vocabulary that is trained on the texts, for want of a tokenizer.json, "
            f"special tokens are 0 to {special[-1]}: give 3, 0 and 0"
        )
    end = vocabulary.id_to_token(shape.end)
    vocabulary.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, shape.end)])


def ends_of_pairs(vocabulary: Tokenizer, shape: InputShape) -> dict[str, str | None]:
    """Return by which tokens texts end and are filled up, by their names in transformers."""
    return {
        "eos_token": vocabulary.id_to_token(shape.end),
        "pad_token": vocabulary.id_to_token(shape.padding),
    }


@dataclass(frozen=True, eq=False)
class PairDataset(CountedTerms):
    """The endless training order over pairs, each side filled up to sequence_length.

    tokens: of each pair the source, then the target; ends: of each of them, rising: 2 x pairs. targets: the
    file with the texts of the targets.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    ends: IntArray
    targets: Path
    shape: InputShape
    sequence_length: int
    seed: int

    @classmethod
    def load(cls, place: Path, reading: Reading) -> "PairDataset":
        """Return the pairs that `Pairs.write` wrote, memory-mapped.

        Raises: InputError if they are missing, torn, or written with another vocabulary.
        """
        if reading.seed < 0:
            raise InputError(f"seed {reading.seed} is negative; choose 0 or more")
        tokens = load_tokens(place, reading.vocabulary)
        try:
            ends = np.fromfile(place / ENDS_FILE, "<i8").astype(np.int64)
        except OSError as error:
            raise InputError(f"pairs in {place} cannot be read ({error}); train into a new folder") from None
        if len(ends) < 2 or len(ends) % 2 or ends[-1] != len(tokens):
            raise InputError(f"pairs in {place} are torn; train into a new folder")
        return cls(tokens, ends, place / TARGETS_FILE, reading.inputs, reading.sequence_length, reading.seed)

    @cached_property
    def _lengths(self) -> IntArray:
        return np.diff(self.ends, prepend=0).reshape(-1, 2)  # of source and target

    @property
    def num_samples(self) -> int:
        """Return the pairs of one epoch."""
        return len(self._lengths)

    @property
    def num_terms(self) -> int:
        """Return how many tokens of targets an epoch learns."""
        return int(self._lengths[:, 1].sum())

    @property
    def count_terms(self) -> Callable[[Any], int] | None:
        """Return what counts them in the labels of a step."""
        return count_labels

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the samples at positions [first_sample, first_sample + num_samples), as `Dataset.batch`.

        The decoder is given the target a token later, after the one that it begins with, as by transformers'
        `prepare_decoder_input_ids_from_labels`.
        """
        samples = permuted(self.seed, self.num_samples, first_sample, num_samples)
        return self.rows(samples, first_sample, self.sequence_length)

    @cached_property
    def lengths(self) -> IntArray:
        """Return the tokens of the longer side of each pair."""
        found: IntArray = self._lengths.max(axis=1)
        return found

    def rows(self, samples: IntArray, first_sample: int, length: int) -> StepData:
        """Return pairs by their number, as `hetpipe.data.length_groups.FilledSamples`."""
        size = (len(samples), length)
        sources = np.full(size, self.shape.padding, np.int64)
        mask, labels = np.zeros(size, np.int64), np.full(size, IGNORE_LABEL, np.int64)
        before = sources.copy()
        for row, pair in enumerate(samples):
            start = 0 if pair == 0 else int(self.ends[2 * pair - 1])
            middle, stop = int(self.ends[2 * pair]), int(self.ends[2 * pair + 1])
            sources[row, : middle - start] = self.tokens[start:middle]
            mask[row, : middle - start] = 1
            target = self.tokens[middle:stop].astype(np.int64)
            labels[row, : len(target)] = target
            before[row, 0] = target[-1] if self.shape.start is None else self.shape.start
            before[row, 1 : len(target) + 1] = target[: length - 1]
        positions = np.arange(first_sample, first_sample + len(samples))
        inputs = {TOKENS: sources, MASK: mask, DECODER: before}
        return StepData(inputs, labels, positions, count_labels(labels))

    @cached_property
    def _texts(self) -> list[str]:
        return [json.loads(line) for line in self.targets.read_bytes().splitlines()]

    def references(self, first_sample: int, num_samples: int) -> list[str]:
        """Return the targets of samples as they were given: whole, and as text."""
        rows = permuted(self.seed, self.num_samples, first_sample, num_samples)
        return [self._texts[row] for row in rows]

    def notes(self) -> list[str]:
        """Return how many there are, and how much of them is filling."""
        filled = 1 - self._lengths.mean(axis=0) / self.sequence_length
        return [
            f"{self.num_samples:,} pairs, {self.num_terms:,} tokens of targets; each side is filled up to "
            f"{self.sequence_length} tokens, {filled[0]:.0%} and {filled[1]:.0%} are filling"
        ]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Texts and their translations, that were read and checked; sha256: of both sides.

    languages: from which to which, where lines name them, else ().
    """

    rows: FileRows[Pair]
    sha256: str
    languages: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: FileRows[Pair]) -> "Pairs":
        """Read pairs from the first to the last.

        Raises: InputError naming the line that is none.
        """
        with rows.read_once("reading the pairs"):
            return cls(rows, texts_sha256(text for row in rows for text in row))

    @property
    def words(self) -> Iterator[str]:
        """Yield the texts of both sides, which share a vocabulary."""
        with self.rows.read_once("training a vocabulary on the pairs"):
            yield from (text for row in self.rows for text in row)

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write the tokens of both sides, each cut to the length, and the targets as text.

        Raises: InputError if the model's vocabulary does not end texts as its configuration says.
        """
        vocabulary = reading.vocabulary
        end = num_pairs = num_cut = 0
        told: list[str] = []
        with (
            self.rows.read_once("splitting the pairs into tokens"),
            cut_at(reading),
            replacing(place / TARGETS_FILE) as targets,
            replacing(place / ENDS_FILE) as ends,
            write_token_ids(place, vocabulary) as write,
        ):
            for part in batches(self.rows, lambda pair: sum(map(len, pair)), TEXTS_PER_WRITE):
                encodings = vocabulary.encode_batch([text for row in part for text in row])
                told = told or _languages_note(reading, encodings[0])
                for encoding in encodings:
                    if reading.inputs.end not in encoding.ids:
                        raise InputError(
                            f"the tokenizer.json of {reading.model.name} ends no text with the eos_token_id "
                            f"of its config.json ({reading.inputs.end}); make them agree"
                        )
                    write(encoding.ids)
                    end += len(encoding.ids)
                    ends.write(end.to_bytes(8, "little"))
                num_pairs += len(part)
                num_cut += sum(
                    bool(source.overflowing or target.overflowing)
                    for source, target in zip(encodings[::2], encodings[1::2], strict=True)
                )
                for _, target in part:
                    targets.write((json.dumps(target, ensure_ascii=False) + "\n").encode())
        if num_cut:
            told.append(
                f"{num_cut:,} of {num_pairs:,} pairs have a side longer than {reading.sequence_length} "
                f"tokens, which is cut {'at its beginning' if reading.cuts_left else 'there'}"
            )
        return told


def _languages_note(reading: Reading, encoding: Encoding) -> list[str]:
    """Return that sources and targets are told to be in one language, where a tokenizer tells languages."""
    folder = reading.model.folder
    if folder is None or folder.config.get("model_type") not in _TELLING_LANGUAGES:
        return []
    special = zip(encoding.tokens, encoding.ids, encoding.special_tokens_mask, strict=True)
    codes = [token for token, number, is_special in special if is_special and number != reading.inputs.end]
    if not codes:
        return []
    return [
        f"the tokenizer.json of {reading.model.name} marks sources and targets alike, as {' '.join(codes)}; "
        "where their languages differ, the model learns to begin a translation with the source's"
    ]


class PairKind:
    """The `hetpipe.data.kind.DataKind` of texts with their translations."""

    name = "pairs of texts"
    form = FORM
    tasks: tuple[Task, ...] = (Task.TRANSLATION,)
    files: tuple[str, ...] = FILES
    is_brought = False
    packs = False
    fills = True
    is_held = False

    def holds(self, path: Path) -> bool:
        """Return whether the file is no JSON lines, or the first line is a pair."""
        return may_hold_pairs(path)

    def read(self, paths: Sequence[Path], model: Learner, like: Pairs | None = None) -> Pairs:
        """Read files; of none texts that are their own translation, to measure with.

        like: the training data of held-out files, in whose direction these are read.
        """
        given = () if like is None else like.languages
        languages = Languages(given, are_given=bool(given))

        def rows() -> Iterator[Pair]:
            return read_pairs(paths, languages) if paths else ((text, text) for text in read_corpus())

        return replace(Pairs.of(FileRows.of(paths, rows)), languages=languages.names)

    def load(self, place: Path, reading: Reading) -> PairDataset:
        """Return the pairs as samples."""
        return PairDataset.load(place, reading)


PAIRS = PairKind()
