"""The texts of a corpus and the vocabulary trained on them: equal texts give equal entries."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cost_model.errors import InputError
from cost_model.strict_files import write_atomically
from hetpipe.data.json_lines import SUFFIX, read_json_lines
from hetpipe.data.special_tokens import SpecialTokens

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_TOKENS))
MAX_VOCABULARY = 30_000
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256  # every byte is a token of its own
TRAINED_TOKENS = SpecialTokens(SEP_ID, CLS_ID, MASK_ID, tuple(range(len(SPECIAL_TOKENS))))
"""Of the vocabularies that `train_vocabulary` makes."""


def read_corpus(paths: Sequence[Path] = ()) -> list[str]:
    """Return the documents: one per UTF-8 text file, or CPython's language reference if no path is given.

    Of a .jsonl file one per line, a text or a chat: see `json_lines`.

    Raises: InputError if a path is missing, not a file, empty or not UTF-8, or a line is neither.
    """
    if not paths:
        return [topics[name] for name in sorted(topics)]
    return [document for path in paths for document in _documents(Path(path))]


def train_vocabulary(documents: Iterable[str], size: int) -> Tokenizer:
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

    Raises: InputError if it is missing, unreadable, or without a token that ends a text.
    """
    remedy = "delete it to train a new one"
    try:
        vocabulary = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # NOTE: tokenizers raises bare Exception on a malformed file
        raise InputError(f"vocabulary {path} cannot be read ({error}); {remedy}") from error
    SpecialTokens.of(vocabulary)
    vocabulary.encode_special_tokens = True
    return vocabulary


def vocabulary_sha256(vocabulary: Tokenizer) -> str:
    """Return a hash of the entries and merges in order, whatever version of the library wrote the file."""
    model = json.loads(vocabulary.to_str())["model"]
    ids = vocabulary.get_vocab()
    entries = sorted(ids, key=ids.__getitem__)
    pairs = model.get("merges", [])  # a vocabulary of words or pieces has none
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in pairs]
    return hashlib.sha256(json.dumps([entries, merges]).encode()).hexdigest()


def lines_of(documents: Iterable[str]) -> Iterator[str]:
    """Return the lines with their ends, so that vocabulary and tokens see the same pieces of any document."""
    return (line for document in documents for line in document.splitlines(keepends=True))


def texts_sha256(documents: Iterable[str]) -> str:
    """Return the hash of texts as they are read, wherever they lie."""
    found = hashlib.sha256()
    for document in documents:
        data = document.encode()
        found.update(b"%d\0" % len(data))
        found.update(data)
    return found.hexdigest()


def _documents(path: Path) -> list[str]:
    document = _read_document(path)
    return read_json_lines(path, document) if path.suffix.lower() == SUFFIX else [document]


def _read_document(path: Path) -> str:
    name = f"data file {path}"
    try:
        document = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except FileNotFoundError as error:
        raise InputError(f"{name} does not exist; give the path of a text file") from error
    except IsADirectoryError as error:
        raise InputError(f"{name} is a folder; give the text files in it") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 at byte {error.start:,}; convert it to UTF-8") from error
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror}); check its permissions") from error
    if not document.strip():
        raise InputError(f"{name} is empty; give a file with text")
    return document
