"""Token files and the batches read from them, each a pure function of tokens, seed and sample position."""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from cost_model.errors import InputError
from hetpipe.data.keyed_order import MASK_STREAM, draws, permuted
from hetpipe.data.kind import IntArray, StepData
from hetpipe.data.long_texts import LONGEST_PIECE, Document
from hetpipe.data.special_tokens import SpecialTokens, WrittenOut, written_out_notes
from hetpipe.data.vocabulary import TRAINED_TOKENS, continuing, pieces_of, vocabulary_sha256
from hetpipe.models.tasks import Task

IGNORE_LABEL = -100  # the value that torch's cross-entropy ignores
MASKED_SHARE = 0.15
TEXTS_PER_WRITE, CHARACTERS_PER_WRITE = 10_000, 1 << 18
PIECES_AT_ONCE = 4  # long ones, which are split side by side
TOKENS_FILE, TOKENS_HEADER, ENDS_FILE = "tokens.bin", "tokens.json", "ends.bin"
TOKENS_PER_COUNT = 1 << 20
Item = TypeVar("Item")
LAST = np.iinfo(np.uint64).max


def write_tokens(folder: Path, documents: Iterable[Document], vocabulary: Tokenizer, separator: int) -> None:
    """Write `tokens.bin` (flat, a separator after every document) and then its header `tokens.json`.

    Also `ends.bin`: of each document in the tokens, its separator in it. The header tells of special tokens
    that are written out in the documents.
    """
    end, written_out = 0, WrittenOut(vocabulary)
    with (
        replacing(folder / ENDS_FILE) as ends,
        write_token_ids(folder, vocabulary, lambda: {"written_out": written_out.said}) as write,
    ):

        def end_document() -> None:
            nonlocal end
            write([separator])
            end += 1
            ends.write(end.to_bytes(8, "little"))

        begun = False
        for ids, begins in _split(written_out.counting(pieces_of(documents)), vocabulary):
            if begins and begun:
                end_document()
            begun = True
            write(ids)
            end += len(ids)
        if begun:
            end_document()


