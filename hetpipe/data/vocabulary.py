"""The vocabulary that is trained on texts: equal texts give equal entries."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cost_model.errors import InputError
from cost_model.strict_files import write_atomically
from hetpipe.data.long_texts import Document, LongText, lines_in, pieces_in
from hetpipe.data.special_tokens import SpecialTokens

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_TOKENS))
MAX_VOCABULARY = 30_000
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256  # every byte is a token of its own
TRAINED_TOKENS = SpecialTokens(SEP_ID, CLS_ID, MASK_ID, tuple(range(len(SPECIAL_TOKENS))))
"""Of the vocabularies that `train_vocabulary` makes."""


def train_vocabulary(documents: Iterable[Document], size: int) -> Tokenizer:
    """Train a byte-level BPE of at most min(size, 30,000) entries; equal documents give equal entries.

    Special tokens come first. The corpus may yield fewer entries than size: `Tokenizer.get_vocab_size()`
    tells. Byte-level BPE (Radford et al., GPT-2, 2019) because the tokenizers library trains it
    deterministically, unlike WordPiece.
    """
    if size < MIN_VOCABULARY:
        raise InputError(
            f"vocabulary of {size} entries: byte-level BPE needs {MIN_VOCABULARY} (256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens); choose a model with a larger vocabulary"
        )
    vocabulary = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[UNK_ID]))
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    vocabulary.encode_special_tokens = True  # "[MASK]" in a text is text; not saved, so `load_vocabulary` too
    trainer = trainers.BpeTrainer(
        vocab_size=min(size, MAX_VOCABULARY),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    vocabulary.train_from_iterator(lines_of(documents), trainer)
    return vocabulary


def save_vocabulary(vocabulary: Tokenizer, path: Path) -> None:
    """Write the vocabulary, in the format of the tokenizers library, complete or not at all."""
    write_atomically(path, vocabulary.to_str(pretty=True))


def load_vocabulary(path: Path) -> Tokenizer:
    """Return the vocabulary that `save_vocabulary` wrote.

    Raises: InputError if it is missing or unreadable.
    """
    remedy = "delete it to train a new one"
    try:
        vocabulary = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # NOTE: tokenizers raises bare Exception on a malformed file
        raise InputError(f"vocabulary {path} cannot be read ({error}); {remedy}") from error
    vocabulary.encode_special_tokens = True
    return vocabulary


def is_trained_here(vocabulary: Tokenizer) -> bool:
    """Return whether a vocabulary begins as those do that `train_vocabulary` makes."""
    return all(vocabulary.id_to_token(at) == token for at, token in enumerate(SPECIAL_TOKENS))


def vocabulary_sha256(vocabulary: Tokenizer) -> str:
    """Return a hash of the entries and merges in order, whatever version of the library wrote the file."""
    model = json.loads(vocabulary.to_str())["model"]
    ids = vocabulary.get_vocab()
    entries = sorted(ids, key=ids.__getitem__)
    pairs = model.get("merges", [])  # a vocabulary of words or pieces has none
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in pairs]
    return hashlib.sha256(json.dumps([entries, merges]).encode()).hexdigest()


def lines_of(documents: Iterable[Document]) -> Iterator[str]:
    """Return the lines with their ends, on which a vocabulary is trained."""
    for document in documents:
        yield from lines_in(_blocks(document))


def pieces_of(documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces in which documents are split into tokens, and whether a document begins with each."""
    for document in documents:
        for index, piece in enumerate(pieces_in(_blocks(document))):
            yield piece, index == 0


def continuing(vocabulary: Tokenizer) -> Tokenizer:
    """Return the vocabulary as it splits what is not the beginning of a text: it puts nothing before it.

    Some put a space before a text, of which they would make a token of each piece.
    """
    said = json.loads(vocabulary.to_str())
    before = json.dumps(said)
    normalizers = _parts(said["normalizer"], "normalizers")
    kept = [part for part in normalizers if part["type"] != "Prepend"]
    if len(kept) < len(normalizers):
        said["normalizer"] = {"type": "Sequence", "normalizers": kept}
    for index, part in enumerate(_parts(said["pre_tokenizer"], "pretokenizers")):
        if part["type"] == "Metaspace" and part["prepend_scheme"] == "first":
            part["prepend_scheme"] = "never"
        if part["type"] == "ByteLevel" and index == 0:  # a later one does so to each part of a text
            part["add_prefix_space"] = False
    if json.dumps(said) == before:
        return vocabulary
    found = Tokenizer.from_str(json.dumps(said))
    found.encode_special_tokens = vocabulary.encode_special_tokens
    return found


def _parts(said: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer, which may be a sequence of several."""
    if said is None:
        return []
    return [each for part in said[several] for each in _parts(part, several)] if several in said else [said]


def texts_sha256(documents: Iterable[Document]) -> str:
    """Return the hash of texts as they are read, wherever they lie."""
    found = hashlib.sha256()
    for document in documents:
        if isinstance(document, str):
            data = document.encode()
            found.update(b"%d\0" % len(data))
            found.update(data)
            continue
        found.update(b"%d\0" % document.num_bytes)
        for block in document.blocks():
            found.update(block.encode())
    return found.hexdigest()


def _blocks(document: Document) -> Iterable[str]:
    return document.blocks() if isinstance(document, LongText) else (document,)
