"""Chats as data: answers are learned, what they answer is read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from cost_model.errors import InputError
from cost_model.strict_files import write_atomically
from hetpipe.data.chat_lines import FORMS, Chat, chats_in, document_of, is_chat
from hetpipe.data.chat_template import ChatTemplate
from hetpipe.data.dataset import (
    ENDS_FILE,
    IGNORE_LABEL,
    TOKENS_FILE,
    load_tokens,
    num_learned,
    replacing,
    sums_of_ranges,
    write_token_ids,
)
from hetpipe.data.file_rows import FileRows
from hetpipe.data.json_lines import first_line
from hetpipe.data.keyed_order import permuted
from hetpipe.data.kind import CountedTerms, IntArray, Learner, Reading, Samples, StepData
from hetpipe.data.packed_samples import PackedSamples
from hetpipe.data.vocabulary import texts_sha256
from hetpipe.models.tasks import Task

LEARNED_FILE = "learned.bin"
CHATS_PER_WRITE = 100


def vocabulary_texts(chats: Iterable[Chat]) -> Iterator[str]:
    """Yield the texts on which a vocabulary for chats is trained, a text a chat."""
    return ("".join(f"{turn.role}: {turn.content}\n" for turn in chat) for chat in chats)


def write_chats(folder: Path, chats: Iterable[Chat], vocabulary: Tokenizer, template: ChatTemplate) -> None:
    """Write the chats' tokens as `write_tokens` does, with `learned.bin`, a byte a token, and `ends.bin`.

    Special tokens that the template writes are read as such.

    Raises: InputError naming the chat that the template refuses.
    """
    end, first, remaining = 0, 0, iter(chats)
    vocabulary.encode_special_tokens = False
    try:
        with (
            replacing(folder / ENDS_FILE) as ends,
            replacing(folder / LEARNED_FILE) as learned,
            write_token_ids(folder, vocabulary) as write,
        ):
            while part := list(islice(remaining, CHATS_PER_WRITE)):
                texts = [_text(template, chat, first + index) for index, chat in enumerate(part)]
                encodings = vocabulary.encode_batch([text for text, _ in texts], add_special_tokens=False)
                for (_, spans), encoding in zip(texts, encodings, strict=True):
                    starts = np.array([start for start, _ in encoding.offsets], np.int64)
                    answers = np.zeros(len(starts), np.uint8)
                    for start, stop in spans:
                        answers[(starts >= start) & (starts < stop)] = 1
                    write(encoding.ids)
                    learned.write(answers.tobytes())
                    end += len(answers)
                    ends.write(end.to_bytes(8, "little"))
                first += len(part)
    finally:
        vocabulary.encode_special_tokens = True


def _text(template: ChatTemplate, chat: Chat, index: int) -> tuple[str, list[tuple[int, int]]]:
    try:
        return template.text(chat)
    except InputError as error:
        raise InputError(f"chat {index + 1}: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class ChatDataset(CountedTerms):
    """The endless training order over chats; each is a sample, cut or filled up to sequence_length.

    Attention is causal, so what fills a sample up changes nothing before it. Chats of which no answer is left
    within the length are left out. As in `Dataset`, a position in the order is the state to save.

    tokens: flat ids; learned: 1 where the assistant speaks; ends: of each chat in both, rising.
    filler: the id that fills up.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    learned: npt.NDArray[np.uint8]
    ends: IntArray
    sequence_length: int
    seed: int
    filler: int
    kept: IntArray = field(init=False)
    num_learned: IntArray = field(init=False)

    def __post_init__(self) -> None:
        starts = np.concatenate(([0], self.ends[:-1]))
        first = np.minimum(starts + 1, self.ends)  # nothing predicts the first token
        stops = np.minimum(starts + self.sequence_length, self.ends)
        counts = sums_of_ranges(lambda begin, end: self.learned[begin:end], first, stops)
        kept = np.flatnonzero(counts)
        if len(kept) == 0:
            raise InputError(
                f"no chat has an answer within {self.sequence_length} tokens; give a larger --sequence-length"
            )
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "num_learned", counts[kept])

    @classmethod
    def load(
        cls, folder: Path, vocabulary: Tokenizer, sequence_length: int, seed: int, filler: int
    ) -> "ChatDataset":
        """Return the chats that `write_chats` wrote, memory-mapped.

        Raises: InputError if they are missing, torn, or written with another vocabulary.
        """
        tokens = load_tokens(folder, vocabulary)
        try:
            learned = np.memmap(folder / LEARNED_FILE, np.uint8, mode="r")
            ends = np.fromfile(folder / ENDS_FILE, "<i8")
        except (OSError, ValueError) as error:
            raise InputError(f"chats in {folder} cannot be read ({error}); train into a new folder") from None
        if not len(tokens) == len(learned) == ends[-1]:
            raise InputError(f"chats in {folder} are torn; train into a new folder")
        return cls(tokens, learned, ends.astype(np.int64), sequence_length, seed, filler)

    @property
    def num_samples(self) -> int:
        """Return the chats of one epoch."""
        return len(self.kept)

    @property
    def num_terms(self) -> int:
        """Return how many tokens enter the loss of an epoch."""
        return int(self.num_learned.sum())

    @property
    def count_terms(self) -> Callable[[Any], int]:
        """Return what counts them in the labels of a step."""
        return num_learned

    @property
    def lengths(self) -> IntArray:
        """Return the tokens of each sample, of those that are cut what is left."""
        return np.minimum(np.diff(self.ends, prepend=0)[self.kept], self.sequence_length)

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the samples at positions [first_sample, first_sample + num_samples), as `Dataset.batch`."""
        samples = permuted(self.seed, self.num_samples, first_sample, num_samples)
        return self.rows(samples, first_sample, self.sequence_length)

    def rows(self, samples: IntArray, first_sample: int, length: int) -> StepData:
        """Return samples by their number, as `hetpipe.data.length_groups.FilledSamples`."""
        inputs = np.full((len(samples), length), self.filler, np.int64)
        labels = np.full_like(inputs, IGNORE_LABEL)
        for row, chat in enumerate(self.kept[samples]):
            start = 0 if chat == 0 else int(self.ends[chat - 1])
            stop = min(int(self.ends[chat]), start + self.sequence_length)
            ids = self.tokens[start:stop].astype(np.int64)
            inputs[row, : len(ids)] = ids
            labels[row, : len(ids)] = np.where(self.learned[start:stop] > 0, ids, IGNORE_LABEL)
        labels[:, 0] = IGNORE_LABEL
        positions = np.arange(first_sample, first_sample + len(samples))
        return StepData({"input_ids": inputs}, labels, positions, int(self.num_learned[samples].sum()))

    def notes(self) -> list[str]:
        """Return what a user should know: what is cut, left out, and how much of the samples is filling."""
        filled = 1 - self.lengths.mean() / self.sequence_length
        return [
            f"{len(self.kept):,} chats, {self.num_terms:,} tokens of answers; filled up to "
            f"{self.sequence_length} tokens each, {filled:.0%} is filling",
            *self._cut_notes(),
        ]

    def _cut_notes(self) -> tuple[str, ...]:
        lengths = np.diff(self.ends, prepend=0)
        cut, left_out = int((lengths > self.sequence_length).sum()), len(lengths) - len(self.kept)
        if not cut:
            return ()
        return (
            f"{cut:,} of {len(lengths):,} chats are longer than {self.sequence_length} tokens and cut "
            f"there{f'; {left_out:,} have no answer before it and are left out' if left_out else ''}",
        )

    def packed(self) -> PackedSamples:
        """Return the same chats, cut alike, several a row."""
        starts = np.concatenate(([0], self.ends[:-1]))[self.kept]
        lengths = np.minimum(self.ends[self.kept] - starts, self.sequence_length)
        return PackedSamples(
            self.tokens, starts, lengths, self.learned, self.num_learned,
            self.sequence_length, self.seed, self.filler, "chats", self._cut_notes(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats that were read and checked; sha256: of all turns."""

    rows: FileRows[Chat]
    sha256: str

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Chats":
        """Read files from the first line to the last.

        Raises: InputError naming the line that is no chat.
        """
        rows = FileRows.of(paths, lambda: chats_in(paths))
        with rows.read_once("reading the chats"):
            return cls(rows, texts_sha256(map(document_of, rows)))

    @property
    def words(self) -> Iterator[str]:
        """Yield the texts of the chats, of no template."""
        with self.rows.read_once("training a vocabulary on the chats"):
            yield from vocabulary_texts(self.rows)

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write tokens, and how chats are written as text; say where the model brings no template."""
        folder = reading.model.folder
        end = str(reading.vocabulary.id_to_token(reading.special.separator))
        template = ChatTemplate.of(None if folder is None else folder.path, end)
        write_atomically(reading.template, template.json_text())
        with self.rows.read_once("splitting the chats into tokens"):
            write_chats(place, self.rows, reading.vocabulary, template)
        if not template.is_plain:
            return []
        return [
            f"{reading.model.name} brings no chat template; turns are written as lines (user: ..., "
            "assistant: ...)"
        ]


class ChatKind:
    """The `hetpipe.data.kind.DataKind` of chats, a line each."""

    name = "chats"
    form = f"JSON lines of chats ({FORMS})"
    tasks: tuple[Task, ...] = (Task.CAUSAL_LM,)
    files: tuple[str, ...] = (TOKENS_FILE, LEARNED_FILE, ENDS_FILE)
    is_brought = False
    packs = True
    fills = True
    is_held = False

    def holds(self, path: Path) -> bool:
        """Return whether the first line is a chat."""
        return is_chat(first_line(path))

    def read(self, paths: Sequence[Path], model: Learner) -> Chats:
        """Read files."""
        return Chats.read(paths)

    def load(self, place: Path, reading: Reading) -> Samples:
        """Return the chats' tokens as samples."""
        chats = ChatDataset.load(
            place, reading.vocabulary, reading.sequence_length, reading.seed, reading.special.separator
        )
        return chats.packed() if reading.inputs.packed else chats


CHATS = ChatKind()