def _split(pieces: Iterable[tuple[str, bool]], vocabulary: Tokenizer) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the tokens of pieces of documents, as `pieces_of` gives them.

    They are those of the whole document, if a token begins where a piece does.
    """
    later = None
    for batch in batches(
        pieces, lambda piece: len(piece[0]), characters_at_once=PIECES_AT_ONCE * LONGEST_PIECE
    ):
        if later is None and not all(begins for _, begins in batch):
            later = continuing(vocabulary)
        encoded = {}
        for begins, splitting in ((True, vocabulary), (False, later or vocabulary)):
            texts = [text for text, is_first in batch if is_first == begins]
            encoded[begins] = iter(splitting.encode_batch_fast(texts, add_special_tokens=False))
        for _, begins in batch:
            yield next(encoded[begins]).ids, begins


def batches(
    items: Iterable[Item],
    num_characters: Callable[[Item], int],
    most: int = TEXTS_PER_WRITE,
    characters_at_once: int = CHARACTERS_PER_WRITE,
) -> Iterator[list[Item]]:
    """Yield items, as many together as are split into tokens at once; num_characters: of one."""
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += num_characters(item)
        if len(batch) == most or characters >= characters_at_once:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def write_token_ids(
    folder: Path, vocabulary: Tokenizer, said: Callable[[], Mapping[str, Any]] = dict
) -> Iterator[Callable[[Sequence[int]], None]]:
    """Give what appends ids to `tokens.bin`; its header follows where nothing was raised.

    said: gives what the header tells beside, when all are written.
    """
    dtype = np.dtype(np.uint16 if vocabulary.get_vocab_size() <= 1 << 16 else np.uint32).newbyteorder("<")
    count = 0
    (folder / TOKENS_HEADER).unlink(missing_ok=True)  # an old header never stands beside new tokens
    with replacing(folder / TOKENS_FILE) as file:

        def write(ids: Sequence[int]) -> None:
            nonlocal count
            file.write(np.array(ids, dtype).tobytes())
            count += len(ids)

        yield write
    header = {"dtype": dtype.str, "count": count, "vocabulary_sha256": vocabulary_sha256(vocabulary)}
    header |= said()
    with replacing(folder / TOKENS_HEADER) as file:
        file.write(json.dumps(header).encode())


def load_tokens(folder: Path, vocabulary: Tokenizer) -> npt.NDArray[np.unsignedinteger]:
    """Return the tokens that `write_tokens` wrote, memory-mapped read-only.

    Raises: InputError if the tokens are missing, torn, or written with another vocabulary.
    """
    remedy = "delete the folder's tokens.* to write them anew"
    try:
        header = json.loads((folder / TOKENS_HEADER).read_text(encoding="utf-8"))
        dtype, count, written_with = np.dtype(header["dtype"]), header["count"], header["vocabulary_sha256"]
        num_bytes = (folder / TOKENS_FILE).stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"tokens in {folder} cannot be read ({error!r}); {remedy}") from error
    if written_with != vocabulary_sha256(vocabulary):
        raise InputError(f"tokens in {folder} were written with vocabulary {written_with[:12]}; {remedy}")
    if num_bytes != (expected := count * dtype.itemsize):
        raise InputError(f"{folder / TOKENS_FILE} has {num_bytes:,} bytes, not {expected:,}; {remedy}")
    return np.memmap(folder / TOKENS_FILE, dtype=dtype, mode="r", shape=(count,))


def written_out_in(folder: Path) -> list[str]:
    """Return what is to be said of special tokens in the documents that `write_tokens` wrote."""
    said = json.loads((folder / TOKENS_HEADER).read_text(encoding="utf-8")).get("written_out", {})
    return written_out_notes(said, (folder / ENDS_FILE).stat().st_size // 8)


def sums_of_ranges(
    part: Callable[[int, int], npt.NDArray[Any]], starts: IntArray, stops: IntArray
) -> IntArray:
    """Return the sums of ranges, rising, of numbers one a token, of which only a part is held at once.

    part: gives those in [begin, end).
    """
    found = np.empty(len(starts), np.int64)
    index = 0
    while index < len(starts):
        after = max(index + 1, int(np.searchsorted(stops, starts[index] + TOKENS_PER_COUNT)))
        begin, end = int(starts[index]), int(stops[after - 1])
        sums = np.concatenate(([0], np.cumsum(part(begin, end), dtype=np.int64)))
        found[index:after] = sums[stops[index:after] - begin] - sums[starts[index:after] - begin]
        index = after
    return found


class Tokens(Protocol):
    """Flat ids that are read where they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: IntArray) -> IntArray:
        """Return those at places, of any shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """The endless training order over one token file.

    The sample at position p belongs to epoch p // num_sequences, and is the (p % num_sequences)-th sequence
    of that epoch's permutation. So position alone, a number of samples consumed, is the state to save: no
    epoch sees a sequence twice or misses one, whatever the batch sizes and the restarts.

    tokens: flat ids.  vocabulary_size: entries really trained, the range of random replacement tokens.
    special: of the vocabulary.
    """

    tokens: "npt.NDArray[np.unsignedinteger] | Tokens"
    task: Task
    sequence_length: int
    vocabulary_size: int
    seed: int
    special: SpecialTokens = TRAINED_TOKENS

    def __post_init__(self) -> None:
        shortest = 3 if self.task == Task.MASKED_LM else 2
        if self.sequence_length < shortest:
            raise InputError(f"sequence length {self.sequence_length}: {self.task} needs at least {shortest}")
        if self.seed < 0:
            raise InputError(f"seed {self.seed} is negative; choose 0 or more")
        if self.num_samples == 0:
            raise InputError(
                f"the corpus has {len(self.tokens):,} tokens, a sequence of length {self.sequence_length} "
                f"needs {self.tokens_per_sequence:,}; give more text or a shorter sequence length"
            )

    @property
    def tokens_per_sequence(self) -> int:
        """Return the tokens that a sequence takes from the corpus: all but [CLS] and [SEP] of masked-lm."""
        return self.sequence_length - 2 if self.task == Task.MASKED_LM else self.sequence_length

    @property
    def num_samples(self) -> int:
        """Return the sequences of one epoch; a rest too short for a sequence is never used."""
        return len(self.tokens) // self.tokens_per_sequence

    def num_loss_tokens(self, num_samples: int) -> int:
        """Return how many tokens enter the loss of num_samples samples: each sequence has as many."""
        if self.task == Task.MASKED_LM:
            return num_samples * _num_masked(self.tokens_per_sequence)
        return num_samples * (self.sequence_length - 1)  # the last token predicts nothing

    @property
    def count_terms(self) -> Callable[[Any], int] | None:
        """Return None: `num_loss_tokens` knows them."""
        return None

    @property
    def num_terms(self) -> int:
        """Return how many tokens enter the loss of an epoch."""
        return self.num_loss_tokens(self.num_samples)

    def sequences(self, first_sample: int, num_samples: int) -> IntArray:
        """Return which sequence of the corpus each position from first_sample on reads: [batch]."""
        return permuted(self.seed, self.num_samples, first_sample, num_samples)

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the samples at positions [first_sample, first_sample + num_samples).

        A slice of a batch is a batch: samples [start, stop) of the step that starts at position p are
        `batch(p + start, stop - start)`, and nothing else is read.
        """
        starts = self.sequences(first_sample, num_samples) * self.tokens_per_sequence
        content = self.tokens[starts[:, None] + np.arange(self.tokens_per_sequence)].astype(np.int64)
        positions = np.arange(first_sample, first_sample + num_samples)
        masked = self.task == Task.MASKED_LM
        inputs, labels = self._masked(content, positions) if masked else (content, content.copy())
        return StepData({"input_ids": inputs}, labels, positions, self.num_loss_tokens(num_samples))

    def notes(self) -> list[str]:
        """Return nothing: no text is left out but the rest of a sequence."""
        return []

    def step(self, step: int, global_batch_size: int) -> StepData:
        """Return the batch of a step, counted from 0, of a run whose batch size never changed."""
        return self.batch(step * global_batch_size, global_batch_size)

    def _masked(self, content: IntArray, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return inputs and labels, each [batch, seq], of content [batch, seq - 2].

        Masks as in Devlin et al. (BERT, NAACL 2019, 3.1), with two departures: the number of masked tokens of
        a sequence is exact, so that every rank knows the step's count of loss tokens without communication,
        and no replacement is a special token.
        """
        num_samples, num_tokens = content.shape
        num_masked = _num_masked(num_tokens)
        special = self.special
        inputs = np.full((num_samples, num_tokens + 2), special.cls, np.int64)
        inputs[:, 1:-1] = content
        inputs[:, -1] = special.separator
        labels = np.full_like(inputs, IGNORE_LABEL)
        ordinary = np.setdiff1d(np.arange(self.vocabulary_size, dtype=np.uint64), special.all)
        for row, position in enumerate(positions):
            words = draws(num_tokens + 2 * num_masked, self.seed, MASK_STREAM, int(position))
            keys, kinds, tokens = np.split(words, (num_tokens, num_tokens + num_masked))
            keys[np.isin(content[row], special.all)] = LAST  # a document's [SEP] is no word to guess
            masked = 1 + np.argsort(keys, kind="stable")[:num_masked]
            labels[row, masked] = inputs[row, masked]
            replacements = ordinary[tokens % np.uint64(len(ordinary))].astype(np.int64)
            tenths = kinds % np.uint64(10)  # 0 to 7: [MASK]; 8: a random token; 9: unchanged
            kept = np.where(tenths == 8, replacements, inputs[row, masked])
            inputs[row, masked] = np.where(tenths < 8, special.mask, kept)
        return inputs, labels


def num_learned(labels: Any) -> int:
    """Return how many terms the loss of a step has, by its labels [samples, seq] of a causal model."""
    return int((labels[:, 1:] != IGNORE_LABEL).sum())


def load_ends(folder: Path, num_tokens: int) -> IntArray:
    """Return the ends of documents in the tokens, rising.

    Raises: InputError if they are missing or torn.
    """
    try:
        ends = np.fromfile(folder / ENDS_FILE, "<i8").astype(np.int64)
    except OSError as error:
        raise InputError(f"ends of texts in {folder} cannot be read ({error}); train anew") from None
    if len(ends) == 0 or ends[-1] != num_tokens:
        raise InputError(f"texts in {folder} are torn; train into a new folder")
    return ends


def _num_masked(num_tokens: int) -> int:
    return max(1, round(MASKED_SHARE * num_tokens))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the path's name only once it is complete and on disk."""
    unfinished = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
